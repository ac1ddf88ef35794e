"""One rank of the decode bench: a rank worker whose decode loop runs all the time, over KV of random numbers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from cp_core.layout.shards import level_counts
from services.offline.bench.model_rank import BLOCK_TOKENS, blocks_for, start_worker
from services.offline.bench.ring_processes import Seat
from services.offline.bench.sample import Sample, peak_memory_bytes
from workers.protocol.decode_commands import AdmitSequence
from workers.protocol.steps import Sampling

EVENT_SECONDS = 120.0
LOOP_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """`batch` sequences of `context` tokens each, decoded for `steps` steps."""

    context: int
    batch: int
    steps: int

    def blocks_per_sequence(self, num_ranks: int) -> int:
        """On each rank, with room for what is decoded."""
        return blocks_for(self.context // num_ranks + 1 + self.steps + 1)

    def kv_tokens(self) -> int:
        """Of the whole ring."""
        return self.batch * BLOCK_TOKENS * self.blocks_per_sequence(1)


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A case, served as `policy` says: by a variant, or by what the ring's rule takes (`auto`)."""

    case: DecodeCase
    policy: str


class DecodeStation:
    """`steps` steps at a time. The first rank submits the batch, and sees a step end when its tokens come."""

    def __init__(self, model: str, cases: tuple[DecodeCase, ...], seat: Seat) -> None:
        self._seat = seat
        num_blocks = max(case.batch * case.blocks_per_sequence(seat.num_ranks) for case in cases)
        self._worker = start_worker(seat, "decode", model, num_blocks, max(case.batch for case in cases))
        self._worker.fill_kv(seat.rank)
        self._worker.probe()
        self._cursor = 0
        self._burst = 0
        self._loop = threading.Thread(target=self._worker.run_decode, name="decode", daemon=True)
        self._loop.start()

    def measure(self, task: DecodeTask) -> Sample:
        """Seconds of one step, the mean over the case's steps: TTIT. Ranks but the first have none to tell."""
        if self._seat.rank:
            return Sample(seconds=0.0, peak_memory_bytes=peak_memory_bytes())
        case = task.case
        self._burst += 1
        self._worker.follow_decode_variant(task.policy)
        self._worker.submit([self._admission(case, row) for row in range(case.batch)])
        times: list[float] = []
        first_steps = 0
        left = case.batch
        while left:
            events = self._worker.poll(self._cursor, EVENT_SECONDS)
            assert events.events, f"no token in {EVENT_SECONDS:g} s"
            times.append(time.perf_counter())
            self._cursor = events.stop
            left -= sum(event.finish_reason is not None for event in events.events)
            if len(times) == 1:
                first_steps = len(events.events) // case.batch
        assert first_steps < case.steps, f"all {case.steps} tokens came at once"
        seconds = (times[-1] - times[0]) / (case.steps - first_steps)
        return Sample(seconds=seconds, peak_memory_bytes=peak_memory_bytes())

    def close(self) -> None:
        self._worker.stop()
        self._loop.join(LOOP_END_SECONDS)

    def _admission(self, case: DecodeCase, row: int) -> AdmitSequence:
        """Blocks of a sequence lie together, as they do in a cache that was empty."""
        ranks = self._seat.num_ranks
        each = case.blocks_per_sequence(ranks)
        return AdmitSequence(
            sequence_id=f"bench-{self._burst}-{row}",
            token_id=row,
            position=case.context,
            held=level_counts((0,) * ranks, case.context),
            blocks=(tuple(range(row * each, (row + 1) * each)),) * ranks,
            sampling=Sampling(max_tokens=case.steps + 1),
        )
