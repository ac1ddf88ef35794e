"""Experiment of a chaos run: the load on a cluster, a fault in an observed phase, and all that is seen of it.

`Run` makes the experiments.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.chaos.faults import Cell, How, Phase, Processes
from bench.chaos.load import FIRST, HIT, LAST, Expected, Stream, begin, play
from bench.chaos.nodes import WorkerNode
from bench.chaos.verdict import (
    MAX_DETECT_SECONDS,
    UNKNOWN,
    Observation,
    Outcome,
    Result,
    Usual,
    judge,
    nothing_hit,
)
from ringserve.client import AsyncClient, ServerInfo
from ringserve.cp_core.errors import NotFound, RingserveError, Unavailable

DECODING_TOKENS = 6
"""Tokens after which a stream counts as decoding."""
STATUS_SECONDS = 1.0
"""Deadline of one question about the state of the rings."""
PAUSE_SECONDS = 0.05
LOOK_SECONDS = 0.02
"""Seconds between two looks at the rings until the fault: a turn may wait for only a few steps."""
REST_SECONDS = 2.0
"""Seconds between two looks once the fault was noticed: looking takes processor time from what recovers."""
TRIGGER_SECONDS = 0.002
RECOVER_SECONDS = 90.0
FREE_SECONDS = 20.0
Info = ServerInfo


@dataclass(slots=True)
class _Target:
    """Process or node that was hit: its name, the process's id, and when.

    `rings` maps its ring, or each ring with ranks on the node, to the ring's incarnation at that time.
    """

    name: str
    rings: Mapping[str, str]
    pid: int
    hit_at: float


class Experiment:
    """Experiments on one cluster, one after the other."""

    def __init__(
        self,
        gateway: str,
        processes: Processes,
        expected: Sequence[Expected],
        stream_seconds: float,
        usual: Usual = UNKNOWN,
        worker: WorkerNode | None = None,
    ) -> None:
        """Take the gateway's address, the processes, the load, each turn's deadline, what is usual, the worker node."""
        self._gateway = gateway
        self._processes = processes
        self._expected = expected
        self._stream_seconds = stream_seconds
        self._worker = worker
        self._may_return = True
        self._usual = usual
        self._info = Info()
        self._num_rings = 0
        self._target: _Target | None = None
        self._sign: tuple[float, str] | None = None

    async def usual(self, prefix: str) -> Usual:
        """Return what is seen of the second turns while nothing is hit."""
        async with AsyncClient(self._gateway) as client:
            await self._whole(client)
            for number in (FIRST, HIT):
                streams = begin(self._expected, number)
                await play(client, streams, prefix, self._stream_seconds)
            await self._forget(client, prefix)
        return Usual.of(streams)

    async def run(self, cell: Cell, prefix: str) -> Result:
        """Run one cell in conversations of its own. Raises RingserveError if the cluster did not serve before it."""
        self._target, self._sign = None, None
        try:
            async with AsyncClient(self._gateway) as client, self._watching(cell):
                return await self._run(client, cell, prefix)
        finally:
            self._end_fault()

    async def _run(self, client: AsyncClient, cell: Cell, prefix: str) -> Result:
        before = await self._whole(client)
        self._num_rings, free_before = len(before.rings), _num_free(before)
        firsts = begin(self._expected, FIRST)
        await play(client, firsts, prefix, self._stream_seconds)
        if wrong := next((stream for stream in firsts if not stream.is_exact), None):
            raise Unavailable(f"the load failed before the fault: {wrong.error or wrong.difference}")
        streams = await self._play_and_hit(client, cell, prefix, firsts)
        if not self._was_hit:
            await self._forget(client, prefix)
            return nothing_hit(cell, Outcome.UNSEEN, f"no stream was seen in the phase {cell.phase}")
        return judge(cell, await self._observe(client, cell, prefix, streams, free_before))

    async def _play_and_hit(
        self, client: AsyncClient, cell: Cell, prefix: str, firsts: Sequence[Stream]
    ) -> list[Stream]:
        """Run the second turns, and hit the process when its phase is seen, or just before them."""
        if cell.phase is Phase.IDLE:
            self._hit(cell, firsts[0])
        streams = begin(self._expected, HIT)

        def look(_: Stream | None = None) -> None:
            rings = self._rings_on_worker() if cell.needs_worker else None
            if not self._was_hit and (stream := in_phase(cell.phase, streams, self._info, rings)):
                self._hit(cell, stream)

        playing = asyncio.create_task(play(client, streams, prefix, self._stream_seconds, look))
        try:
            while not playing.done() and not self._was_hit:
                look()
                await asyncio.wait([playing], timeout=TRIGGER_SECONDS)
            await playing
        finally:
            playing.cancel()
        return streams

    @property
    def _was_hit(self) -> bool:
        return self._target is not None

    def _rings_on_worker(self) -> dict[str, str]:
        """Return the rings with ranks on the worker node, with their incarnations."""
        worker = self._worker
        return {ring.name: ring.incarnation for ring in self._info.rings if worker and worker.address in ring.nodes}

    def _hit(self, cell: Cell, stream: Stream) -> None:
        """Hit the process of the cell's kind that works for a stream, or the worker node."""
        where, rings = "", dict[str, str]()
        if cell.needs_worker and self._worker is not None:
            where, rings = self._worker.address, self._rings_on_worker()
        elif cell.role and stream.plan is not None:
            where = stream.plan.prefill_ring if cell.role == "prefill" else stream.plan.decode_ring
            rings = {ring.name: ring.incarnation for ring in self._info.rings if ring.name == where}
        name = self._processes.name_of(cell.kind, where)
        if not name:
            return
        if cell.needs_worker and self._worker is not None:
            self._may_return = False
        if cell.how is How.CUT and self._worker is not None:
            self._worker.cut()
            self._target = _Target(f"link of {where}", rings, self._processes.pid_of(name), time.monotonic())
        else:
            self._target = _Target(name, rings, self._processes.hit(name, cell.how), time.monotonic())

    def _end_fault(self) -> None:
        """Let what was stopped or cut off go on, and a node that was lost come back."""
        self._processes.resume()
        if self._worker is not None:
            self._worker.heal()
        self._may_return = True

    async def _observe(
        self, client: AsyncClient, cell: Cell, prefix: str, streams: list[Stream], free_before: int
    ) -> Observation:
        """Collect what is seen of the fault from the end of the streams to a cluster that is whole again."""
        target = self._target
        assert target is not None, "something was hit"
        affected = [stream for stream in streams if not target.rings or stream.uses(target.rings)]
        affected = [stream for stream in affected if not stream.ended < target.hit_at]
        self._note_errors(affected)
        while self._sign is None and time.monotonic() < target.hit_at + 2 * MAX_DETECT_SECONDS:
            await asyncio.sleep(PAUSE_SECONDS)
        self._end_fault()  # a process that the service gave up must do no harm when it goes on
        recovered, info = None, self._info
        with contextlib.suppress(RingserveError):
            info = await self._whole(client)
            recovered = time.monotonic() - target.hit_at
        lost, follow_ups = ([], []) if recovered is None else await self._follow_up(client, prefix, streams)
        free_after = await self._forget(client, prefix) if recovered is not None else 0
        sign = self._sign
        role_rings = [ring for ring in info.rings if ring.role == cell.role]
        return Observation(
            victim=target.name,
            streams=streams,
            affected=affected,
            follow_ups=follow_ups,
            hit_at=target.hit_at,
            detect_seconds=None if sign is None else sign[0] - target.hit_at,
            sign="" if sign is None else sign[1],
            recover_seconds=recovered,
            free_before=free_before,
            free_after=free_after,
            lost=lost,
            is_alone=bool(cell.role) and len(role_rings) == 1,
            usual=self._usual,
        )

    def _note_errors(self, affected: Sequence[Stream]) -> None:
        """Take the first error of the affected streams as a sign that the fault was noticed."""
        failed = [stream for stream in affected if stream.error]
        if failed:
            first = min(failed, key=lambda stream: stream.ended)
            self._note(first.ended, "a stream failed")

    def _note(self, at: float, sign: str) -> None:
        if self._sign is None or at < self._sign[0]:
            self._sign = (at, sign)

    async def _follow_up(
        self, client: AsyncClient, prefix: str, streams: Sequence[Stream]
    ) -> tuple[list[str], list[Stream]]:
        """Check every conversation's length and run the turn after the fault. Return the lost ones and the turns."""
        lost, after = [], []
        for stream in streams:
            name = stream.expected.script.name
            # A turn that failed may have been committed, or not at all.
            lengths = {len(stream.expected.history(LAST))} | (
                {len(stream.expected.history(HIT))} if stream.error else set()
            )
            try:
                num_tokens = (await client.conversation(prefix + name)).num_tokens
            except NotFound:
                num_tokens = 0
            if num_tokens not in lengths:
                lost.append(name)
            elif num_tokens == max(lengths):
                after.append(stream.expected)
        follow_ups = begin(after, LAST)
        await play(client, follow_ups, prefix, self._stream_seconds)
        return lost, follow_ups

    # --- the cluster -------------------------------------------------------------------------------------------------

    async def _whole(self, client: AsyncClient) -> Info:
        """Return the state of the rings when all serve and no turn runs. Raises Unavailable if that never comes."""
        deadline = time.monotonic() + RECOVER_SECONDS
        while True:
            with contextlib.suppress(RingserveError, TimeoutError):
                async with asyncio.timeout(STATUS_SECONDS):
                    info = await client.server_info()
                if len(info.rings) >= self._num_rings and is_whole(info):
                    return info
            if time.monotonic() > deadline:
                raise Unavailable(f"the cluster is not whole and idle after {RECOVER_SECONDS:.0f} s")
            await asyncio.sleep(PAUSE_SECONDS)

    async def _forget(self, client: AsyncClient, prefix: str) -> int:
        """Delete the conversations of a cell. Return how many KV blocks are free once all are, or after a while."""
        for each in self._expected:
            with contextlib.suppress(RingserveError):
                await client.delete_conversation(prefix + each.script.name)
        deadline = time.monotonic() + FREE_SECONDS
        while True:
            info = await self._whole(client)
            if _num_free(info) == _num_blocks(info) or time.monotonic() > deadline:
                return _num_free(info)
            await asyncio.sleep(PAUSE_SECONDS)

    @asynccontextmanager
    async def _watching(self, cell: Cell) -> AsyncIterator[None]:
        """Look at rings and processes all the time, and note the first sign that the service has noticed the fault."""
        watching = [asyncio.create_task(self._watch_rings()), asyncio.create_task(self._watch_processes(cell))]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _watch_rings(self) -> None:
        async with AsyncClient(self._gateway) as client:
            while True:
                with contextlib.suppress(RingserveError, TimeoutError):
                    async with asyncio.timeout(STATUS_SECONDS):
                        self._info = await client.server_info()
                    if self._target is not None:
                        self._look_at_rings(self._target.rings)
                rest = LOOK_SECONDS if not self._was_hit else PAUSE_SECONDS if self._sign is None else REST_SECONDS
                await asyncio.sleep(rest)

    def _look_at_rings(self, before: Mapping[str, str]) -> None:
        """Note a sign if one of some rings, given with their old incarnations, is not ready or was built again."""
        now = {ring.name: ring for ring in self._info.rings}
        for name, incarnation in before.items():
            ring = now.get(name)
            if ring is None or ring.state != "ready":
                self._note(time.monotonic(), f"the ring is {'gone' if ring is None else ring.state}")
            elif ring.incarnation != incarnation:
                self._note(time.monotonic(), "the ring was built again")

    async def _watch_processes(self, cell: Cell) -> None:
        """Look at processes and note signs. Keep the worker node up: its return is our own doing and no sign."""
        while True:
            pids = await asyncio.to_thread(self._processes.look)
            if cell.needs_worker:
                if self._worker is not None and self._may_return:
                    await asyncio.to_thread(self._worker.keep)
            elif (target := self._target) is not None:
                pid = pids.get(target.name, 0)
                if pid and pid != target.pid:
                    self._note(time.monotonic(), "the process was replaced")
                elif not pid and cell.how is How.STOP:
                    self._note(time.monotonic(), "the stopped process was killed")
            await asyncio.sleep(10 * PAUSE_SECONDS if self._sign is None or cell.needs_worker else REST_SECONDS)


def in_phase(
    phase: Phase, streams: Sequence[Stream], info: Info, among: Collection[str] | None = None
) -> Stream | None:
    """Return a stream that is in this phase, or None. `Phase` says what shows each phase.

    `among` are the only rings that count: the prefill ring before the first token, the decode ring after several, and
    either in between. None: all count.
    """
    running = [stream for stream in streams if stream.plan is not None and not stream.is_over]
    if among is not None:
        running = [stream for stream in running if not _rings_at_work(phase, stream).isdisjoint(among)]
    waiting = [stream for stream in running if not stream.token_ids]
    match phase:
        case Phase.QUEUED:
            rings = {ring.name for ring in info.rings if ring.role == "prefill" and ring.num_requests_waiting}
            found = [stream for stream in waiting if stream.plan and stream.plan.prefill_ring in rings]
            return found[-1] if found else None
        case Phase.PREFILL:
            rings = {ring.name for ring in info.rings if ring.role == "prefill" and ring.num_requests_running}
            return next((each for each in waiting if each.plan and each.plan.prefill_ring in rings), None)
        case Phase.MIGRATING:
            migrating = (each for each in running if each.plan and each.plan.prefill_ring != each.plan.decode_ring)
            return next((stream for stream in migrating if len(stream.token_ids) == 1), None)
        case Phase.DECODING:
            return next((stream for stream in running if len(stream.token_ids) >= DECODING_TOKENS), None)
        case Phase.IDLE:
            return None


def _rings_at_work(phase: Phase, stream: Stream) -> set[str]:
    """Return the rings that work for a stream in a phase."""
    plan = stream.plan
    if plan is None:
        return set()
    match phase:
        case Phase.QUEUED | Phase.PREFILL:
            return {plan.prefill_ring}
        case Phase.DECODING:
            return {plan.decode_ring}
        case _:
            return {plan.prefill_ring, plan.decode_ring}


def is_whole(info: Info) -> bool:
    return (
        bool(info.rings)
        and not info.running_turns
        and all(
            ring.state == "ready"
            and not ring.num_requests_running
            and not ring.num_requests_waiting
            and ring.kv_usage
            and not any(rank.active_blocks for rank in ring.kv_usage)
            for ring in info.rings
        )
    )


def _num_free(info: Info) -> int:
    return sum(rank.free_blocks for ring in info.rings for rank in ring.kv_usage)


def _num_blocks(info: Info) -> int:
    return sum(rank.total_blocks for ring in info.rings for rank in ring.kv_usage)
