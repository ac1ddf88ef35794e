"""Steps of a prefill ring: within its limits, without starvation, short prompts at once, and every token once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringserve.cp_core.cost.steps import StepLimits, WorkModel, cut
from ringserve.cp_core.errors import CapacityExceeded
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.prefill.scheduler import AGE_SHARE, PrefillScheduler, ScheduledStep
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.orchestration.ring.leader import TenantShares
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm

WORK = WorkModel(pairs_per_token=240.0, flops_per_unit=1.0)
RATE = 1000.0
"""Work units a second of the simulated ring."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt that arrives before step `at`."""

    at: int = 0
    new: int
    cached: int = 0
    priority: int = 0
    algorithm: Algorithm = Algorithm.PASS_KV
    tenant: str = ""

    @property
    def tokens(self) -> TokenRange:
        return TokenRange(self.cached, self.cached + self.new)


class Simulation:
    """Ring whose steps take time in proportion to their work; turns are named by their index in `prompts`."""

    def __init__(
        self, scheduling: PrefillScheduling, *, chunk_tokens: int = 256, budget: float = 0.0, min_chunk: int = 32
    ) -> None:
        limits = StepLimits.of(WORK, step_budget=budget, chunk_tokens=chunk_tokens, min_chunk_tokens=min_chunk)
        self.limits = limits
        self.shares = TenantShares("prefill ring ring")
        self.scheduler = PrefillScheduler("ring", WORK, limits, scheduling, rate=RATE, shares=self.shares)
        self.now = 0.0
        self.steps: list[ScheduledStep] = []
        self.arrived: dict[str, float] = {}

    def add(self, name: str, prompt: Prompt) -> None:
        self.arrived[name] = self.now
        self.scheduler.reserve(name, tokens=prompt.tokens, priority=prompt.priority, now=self.now, tenant=prompt.tenant)
        self.scheduler.ready(name, [PlannedChunk(tokens=prompt.tokens, algorithm=prompt.algorithm)])

    def step(self) -> ScheduledStep | None:
        step = self.scheduler.next_step()
        if step is not None:
            seconds = step.work / RATE
            self.now += seconds
            self.scheduler.commit(step, seconds)
            self.steps.append(step)
        return step

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Run until all prompts are computed; with an empty queue the next prompt arrives at once."""
        waiting = sorted(enumerate(prompts), key=lambda item: item[1].at)
        for number in itertools.count():
            while waiting and waiting[0][1].at <= number:
                name, prompt = waiting.pop(0)
                self.add(str(name), prompt)
            if self.step() is None and not waiting:
                return

    def steps_of(self, name: str) -> list[int]:
        return [place for place, step in enumerate(self.steps) if name in names(step)]


def names(step: ScheduledStep) -> list[str]:
    return [piece.turn_id for piece in step.pieces]


prompt_lists = st.lists(
    st.builds(
        Prompt,
        at=st.integers(0, 20),
        new=st.one_of(st.integers(1, 40), st.integers(1, 2000)),
        cached=st.one_of(st.just(0), st.integers(0, 5000)),
        priority=st.integers(-2, 2),
        algorithm=st.sampled_from(RING_ALGORITHMS),
    ),
    min_size=1,
    max_size=12,
)
chunk_sizes = st.sampled_from([1, 2, 3, 4, 7, 64, 256])


@settings(max_examples=70, deadline=None)
@given(prompts=prompt_lists, chunk_tokens=chunk_sizes, budget=st.sampled_from([0.0, 20.0, 900.0]))
def test_every_token_is_computed_once_and_no_step_breaks_its_limits(
    prompts: list[Prompt], chunk_tokens: int, budget: float
) -> None:
    ring = Simulation(PrefillScheduling(ageing_seconds=0.5), chunk_tokens=chunk_tokens, budget=budget)
    ring.run(prompts)
    limits = ring.limits
    position = {str(name): prompt.cached for name, prompt in enumerate(prompts)}
    for step in ring.steps:
        assert len(set(names(step))) == len(step.pieces)
        assert sum(len(piece.tokens) for piece in step.pieces) <= limits.tokens
        # Only the least chunks of the oldest turn and of the shortest may exceed the budget.
        least = sorted(WORK.work(min(len(p.tokens), limits.min_chunk), p.tokens.start) for p in step.pieces)[-2:]
        assert step.work <= limits.budget + sum(least)
        assert step.work == pytest.approx(sum(WORK.work(len(p.tokens), p.tokens.start) for p in step.pieces))
        for piece in step.pieces:
            assert piece.tokens.start == position[piece.turn_id]
            assert len(piece.tokens) >= 1
            position[piece.turn_id] = piece.tokens.stop
    assert position == {str(name): prompt.tokens.stop for name, prompt in enumerate(prompts)}
    assert ring.scheduler.load == 0
    assert ring.scheduler.num_waiting == 0


@settings(max_examples=200, deadline=None)
@given(prompts=prompt_lists, budget=st.sampled_from([0.0, 100.0, 900.0]))
def test_a_turn_waits_no_longer_than_for_those_before_it_by_age(prompts: list[Prompt], budget: float) -> None:
    """The work done while a turn waits is bounded, however many younger turns come.

    A step in which the debt is due advances the oldest turn by the longest chunk that the share allows. That bounds the
    number of such steps for the turns up to this one by age. Between them other turns get the work that makes a debt
    due: (1 - share) / share times the work of the older turns, the lead that these may have, and one more step.
    """
    ring = Simulation(PrefillScheduling(ageing_seconds=0.5), budget=budget)
    ring.run(prompts)
    share = replace(ring.limits, budget=AGE_SHARE * ring.limits.budget, tokens=int(AGE_SHARE * ring.limits.tokens))
    age = {name: ring.arrived[name] - 0.5 * prompts[int(name)].priority for name in ring.arrived}
    longest_step = max(step.work for step in ring.steps)
    others = (1 - AGE_SHARE) / AGE_SHARE
    for name, arrived in ring.arrived.items():
        before = [prompts[int(other)] for other in age if (age[other], other) <= (age[name], name)]
        due_steps = sum(len(cut(WORK, share, prompt.tokens)) for prompt in before)
        own_work = sum(WORK.work(prompt.new, prompt.cached) for prompt in before)
        done = sum(step.work for step in ring.steps[: ring.steps_of(name)[-1] + 1])
        bound = (due_steps + 1 + others) * longest_step + (1 + others) * own_work
        assert done - arrived * RATE <= bound + 1e-6


@pytest.mark.parametrize("priority", [0, 3])
def test_a_flood_of_short_prompts_does_not_starve_a_long_one(priority: int) -> None:
    ring = Simulation(PrefillScheduling(ageing_seconds=0.5))
    ring.add("long", Prompt(new=800))
    # The share of the oldest pays for the prompt itself and for prompts that arrive while their priority counts more.
    owed = WORK.work(800, 0)
    number = 0
    while ring.now <= priority * 0.5 + 1.25 * owed / (AGE_SHARE * RATE) + 1.0:
        for _ in range(6):  # more than a step's worth, at every step
            number += 1
            ring.add(f"short-{number}", Prompt(new=60, priority=priority))
            owed += WORK.work(60, 0) if ring.now <= priority * 0.5 else 0.0
        ring.step()
    pieces = [piece for step in ring.steps for piece in step.pieces if piece.turn_id == "long"]
    assert pieces[-1].tokens.stop == 800
    assert ring.scheduler.num_waiting > 10, "the flood did not leave room by itself"


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(200, 100_000), min_size=1, max_size=5),
    cached=st.integers(0, 50_000),
    before=st.integers(0, 6),
    short=st.integers(1, 150),
)
@example(lengths=[200, 201, 200], cached=606, before=5, short=144)  # 25 tokens of a long one are less work
def test_a_short_prompt_waits_for_shorter_ones_alone_however_long_the_others_are(
    lengths: list[int], cached: int, before: int, short: int
) -> None:
    """It is whole in the next step, or, where others are shorter, after each of these has had a step."""
    ring = Simulation(PrefillScheduling(max_queue_work=1e12))
    for place, length in enumerate(lengths):
        ring.add(f"long-{place}", Prompt(new=length, cached=cached))
    for _ in range(before):
        ring.step()
    done = Counter[str]()
    for piece in (piece for step in ring.steps for piece in step.pieces):
        done[piece.turn_id] += len(piece.tokens)
    left = [(length - done[f"long-{place}"], cached + done[f"long-{place}"]) for place, length in enumerate(lengths)]
    shorter = sum(1 for tokens, position in left if 0 < WORK.work(tokens, position) <= WORK.work(short, 0))
    ring.add("short", Prompt(new=short))
    steps = [ring.step() for _ in range(1 + shorter)]
    pieces = [piece for step in steps if step is not None for piece in step.pieces]
    assert TokenRange(0, short) in [piece.tokens for piece in pieces if piece.turn_id == "short"]


def test_short_prompts_fuse_with_each_other_and_with_the_last_chunk_of_a_long_one() -> None:
    ring = Simulation(PrefillScheduling(), budget=1e9)
    ring.add("long", Prompt(new=256 + 40))
    ring.step()
    for number in range(3):
        ring.add(f"short-{number}", Prompt(new=50))
    step = ring.step()
    assert step is not None
    assert sorted(names(step)) == ["long", "short-0", "short-1", "short-2"]
    assert sum(len(piece.tokens) for piece in step.pieces) == 40 + 3 * 50


def test_short_prompts_have_a_short_step_and_a_long_one_goes_on_after_it() -> None:
    ring = Simulation(PrefillScheduling(), budget=1e9)
    ring.add("long", Prompt(new=5000))
    for name in ("a", "b"):
        ring.add(name, Prompt(new=50))
    shared, alone = ring.step(), ring.step()
    assert shared is not None
    assert alone is not None
    assert names(shared) == ["a", "b"]
    assert [piece.tokens for piece in alone.pieces] == [TokenRange(0, 256)]


def test_the_oldest_turn_and_short_ones_share_a_step_when_its_share_is_due() -> None:
    ring = Simulation(PrefillScheduling(), budget=1e9)
    ring.add("long", Prompt(new=5000))
    number = 0
    ring.step()
    for _ in range(20):
        for _ in range(5):
            number += 1
            ring.add(f"{number}", Prompt(new=50))
        ring.step()
    tokens = [{piece.turn_id: len(piece.tokens) for piece in step.pieces} for step in ring.steps[1:]]
    # Short prompts come first until they have made up for the lead of the long one.
    short_steps = (1 - AGE_SHARE) * WORK.work(256, 0) / (AGE_SHARE * 5 * WORK.work(50, 0))
    due = next(place for place, step in enumerate(tokens) if "long" in step)
    assert due - 1 <= short_steps <= due
    # Then it gets a quarter of 256 tokens, and what three short prompts leave of the rest.
    assert [step["long"] for step in tokens if "long" in step].count(256 - 3 * 50) >= 2


def test_of_equal_age_the_higher_priority_goes_first() -> None:
    ring = Simulation(PrefillScheduling())
    for priority in (-1, 5, 0):
        ring.add(f"p{priority}", Prompt(new=3000, priority=priority))
    while ring.step():
        pass
    ends = {name: ring.steps_of(name)[-1] for name in ring.arrived}
    assert sorted(ends, key=lambda name: ends[name]) == ["p5", "p0", "p-1"]


def test_what_is_finished_soonest_goes_first() -> None:
    ring = Simulation(PrefillScheduling())
    ring.add("longest", Prompt(new=6000))
    for length in (3000, 1000, 2000):
        ring.add(f"{length}", Prompt(new=length))
    while ring.step():
        pass
    ends = {name: ring.steps_of(name)[-1] for name in ring.arrived if name != "longest"}
    assert sorted(ends, key=lambda name: ends[name]) == ["1000", "2000", "3000"]


def test_a_step_takes_the_algorithm_of_most_of_its_work() -> None:
    ring = Simulation(PrefillScheduling(), budget=1e9)
    ring.add("deep", Prompt(new=20, cached=50_000, algorithm=Algorithm.PASS_Q))
    ring.add("shallow", Prompt(new=100, algorithm=Algorithm.PASS_KV))
    step = ring.step()
    assert step is not None
    assert (len(step.pieces), step.algorithm) == (2, Algorithm.PASS_Q)


@given(prompts=prompt_lists, forced=st.sampled_from(RING_ALGORITHMS))
@settings(max_examples=50, deadline=None)
def test_a_forced_algorithm_stays_forced(prompts: list[Prompt], forced: Algorithm) -> None:
    ring = Simulation(PrefillScheduling(ageing_seconds=0.5))
    ring.run([replace(prompt, algorithm=forced) for prompt in prompts])
    assert {step.algorithm for step in ring.steps} == {forced}


def test_the_advice_of_a_chunk_holds_where_it_was_planned() -> None:
    ring = Simulation(PrefillScheduling())
    ring.scheduler.reserve("t", tokens=TokenRange(0, 1000), priority=0, now=0.0)
    advice = [
        PlannedChunk(tokens=TokenRange(0, 400), algorithm=Algorithm.PASS_KV),
        PlannedChunk(tokens=TokenRange(400, 1000), algorithm=Algorithm.PASS_Q),
    ]
    ring.scheduler.ready("t", advice)
    while ring.step():
        pass
    for step in ring.steps:
        assert step.algorithm == ("pass_kv" if step.pieces[0].tokens.start < 400 else "pass_q")


def test_a_queue_that_is_full_refuses_at_once_and_says_when_to_come_again() -> None:
    ring = Simulation(PrefillScheduling(max_queue_work=5000.0))
    ring.scheduler.reserve("a", tokens=TokenRange(0, 1000), priority=0, now=0.0)
    load, asked = ring.scheduler.load, WORK.work(900, 0)
    with pytest.raises(CapacityExceeded) as refused:
        ring.scheduler.reserve("b", tokens=TokenRange(0, 900), priority=100, now=0.0)
    hint = (load + asked - 5000.0) / RATE
    assert str(refused.value) == (
        f"prefill ring ring: {load:.0f} work units are waiting, the prompt adds {asked:.0f} and at most 5000 are "
        f"allowed; retry in {hint:.1f} s"
    )
    assert refused.value.retry_after_seconds == pytest.approx(hint)
    assert ring.scheduler.load == load, "what is refused leaves nothing"
    ring.scheduler.remove("a")
    ring.scheduler.reserve("b", tokens=TokenRange(0, 900), priority=0, now=0.0)


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    ring = Simulation(PrefillScheduling(max_queue_work=10.0))
    ring.scheduler.reserve("a", tokens=TokenRange(0, 10_000), priority=0, now=0.0)
    with pytest.raises(CapacityExceeded) as refused:
        ring.scheduler.reserve("b", tokens=TokenRange(0, 20_000), priority=0, now=0.0)
    assert refused.value.retry_after_seconds == pytest.approx(ring.scheduler.load / RATE), "until the queue is empty"


def test_a_tenant_keeps_three_quarters_of_the_queue_at_most_and_others_find_room() -> None:
    asked = WORK.work(1000, 0)
    ring = Simulation(PrefillScheduling(max_queue_work=16.5 * asked))

    def fill(tenant: str) -> int:
        for number in range(100):
            try:
                ring.add(f"{tenant}-{number}", Prompt(new=1000, tenant=tenant))
            except CapacityExceeded:
                return number
        raise AssertionError("the queue has a limit")

    for tenant in ("flood", "another", "third"):
        ring.shares.note(tenant)
    assert fill("flood") == 12
    told = r"prefill ring ring: tenant .flood. has \d+ work units under way, .* must stay free for other tenants; retry"
    with pytest.raises(CapacityExceeded, match=told):
        ring.add("flood", Prompt(new=1000, tenant="flood"))
    assert fill("another") == 3
    assert fill("third") == 1, "a tenant's first turn needs room alone"


@pytest.mark.parametrize("tenant", ["", "lone"])
def test_without_other_tenants_the_whole_queue_is_everybodys(tenant: str) -> None:
    ring = Simulation(PrefillScheduling(max_queue_work=16.5 * WORK.work(1000, 0)))
    ring.shares.note(tenant)
    for number in range(16):
        ring.add(str(number), Prompt(new=1000, tenant=tenant))
    with pytest.raises(CapacityExceeded, match="work units are waiting"):
        ring.add("16", Prompt(new=1000, tenant=tenant))


@pytest.mark.parametrize("length", [100, 1000])
def test_a_lone_turn_of_a_tenant_is_second_beside_forty_of_another(length: int) -> None:
    ring = Simulation(PrefillScheduling())
    flood = [Prompt(new=1000, tenant="flood") for _ in range(40)]
    ring.run([*flood, Prompt(new=length, tenant="another")])
    before = {name for step in ring.steps[: ring.steps_of("40")[-1]] for name in names(step)}
    assert len(before - {"40"}) <= 2  # the shortest of the flood, and its oldest


def test_two_tenants_advance_alike_whatever_they_ask_for() -> None:
    ring = Simulation(PrefillScheduling())
    short = [Prompt(new=200, tenant="short") for _ in range(50)]
    ring.run([*short, *(Prompt(new=2000, tenant="long") for _ in range(5))])
    got = {True: 0.0, False: 0.0}
    for step in ring.steps:
        for piece in step.pieces:
            got[int(piece.turn_id) < len(short)] += WORK.work(len(piece.tokens), piece.tokens.start)
        if str(len(short) - 1) in names(step):
            break
    assert got[False] == pytest.approx(got[True], rel=0.5)  # a prompt is not divided as finely as work


def test_the_rate_is_that_of_the_latest_steps() -> None:
    ring = Simulation(PrefillScheduling())
    assert ring.scheduler.rate == RATE, "a guess until something was measured"
    ring.add("a", Prompt(new=100_000))
    for _ in range(100):
        step = ring.scheduler.next_step()
        assert step is not None
        ring.scheduler.commit(step, step.work / 50.0)
    assert ring.scheduler.rate == pytest.approx(50.0)


def test_a_turn_that_is_removed_is_in_no_further_step() -> None:
    ring = Simulation(PrefillScheduling())
    for name in ("a", "b"):
        ring.add(name, Prompt(new=1000))
    step = ring.scheduler.next_step()
    assert step is not None
    ring.scheduler.remove("a")  # while it computes
    ring.scheduler.commit(step, 1.0)
    while following := ring.step():
        assert names(following) == ["b"]
    assert ring.scheduler.load == 0


def test_a_turn_that_is_not_ready_counts_and_is_not_computed() -> None:
    ring = Simulation(PrefillScheduling())
    ring.scheduler.reserve("a", tokens=TokenRange(10, 110), priority=0, now=0.0)
    assert ring.scheduler.next_step() is None
    assert (ring.scheduler.load, ring.scheduler.num_waiting) == (WORK.work(100, 10), 0)
    ring.scheduler.ready("a", [PlannedChunk(tokens=TokenRange(60, 110), algorithm=Algorithm.PASS_Q)])
    assert (ring.scheduler.load, ring.scheduler.num_waiting) == (WORK.work(50, 60), 1)
