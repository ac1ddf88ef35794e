"""Plan of a turn: how it is computed, and why. The planner makes it, leaders follow it, clients get it. Frozen data."""

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

    `source` is "kept_on_prefill", "pulled_from_decode", "pulled_from_other" (from `ring`, which the conversation
    leaves) or, if the decode ring computes the prompt itself, "kept_on_decode".
    """

    source: str
    tokens: TokenRange
    ring: str = ""


class LayoutFallback(StrEnum):
    """Layouts used instead of the intended one if a single rank lacks room. Predictions assume the intended layout.

    LEVEL_CUTS: a chain is cut so that all ranks store equally much. SPREAD: a short prompt is spread over all ranks
    instead of computed whole on one.
    """

    LEVEL_CUTS = "level_cuts"
    SPREAD = "spread"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChunk:
    """New tokens computed in one step, after all before them. `num_turns` turns shared the step; 0 if only planned.

    `fallback` is the layout used for lack of room; None: the tokens have the intended one.
    """

    tokens: TokenRange
    algorithm: Algorithm
    num_turns: int = 0
    fallback: LayoutFallback | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RingAlternative:
    """Predicted seconds of a turn on one ring, with `num_ranks` ranks of `tp` processes each.

    The total is the sum of the queue, the pull of cached KV that the ring lacks, and the prefill of the rest. If the
    decode ring could compute the prompt, it is an alternative too, and two costs are added. Prefill rings have
    `handoff_seconds`, in which they send the new tokens' KV. The decode ring has `stall_seconds`, the delay of the
    turns that decode there, summed over them.
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
"""Names of a sparse turn's bounds: least time within a loss (MAX_LOSS), least loss within seconds (MAX_TTFT)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bound of a turn that may be sparse; `name` is MAX_LOSS or MAX_TTFT. A MAX_LOSS of 0 allows exact turns alone."""

    name: str
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePlan:
    """Sparsity of a turn's prefill, and the bound for which it was chosen.

    A loss is the mean KL divergence, in nats, of the answer tokens' distributions from those of exact computation.
    `predicted_loss` is the higher one of the measured lengths on both sides of the prompt's. `measured_loss` and
    `measured_accuracy`, the share of questions that were answered correctly, are those of the nearest length,
    `measured_tokens`.
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
        """Sparsity that labels the KV computed with it, so that no other turn uses this KV as exact."""
        return Sparsity(keep=self.keep, sinks=self.sinks, window=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """Plan of a turn. `algorithm` computes most of the new tokens.

    `reason` is one short sentence, whose numbers are also fields.

    `remarks` has exceptions, one sentence each, for example that a ring had no room. `correction` is the learned factor
    by which the predictions for `algorithm` were multiplied. `decode_turns` counts the turns on the decode ring when it
    was chosen.

    `alternatives` are (algorithm, predicted seconds) of computing every chunk by it. If only the decode ring retains a
    part of the KV, "pull" and "recompute" are there too, with the seconds until the prefill has ended. `chunks` are for
    an idle ring: the prefill leader cuts by its queue, and reports its cuts. `ring_alternatives` are the rings
    compared, the fastest few and the chosen one; none if there was no choice.

    With `sparse` the turn's KV and answer are approximate. None: they are exact.

    With `Algorithm.DECODE_RING` the decode ring is also `prefill_ring`, and nothing is handed over. Other plans have
    this algorithm among their `alternatives` if it was possible.
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
