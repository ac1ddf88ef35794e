"""Simulated clusters against results by hand, and placements against each other."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ringserve.cp_core.cost.decode import fastest_step
from ringserve.cp_core.cost.memory import weight_bytes
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.cost.prefill import predict_migration, predict_turn
from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.cost.steps import StepLimits, WorkModel, cut
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.services.offline.simulator.cluster import (
    ClusterShape,
    PoolShape,
    StepTimes,
    conversations_for,
    prefill_seconds,
)
from ringserve.services.offline.simulator.placement import POLICIES
from ringserve.services.offline.simulator.results import SimulationResult
from ringserve.services.offline.simulator.scaling import ScalingShape
from ringserve.services.offline.simulator.simulation import Simulation
from ringserve.services.offline.simulator.trace import (
    FirstPrompts,
    SyntheticTrace,
    TracedConversation,
    TracedTurn,
    TraceShape,
    around,
)
from tests.rings import LLAMA_8B as MODEL

CLUSTER = ClusterShape(
    model=MODEL,
    weights=weight_bytes(MODEL.shape),
    profile=read_profile("gtt"),
    prefill=PoolShape(num_rings=1, cp=2, tp=2),
    decode=PoolShape(num_rings=1, cp=1, tp=2),
)


def conversation(start: float, *turns: tuple[int, int, float]) -> TracedConversation:
    traced = tuple(TracedTurn(new_tokens=new, output_tokens=out, think_seconds=think) for new, out, think in turns)
    return TracedConversation(start_seconds=start, turns=traced)


def simulate(trace: Iterable[TracedConversation], *, placement: str = "router", **changes: object) -> SimulationResult:
    return Simulation(replace(CLUSTER, **changes), trace, placement).run()  # type: ignore[arg-type]


def seconds_of(new: int, cached: int = 0, algorithm: str = "pass_kv") -> float:
    """Predict one prefill step on the prefill ring by the cost model."""
    return predict_turn(
        MODEL.shape, CLUSTER.profile, cp=2, tp=2, algorithm=algorithm, new_tokens=new, cached_tokens=cached
    ).total_seconds


def exposed_of(tokens: int, seconds: float) -> float:
    return predict_migration(
        MODEL.shape, CLUSTER.profile, from_processes=4, to_processes=2, tokens=tokens, prefill_seconds=seconds
    ).exposed_seconds


def step_of(context: int) -> float:
    return fastest_step(
        MODEL.shape, CLUSTER.weights, CLUSTER.profile, cp=1, tp=2, batch=1, context_tokens=context
    ).total_seconds


@pytest.mark.parametrize("placement", sorted(POLICIES))
def test_a_turn_alone_takes_what_the_cost_model_says(placement: str) -> None:
    result = simulate([conversation(5.0, (20_000, 11, 0.0))], placement=placement)
    prefill = seconds_of(20_000)
    assert result.ttft.mean == pytest.approx(prefill + exposed_of(20_000, prefill) + step_of(20_000))
    assert result.ttit_mean == pytest.approx(step_of(20_000))
    assert result.cached_share == 0.0


def test_a_follow_up_computes_what_is_new_and_pulls_the_answer_from_the_decode_ring() -> None:
    result = simulate([conversation(0.0, (20_000, 1000, 0.0), (100, 10, 30.0))])
    assert result.num_turns == 2
    # 20,000 tokens are retained on the prefill ring and the answer of 1,000 is pulled; the prompts have 41,100.
    assert result.cached_share == pytest.approx(21_000 / 41_100)
    slowest = result.ttft.most
    follow_up = 2 * result.ttft.mean - slowest
    # The planner knows less than the profile: its choice is its own. Contexts are rounded to thousands.
    names = ["pass_q"] if result.pass_q_share else [name for name in PREFILL_ALGORITHMS if name != "pass_q"]
    prefills = [seconds_of(100, 21_000, name) for name in names]
    afters = [exposed_of(1000, 0.0) + prefill + exposed_of(100, prefill) + step_of(21_000) for prefill in prefills]
    assert min(abs(follow_up / after - 1) for after in afters) < 1e-6


def test_long_prompts_are_cut_and_every_step_takes_its_time() -> None:
    work = WorkModel.of_shape(MODEL.shape)
    limits = StepLimits.of(work, step_budget=0.0, chunk_tokens=20_000, min_chunk_tokens=1024)
    steps = cut(work, limits, TokenRange(0, 60_000))
    assert len(steps) > 3, "later steps are shorter"
    result = simulate([conversation(0.0, (60_000, 1, 0.0))], chunk_tokens=20_000)
    by_name = [[seconds_of(len(step), step.start, name) for name in PREFILL_ALGORITHMS] for step in steps]
    # The planner knows less than the profile: its choice between pass-KV and a chain that is about as fast is its own.
    by_pass_kv, least = (sum(pick(each) for each in by_name) for pick in (lambda each: each[0], min))
    assert least * (1 - 1e-9) <= busy_seconds(result) <= by_pass_kv * (1 + 1e-9)
    assert least > 0.98 * by_pass_kv


def test_short_prompts_that_wait_share_steps_and_their_overhead() -> None:
    """Compute the first prompt alone; the nine later ones fit one step, whose overhead counts once."""
    trace = [conversation(0.0, (200, 1, 0.0)) for _ in range(10)]
    shared = simulate(trace)
    alone = simulate(trace, chunk_tokens=200)
    overhead = MODEL.num_layers * CLUSTER.profile.prefill.rates(2, is_cached=False).layer_overhead_seconds
    assert busy_seconds(alone) == pytest.approx(10 * seconds_of(200))
    assert busy_seconds(alone) - busy_seconds(shared) == pytest.approx(8 * overhead)


def busy_seconds(result: SimulationResult) -> float:
    return result.busy_share * result.simulated_seconds


def test_random_arrivals_wait_as_the_theory_of_queues_says() -> None:
    """Run equal turns on one ring, 60% busy: the mean wait is rho S / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    service = min(seconds_of(8_000, algorithm=name) for name in PREFILL_ALGORITHMS)
    draw, start = random.Random(1), 0.0
    trace = []
    for _ in range(8_000):
        start += draw.expovariate(0.6 / service)
        trace.append(conversation(start, (8_000, 1, 0.0)))
    result = simulate(trace, max_batch=1000, chunk_tokens=8_000)  # a step has room for one turn
    alone = simulate(trace[:1])
    assert result.busy_share == pytest.approx(0.6, rel=0.02)
    assert result.ttft.mean - alone.ttft.mean == pytest.approx(0.6 * service / (2 * 0.4), rel=0.06)


def test_a_wait_is_told_apart_from_the_prefill_itself() -> None:
    """Start two turns at once on one ring: the second begins when the first has ended."""
    trace = [conversation(0.0, (20_000, 1, 0.0)), conversation(0.0, (20_000, 1, 0.0))]
    result = simulate(trace, chunk_tokens=20_000)
    assert (result.queue.least, result.queue.most) == pytest.approx((0.0, seconds_of(20_000)))


BUSY = {
    "prefill": PoolShape(num_rings=3, cp=2, tp=2),
    "decode": PoolShape(num_rings=3, cp=1, tp=2),
    "profile": replace(CLUSTER.profile, memory_bytes=14e9),
    "max_batch": 4,
    "scheduling": PrefillScheduling(max_queue_work=40_000.0),
}
"""Small rings, small batches and short queues, so that turns are refused, moved, and computed again."""


@pytest.mark.parametrize("placement", sorted(POLICIES))
def test_no_token_is_lost_or_computed_in_vain(placement: str) -> None:
    """End every turn; rings computed new and lost tokens, and no cached ones."""
    trace = list(
        SyntheticTrace(TraceShape(num_conversations=80, seconds=10.0, first=(around(2000), around(20_000))), 5)
    )
    result = simulate(trace, placement=placement, **BUSY)
    turns = [turn for each in trace for turn in each.turns]
    assert (
        result.num_turns == len(turns) == result.queue.count == sum(each.values.count for each in result.ttft_over_time)
    )
    assert result.new_tokens == sum(turn.new_tokens for turn in turns)
    assert result.computed_tokens == result.new_tokens + result.recomputed_tokens
    history = sum(
        (len(each.turns) - place) * (turn.new_tokens + turn.output_tokens)
        for each in trace
        for place, turn in enumerate(each.turns, start=1)
    )
    assert result.prompt_tokens == result.new_tokens + history
    assert result.recomputed_tokens + result.moved_tokens <= history
    assert result.cached_share == pytest.approx((history - result.recomputed_tokens) / result.prompt_tokens)
    assert result.num_refusals > 0, "this load is more than fits"
    assert result.recomputed_tokens > 0
    assert 0 < result.largest_batch <= BUSY["max_batch"]  # type: ignore[operator]
    assert 0.0 < result.batch_share <= 1.0
    assert 0.0 <= result.queue.p50 <= result.ttft.p50 <= result.ttft.p90 <= result.ttft.p99
    assert 0.0 < result.busy_share <= result.busiest_share <= 1.0
    assert sum(each.count for each in result.ttft_of_size.values()) == result.num_turns


@pytest.mark.parametrize("placement", sorted(POLICIES))
def test_the_same_trace_gives_the_same_result(placement: str) -> None:
    shape = TraceShape(num_conversations=15, seconds=4.0, first=(around(2000), around(20_000)))
    once, again, other = (simulate(SyntheticTrace(shape, seed), placement=placement, **BUSY) for seed in (5, 5, 6))
    assert once == again != other


def test_rings_are_as_busy_as_the_load_was_made_for() -> None:
    """Run prompts that hardly ever share a step: rings are busy for the requested share of the time."""
    shape = TraceShape(
        num_conversations=1, seconds=300.0, first=(FirstPrompts(least=5000, most=40_000),), mean_turns=2.0, swing=0.0
    )
    pools = {"prefill": PoolShape(num_rings=4, cp=2, tp=2), "decode": PoolShape(num_rings=8, cp=1, tp=2)}
    cluster = replace(CLUSTER, **pools)  # type: ignore[arg-type]
    shape = replace(shape, num_conversations=conversations_for(0.5, cluster, shape, 3))
    result = Simulation(cluster, SyntheticTrace(shape, 4), "router").run()
    assert result.busy_share * result.simulated_seconds / shape.seconds == pytest.approx(0.5, rel=0.05)


def test_the_load_of_a_conversation_is_what_its_turns_take_alone() -> None:
    one = conversation(0.0, (20_000, 1000, 0.0), (100, 10, 30.0))
    quickest = min(seconds_of(100, 21_000, name) for name in PREFILL_ALGORITHMS)
    assert prefill_seconds(StepTimes(CLUSTER), one) == pytest.approx(seconds_of(20_000) + quickest)


def test_a_conversation_that_moves_is_sent_whole_and_leaves_nothing_behind() -> None:
    """Place the second turn on the other decode ring; its KV is retained on the one prefill ring."""
    trace = [conversation(0.0, (20_000, 10, 0.0), (100, 10, 30.0))]
    pools = {"prefill": PoolShape(num_rings=1, cp=2, tp=2), "decode": PoolShape(num_rings=2, cp=1, tp=2)}
    simulation = Simulation(replace(CLUSTER, **pools), trace, "round_robin")  # type: ignore[arg-type]
    result = simulation.run()
    assert [ring.kv.held("0") for ring in simulation.cluster.decode.values()] == [0, 20_120]
    assert (result.moved_tokens, result.recomputed_tokens) == (0, 10), "only the first decode ring had the answer"
    assert sorted((result.ttft.most, 2 * result.ttft.mean - result.ttft.most))[0] > exposed_of(20_110, 0.0)


def test_looking_at_retained_kv_beats_round_robin() -> None:
    trace = SyntheticTrace(TraceShape(num_conversations=200, seconds=300.0), 11)
    pools = {"prefill": PoolShape(num_rings=30, cp=2, tp=2), "decode": PoolShape(num_rings=20, cp=1, tp=2)}
    turns = simulate(trace, placement="round_robin", **pools)
    assert turns.cached_share < 0.2
    for name in ("router", "kv_aware"):
        aware = simulate(trace, placement=name, **pools)
        assert aware.cached_share > 0.6
        assert aware.ttft.p90 < turns.ttft.p90 / 2
        assert aware.ttft.mean < turns.ttft.mean / 2


def test_turns_that_find_no_room_ask_again_until_they_do() -> None:
    """Start thirty conversations on one small ring: not all fit its KV at a time, and all are answered."""
    small = replace(CLUSTER.profile, memory_bytes=14e9)
    trace = [conversation(0.0, (20_000, 50, 0.0)) for _ in range(30)]
    result = simulate(trace, profile=small)
    assert result.num_turns == 30
    assert result.num_retries > 0
    assert simulate(trace).num_retries == 0


def test_a_conversation_that_can_never_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="a conversation comes to 9000010 tokens, and a prefill ring of cp 2"):
        Simulation(CLUSTER, [conversation(0.0, (9_000_000, 10, 0.0))], "router")
    with pytest.raises(ConfigError, match="placement is 'best'; allowed are router, least_loaded, round_robin, kv_awa"):
        Simulation(CLUSTER, [], "best")


@pytest.mark.parametrize("way", ["load", "busy"])
def test_rings_end_while_fewer_will_do_and_all_turns_are_answered_all_the_same(way: str) -> None:
    """A burst at the beginning and at the end of an hour, and one turn every two minutes between them."""
    shape = replace(CLUSTER, prefill=PoolShape(num_rings=6, cp=2, tp=2), decode=PoolShape(num_rings=4, cp=1, tp=2))
    starts = [number * 0.2 for number in range(150)]
    trace = [conversation(start, (20_000, 100, 0.0)) for start in starts]
    trace += [conversation(60.0 + 120.0 * number, (2_000, 50, 0.0)) for number in range(29)]
    trace += [conversation(3600.0 + start, (20_000, 100, 0.0)) for start in starts]
    fixed = Simulation(shape, trace, "router").run()
    scaled = Simulation(shape, trace, "router", scaling=ScalingShape(way=way, least=1, start_seconds=30.0)).run()
    assert fixed.prefill_ring_seconds == pytest.approx(6 * fixed.simulated_seconds)
    assert fixed.decode_ring_seconds == pytest.approx(4 * fixed.simulated_seconds)
    assert scaled.num_turns == fixed.num_turns == len(trace)
    assert scaled.prefill_ring_seconds < 0.7 * fixed.prefill_ring_seconds
    assert scaled.prefill_ring_seconds > scaled.simulated_seconds, "one ring always serves"
    assert scaled.ttft.p99 >= fixed.ttft.p99
