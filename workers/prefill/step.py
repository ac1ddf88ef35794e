"""Prefill step of one rank: its tokens of every sequence, and their attention in each layer.

A rank's worker and its decode loop run it; it writes the rank's KV cache. Shapes: T new tokens of this rank over all
sequences, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringserve.cp_core.attention.native import MAX_SINGLE_TOKENS, NativeCpu, OwnRows, PromptRows, PromptSequences
from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, SequencePlan
from ringserve.cp_core.ring.helix import HelixColumns, NewRows, helix_prefill
from ringserve.cp_core.ring.prefill import RingPrefill
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.kv.cache import KvCache, SlotRun
from ringserve.workers.model.loading import AttentionStep, LoadedModel
from ringserve.workers.protocol.steps import Algorithm, PrefillOutput, PrefillStep, SequencePrefill
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.grammar import Grammars
from ringserve.workers.sampling.parameters import TokenLogprobs
from ringserve.workers.sampling.sampler import RowSampler, logprobs_of, prepare_masks

# Prompt tokens whose logits are in memory at a time if the prompt's log-probabilities are requested.
SCORED_ROWS = 256
# Every so many layers, the ranks of a chain synchronise to let another step run. They run at different layers, so each
# synchronisation costs the chain one message latency per hop.
CHAIN_LAYERS = 8


@dataclass(frozen=True, slots=True)
class LastRow:
    """Row of this rank's hidden states that a sequence's token at `next_position` is sampled from."""

    sequence_id: str
    row: int
    next_position: int
    sampler: RowSampler


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows of this rank's hidden states that score the prompt tokens at `positions`."""

    sequence_id: str
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class LocalShare:
    """This rank's share of one sequence: rows [begin, end) of the packed step, and KV slots.

    The sequence's first new token is at position `start`.

    `stored` has the ranges of those rows whose KV this rank stores. Old KV is in the slots `cached`, new KV goes to the
    slots `written`; `slots` is an index of `written` if it has many runs. With `is_relayed` the rank stores other
    tokens, which arrive along a chain.
    """

    start: int
    begin: int
    end: int
    stored: tuple[TokenRange, ...]
    cached: list[SlotRun | Tensor]
    written: tuple[SlotRun, ...]
    slots: Tensor | None
    keys: tuple[TransferKey, ...]
    is_relayed: bool


def run_prefill(
    step: PrefillStep,
    model: LoadedModel,
    transport: RingTransport,
    cache: KvCache,
    backend: AttentionBackend,
    layer_ready: Callable[[TransferKey, int], None],
    before_layer: Callable[[], None] | None = None,
    hidden_states: Callable[[Tensor, Tensor, AttentionStep], Tensor] | None = None,
) -> tuple[PrefillPass, Tensor]:
    """Run a step and return (pass, hidden states [T, hidden_size]) of this rank. Collective. Raises Unavailable.

    If given, `hidden_states` replaces the model's function.
    """
    columns = model.columns(cache.device)
    grammars = model.grammars if model.samples else None
    forward = PrefillPass(
        step,
        transport,
        cache,
        backend,
        layer_ready,
        model.share.num_layers,
        columns,
        before_layer,
        grammars,
        model.windows,
        model.sinks,
    )
    prepare_masks(forward.last_rows)
    if forward.num_tokens:
        states = (hidden_states or model.hidden_states)(forward.token_ids, forward.positions, forward)
    else:
        states = model.attend_without_tokens(forward)
    forward.finish()
    return forward, states


class PrefillPass:
    """Attention of one forward pass.

    `before_layer` is called before each layer's attention (in a chain: only before some layers), `layer_ready` when a
    layer's new KV is in the cache.

    With `columns` (helix) every rank computes all rows of the step, by position, and attends its KV shard. The step's
    algorithm is then ignored.
    """

    def __init__(
        self,
        step: PrefillStep,
        transport: RingTransport,
        cache: KvCache,
        backend: AttentionBackend,
        layer_ready: Callable[[TransferKey, int], None],
        num_layers: int,
        columns: HelixColumns | None = None,
        before_layer: Callable[[], None] | None = None,
        grammars: Grammars | None = None,
        windows: Sequence[int] = (),
        sinks: Sequence[Tensor | None] = (),
    ) -> None:
        """Lay out the step. A rank that samples has `grammars`. Each layer has its window and its sinks."""
        self._transport = transport
        self._grammars = grammars
        self._columns = columns
        self._cache = cache
        self._backend = backend
        self._layer_ready = layer_ready
        self._before_layer = before_layer
        sequences = tuple(
            SequencePlan(each.layout, each.cached, each.stored, each.sparsity, each.tail) for each in step.sequences
        )
        plan = PrefillPlan(sequences, step.order, step.num_segments)
        # Ranks may synchronise before every layer whose number is a multiple of this.
        self._period = CHAIN_LAYERS if step.algorithm is Algorithm.CHAIN and columns is None else 1
        self._ring = RingPrefill(
            plan,
            transport,
            backend,
            step.algorithm.value,
            num_layers,
            self._period if before_layer else 0,
            windows,
            sinks,
        )
        self._shares = self._place(step.sequences)
        self._own = self._own_sequences()
        self.token_ids, self.positions = self._tokens(step.sequences)
        self.last_rows = self._last_rows(step.sequences)
        self.scored_rows = self._scored_rows(step.sequences)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def stored_rows(self) -> list[int]:
        """Computed rows whose KV this rank stores."""
        return [row for share in self._shares for rows in share.stored for row in range(rows.start, rows.stop)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store this layer's k[T,K,D] and v[T,K,D], start sending them, and attend q[T,H,D] over the ring."""
        self._let_others_run(layer)
        for share in self._shares:
            if not share.is_relayed:
                self._store(layer, share, _rows(k, share.stored), _rows(v, share.stored))
        if self._columns is not None:
            new = [
                NewRows(TokenRange(share.begin, share.end), share.stored, runs, share.start, shard.window, shard.tail)
                for share, runs, shard in zip(self._shares, self._cached(layer), self._ring.shards(layer), strict=True)
            ]
            return helix_prefill(q, k, v, new, self._columns, self._transport, self._backend, scale)
        out = self._ring.attend(layer, q, k, v, self._cached, scale)
        for index, share in enumerate(self._shares):
            if share.is_relayed:
                stored = self._ring.stored(index)
                self._store(layer, share, stored.k, stored.v)
        return out

    def own_layer(self, layer: int, dtype: torch.dtype, run: Callable[[OwnRows], Tensor]) -> Tensor | None:
        """Return run(rows) if CPU kernels store and attend this layer's rows, else None.

        It returns None, and `attend` must be called, if KV is on several ranks or the layer has a window or sinks.
        """
        cache = self._cache
        if self._own is None or not self._ring.is_lone(layer) or cache.dtype != dtype:
            return None
        self._let_others_run(layer)
        out = run(PromptRows(cache.k_layers[layer], cache.v_layers[layer], *self._own))
        for share in self._shares:
            self._announce(layer, share)
        return out

    def finish(self) -> None:
        """Wait until all messages of this rank have left. Call it after the last layer. Raises Unavailable."""
        self._ring.finish()

    def _cached(self, layer: int) -> list[list[KvRun]]:
        """Return the sequences' cached tokens in a layer."""
        return [self._cache.gathered(layer, share.cached) for share in self._shares]

    def _store(self, layer: int, share: LocalShare, k: Tensor, v: Tensor) -> None:
        """Write the KV of the new tokens that this rank stores, and start sending it."""
        if share.slots is None:
            self._cache.write_runs(layer, share.written, k, v)
        else:
            self._cache.write_slots(layer, share.slots, k, v)
        self._announce(layer, share)

    def _announce(self, layer: int, share: LocalShare) -> None:
        for key in share.keys:
            self._layer_ready(key, layer)

    def _let_others_run(self, layer: int) -> None:
        if self._before_layer is not None and layer % self._period == 0:
            self._before_layer()

    def _own_sequences(self) -> tuple[Tensor, PromptSequences] | None:
        """Return the slots of all rows and the sequences, if CPU kernels may store and attend them without a ring.

        They may not if a sequence has so few tokens that these are attended one by one.
        """
        if self._transport.size > 1 or self._columns is not None or not isinstance(self._backend, NativeCpu):
            return None
        num_new = [share.end - share.begin for share in self._shares]
        if min(num_new, default=0) <= MAX_SINGLE_TOKENS:
            return None
        slots = self._cache.index([run for share in self._shares for run in share.written])
        cached = [
            [(piece.start, len(piece)) if isinstance(piece, SlotRun) else piece for piece in share.cached]
            for share in self._shares
        ]
        return slots, PromptSequences(cached, num_new)

    def _computed(self, sequence: SequencePrefill) -> tuple[TokenRange, ...]:
        """Return the positions that this rank computes, in row order."""
        layout = sequence.layout
        return layout.ranges[self._transport.rank] if self._columns is None else (layout.tokens,)

    def _place(self, sequences: Sequence[SequencePrefill]) -> tuple[LocalShare, ...]:
        rank, shares, begin = self._transport.rank, [], 0
        for sequence in sequences:
            held, new = sequence.cached[rank], sequence.stored_on(rank)
            end = begin + sum(len(positions) for positions in self._computed(sequence))
            stored: tuple[TokenRange, ...] = (TokenRange(begin, end),)
            if self._columns is not None:
                shift = begin - sequence.layout.start
                ranges = sequence.layout.ranges[rank] if sequence.stored is None else sequence.stored.ranks[rank]
                stored = tuple(TokenRange(each.start + shift, each.stop + shift) for each in ranges)
            written = self._cache.runs(sequence.blocks, new, first=held)
            shares.append(
                LocalShare(
                    sequence.layout.start,
                    begin,
                    end,
                    stored,
                    cached=self._cache.joined(self._cache.runs(sequence.blocks, held)),
                    written=written,
                    slots=self._cache.scattered(written),
                    keys=tuple(send.key for send in sequence.sends),
                    # In helix each rank computes the KV of all tokens, wherever they are stored.
                    is_relayed=self._columns is None
                    and sequence.stored is not None
                    and tuple(sequence.stored.ranks[rank]) != sequence.layout.ranges[rank],
                )
            )
            begin = end
        return tuple(shares)

    def _tokens(self, sequences: Sequence[SequencePrefill]) -> tuple[Tensor, Tensor]:
        """Return (token ids, positions) int64[T] on the device, in row order."""
        empty = np.empty(0, np.int64)
        token_ids, positions = [empty], [empty]
        for sequence in sequences:
            start = sequence.layout.start
            assert len(sequence.token_ids) == sequence.layout.num_tokens, "token ids do not match the layout"
            for chunk in self._computed(sequence):
                token_ids.append(sequence.token_ids[chunk.start - start : chunk.stop - start])
                positions.append(np.arange(chunk.start, chunk.stop))
        device = self._cache.device
        return (
            torch.from_numpy(np.concatenate(token_ids)).to(device),
            torch.from_numpy(np.concatenate(positions)).to(device),
        )

    def _last_rows(self, sequences: Sequence[SequencePrefill]) -> tuple[LastRow, ...]:
        """Return the last row of each sequence that is sampled after this step and has its last token here."""
        rows = []
        for sequence, share in zip(sequences, self._shares, strict=True):
            if sequence.sample is None:
                continue
            stop = sequence.layout.tokens.stop
            # If a rank has the last token, it is the rank's last row of the sequence.
            if any(positions.stop == stop and len(positions) for positions in self._computed(sequence)):
                sampler = RowSampler(sequence.sample, sequence.history, self._grammars)
                rows.append(LastRow(sequence.sequence_id, share.end - 1, stop, sampler))
        return tuple(rows)

    def _scored_rows(self, sequences: Sequence[SequencePrefill]) -> tuple[ScoredRows, ...]:
        """Return the rows whose next tokens are scored. A next token may be on another rank or in the next step."""
        scored = []
        for sequence, share in zip(sequences, self._shares, strict=True):
            if sequence.score is None:
                continue
            start = sequence.layout.start
            end = [] if sequence.score.following is None else [sequence.score.following]
            following = [*sequence.token_ids[1:].tolist(), *end]
            here = [position for chunk in self._computed(sequence) for position in range(chunk.start, chunk.stop)]
            rows = [row for row, position in enumerate(here) if position - start < len(following)]
            scored.append(
                ScoredRows(
                    sequence.sequence_id,
                    rows=tuple(share.begin + row for row in rows),
                    positions=tuple(here[row] + 1 for row in rows),
                    token_ids=tuple(following[here[row] - start] for row in rows),
                    num_top=sequence.score.num_top,
                )
            )
        return tuple(scored)


def _rows(tensor: Tensor, ranges: Sequence[TokenRange]) -> Tensor:
    """Return these rows of a tensor: a view if they are one range."""
    parts = [tensor[each.start : each.stop] for each in ranges]
    return parts[0] if len(parts) == 1 else torch.cat([tensor[:0], *parts])


def score_rows(model: LoadedModel, scored: Sequence[ScoredRows], states: Tensor) -> dict[str, dict[int, TokenLogprobs]]:
    """Return log-probabilities by sequence and position. Collective over tensor-parallel ranks.

    Rows are scored a few at a time, because the logits of a whole step would take as much memory as its KV.
    """
    scores: dict[str, dict[int, TokenLogprobs]] = {}
    for each in scored:
        own = scores.setdefault(each.sequence_id, {})
        for begin in range(0, len(each.rows), SCORED_ROWS):
            part = slice(begin, begin + SCORED_ROWS)
            logits = model.logits(states[list(each.rows[part])])
            found = logprobs_of(logits, each.token_ids[part], each.num_top)
            own.update(zip(each.positions[part], found, strict=True))
    return scores


class StepEnded(Exception):
    """End of the current step between two layers, on all ranks. Its results are dropped."""


class StepInbox:
    """Inbox for a step that runs between two layers of the current step. It holds at most one step.

    The leader's call may arrive before the current step begins here, or after it ends, so steps are numbered. The
    compute thread takes a step only when it waits on every rank (`is_true_everywhere`), so that all ranks take the same
    step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: tuple[PrefillStep, Future[PrefillOutput | None]] | None = None
        self._latest_ended = 0

    def enter(self, step: PrefillStep) -> Future[PrefillOutput | None]:
        """Queue the step. The result is None if the enclosing step ends before this step runs."""
        answer: Future[PrefillOutput | None] = Future()
        with self._lock:
            if step.within <= self._latest_ended:
                answer.set_result(None)
                return answer
            assert self._waiting is None, "a step waits already"
            self._waiting = step, answer
        return answer

    @contextmanager
    def serving(self, step: PrefillStep) -> Iterator[None]:
        """Accept steps inside `step` until the end of the `with` block."""
        try:
            yield
        finally:
            with self._lock:
                self._latest_ended = max(self._latest_ended, step.number)
                waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting[1].set_result(None)

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    def run(self, compute: Callable[[PrefillStep], PrefillOutput]) -> None:
        """Compute the waiting step in the calling thread and answer its caller. Raises what `compute` raises.

        A step without sequences ends the current step: raises StepEnded.
        """
        with self._lock:
            assert self._waiting is not None, "no step waits"
            (step, answer), self._waiting = self._waiting, None
        try:
            answer.set_result(compute(step) if step.sequences else PrefillOutput())
        except BaseException as error:
            answer.set_exception(error)
            raise
        if not step.sequences:
            raise StepEnded


def is_true_everywhere(own: bool, transports: Sequence[RingTransport]) -> bool:
    """Return True on every rank if `own` is True on every rank. Collective over all transports, one after another.

    The transports carry host tensors.
    """
    for transport in transports:
        told = torch.empty(transport.size, 1)
        transport.gather_all(torch.full((1,), float(own)), list(told)).wait()
        own = bool(told.min() > 0)
    return own
