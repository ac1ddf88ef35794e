"""Steps that a device replays: one launch for a recording, in place of one for each of its kernels.

Decode steps are recorded by the number of their rows, in buckets of powers of two, at their first use. The whole step
is recorded if attention reads block tables and messages, if any, are work of the device's stream. Else the pieces
between two attentions are recorded, and messages are sent between them. Short prompts are recorded in pieces too. What
a replayed step reads lies at the same addresses, and so do its results: one copy from pinned memory fills its inputs,
and the host does not wait for that copy.

Rows of padding fill a bucket. No row of a step depends on another, so they may hold anything.

Messages must be recorded and replayed by all their ranks together (NCCL's user guide, "Using NCCL with CUDA Graphs").
So all ranks decide alike whether a step is computed, recorded or replayed, and vote after a recording. A rank's decode
steps, prompts and draft model run through these classes, which own the recordings and their memory.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ringserve.cp_core.errors import RingserveError
from ringserve.cp_core.transport.interface import TransportStats
from ringserve.workers.model.loading import AttentionStep, LoadedModel

if TYPE_CHECKING:
    from ringserve.workers.model.pieces import Pieces


# Rows of four int64 arrays (token ids, positions, slots, stored rows); after them come the int32 arrays: lengths, ends,
# firsts and the table.
WORD_ARRAYS = 4
# Buffers begin with this many rows, the least of a recorded step with drafts: making them anew for it would forget
# recorded steps.
LEAST_ROWS = 16
LEAST_WIDTH = 16
logger = logging.getLogger(__name__)
# Why a step ran without a graph: the labels of a metric.
NOT_COMPILED = "not_compiled"
RECORDING = "recording"
RECORDING_FAILED = "recording_failed"
# Smallest bucket of whole steps with drafts. The number of drafts changes from step to step, and a device that reads
# all weights for one row hardly takes longer for this many. So fewer buckets are recorded while users wait.
DRAFTS_BUCKET = LEAST_ROWS
# Maximum tokens of a prompt whose pieces are recorded: with more, the GPU is slower than its host. Each bucket needs a
# recording, and a prompt is padded by less than the distance of two buckets.
MOST_RECORDED_TOKENS = 1024
PROMPT_BUCKET_TOKENS = 128
LEAST_PROMPT_BUCKET = 32


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the buffers for one step, valid until the next `fill`.

    `token_ids` and `positions` int64[R] are the model's, `slots` int64[A] where new KV goes, `stored` int64[A] the
    places among the computed rows of the rows whose KV goes there. `table` int32[B, M] and `lengths` int32[B] are this
    rank's shards. `firsts[w]` int32[B] has, for each row, the index of the first token of its shard that it sees in
    layers with the w-th of the loop's windows. `ends` int32[E] has one more than the number of each sequence's last
    row, if some have several rows. `allocation` identifies the buffers' memory: a recorded step is valid for one
    allocation only.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    stored: Tensor
    lengths: Tensor
    table: Tensor
    firsts: tuple[Tensor, ...]
    ends: Tensor | None
    allocation: object


class _HostBuffer:
    """Inputs of a step on the host: `words` int64[WORD_ARRAYS, rows], then int32 bounds[2 + W, rows] and the table.

    It remembers which table lies in each row, and how many blocks of it: an unchanged table is not written again.
    """

    def __init__(self, rows: int, width: int, num_windows: int, *, is_pinned: bool) -> None:
        words, bounds = WORD_ARRAYS * rows, rows * (2 + num_windows)
        self.memory = torch.zeros(words + (bounds + rows * width) // 2, dtype=torch.int64, pin_memory=is_pinned)
        self.words = self.memory[:words].numpy().reshape(WORD_ARRAYS, rows)
        narrow = self.memory[words:].numpy().view(np.int32)
        self.lengths, self.ends, *self.firsts = narrow[:bounds].reshape(-1, rows)
        self.table = narrow[bounds:].reshape(rows, width)
        # Event after the copy of this memory, which must not be written before it.
        self.copied: torch.Event | None = None
        self._placed: list[list[int] | None] = [None] * rows
        self._num_placed = [0] * rows

    def place(self, tables: Sequence[list[int]]) -> None:
        """Write the block tables of all rows."""
        for row, table in enumerate(tables):
            if self._placed[row] is not table or self._num_placed[row] != len(table):
                self.table[row, : len(table)] = table
                self._placed[row], self._num_placed[row] = table, len(table)


class InputBuffers:
    """Persistent buffers of a loop's steps. Their addresses change only when a batch or a table outgrows them.

    On a CPU the host's memory is the device's, and nothing is copied unless `is_staged`, as in tests of the copy. A
    device is filled from two buffers of the host in turn: the inputs of a step may be written while it has yet to copy
    those of the step before.
    """

    def __init__(self, device: torch.device, num_windows: int = 0, *, is_staged: bool = False) -> None:
        """Make buffers for a model with `num_windows` different windows that the kernel takes with its tables."""
        self._device = device
        self._num_windows = num_windows
        self._is_staged = is_staged or device.type == "cuda"
        self._allocate(LEAST_ROWS, LEAST_WIDTH)

    def fill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        stored: Sequence[int],
        blocks: Sequence[list[int]] = (),
        lengths: Sequence[int] = (),
        widest: int = 0,
        firsts: Sequence[Sequence[int]] = (),
        ends: Sequence[int] = (),
    ) -> StepInputs:
        """Fill the buffers and start their copy to the device.

        `blocks` are the block tables of all rows, lists that only grow while a sequence is in the batch: a table that
        is in its place already is not written again. `widest` counts the blocks of the longest table on any rank: so
        the buffers of all ranks are made anew in the same step.
        """
        rows, width = max(len(token_ids), len(slots), len(lengths)), max(widest, *map(len, blocks), 0)
        if rows > self._rows or width > self._width:
            self._allocate(max(rows, self._rows), max(width, self._width))
        self._hosts.reverse()
        host = self._hosts[0]
        if host.copied is not None:
            host.copied.synchronize()
        for array, values in zip(host.words, (token_ids, positions, slots, stored), strict=True):
            array[: len(values)] = values
        host.lengths[: len(lengths)] = lengths
        host.ends[: len(ends)] = ends
        for array, bounds in zip(host.firsts, firsts, strict=True):
            array[: len(bounds)] = bounds
        host.place(blocks)
        if self._is_staged:
            num_bounds = self._rows * (2 + self._num_windows)
            used = WORD_ARRAYS * self._rows + (num_bounds + len(blocks) * self._width + 1) // 2
            host.copied = self._copy(self._on_device[:used], host.memory[:used])
        computed, appended, batch = len(token_ids), len(slots), len(lengths)
        ids, at, to, places = self._on_device[: WORD_ARRAYS * self._rows].view(WORD_ARRAYS, self._rows)
        narrow = self._on_device[WORD_ARRAYS * self._rows :].view(torch.int32)
        counts, tables = narrow.tensor_split([self._rows * (2 + self._num_windows)])
        held, last_rows, *first_seen = counts.view(-1, self._rows)
        return StepInputs(
            token_ids=ids[:computed],
            positions=at[:computed],
            slots=to[:appended],
            stored=places[:appended],
            lengths=held[:batch],
            table=tables.view(self._rows, self._width)[:batch],
            firsts=tuple(each[:batch] for each in first_seen),
            ends=last_rows[: len(ends)] if ends else None,
            allocation=self._allocation,
        )

    def _allocate(self, rows: int, width: int) -> None:
        """Make buffers of powers of two of rows and blocks, so that they are seldom made anew."""
        self._allocation = object()
        self._rows, self._width = (1 << (size - 1).bit_length() for size in (rows, width))
        is_pinned = self._device.type == "cuda"
        count = 2 if self._is_staged else 1
        self._hosts = [
            _HostBuffer(self._rows, self._width, self._num_windows, is_pinned=is_pinned) for _ in range(count)
        ]
        memory = self._hosts[0].memory
        self._on_device = torch.zeros_like(memory, device=self._device) if self._is_staged else memory

    def _copy(self, on_device: Tensor, on_host: Tensor) -> torch.Event | None:
        """Start a copy to the device. Return the event after it; None if it is done."""
        on_device.copy_(on_host, non_blocking=True)
        return torch.cuda.current_stream(self._device).record_event() if on_device.is_cuda else None


@dataclass(slots=True)
class Recorded:
    """Recorded computation. `replay` computes it again from the same memory into `results`."""

    replay: Callable[[], None]
    results: Any


class Recorder(Protocol):
    """Recorder of a device's computations."""

    def record(self, compute: Callable[[], Any]) -> Recorded:
        """Record the launches of `compute`; its results hold nothing before the first replay."""
        ...


class CudaRecorder:
    """Recorder of CUDA graphs, which share one pool of memory: they are replayed in the order of their recording.

    A process records one graph at a time, on a stream of high priority. torch hands out the streams of each priority in
    turn, again and again: with normal priority, a copy of KV could get the recorder's stream and be recorded with it.
    """

    _recording: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        """Record on `device`; it is not touched before the first recording."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        # Trivial graph that lives as long as the recorder: torch refuses a pool whose graphs are all gone while its
        # memory is used, and the workspace of matrix products stays in use. The graph has no messages, since an NCCL
        # ring ends only when all graphs with its messages are gone.
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, compute: Callable[[], Any]) -> Recorded:
        """See Recorder. Other threads go on meanwhile: KV of other turns comes and goes."""
        with self._recording:
            self._stream = self._stream or torch.cuda.Stream(self._device, priority=-1)
            if self._first is None:
                self._first, _ = self._capture(lambda: torch.zeros(1, device=self._device))
            graph, results = self._capture(compute)
        return Recorded(graph.replay, results)

    def _capture(self, compute: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph, pool = torch.cuda.CUDAGraph(), None if self._first is None else self._first.pool()
        # After a failure torch leaves the capture stream current; the outer `with` restores the stream of the steps.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            results = compute()
        return graph, results


@dataclass(frozen=True, slots=True)
class Compilation:
    """Backend of torch's compiler for a model's layers, and the recorder of its decode steps."""

    backend: str
    recorder: Recorder


def bucket_of(num_rows: int) -> int:
    """Return the size of the bucket for `num_rows` rows: a power of two."""
    return 1 << (num_rows - 1).bit_length()


def prompt_bucket(num_tokens: int) -> int:
    """Return the size of the bucket for a prompt's new tokens: 32, 64, or a multiple of 128."""
    if num_tokens <= PROMPT_BUCKET_TOKENS // 2:
        return max(LEAST_PROMPT_BUCKET, bucket_of(num_tokens))
    return -(-num_tokens // PROMPT_BUCKET_TOKENS) * PROMPT_BUCKET_TOKENS


class RecordedPieces:
    """Forward pass of one bucket in recorded pieces, with attention (of the rows in use) and sums in between.

    The first `run` records. If a piece cannot be recorded, it and all later ones are only computed, and `fault` is the
    reason. The step goes on, since its attention has sent messages already.
    """

    def __init__(
        self, pieces: Pieces, total: Callable[[Tensor], Tensor], recorder: Recorder, bucket: int, device: torch.device
    ) -> None:
        """Begin without a recording; `total` sums over ranks."""
        self._pieces = pieces
        self._total = total
        self._recorder = recorder
        self._token_ids, self._positions = torch.zeros(2, bucket, dtype=torch.int64, device=device)
        self._num_rows = 0
        self._step: AttentionStep
        self._actions: list[Callable[[], object]] = []
        self._states: Tensor | None = None
        self.attended: Tensor | None = None
        self.fault: Exception | None = None

    def run(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Return hidden states [T, hidden_size], valid until the next run."""
        self._num_rows, self._step = token_ids.shape[0], step
        self._token_ids[: self._num_rows].copy_(token_ids)
        self._positions[: self._num_rows].copy_(positions)
        if self._states is None:
            self._states = self._pieces.run(
                self._token_ids, self._positions, self._first_attend, self._first_total, self._first_call
            )
        else:
            for act in self._actions:
                act()
        return self._states[: self._num_rows]

    def _first_call(self, compute: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        results = compute(*arguments)
        if self.fault is not None:
            return results
        recorded = try_record(self._recorder, lambda: compute(*arguments))
        if isinstance(recorded, Exception):
            self.fault = recorded
            return results
        recorded.replay()
        self._actions.append(recorded.replay)
        return recorded.results

    def _first_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        def attend() -> Tensor:
            rows = self._num_rows
            out = self._step.attend(layer, q[:rows], k[:rows], v[:rows], scale)
            if self.attended is None:
                self.attended = out.new_zeros(q.shape[0], *out.shape[1:])
            self.attended[:rows].copy_(out)
            return self.attended

        self._actions.append(attend)
        return attend()

    def _first_total(self, part: Tensor) -> Tensor:
        total = self._total(part).clone()
        self._actions.append(lambda: total.copy_(self._total(part)))
        return total


class PromptRunner:
    """Forward passes of prompts. The pieces of short ones are replayed: a host launches their kernels too slowly.

    They have buckets of their own, which are recorded when they are needed for the second time.
    """

    def __init__(self, model: LoadedModel, recorder: Recorder, device: torch.device) -> None:
        self._model = model
        self._recorder = recorder
        self._device = device
        self._recorded: dict[int, RecordedPieces] = {}
        self._seen: set[int] = set()
        self._broken: set[int] = set()
        self._is_running = False

    def hidden_states(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Return `LoadedModel.hidden_states`, valid until the next call.

        A prompt between two layers of a recorded one is computed as it is.
        """
        pieces, bucket = self._model.pieces, prompt_bucket(token_ids.shape[0])
        is_short = pieces is not None and bucket <= MOST_RECORDED_TOKENS
        if not is_short or bucket in self._broken or self._is_running:
            return self._model.hidden_states(token_ids, positions, step)
        if bucket not in self._seen:
            self._seen.add(bucket)
            return self._model.hidden_states(token_ids, positions, step)
        assert pieces is not None
        recorded = self._recorded.get(bucket) or RecordedPieces(
            pieces, self._model.total, self._recorder, bucket, self._device
        )
        self._is_running = True
        try:
            states = recorded.run(token_ids, positions, step)
        finally:
            self._is_running = False
        if recorded.fault is None:
            self._recorded[bucket] = recorded
        else:
            logger.warning("prompts of up to %d tokens are not recorded: %s", bucket, recorded.fault)
            self._broken.add(bucket)
        return states


class RecordedStep:
    """Forward pass of one bucket that is recorded with attention and messages; its inputs lie in the loop's buffers."""

    def __init__(
        self, model: LoadedModel, recorder: Recorder, inputs: StepInputs, step: AttentionStep, stats: TransportStats
    ) -> None:
        """Compute the pass, then record it; `states` come from the first step. `fault` tells why it could not.

        `stats` are the ring's, which counts messages only when they are issued: those of each replay are added here.
        """

        def compute() -> Tensor:
            return model.hidden_states(inputs.token_ids, inputs.positions, step)

        self.states = compute()
        self._stats, before = stats, stats.counts
        recorded = try_record(recorder, compute) if model.pieces else RuntimeError("its layers are not compiled")
        self._sent = {name: count - before[name] for name, count in stats.counts.items()}
        stats.add(self._sent, -1)
        self.fault = recorded if isinstance(recorded, Exception) else None
        self._recorded = None if isinstance(recorded, Exception) else recorded

    def run(self) -> Tensor:
        """Return hidden states [bucket, hidden_size], valid until the next run."""
        assert self._recorded is not None, "the pass could not be recorded"
        self._recorded.replay()
        self._stats.add(self._sent)
        states = self._recorded.results
        assert isinstance(states, Tensor)
        return states


def try_record(recorder: Recorder, compute: Callable[[], Any]) -> Recorded | Exception:
    """Record a computation; return the error of the device or the compiler that prevents it."""
    try:
        return recorder.record(compute)
    except RingserveError:
        raise
    except Exception as error:
        return error


class GraphRunner:
    """Forward passes of a decode loop: replayed if they are recorded, else computed as they are and counted.

    `eager_steps` counts steps by the reason for which nothing was replayed. A bucket whose whole step cannot be
    recorded on some rank is recorded in pieces on all of them.
    """

    def __init__(
        self,
        model: LoadedModel,
        recorder: Recorder,
        device: torch.device,
        stats: TransportStats | None = None,
        agrees: Callable[[bool], bool] = bool,
    ) -> None:
        """`stats` are the ring's. Every rank calls `agrees` with its vote; it returns True if all votes are True."""
        self._model = model
        self._recorder = recorder
        self._device = device
        self._stats = stats or TransportStats()
        self._agrees = agrees
        self._pieces: dict[int, RecordedPieces] = {}
        # By rows, and by sequences if they have drafts.
        self._steps: dict[tuple[int, int], RecordedStep] = {}
        self._allocation: object = None
        self._in_pieces: set[int] = set()
        self._broken: set[int] = set()
        self.eager_steps: Counter[str] = Counter()

    def num_padding(self, num_rows: int, *, has_drafts: bool = False) -> int | None:
        """Return the padding rows of a whole step of `num_rows` rows, alike on all ranks; None if it runs in pieces."""
        bucket = max(bucket_of(num_rows), DRAFTS_BUCKET if has_drafts else 1)
        return None if bucket in self._in_pieces else bucket - num_rows

    def forget(self) -> None:
        """Drop all recordings: their ring can end only then."""
        self._steps.clear()
        self._pieces.clear()

    def run_pieces(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Return hidden states [T, hidden_size] of a step whose attention is not recorded."""
        pieces, bucket = self._model.pieces, bucket_of(token_ids.shape[0])
        if pieces is None or bucket in self._broken:
            self.eager_steps[NOT_COMPILED if pieces is None else RECORDING_FAILED] += 1
            return self._model.hidden_states(token_ids, positions, step)
        if bucket in self._pieces:
            return self._pieces[bucket].run(token_ids, positions, step)
        self.eager_steps[RECORDING] += 1
        recorded = RecordedPieces(pieces, self._model.total, self._recorder, bucket, self._device)
        states = recorded.run(token_ids, positions, step)
        if recorded.fault is None:
            self._pieces[bucket] = recorded
        else:
            logger.warning("steps of up to %d rows are not recorded: %s", bucket, recorded.fault)
            self._broken.add(bucket)
        return states

    def run_step(self, inputs: StepInputs, step: AttentionStep) -> Tensor:
        """Return hidden states [bucket, hidden_size] of a whole step with its rows of padding.

        Recordings for earlier buffers of the inputs are forgotten.
        """
        bucket = inputs.token_ids.shape[0]
        key = bucket, 0 if inputs.ends is None else inputs.ends.shape[0]
        if inputs.allocation is self._allocation and key in self._steps:
            return self._steps[key].run()
        recorded = RecordedStep(self._model, self._recorder, inputs, step, self._stats)
        if inputs.allocation is not self._allocation:
            # Not earlier: an old recording may run until the device is waited for, as it is to record another.
            self._steps.clear()
            self._allocation = inputs.allocation
        if self._agrees(recorded.fault is None):
            self.eager_steps[RECORDING] += 1
            self._steps[key] = recorded
        else:
            self.eager_steps[NOT_COMPILED if self._model.pieces is None else RECORDING_FAILED] += 1
            fault = recorded.fault or "another rank could not"
            logger.warning("steps of up to %d rows are not recorded whole: %s", bucket, fault)
            self._in_pieces.add(bucket)
        return recorded.states
