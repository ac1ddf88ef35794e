"""Turn plan: how it is computed, and why. Frozen data, which crosses to the client."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ringserve.cp_core.layout.shards import TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.workers.protocol.steps import Algorithm


class PromptMode(StrEnum):
    """Relation of a prompt to its conversation's earlier tokens; NEW if there are none.

    AUTO is APPEND, or NEW if APPEND would be refused.
    """

    AUTO = "auto"
    NEW = "new"
    APPEND = "append"
    WHOLE_HISTORY = "whole_history"


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedSource:
    """Source of cached tokens.

    One of "kept_on_prefill", "pulled_from_decode", "pulled_from_other" (`ring`, which the conversation leaves), and
    "kept_on_decode", if that ring computes the prompt itself.
    """

    source: str
    tokens: TokenRange
    ring: str = ""


class LayoutFallback(StrEnum):
    """Layouts that a chunk gets for lack of room on single ranks; predictions are of the layout that it should have.

    LEVEL_CUTS: a chain is cut so that all ranks store equally much. SPREAD: a short prompt lies over all ranks and not
    whole on one.
    """

    LEVEL_CUTS = "level_cuts"
    SPREAD = "spread"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChunk:
    """New tokens computed in one step, after all before them. `num_turns` turns shared the step; 0 if only planned.

    `fallback` is the layout that they got for lack of room, None if they have the one of their algorithm.
    """

    tokens: TokenRange
    algorithm: Algorithm
    num_turns: int = 0
    fallback: LayoutFallback | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RingAlternative:
    """Predicted seconds of a turn on one ring of `num_ranks` ranks of `tp` processes.

    They add up from the queue, the pull of cached KV that the ring lacks, and the prefill of the rest. If the decode
    ring could compute the prompt, it is one of the alternatives. Then `handoff_seconds` are for the new tokens' KV
    from a prefill ring, and `stall_seconds` those by which all turns that decode there wait longer together.
    """

    ring: str
    num_ranks: int
    tp: int
    queue_seconds: float
    move_seconds: float
    prefill_seconds: float
    handoff_seconds: float = 0.0
    stall_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds until the first token."""
        return self.queue_seconds + self.move_seconds + self.handoff_seconds + self.stall_seconds + self.prefill_seconds


MAX_LOSS, MAX_TTFT = "max_loss", "max_ttft"
"""Bounds that a turn may name: of the loss, for the least time; of the time in seconds, for the least loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bound of a turn that may be sparse; `name` is MAX_LOSS or MAX_TTFT. A MAX_LOSS of 0 allows exact turns alone."""

    name: str
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePlan:
    """Sparsity of a turn's prefill, and the bound for which it was chosen.

    Losses are mean KL divergences of answer tokens from exact ones, in nats. `predicted_loss` is the worse of those of
    the measured lengths next to the prompt's; `measured_loss` and `measured_accuracy`, the share of questions that were
    answered, are those of the nearest length, `measured_tokens`.
    """

    keep: float
    sinks: int
    window: int
    bound: str
    limit: float
    predicted_loss: float
    measured_loss: float
    measured_accuracy: float
    measured_tokens: int

    @property
    def sparsity(self) -> Sparsity:
        """Sparsity, by which KV that was computed with it is told from other KV."""
        return Sparsity(keep=self.keep, sinks=self.sinks, window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """Plan of a turn and its reason, one short sentence whose numbers are fields. Most new tokens use `algorithm`.

    `remarks` has exceptions, one sentence each, for example that a ring had no room. `correction` is the learned factor
    in the predictions for `algorithm`. `decode_turns` counts the turns on the decode ring when it was chosen.

    `alternatives` are (algorithm, predicted seconds) of computing every chunk by it. If only the decode ring retains
    a part, "pull" and "recompute" are there too, each until the prefill has ended. `chunks` are for an idle ring: the
    prefill leader cuts by its queue, and reports its cuts. `ring_alternatives` are the rings compared, the fastest few
    and the chosen one; none if there was no choice.

    With `sparse` the turn's KV and answer are approximate. None: they are exact.

    With `Algorithm.DECODE_RING` the decode ring is also `prefill_ring`, and nothing is handed over. Other plans have it
    among their `alternatives` if it was possible.
    """

    algorithm: Algorithm
    reason: str
    new_tokens: int
    cached_tokens: int
    prefill_ring: str
    decode_ring: str
    prefill_ranks: int
    decode_ranks: int
    cached_sources: tuple[CachedSource, ...]
    chunks: tuple[PlannedChunk, ...]
    predicted_prefill_seconds: float
    alternatives: tuple[tuple[str, float], ...]
    prompt_mode: PromptMode
    correction: float = 1.0
    remarks: tuple[str, ...] = ()
    decode_turns: int = 0
    ring_alternatives: tuple[RingAlternative, ...] = ()
    sparse: SparsePlan | None = None
