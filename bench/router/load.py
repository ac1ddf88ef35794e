"""Load of the real router: turns of many conversations, one after the other, on rings that answer at once.

The router bench calls `measure_load`. A `LoadedRouter` owns its router and the fake rings, and closes the journal.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.router.records import turn_request
from bench.router.rings import InstantRings, registrations
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.protocol.inventory import KnownEpoch
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, NoJournal
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import TurnOutcome
from ringserve.orchestration.router.router import Router, RouterSettings
from ringserve.services.cluster.garbage import FrozenSurvivors
from ringserve.services.offline.reports import Summary
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import Algorithm, TokenIds

VOCABULARY = 32_000
MAX_FOLLOWED = 20_000
"""Conversations that have further turns; all others are idle after their first."""
MAX_JOURNALED = 5_000
"""Maximum number of conversations in the journal."""
MEMORY_SAMPLE = 100
"""Conversations whose memory is measured; more would take long, because tracing is slow."""
NUM_PARTS = 10
"""Parts of the run; in each, the median turn with a journal is compared with the one without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLoad:
    """Load of the router: `turns` turns in each conversation, the first of `tokens` tokens, the others of `follow_up`.

    Half of the `rings` are prefill rings; their sizes and rates differ. Only the first MAX_FOLLOWED conversations have
    further turns, and at most MAX_JOURNALED are in the journal.
    """

    conversations: int = 10_000
    rings: int = 200
    turns: int = 2
    tokens: int = 1000
    follow_up: int = 50
    answer: int = 20
    seed: int = 0

    @property
    def num_turns(self) -> int:
        """Turns of all conversations."""
        return self.conversations + (self.turns - 1) * min(self.conversations, MAX_FOLLOWED)

    def is_journaled(self, name: str) -> bool:
        """Return whether a conversation is in the journal: every second one, or fewer if these are too many."""
        return int(name.rpartition("-")[2]) % max(2, -(-self.conversations // MAX_JOURNALED)) == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalCost:
    """Milliseconds of whole turns and decisions with a journal.

    `added` has, for each part of the run, the median turn with a journal minus the one without.
    """

    turn: Summary
    decision: Summary
    added: Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Figures of the router under load; durations are in milliseconds.

    `decision` is a whole `begin_turn`: matching, placement, reservations and the plan; `following` are the decisions of
    further turns, which have more to compare. `processor` is a decision's processor time, which other work on the
    machine hardly lengthens, and `uncollected` that time without garbage collections. `placement` is the choice of
    rings alone. `turn` is `begin_turn` and `end_turn` together. `decision`, `following` and `turn` leave out turns with
    a journal, which are in `journal`. `announcement` is one ring's repeated registration; one comes after each turn.
    `kept_share` is the share of follow-ups on the rings of the turn before, `direct_share` the share that the decode
    ring computes. Garbage collection pauses all lie within turns. Bytes are those of an idle conversation;
    `token_bytes_per_conversation` counts its token ids, 8 bytes each.
    """

    decisions: int
    rings: int
    conversations: int
    decisions_per_second: float
    decision: Summary
    following: Summary | None
    processor: Summary
    uncollected: Summary
    placement: Summary
    turn: Summary
    announcement: Summary
    journal: JournalCost | None
    num_pauses: int
    longest_pause: float
    pauses_share: float
    kept_share: float
    direct_share: float
    rings_used: int
    bytes_per_conversation: float
    token_bytes_per_conversation: float


class _SomeJournal(NoJournal):
    """Journal that records only some conversations, so that one run has turns with it and without."""

    def __init__(self, journal: SqliteJournal, is_journaled: Callable[[str], bool]) -> None:
        self.epoch = journal.epoch
        self._journal = journal
        self._is_journaled = is_journaled
        self._taken: set[str] = set()

    def begun(self, record: BegunRecord) -> Awaitable[None]:
        if not self._is_journaled(record.request.conversation_id):
            return super().begun(record)
        self._taken.add(record.turn_id)
        return self._journal.begun(record)

    def committed(self, record: CommittedRecord) -> Awaitable[None]:
        if record.turn_id not in self._taken:
            return super().committed(record)
        self._taken.discard(record.turn_id)
        return self._journal.committed(record)


def measure_load(model: ModelInfo, load: RouterLoad, journal: Path | None, tell: Callable[[str], None]) -> LoadReport:
    """Run the load with a journal in `journal`, then a part of it to trace memory; `tell` is called for every turn."""
    bench = LoadedRouter(model, load, None if journal is None else SqliteJournal(journal))
    with bench.pauses as pauses, closing(FrozenSurvivors()):
        asyncio.run(bench.run(load.conversations, tell))
    bench.close()
    num_bytes = _bytes_per_conversation(model, load)
    tokens = load.tokens + (load.turns - 1) * load.follow_up + load.turns * load.answer
    without, with_journal = bench.deciding_seconds
    return LoadReport(
        decisions=len(without) + len(with_journal),
        rings=load.rings,
        conversations=load.conversations,
        decisions_per_second=len(without) / sum(without),
        decision=Summary.of(without, 1e3),
        following=Summary.of(bench.following_seconds, 1e3) if bench.following_seconds else None,
        processor=Summary.of(bench.processor_seconds, 1e3),
        uncollected=Summary.of(bench.uncollected_seconds, 1e3),
        placement=Summary.of(bench.placement_seconds, 1e3),
        turn=Summary.of(bench.turn_seconds[0], 1e3),
        announcement=Summary.of(bench.announcing_seconds, 1e3),
        journal=_journal_cost(*bench.turn_seconds, with_journal) if with_journal else None,
        num_pauses=len(pauses.seconds),
        longest_pause=1e3 * max(pauses.seconds, default=0.0),
        pauses_share=sum(pauses.seconds) / bench.whole_seconds,
        kept_share=bench.num_on_same_rings / max(1, bench.num_follow_ups),
        direct_share=bench.num_direct / max(1, bench.num_follow_ups),
        rings_used=len(bench.rings_used),
        bytes_per_conversation=num_bytes,
        token_bytes_per_conversation=8.0 * tokens,
    )


def _journal_cost(without: Sequence[float], having: Sequence[float], decisions: Sequence[float]) -> JournalCost:
    parts = (np.array_split(np.asarray(each), min(NUM_PARTS, len(having))) for each in (without, having))
    added = [1e3 * float(np.median(after) - np.median(before)) for before, after in zip(*parts, strict=True)]
    return JournalCost(turn=Summary.of(having, 1e3), decision=Summary.of(decisions, 1e3), added=Summary.of(added))


def _bytes_per_conversation(model: ModelInfo, load: RouterLoad) -> float:
    """Return the router's memory for one more idle conversation."""
    sample = LoadedRouter(model, load, None)
    gc.collect()
    tracemalloc.start()
    count = min(MEMORY_SAMPLE, load.conversations)
    asyncio.run(sample.run(1, lambda name: None, first=count))  # memory that every router has
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    asyncio.run(sample.run(count, lambda name: None))
    sample.forget_figures()
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return num_bytes / count


class _Pauses:
    """Durations of each garbage collection within the context, in seconds; `computed` is their processor time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.computed = 0.0
        self._began = self._computing = 0.0

    def __enter__(self) -> _Pauses:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began, self._computing = time.perf_counter(), time.thread_time()
        else:
            self.seconds.append(time.perf_counter() - self._began)
            self.computed += time.thread_time() - self._computing


class LoadedRouter:
    """Router under load, with its measurements in seconds. Pairs are (turns without a journal, turns with it)."""

    def __init__(self, model: ModelInfo, load: RouterLoad, journal: SqliteJournal | None) -> None:
        self._load = load
        self._ids = np.random.default_rng(load.seed)
        self._registrations = registrations(load.rings, load.seed)
        self._peers = InstantRings(self._registrations)
        self._journal = journal
        self._known = KnownEpoch(epoch=journal.epoch if journal else 0)
        # Turns come as fast as the router takes them, so rings announce themselves once a turn and not by the clock.
        settings = RouterSettings(max_conversations=load.conversations + 1, max_positions=1 << 30, ring_lease=0.0)
        planner = Planner(model, PlannerSettings())
        some = _SomeJournal(journal, load.is_journaled) if journal else None
        self._router = Router(settings, planner, self._peers, journal=some)
        self._where: dict[str, tuple[str, str]] = {}
        self._num_announced = 0
        self.pauses = _Pauses()
        self.forget_figures()

    def forget_figures(self) -> None:
        """Drop all figures and what the rings retain, so that only the router's memory is left."""
        self.deciding_seconds: tuple[list[float], list[float]] = ([], [])
        self.following_seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.uncollected_seconds: list[float] = []
        self.whole_seconds = 0.0
        self.placement_seconds: list[float] = []
        self.announcing_seconds: list[float] = []
        self.turn_seconds: tuple[list[float], list[float]] = ([], [])
        self.rings_used: set[str] = set()
        self.num_on_same_rings = self.num_direct = self.num_follow_ups = 0
        self._where.clear()
        for ring in self._peers.rings.values():
            ring.retained.clear()

    async def run(self, count: int, tell: Callable[[str], None], *, first: int = 0) -> None:
        """Run all turns of `count` conversations, one turn of each a round; all conversations but one are idle."""
        for registration in self._registrations:
            await self._router.register_ring(registration, self._known)
        choose = self._router.placer.choose

        def timed(wanted: object) -> object:
            began = time.perf_counter()
            choice = choose(wanted)  # type: ignore[arg-type]
            self.placement_seconds.append(time.perf_counter() - began)
            return choice

        self._router.placer.choose = timed  # type: ignore[method-assign, assignment]
        started = time.perf_counter()
        for turn in range(self._load.turns):
            for number in range(first, first + (min(count, MAX_FOLLOWED) if turn else count)):
                await self._turn(f"conversation-{number}", turn)
                await self._announce_next()
                tell(f"turn {turn + 1} of each conversation")
        self.whole_seconds = time.perf_counter() - started
        self._router.placer.choose = choose  # type: ignore[method-assign]
        await self._router.close()

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    async def _announce_next(self) -> None:
        registration = self._registrations[self._num_announced % len(self._registrations)]
        self._num_announced += 1
        began = time.perf_counter()
        await self._router.register_ring(registration, self._known)
        self.announcing_seconds.append(time.perf_counter() - began)

    async def _turn(self, name: str, turn: int) -> None:
        load = self._load
        new = self._tokens(load.follow_up if turn else load.tokens)
        mode = PromptMode.APPEND if turn else PromptMode.WHOLE_HISTORY
        request = turn_request(f"{name}/{turn}", name, new, load.answer, mode)
        began, computing, collected = time.perf_counter(), time.thread_time(), self.pauses.computed
        begun = await self._router.begin_turn(request)
        deciding, computing = time.perf_counter() - began, time.thread_time() - computing
        has_journal = self._journal is not None and load.is_journaled(name)
        self.deciding_seconds[has_journal].append(deciding)
        if turn and not has_journal:
            self.following_seconds.append(deciding)
        self.processor_seconds.append(computing)
        self.uncollected_seconds.append(computing - (self.pauses.computed - collected))
        plan = begun.plan
        self.rings_used.update((plan.prefill_ring, plan.decode_ring))
        is_direct = plan.algorithm is Algorithm.DECODE_RING
        before = self._where.get(name, ("", ""))
        # A turn that its decode ring computes leaves the KV on the prefill ring.
        where = before[0] if is_direct else plan.prefill_ring, plan.decode_ring
        if turn:
            self.num_follow_ups += 1
            self.num_on_same_rings += where == before
            self.num_direct += is_direct
        self._where[name] = where
        ring = self._peers.leader("decode", begun.decode_endpoint)
        kv_tokens = begun.prompt_tokens + load.answer - 1
        outcome = TurnOutcome(
            turn_id=begun.turn_id,
            ok=True,
            token_ids=tuple(self._tokens(load.answer).tolist()),
            kv_tokens=kv_tokens,
            shards=ring.shards(kv_tokens),
        )
        began = time.perf_counter()
        retained = await self._router.end_turn(outcome)
        self.turn_seconds[has_journal].append(deciding + time.perf_counter() - began)
        await ring.settle(name, begun.turn_id, retained)

    def _tokens(self, count: int) -> TokenIds:
        return self._ids.integers(0, VOCABULARY, count)
