"""Long steps of a lone turn, and the shorter turns that overtake it between two layers."""

from __future__ import annotations

import itertools

import pytest

from ringserve.cp_core.cost.steps import StepLimits
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.prefill.scheduler import AGE_SHARE
from ringserve.orchestration.protocol.inventory import KnownEpoch, Registered
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.rings import PrefillScheduling, RingSettings
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.fake_ranks import FakeRanks
from tests.orchestration.prefill.test_scheduler import WORK, Prompt, Simulation, names
from tests.orchestration.service import DirectPeers

SCHEDULING = PrefillScheduling()


def lone_simulation(scheduling: PrefillScheduling = SCHEDULING, *, budget: float = 100.0) -> Simulation:
    """Return a ring with steps of at most `budget` units, and of twenty times as many for a lone turn."""
    simulation = Simulation(scheduling, chunk_tokens=4096, budget=budget, min_chunk=32)
    lone = StepLimits.of(WORK, step_budget=20 * budget, chunk_tokens=4096, min_chunk_tokens=32)
    simulation.scheduler.limit_steps(simulation.limits, lone)
    return simulation


def test_a_lone_turn_has_long_steps_that_yield_and_turns_side_by_side_have_short_ones() -> None:
    simulation = lone_simulation()
    simulation.add("long", Prompt(new=3000))
    first = simulation.step()
    assert first is not None
    assert first.yields
    assert 1900.0 < first.work <= 2000.0
    simulation.add("other", Prompt(new=3000))
    second = simulation.step()
    assert second is not None
    assert not second.yields
    assert [len(piece.tokens) for piece in second.pieces] == [32]


def test_a_lone_turn_of_an_ordinary_length_does_not_yield() -> None:
    simulation = lone_simulation()
    simulation.add("short", Prompt(new=50))
    step = simulation.step()
    assert step is not None
    assert not step.yields
    assert names(step) == ["short"]


def test_shorter_turns_overtake_a_step_that_yields_and_longer_or_less_important_ones_wait() -> None:
    simulation = lone_simulation()
    scheduler = simulation.scheduler
    simulation.add("long", Prompt(new=3000))
    outer = scheduler.next_step()
    assert outer is not None
    assert outer.yields
    assert scheduler.next_step_within(outer) is None
    simulation.add("longer", Prompt(new=4000))
    simulation.add("less important", Prompt(new=5, priority=-1))
    assert scheduler.next_step_within(outer) is None
    simulation.add("short", Prompt(new=20))
    simulation.add("medium", Prompt(new=200))
    overtaking = []
    while (inner := scheduler.next_step_within(outer)) is not None:
        assert not inner.yields
        assert inner.work <= 100.0 or [len(piece.tokens) for piece in inner.pieces] == [32]
        scheduler.commit(inner, 0.01)
        overtaking.append(names(inner))
    assert overtaking[0][0] == "short"
    assert {name for step in overtaking for name in step} == {"short", "medium"}
    scheduler.commit(outer, 1.0)
    after = scheduler.next_step()
    assert after is not None
    assert {"long", "longer", "less important"} >= set(names(after))


@pytest.mark.parametrize("num_late", [0, 3])
def test_a_long_turn_has_its_share_however_many_short_ones_overtake_it(num_late: int) -> None:
    """Steps that come too late to be computed within the long one do not count."""
    simulation = lone_simulation()
    scheduler = simulation.scheduler
    simulation.add("long", Prompt(new=3000))
    outer = scheduler.next_step()
    assert outer is not None
    others = 0.0
    for number in itertools.count():
        simulation.add(f"short {number}", Prompt(new=60))
        for _ in range(num_late):
            if (late := scheduler.next_step_within(outer)) is not None:
                scheduler.take_back(late)
        inner = scheduler.next_step_within(outer)
        if inner is None:
            break
        scheduler.commit(inner, 0.01)
        others += inner.work
    share = outer.work * (1 - AGE_SHARE) / AGE_SHARE
    assert share - 2 * simulation.limits.budget <= others <= share + 2 * simulation.limits.budget


def test_a_short_turn_that_came_first_does_not_end_what_the_long_one_has_in_advance() -> None:
    """Otherwise the next short turns wait until the long step ends."""
    simulation = lone_simulation()
    scheduler = simulation.scheduler
    simulation.scheduler.reserve("first", tokens=TokenRange(0, 20), priority=0, now=0.0)
    simulation.now = 0.001
    simulation.add("long", Prompt(new=3000))
    outer = scheduler.next_step()
    assert outer is not None
    assert names(outer) == ["long"], "the first turn has no place in a decode ring yet"
    scheduler.ready("first", [PlannedChunk(tokens=TokenRange(0, 20), algorithm=Algorithm.PASS_KV)])
    overtaking = 0.0
    for number in range(20):
        simulation.add(f"short {number}", Prompt(new=20))
        inner = scheduler.next_step_within(outer)
        assert inner is not None, f"after {overtaking} units of {outer.work}"
        scheduler.commit(inner, 0.01)
        overtaking += inner.work
    assert AGE_SHARE * overtaking > (1 - AGE_SHARE) * WORK.work(20, 0), "more than the first turn's own excess"


async def registered(_: RingRegistration, __: KnownEpoch) -> Registered:
    return Registered(running_turns=0, epoch=0)


async def test_a_lone_turn_has_layers_half_as_long_where_decode_steps_use_the_cores() -> None:
    """A layer takes up to twice as long there, and a short prompt waits for one of them."""
    budgets = []
    for cores in ("", "one machine"):
        ranks = RankSettings(model_path="model", num_blocks=5, block_tokens=4, cores=cores)
        settings = RingSettings(
            role="prefill",
            name="ring",
            num_ranks=1,
            ranks=ranks,
            prefill_scheduling=PrefillScheduling(step_seconds=1e7),  # these ranks do one operation a second
            announce_interval=3600,
        )
        leader = PrefillLeader(settings, FakeRanks(), DirectPeers(), registered)
        await leader.start("here:1")
        budgets.append(leader.step_budget)
        await leader.close()
    assert budgets[1] > 1.0, "the time decides, and not the least budget"
    assert budgets[0] == pytest.approx(2 * budgets[1])
