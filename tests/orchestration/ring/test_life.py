"""A ring is rebuilt whole: one lost rank, one rebuild, a new incarnation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ringserve.cp_core.cost.decode import HELIX
from ringserve.cp_core.errors import ModelRefused, RingserveError, Unavailable
from ringserve.orchestration.protocol.rings import RingSettings, RingState
from ringserve.orchestration.ring import life, step_probe
from ringserve.orchestration.ring.life import Measured, Ring
from ringserve.orchestration.ring.step_probe import StepCorrection
from ringserve.workers.protocol.ranks import RankInfo, RankSettings, RankSpec, RankStatus
from tests.orchestration.fake_ranks import RATES, FakeRanks
from tests.waiting import WAIT_SECONDS, eventually

DEAD = Unavailable("rank 1 died")
HOSTS = ("kv",) * 3


class Rings:
    """Ring of fake ranks, and its calls of its leader."""

    def __init__(self, role: str = "prefill", num_ranks: int = 3, tp: int = 1, ranks: FakeRanks | None = None) -> None:
        self.ranks = ranks or FakeRanks()
        self.told: list[str] = []
        self.ready_error: RingserveError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._changed = asyncio.Event()
        settings = RingSettings(
            role=role,
            name="ring",
            num_ranks=num_ranks,
            watch_interval=0.001,
            retry_pause=0.001,
            ranks=RankSettings(
                tp=tp,
                model_path="model",
                num_blocks=5,
                block_tokens=4,
            ),
        )
        self.ring = Ring(settings, self.ranks, on_ready=self._on_ready, on_lost=self._on_lost)

    async def _on_ready(self) -> None:
        self._tell("ready")
        await self.gate.wait()
        if self.ready_error is not None:
            raise self.ready_error

    async def _on_lost(self, error: RingserveError) -> None:
        assert self.ring.state is RingState.REBUILDING
        assert not any(rank.is_killed for rank in self.ranks.latest), "turns end before ranks are remade"
        self._tell(f"lost: {error}")

    def _tell(self, what: str) -> None:
        self.told.append(what)
        self._changed.set()

    async def until_told(self, *told: str) -> None:
        """Wait until the ring has called its leader exactly so, by the beginnings of the calls."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(self.told) < len(told):
                self._changed.clear()
                await self._changed.wait()
        assert [have.startswith(want) for have, want in zip(self.told, told, strict=True)] == [True] * len(told)


@asynccontextmanager
async def started(role: str = "prefill", num_ranks: int = 3, tp: int = 1) -> AsyncIterator[Rings]:
    rings = Rings(role, num_ranks, tp)
    await rings.ring.start()
    try:
        yield rings
    finally:
        rings.gate.set()
        await rings.ring.close()


# --- start -----------------------------------------------------------------------------------------------------------


async def test_a_started_ring_serves_with_every_rank_in_its_place() -> None:
    async with started() as rings:
        ring = rings.ring
        assert ring.state is RingState.READY
        assert rings.told == ["ready"]
        specs = [spec for rank in rings.ranks.latest for spec in rank.specs]
        assert [spec.rank for spec in specs] == [0, 1, 2]
        assert {spec.incarnation for spec in specs} == {ring.incarnation}
        rendezvous = {rank.rendezvous for rank in rings.ranks.latest}
        assert [each.name for each in rendezvous if each] == [ring.incarnation]
        assert [[endpoints.tokens for endpoints in each.endpoints] for each in rendezvous if each] == [
            [f"tokens:{rank.number}" for rank in rings.ranks.latest]
        ]
        assert ring.kv_endpoints == ("kv:0", "kv:1", "kv:2")
        assert ring.rates == RATES
        assert ring.pool.capacity_tokens == 3 * 5 * 4
        ring.require_ready(ring.incarnation)


async def test_each_rank_of_a_tensor_parallel_ring_is_several_processes_with_one_block_table() -> None:
    async with started(num_ranks=3, tp=2) as rings:
        ring = rings.ring
        specs = [spec for rank in rings.ranks.latest for spec in rank.specs]
        assert [(spec.rank, spec.cp_rank, spec.tp_rank) for spec in specs] == [
            (0, 0, 0),
            (1, 0, 1),
            (2, 1, 0),
            (3, 1, 1),
            (4, 2, 0),
            (5, 2, 1),
        ]
        assert {(spec.num_ranks, spec.cp, spec.tp) for spec in specs} == {(6, 3, 2)}
        assert ring.cp_ranks == [0, 0, 1, 1, 2, 2]
        assert len(ring.kv_endpoints) == 6
        assert ring.pool.num_ranks == 3
        assert ring.pool.capacity_tokens == 3 * 5 * 4


async def test_a_ring_that_is_starting_refuses_turns_with_its_state() -> None:
    with pytest.raises(Unavailable, match="ring ring is starting; retry in a few seconds"):
        Rings().ring.require_ready()


@pytest.mark.parametrize("error", [ModelRefused("no such model"), RuntimeError("unforeseen")])
async def test_a_rank_that_does_not_start_frees_all_ranks_and_says_why(error: Exception) -> None:
    rings = Rings()
    rings.ranks.start_errors = [error]
    with pytest.raises(type(error), match=str(error)):
        await rings.ring.start()
    assert rings.ranks.num_open == 0
    assert rings.ring.state is RingState.CLOSED
    assert rings.told == []


async def test_ranks_that_cannot_be_made_are_an_error_at_once() -> None:
    rings = Rings()
    rings.ranks.create_errors = [Unavailable("no room")]
    with pytest.raises(Unavailable, match="no room"):
        await rings.ring.start()
    assert rings.ring.state is RingState.CLOSED


async def test_a_ring_that_cannot_announce_itself_does_not_start_and_stays_closed() -> None:
    rings = Rings(role="decode")
    rings.ready_error = Unavailable("no router")
    with pytest.raises(Unavailable, match="no router"):
        await rings.ring.start()
    assert rings.ranks.num_open == 0
    assert all(rank.is_killed for rank in rings.ranks.latest)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody watches any more"
    assert rings.ring.state is RingState.CLOSED
    assert len(rings.ranks.rings) == 1


async def test_a_ring_closed_while_it_starts_does_not_come_up() -> None:
    rings = Rings()

    def close() -> None:
        closing.append(asyncio.create_task(rings.ring.close()))

    closing: list[asyncio.Task[None]] = []
    rings.ranks.on_create = close
    with pytest.raises(Unavailable, match="closed while it started"):
        await rings.ring.start()
    await asyncio.gather(*closing)
    assert rings.ring.state is RingState.CLOSED
    assert rings.ranks.num_open == 0


# --- a leader's successor --------------------------------------------------------------------------------------------


async def test_steps_are_measured_in_free_blocks_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turns may come before, and others meanwhile."""
    tables: list[Sequence[Sequence[int]]] = []
    correction = StepCorrection(step_seconds=0.5, products=2.0)

    async def measured(*given: object) -> StepCorrection:
        tables.append(given[-2])  # type: ignore[arg-type]
        reserved = rings.ring.pool.pin("b", "turn", 0)
        rings.ring.pool.make_room(reserved, (4, 4, 4))
        for rank, table in enumerate(tables[-1]):
            assert not {*kept.table(rank), *reserved.table(rank)} & {*table}
        rings.ring.pool.settle("b", "turn", 0)
        return correction

    monkeypatch.setattr(life, "measure_steps", measured)
    monkeypatch.setattr(step_probe, "LONG_TOKENS", 24)
    async with started() as rings:
        pool = rings.ring.pool
        kept = pool.pin("a", "turn", 0)
        pool.make_room(kept, (4, 8, 4))
        free = pool.usage()
        await rings.ring.measure()
        assert [[len(table) for table in each] for each in tables] == [[2, 2, 2]]
        assert rings.ring.rates == correction.applied(RATES)
        assert pool.usage() == free
        pool.make_room(kept, (4, 16, 4))
        await rings.ring.measure()
        assert len(tables) == 1, "one block is free on the second rank"
        assert rings.ring.rates == correction.applied(RATES)


async def test_a_leader_takes_over_the_ranks_of_a_dead_one_and_what_it_had_measured() -> None:
    async with started() as dead:
        before, first = list(dead.ranks.latest), dead.ring.incarnation
        measured = replace(RATES, gemm_flops=7e9)
        await before[0].remember(Measured(measured, None, HOSTS), 1.0)
        for rank in before:
            rank.renews = True
        successor = Rings(ranks=dead.ranks)
        await successor.ring.start()
        assert successor.told == ["ready"]
        assert successor.ring.ranks == before
        assert {rank.specs[-1].incarnation for rank in before} == {successor.ring.incarnation} != {first}
        assert successor.ring.rates == measured, "the machine may be busy now"
        assert [rank.num_probes for rank in before] == [1, 1, 1], "which takes what others compute with"
        await successor.ring.close()


@pytest.mark.parametrize(
    ("silent", "hosts", "is_known"),
    [((2,), HOSTS, True), ((2,), ("kv", "kv", "elsewhere"), False), ((0, 1, 2), HOSTS, False)],
)
async def test_ranks_that_cannot_be_taken_over_are_made_anew_and_measured_unless_they_are_where_they_were(
    silent: tuple[int, ...], hosts: tuple[str, ...], is_known: bool
) -> None:
    measured = replace(RATES, gemm_flops=7e9)
    async with started() as dead:
        before = list(dead.ranks.latest)
        await before[0].remember(Measured(measured, None, hosts), 1.0)
        for rank in before:
            rank.renews = rank.number not in silent
        successor = Rings(ranks=dead.ranks)
        await successor.ring.start()
        after = dead.ranks.latest
        assert [number for number in range(3) if after[number] is not before[number]] == [*silent]
        assert [rank.number for rank in before if rank.is_killed] == [*silent]
        assert successor.ring.ranks == after
        assert successor.ring.rates == (measured if is_known else RATES)
        assert after[0].note == Measured(successor.ring.rates, None, HOSTS), "for the next one"
        await successor.ring.close()


async def test_ranks_of_a_leader_that_never_served_are_made_anew() -> None:
    async with started() as dead:
        before = list(dead.ranks.latest)
        before[0].note = None
        for rank in before:
            rank.renews = True
        successor = Rings(ranks=dead.ranks)
        await successor.ring.start()
        assert all(rank.is_killed for rank in before)
        assert successor.ring.state is RingState.READY
        await successor.ring.close()


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_ring_whose_new_rank_is_where_the_lost_one_was_is_not_measured_again(is_moved: bool) -> None:
    async with started() as rings:
        ring, before = rings.ring, list(rings.ranks.latest)
        for rank in before:
            rank.renews = True
        ring.rates = measured = replace(RATES, gemm_flops=7e9)
        if is_moved:
            ring.infos[1] = replace(ring.infos[1], kv_endpoint="elsewhere:1")
        before[1].fail(DEAD)
        await rings.until_told("ready", "lost: ring ring lost a rank and is being rebuilt: rank 1 died", "ready")
        assert ring.rates == (RATES if is_moved else measured), "others compute meanwhile"
        assert [rank.num_probes for rank in (before[0], before[2])] == [1 + is_moved] * 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_lost_rank_ends_the_turns_and_then_the_ring_is_rebuilt(role: str) -> None:
    async with started(role) as rings:
        first, pool = rings.ring.incarnation, rings.ring.pool
        rings.ranks.latest[1].fail(DEAD)
        await rings.until_told("ready", "lost: ring ring lost a rank and is being rebuilt: rank 1 died", "ready")
        ring = rings.ring
        assert ring.state is RingState.READY
        assert ring.rebuilds == 1
        assert ring.incarnation != first
        assert ring.pool is not pool
        assert ring.kv_endpoints == ("kv:100", "kv:101", "kv:102")
        assert all(rank.is_killed for rank in rings.ranks.rings[0])
        assert not any(rank.is_killed for rank in rings.ranks.rings[1])
        with pytest.raises(Unavailable, match="rebuilt during the turn"):
            ring.require_ready(first)
        assert not ring.is_serving(first)


@pytest.mark.parametrize(("silent", "made_anew"), [((), [1]), ((2,), [1, 2])])
async def test_ranks_that_live_stay_in_the_rebuilt_ring_with_their_models(
    silent: tuple[int, ...], made_anew: list[int]
) -> None:
    async with started() as rings:
        first, before = rings.ring.incarnation, list(rings.ranks.latest)
        for rank in before:
            rank.renews = rank.number not in silent
        before[1].fail(DEAD)
        await rings.until_told("ready", "lost", "ready")
        after = rings.ranks.latest
        assert [number for number in range(3) if after[number] is not before[number]] == made_anew
        assert [rank.number for rank in before if rank.is_killed] == made_anew
        assert rings.ring.ranks == after
        assert {rank.specs[-1].incarnation for rank in after} == {rings.ring.incarnation} != {first}
        assert {rank.rendezvous.name for rank in after if rank.rendezvous} == {rings.ring.incarnation}
        assert rings.ring.kv_endpoints == tuple(f"kv:{100 + n if n in made_anew else n}" for n in range(3))


async def test_a_rank_that_stands_still_is_dead_before_the_others_are_asked_to_leave_it() -> None:
    async with started() as rings:
        before, killed = list(rings.ranks.latest), list[bool]()
        for rank in before:
            rank.renews = True
        renew = before[0].renew

        async def noted(spec: RankSpec, timeout: float) -> RankInfo:
            killed.append(before[1].is_killed)
            return await renew(spec, timeout)

        before[0].renew = noted  # type: ignore[method-assign]
        before[1].fail(DEAD)
        await rings.until_told("ready", "lost", "ready")
        assert killed == [True]


@pytest.mark.parametrize("is_helix", [False, True])
async def test_a_new_rank_joins_survivors_with_the_share_of_the_weights_that_they_leave(is_helix: bool) -> None:
    async with started("decode") as rings:
        for rank in rings.ranks.latest:
            rank.renews, rank.is_helix = True, is_helix
        rings.ranks.latest[1].fail(DEAD)
        await rings.until_told("ready", "lost", "ready")
        variants = [rank.specs[-1].settings.decode_variant for rank in rings.ranks.latest]
    assert variants == ["auto", HELIX if is_helix else "auto", "auto"]


async def test_a_rank_that_gives_no_sign_of_life_is_lost() -> None:
    async with started() as rings:
        rings.ring.settings = replace(rings.ring.settings, lost_timeout=0.2)

        async def hang(timeout: float) -> RankStatus:
            await asyncio.Event().wait()
            raise AssertionError

        rings.ranks.latest[1].status = hang  # type: ignore[method-assign]
        await rings.until_told(
            "ready", "lost: ring ring lost a rank and is being rebuilt: rank 1 of ring ring", "ready"
        )
        assert "sent no heartbeat for 0.2 s" in rings.told[1]


async def test_a_leader_that_stood_still_itself_takes_no_rank_for_lost() -> None:
    async with started() as rings:
        rings.ring.settings = replace(rings.ring.settings, lost_timeout=0.2)
        rank, answered, asked_again = rings.ranks.latest[1], asyncio.Event(), asyncio.Event()
        status = rank.status

        async def late(timeout: float) -> RankStatus:
            time.sleep(0.5)
            await asyncio.sleep(0)
            answered.set()
            return await status(timeout)

        async def again(timeout: float) -> RankStatus:
            asked_again.set()
            return await status(timeout)

        rank.status = late  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_SECONDS):
            await answered.wait()
            rank.status = again  # type: ignore[method-assign]
            await asked_again.wait()  # the verdict on the late answer is past
        assert rings.told == ["ready"]


async def test_a_decode_step_that_hangs_in_a_live_rank_is_lost_long_before_the_longest_prefill() -> None:
    async with started("decode") as rings:
        rank = rings.ranks.latest[2]
        rank.seconds_since_step, rank.running = life.LEAST_PATIENCE_CPU + 1, 1
        assert rank.seconds_since_step < rings.ring.settings.step_timeout
        await rings.until_told("ready", "lost: ring ring lost a rank and is being rebuilt: a rank of ring made no step")
        await eventually(lambda: rings.ring.rebuilds == 1)


async def test_a_rank_stuck_in_a_step_is_lost() -> None:
    async with started() as rings:
        rank = rings.ranks.latest[2]
        rank.seconds_since_step = rings.ring.settings.step_timeout + 1
        rank.running = 1
        await rings.until_told("ready", "lost: ring ring lost a rank and is being rebuilt: a rank of ring made no step")
        await eventually(lambda: rings.ring.rebuilds == 1)


async def test_an_idle_rank_may_be_idle_for_as_long_as_it_likes() -> None:
    async with started() as rings:
        rank, asked = rings.ranks.latest[0], list[float]()
        rank.seconds_since_step, status = 1e9, rank.status

        async def counted(timeout: float) -> RankStatus:
            asked.append(timeout)
            return await status(timeout)

        rank.status = counted  # type: ignore[method-assign]
        await eventually(lambda: len(asked) >= 3)
        assert rings.told == ["ready"]


async def test_a_decode_loop_that_ends_by_itself_is_a_lost_ring() -> None:
    async with started("decode") as rings:
        rings.ranks.latest[0]._failed.set()
        await rings.until_told("ready", "lost: ring ring lost a rank and is being rebuilt: a decode loop of ring ended")
        await eventually(lambda: rings.ring.rebuilds == 1)


async def test_the_second_report_of_a_loss_is_echo() -> None:
    async with started() as rings:
        ring, first = rings.ring, rings.ring.incarnation
        ring.report_lost(DEAD, first)
        ring.report_lost(DEAD, first)
        with pytest.raises(Unavailable, match="is rebuilding; retry"):
            ring.require_ready()
        await rings.until_told("ready", "lost", "ready")
        ring.report_lost(DEAD, first)  # of an incarnation that is gone
        assert ring.state is RingState.READY
        assert len(rings.ranks.rings) == 2


async def test_a_rebuild_is_tried_until_it_succeeds() -> None:
    async with started() as rings:
        rings.ranks.create_errors = [Unavailable("no room"), RuntimeError("unforeseen")]
        rings.ranks.start_errors = [Unavailable("slow")]
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        await rings.until_told("ready", "lost", "ready")
        assert rings.ring.state is RingState.READY
        assert rings.ring.rebuilds == 1
        assert len(rings.ranks.rings) == 3, "the first, the one that did not start, the one that did"


async def test_a_ring_tells_why_it_cannot_be_rebuilt_until_it_is() -> None:
    async with started() as rings:
        refusal = "model is not the model that the service began with"
        rings.ranks.start_errors = [ModelRefused(refusal)] * 1000
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        await eventually(lambda: rings.ring.failure == refusal)
        with pytest.raises(Unavailable, match=f"ring ring is rebuilding: {refusal}; retry"):
            rings.ring.require_ready()
        rings.ranks.start_errors.clear()
        await rings.until_told("ready", "lost", "ready")
        assert rings.ring.failure == ""
        rings.ring.require_ready()


async def test_a_rank_lost_while_the_rebuilt_ring_announces_itself_means_one_more_rebuild() -> None:
    async with started() as rings:
        rings.gate.clear()
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        await rings.until_told("ready", "lost", "ready")
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        await eventually(lambda: rings.ring.rebuilds == 2)
        rings.gate.set()
        await rings.until_told("ready", "lost", "ready", "lost", "ready")
        assert rings.ring.state is RingState.READY
        assert len(rings.ranks.rings) == 3


async def test_a_rebuilt_ring_serves_though_it_could_not_say_so() -> None:
    async with started() as rings:
        rings.ready_error = Unavailable("no router")
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        await rings.until_told("ready", "lost", "ready")
        assert rings.ring.state is RingState.READY
        assert len(rings.ranks.rings) == 2


# --- close -----------------------------------------------------------------------------------------------------------


async def test_closing_kills_the_ranks_and_may_be_repeated() -> None:
    async with started("decode") as rings:
        await rings.ring.close()
        await rings.ring.close()
        assert all(rank.is_killed for rank in rings.ranks.latest)
        assert rings.ranks.num_open == 0
        with pytest.raises(Unavailable, match="is closed"):
            rings.ring.require_ready()
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        assert rings.ring.state is RingState.CLOSED


async def test_closing_during_a_rebuild_ends_the_rebuild() -> None:
    async with started() as rings:
        rings.ranks.create_errors = [Unavailable("no room")] * 1000
        attempts = asyncio.Event()
        rings.ranks.on_create = attempts.set
        rings.ring.report_lost(DEAD, rings.ring.incarnation)
        async with asyncio.timeout(WAIT_SECONDS):
            await attempts.wait()
            await rings.ring.close()
        assert rings.ring.state is RingState.CLOSED
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody is left to try again"
        assert rings.told[-1].startswith("lost")
