"""A router that dies at any write to its journal: what it has acknowledged is so for the next one, and nothing half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringserve.cp_core.errors import NotFound, RingserveError
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.protocol.inventory import KnownEpoch, RingInventory, TurnOnRing
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, NoJournal, StoredConversation
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import BegunTurn, ForkedKv, ForkKv, TurnOutcome, TurnRequest
from ringserve.orchestration.router.router import Router, RouterSettings
from ringserve.workers.protocol.steps import TokenIds
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.fake_ranks import MODEL
from tests.orchestration.router.fake_rings import FakeRings, shards
from tests.virtual_time import VirtualTimeLoop

NAMES = ("a", "b", "c")
LONG_SECONDS = 30.0
"""More than a router waits for anything after its start."""
Tokens = tuple[int, ...]
operations = st.tuples(
    st.sampled_from(("turn", "turn", "turn", "begin", "begin", "fork", "fork", "fail", "delete", "die")),
    st.sampled_from(("a", "a", "b")),
    st.sampled_from(NAMES),
    st.integers(1, 3),
)


@dataclass
class Disk:
    """Contents of a journal; `left` writes until the router dies, the last of them on the disk if `is_written`."""

    left: int = 1 << 30
    is_written: bool = True
    epoch: int = 0
    conversations: dict[str, tuple[Tokens, int, str]] = field(default_factory=dict)
    turns: dict[str, BegunRecord] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)


class DyingJournal(NoJournal):
    """Journal on a disk, whose router dies at one of its writes. From then on nothing is written."""

    def __init__(self, disk: Disk) -> None:
        disk.epoch += 1
        self.epoch = disk.epoch
        self.died = asyncio.Event()
        self._disk = disk

    def _write(self, change: Callable[[], object]) -> Awaitable[None]:
        disk, done = self._disk, asyncio.get_running_loop().create_future()
        disk.left -= 1
        if not self.died.is_set() and (disk.left or disk.is_written):
            change()
        if not disk.left:
            self.died.set()
        if not self.died.is_set():
            done.set_result(None)
        return done

    def begun(self, record: BegunRecord) -> Awaitable[None]:
        return self._write(lambda: self._disk.turns.update({record.turn_id: record}))

    def committed(self, record: CommittedRecord) -> Awaitable[None]:
        return self._write(lambda: self._commit(record))

    def _commit(self, record: CommittedRecord) -> None:
        begun = self._disk.turns.pop(record.turn_id, None)
        if begun is None:
            return
        name = begun.request.conversation_id
        before, num_turns, _ = self._disk.conversations.get(name, ((), 0, ""))
        tokens = (*before[: begun.base_tokens], *begun.request.token_ids.tolist(), *record.answer.tolist())
        self._disk.conversations[name] = tokens, num_turns + 1, record.turn_id
        self._disk.ended[record.turn_id] = record.kv_tokens

    def failed(self, turn_id: str) -> Awaitable[None]:
        return self._write(lambda: self._disk.turns.pop(turn_id, None))

    def forked(self, source_id: str, new: StoredConversation) -> Awaitable[None]:
        tokens, _, _ = self._disk.conversations[source_id]
        entry = tokens[: new.num_tokens], new.num_turns, ""
        return self._write(lambda: self._disk.conversations.update({new.conversation_id: entry}))

    def deleted(self, conversation_ids: Sequence[str]) -> Awaitable[None]:
        return self._write(lambda: [self._disk.conversations.pop(name, None) for name in conversation_ids])

    def conversations(self) -> Iterable[StoredConversation]:
        for name, (tokens, num_turns, last_turn) in self._disk.conversations.items():
            yield StoredConversation(
                conversation_id=name,
                num_tokens=len(tokens),
                num_turns=num_turns,
                forked_from="",
                ttl_seconds=0.0,
                last_used=0.0,
                last_turn=last_turn,
            )

    def turns(self) -> Iterable[BegunRecord]:
        return list(self._disk.turns.values())

    def ended(self) -> Iterable[tuple[str, int]]:
        return list(self._disk.ended.items())

    def tokens_of(self, conversation_id: str) -> TokenIds:
        return np.asarray(self._disk.conversations[conversation_id][0], dtype=np.int64)


async def _keep_nothing(request: ForkKv) -> ForkedKv:
    raise NotFound("nothing of it is here")


class Crashes:
    """Router over rings that outlive it, and the model: what clients have been told."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.told: dict[str, Tokens] = {}
        self.running: dict[str, tuple[BegunTurn, Tokens]] = {}
        self._count = 0
        self._rings = FakeRings(1, 1)
        for ring in self._rings.rings.values():
            ring.fork_kv = _keep_nothing  # type: ignore[method-assign]
        self._calls: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Start a router, to which the rings tell what they hold."""
        self._journal = DyingJournal(self.disk)
        limits = RouterSettings(max_positions=4096, ring_lease=0.0, retain_prompts=False, num_rings=2)
        clock = asyncio.get_running_loop().time
        self.router = Router(limits, Planner(MODEL, PlannerSettings()), self._rings, clock, self._journal)
        self.router.restore()
        for name, ring in self._rings.rings.items():
            ring.on_aborted = self._on_aborted
            turns = [
                TurnOnRing(turn_id=turn, kv_id=kv_id, attempt=1, retained_tokens=0, is_begun=True, is_sealed=True)
                for turn, kv_id in self._held(name)
            ]
            inventory = RingInventory(sequences=(), turns=tuple(turns))
            await self.router.register_ring(ring.registration, KnownEpoch(epoch=self.disk.epoch, inventory=inventory))

    def _held(self, name: str) -> list[tuple[str, str]]:
        names = {begun.turn_id: kv_id for kv_id, (begun, _) in self.running.items()}
        return [(turn, names.get(turn, turn)) for turn in self._rings.rings[name].held]

    def _on_aborted(self, turn_id: str) -> None:
        self._calls.append(asyncio.create_task(self.router.end_turn(TurnOutcome(turn_id=turn_id, ok=False))))

    async def call(self, work: Coroutine[Any, Any, Any]) -> tuple[Any, bool]:
        """Make a call. Return its answer, and whether one came before the router died."""
        task, died = asyncio.create_task(work), asyncio.create_task(self._journal.died.wait())
        await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if task.done() and not self._journal.died.is_set():
            return task.result(), True
        await self._die()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None, False

    async def _die(self) -> None:
        crashed = self.router
        for turn in crashed._turns._running.values():
            for running in (turn.attempt.prefilling, turn.attempt.resuming, turn.ending):
                if running is not None:
                    running.cancel()
            if turn.lease is not None:
                turn.lease.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._calls.clear()
        await crashed._tasks.close()
        await self.start()
        await asyncio.sleep(LONG_SECONDS)

    async def apply(self, operation: tuple[str, str, str, int]) -> None:
        kind, name, other, length = operation
        history = self.told.get(name, ())
        if kind in ("begin", "turn") and name not in self.running:
            await self._begin(name, length)
        if kind in ("turn", "end", "fail") and name in self.running:
            await self._end(name, length, is_good=kind != "fail")
        elif kind == "fork" and history and not {name, other} & self.running.keys() and other not in self.told:
            cut = min(length, len(history))
            _, is_told = await self.call(self.router.fork_conversation(name, other, cut))
            if is_told or await self._length(other):
                self.told[other] = history[:cut]
        elif kind == "die":
            await self._die()
        elif kind == "delete" and history and name not in self.running:
            _, is_told = await self.call(self.router.delete_conversation(name))
            if is_told or not await self._length(name):
                del self.told[name]

    async def _begin(self, name: str, length: int) -> None:
        self._count += 1
        new = tuple(self._count * 10 + place for place in range(length))
        request = TurnRequest(
            request_id=f"request-{self._count}",
            conversation_id=name,
            prompt_mode=PromptMode.WHOLE_HISTORY,
            token_ids=np.asarray((*self.told.get(name, ()), *new), dtype=np.int64),
            sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=8, stop_token_ids=()),
            deadline_seconds=600.0,
        )
        begun, is_told = await self.call(self.router.begin_turn(request))
        if is_told:
            self.running[name] = begun, new
        else:  # its client is gone with it
            await self.router.abort_requests([request.request_id])
            await asyncio.sleep(LONG_SECONDS)

    async def _end(self, name: str, length: int, *, is_good: bool) -> None:
        """Have the ring tell an end, again and again until a router has heard it."""
        begun, new = self.running.pop(name)
        answer = tuple(range(500, 500 + length))
        self._rings.rings[begun.decode_endpoint].drop(begun.turn_id)
        tokens = (*self.told.get(name, ()), *new, *answer)
        outcome = TurnOutcome(
            turn_id=begun.turn_id,
            ok=is_good,
            token_ids=answer if is_good else (),
            kv_tokens=len(tokens) - 1 if is_good else 0,
            shards=shards(0, len(tokens) - 1),
        )
        is_told = False
        while not is_told:
            self._rings.rings[begun.decode_endpoint].held.add(begun.turn_id)  # in the inventory while it is untold
            self.running[name] = begun, new
            _, is_told = await self.call(self.router.end_turn(outcome))
            self._rings.rings[begun.decode_endpoint].drop(begun.turn_id)
            self.running.pop(name)
        if is_good:
            self.told[name] = tokens

    async def _length(self, name: str) -> int:
        try:
            return (await self.router.get_conversation(name)).num_tokens
        except NotFound:
            return 0

    async def check(self) -> None:
        """Compare the router with what clients know, and the next one on the same disk."""
        for _ in range(2):
            await asyncio.sleep(LONG_SECONDS)
            assert self.router.num_running == len(self.running)
            for name in NAMES:
                conversation = self.router._conversations.known(name)
                tokens = () if conversation is None or conversation.tokens is None else tuple(conversation.tokens)
                assert tokens == self.told.get(name, ()), name
                assert conversation is None or bool(conversation.running_request) == (name in self.running)
            await self._die()
        await self.router.close()
        for call in self._calls:
            assert isinstance(call.exception(), RingserveError | None)


GOES_ON = [("turn", "a", "b", 2), ("begin", "a", "b", 2), ("die", "a", "b", 1), ("turn", "a", "b", 2)]
"""Turn that continues a conversation, and ends under the next router."""


@settings(max_examples=50, deadline=None)
@example(steps=GOES_ON, write=1 << 30, is_written=True)
@given(st.lists(operations, min_size=6, max_size=16), st.integers(1, 24), st.booleans())
def test_a_router_that_dies_at_any_write_leaves_what_it_has_acknowledged_and_nothing_half(
    steps: Sequence[tuple[str, str, str, int]], write: int, is_written: bool
) -> None:
    async def run() -> None:
        crashes = Crashes(Disk(left=write, is_written=is_written))
        await crashes.start()
        for step in steps:
            await crashes.apply(step)
        crashes.disk.left = 1 << 30
        await crashes.check()

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
