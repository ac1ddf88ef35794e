"""Ranks as threads of one process, behind the same port as Ray actors.

The leaders of both roles take `ThreadRanks` in place of Ray's ranks. Ranks of a ring talk over
`cp_core.transport.inprocess`; KV still crosses real sockets on loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.views import RingRates
from ringserve.workers.kv.arrivals import Arrivals
from ringserve.workers.protocol.ranks import RankEndpoints, RankInfo, RankSpec, RankStatus, RingSpec
from ringserve.workers.protocol.steps import DecodeCommand, DecodeEvents, PrefillOutput, PrefillStep
from ringserve.workers.protocol.transfers import BlockPair, KvEnds, KvExpect, KvSend, TransferKey, TransferReport
from ringserve.workers.rank.worker import RankWorker

T = TypeVar("T")

RATES = RingRates(gemm_flops=5e10, attention_flops=3e10, link_bytes_per_second=1e9, link_latency_seconds=2e-4)
"""Rates that thread ranks report by default. Measured rates of threads mean nothing and differ from run to run."""


class ThreadRendezvous:
    """In-process rings that the ranks of one ring join. Rank r of `num_ranks` is cp_rank * tp + tp_rank.

    The first rank that joins makes the rings: only then the number of tensor parallel ranks, `tp`, is known.
    """

    def __init__(self, num_ranks: int, timeout_seconds: float) -> None:
        self._num_ranks = num_ranks
        self._timeout_seconds = timeout_seconds
        self._rings: list[InProcessRing] = []
        self._tensor_rings: list[InProcessRing] = []

    def join(self, worker: RankWorker, rank: int, tp: int) -> None:
        """Attach a started worker to its ring and, with tensor parallelism, to its tensor parallel ring."""
        cp = self._num_ranks // tp
        if not self._rings:
            self._rings = [InProcessRing(cp, self._timeout_seconds) for _ in range(tp)]
            self._tensor_rings = [InProcessRing(tp, self._timeout_seconds) for _ in range(cp)]
        cp_rank, tp_rank = divmod(rank, tp)
        tensor = self._tensor_rings[cp_rank].transports[tp_rank] if tp > 1 else None
        worker.attach(self._rings[tp_rank].transports[cp_rank], tensor)


class ThreadRank:
    """`RankPort` to a RankWorker in this process. One thread computes, other threads answer calls.

    With `poisoned`, unused KV holds NaN, so that a read of it is noticed. The rank reports `rates`.
    """

    def __init__(self, rendezvous: ThreadRendezvous, rank: int, poisoned: bool, rates: RingRates) -> None:
        self.worker = RankWorker()
        self._rendezvous = rendezvous
        self._tp = 1
        self._rank = rank
        self._poisoned = poisoned
        self._rates = rates
        self._compute = ThreadPoolExecutor(1, f"rank-{rank}")
        self._others = ThreadPoolExecutor(32, f"rank-{rank}-calls")
        self._is_dead = False
        self._note: object = None
        self._arrivals = Arrivals(self._poll_kv)

    async def _run(self, pool: ThreadPoolExecutor, timeout: float | None, call: Callable[[], T]) -> T:
        if self._is_dead:
            raise Unavailable(f"rank {self._rank} died")
        try:
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 can swallow a cancellation
                return await asyncio.get_running_loop().run_in_executor(pool, call)
        except TimeoutError:
            raise Unavailable(f"rank {self._rank} did not answer within {timeout} s") from None
        except RingserveError:
            raise
        except Exception as error:  # as over Ray: any error of a rank loses its ring
            raise Unavailable(f"rank {self._rank} failed: {type(error).__name__}: {error}") from error

    async def start(self, spec: RankSpec, timeout: float) -> RankInfo:
        self._tp = spec.tp
        return await self._run(self._others, timeout, lambda: self.worker.start(spec, poisoned=self._poisoned))

    async def renew(self, spec: RankSpec, timeout: float) -> RankInfo:
        return await self._run(self._others, timeout, lambda: self.worker.renew(spec))

    def meet(self, rendezvous: ThreadRendezvous) -> None:
        """Join the next ring there."""
        self._rendezvous = rendezvous

    async def open_endpoints(self, timeout: float) -> RankEndpoints:
        return RankEndpoints()

    async def join(self, ring: RingSpec, timeout: float) -> None:
        self._rendezvous.join(self.worker, self._rank, self._tp)

    async def probe(self, timeout: float) -> RingRates:
        return self._rates

    async def probe_between_steps(self, timeout: float) -> RingRates:
        await self._run(self._others, timeout + 5, lambda: self.worker.probe_between_steps(timeout))
        return self._rates

    async def prefill(self, step: PrefillStep, timeout: float) -> PrefillOutput:
        return await self._run(self._compute, timeout, lambda: self.worker.prefill(step))

    async def prefill_within(self, step: PrefillStep, timeout: float) -> PrefillOutput | None:
        return await self._run(self._others, timeout + 5, lambda: self.worker.prefill_within(step, timeout))

    async def run_decode(self) -> None:
        await self._run(self._compute, None, self.worker.run_decode)

    async def finish_sends(self, key: TransferKey, timeout: float) -> TransferReport:
        return await self._run(self._others, timeout + 5, lambda: self.worker.finish_sends(key, timeout))

    async def abandon_send(self, key: TransferKey, timeout: float) -> None:
        await self._run(self._others, timeout, lambda: self.worker.abandon_send(key))

    async def send_kv(self, send: KvSend, timeout: float) -> TransferReport:
        return await self._run(self._others, timeout + 5, lambda: self.worker.send_kv(send, timeout))

    async def expect_kv(self, expect: KvExpect, timeout: float) -> None:
        self._arrivals.expect(expect.key)
        try:
            await self._run(self._others, timeout, lambda: self.worker.expect_kv(expect))
        except BaseException:
            self._arrivals.drop(expect.key)
            raise

    async def await_kv(self, key: TransferKey, timeout: float) -> TransferReport:
        return await self._arrivals.wait(key, timeout)

    async def _poll_kv(self, after: int, wait_seconds: float) -> KvEnds:
        return await self._run(self._others, wait_seconds + 30, lambda: self.worker.poll_kv(after, wait_seconds))

    async def drop_kv(self, key: TransferKey, timeout: float) -> None:
        self._arrivals.drop(key)
        await self._run(self._others, timeout, lambda: self.worker.drop_kv(key))

    async def copy_blocks(self, pairs: Sequence[BlockPair], timeout: float) -> None:
        await self._run(self._others, timeout, lambda: self.worker.copy_blocks(pairs))

    async def prepare_grammar(self, grammar: str, timeout: float) -> None:
        await self._run(self._others, timeout, lambda: self.worker.prepare_grammar(grammar))

    async def submit(self, commands: Sequence[DecodeCommand], timeout: float) -> None:
        await self._run(self._others, timeout, lambda: self.worker.submit(commands))

    async def poll(self, after: int, wait_seconds: float, timeout: float) -> DecodeEvents:
        return await self._run(self._others, timeout, lambda: self.worker.poll(after, wait_seconds))

    async def status(self, timeout: float) -> RankStatus:
        return await self._run(self._others, timeout, self.worker.status)

    async def remember(self, note: object, timeout: float) -> None:
        self._note = note

    async def recall(self, timeout: float) -> object:
        return self._note

    async def kill(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._arrivals.close(f"rank {self._rank} died")
            await asyncio.get_running_loop().run_in_executor(self._others, self.worker.stop)
            self._compute.shutdown(wait=False)
            self._others.shutdown(wait=False)


class ThreadRanks:
    """`RankFactory` of thread ranks. `made` holds the ranks of the latest ring."""

    def __init__(self, *, poisoned: bool = False, ring_timeout: float = 30.0, rates: RingRates = RATES) -> None:
        self.made: list[ThreadRank] = []
        self._poisoned = poisoned
        self._rates = rates
        self._ring_timeout = ring_timeout

    async def create(self, num_ranks: int, timeout: float) -> Sequence[ThreadRank]:
        rendezvous = ThreadRendezvous(num_ranks, self._ring_timeout)
        self.made = [ThreadRank(rendezvous, rank, self._poisoned, self._rates) for rank in range(num_ranks)]
        return list(self.made)

    async def adopt(self, num_ranks: int) -> Sequence[ThreadRank]:
        """Return the ranks of the latest ring, unless it was closed."""
        return list(self.made)

    async def replace(self, lost: Sequence[int], timeout: float) -> Sequence[ThreadRank]:
        """Kill lost ranks, make others in their places, and let all meet anew."""
        rendezvous = ThreadRendezvous(len(self.made), self._ring_timeout)
        for number in lost:
            await self.made[number].kill()
            self.made[number] = ThreadRank(rendezvous, number, self._poisoned, self._rates)
        for rank in self.made:
            rank.meet(rendezvous)
        return list(self.made)

    async def close(self) -> None:
        await asyncio.gather(*(rank.kill() for rank in self.made))
        self.made = []
