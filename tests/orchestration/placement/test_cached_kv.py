"""KV that only the decode ring retains is pulled where that is predicted to be faster than computing it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.placement.planner import (
    AUTO,
    PULL,
    PULLED_FROM_OTHER,
    RECOMPUTE,
    CachedKv,
    Planner,
    PlannerSettings,
    PromptOnRings,
    RetainedPrefix,
    choose_source,
)
from ringserve.orchestration.protocol.plans import CachedSource, PromptMode, TurnPlan
from ringserve.views import RingRates
from tests.orchestration.fake_ranks import MODEL
from tests.rings import CPU_RATES as RATES
from tests.rings import registration

RETAINED = CachedSource(source="kept_on_prefill", tokens=TokenRange(0, 60))
PULLED = CachedSource(source="pulled_from_decode", tokens=TokenRange(60, 90))


def chosen(policy: str, pull: float, recompute: float, on_prefill: int = 60, on_decode: int = 90) -> CachedKv:
    return choose_source(
        policy,
        retained_on_prefill=on_prefill,
        retained_elsewhere=on_decode,
        pull_seconds=pull,
        recompute_seconds=recompute,
    )


@pytest.mark.parametrize(
    ("policy", "pull", "recompute", "is_pulled"),
    [
        (AUTO, 1.0, 2.0, True),
        (AUTO, 2.0, 2.0, True),
        (AUTO, 2.1, 2.0, False),
        (PULL, 9.0, 1.0, True),
        (RECOMPUTE, 1.0, 9.0, False),
    ],
)
def test_the_cheaper_is_taken_unless_one_is_configured(
    policy: str, pull: float, recompute: float, is_pulled: bool
) -> None:
    choice = chosen(policy, pull, recompute)
    assert choice.cached_tokens == (90 if is_pulled else 60)
    assert choice.sources == ((RETAINED, PULLED) if is_pulled else (RETAINED,))
    assert choice.alternatives == (("pull", pull), ("recompute", recompute))


@pytest.mark.parametrize("on_decode", [0, 30, 60])
def test_what_the_prefill_ring_keeps_needs_no_choice(on_decode: int) -> None:
    assert chosen(RECOMPUTE, 1.0, 2.0, on_decode=on_decode) == CachedKv(cached_tokens=60, sources=(RETAINED,))


def test_nothing_kept_is_nothing_cached() -> None:
    assert chosen(AUTO, 1.0, 2.0, on_prefill=0, on_decode=0) == CachedKv(cached_tokens=0, sources=())
    assert chosen(RECOMPUTE, 1.0, 2.0, on_prefill=0).sources == ()


def test_a_ring_that_the_conversation_leaves_is_named() -> None:
    choice = choose_source(
        PULL,
        retained_on_prefill=60,
        retained_elsewhere=90,
        pull_seconds=1.0,
        recompute_seconds=2.0,
        other_ring="decode-3",
    )
    pulled = CachedSource(source=PULLED_FROM_OTHER, tokens=TokenRange(60, 90), ring="decode-3")
    assert choice.sources == (RETAINED, pulled)


@pytest.mark.parametrize(
    ("on_decode", "kept", "source", "ring"),
    [
        (80, [90, 70], PULLED_FROM_OTHER, "other-0"),
        (80, [70, 95], PULLED_FROM_OTHER, "other-1"),
        (90, [90, 90], "pulled_from_decode", ""),
        (90, [], "pulled_from_decode", ""),
        (0, [61], PULLED_FROM_OTHER, "other-0"),
    ],
)
def test_what_is_pulled_comes_from_the_ring_that_keeps_most_of_equals_the_turns_own(
    on_decode: int, kept: list[int], source: str, ring: str
) -> None:
    left = [RetainedPrefix(registration(name=f"other-{number}"), count) for number, count in enumerate(kept)]
    prompt = PromptOnRings(4096, 60, on_decode, registration(), registration(), left)
    plan = Planner(MODEL, PlannerSettings(missing_kv=PULL)).plan(prompt, mode=PromptMode.APPEND)
    last = plan.cached_sources[-1]
    assert (last.source, last.ring) == (source, ring)
    assert plan.cached_tokens == last.tokens.stop == max([on_decode, *kept])


def planned(on_prefill: int, on_decode: int, rates: RingRates, num_ranks: int = 2) -> TurnPlan:
    ring = registration(rates=rates, num_ranks=num_ranks)
    return Planner(MODEL, PlannerSettings()).plan(
        PromptOnRings(
            num_tokens=4096, retained_on_prefill=on_prefill, retained_on_decode=on_decode, prefill=ring, decode=ring
        ),
        mode=PromptMode.APPEND,
    )


def test_a_fast_link_pulls_and_a_slow_one_computes_again() -> None:
    fast, slow = (planned(1000, 4000, replace(RATES, link_bytes_per_second=rate), 1) for rate in (1e9, 1e3))
    assert (fast.cached_tokens, fast.new_tokens) == (4000, 96)
    assert (slow.cached_tokens, slow.new_tokens) == (1000, 3096)


def test_a_few_tokens_are_computed_again_where_a_message_takes_longer() -> None:
    assert planned(4000, 4002, replace(RATES, link_latency_seconds=1.0), 1).cached_tokens == 4000
    assert planned(4000, 4002, replace(RATES, link_latency_seconds=0.0), 1).cached_tokens == 4002


def test_the_predicted_gain_is_the_bytes_over_the_links_against_the_longer_prefill() -> None:
    costs = dict(planned(1000, 4000, RATES).alternatives)
    # After a pull the prefill takes as long as with the whole prefix cached on the prefill ring.
    after = min(dict(planned(4000, 0, RATES).alternatives).values())
    num_bytes = 3000 * MODEL.kv_bytes_per_token
    assert costs["pull"] - after == pytest.approx(1e-3 + num_bytes / 2 / 1e8, rel=1e-6)
    assert costs["recompute"] == pytest.approx(min(dict(planned(1000, 0, RATES).alternatives).values()), rel=1e-6)
