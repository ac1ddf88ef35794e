"""Selection by predicted times and by name, and its reasons in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS, ModelShape, PrefillRates
from ringserve.cp_core.cost.selector import (
    GATHERED_TOKENS,
    POLICIES,
    Selection,
    Turn,
    choose_fastest,
    fastest,
    forced,
    select,
)
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError, InvalidRequest
from ringserve.views import RingRates


def llama_405b(tensor_parallel: int = 1) -> ModelShape:
    """Return the shape of Llama 3 405B, or one tensor parallel share of it."""
    return ModelShape(
        num_layers=126,
        hidden_size=16384,
        intermediate_size=53248 // tensor_parallel,
        num_heads=128 // tensor_parallel,
        num_kv_heads=8 // tensor_parallel,
        head_dim=128,
        vocab_size=128256 // tensor_parallel,
        element_bytes=2,
        partial_bytes=2,
    )


def fitted_rates() -> PrefillRates:
    """Return rates of a GPU, fitted to the paper's tables 4 and 5; the overhead is of 4 ranks with cached tokens."""
    return PrefillRates(
        ring=RingRates(
            gemm_flops=llama_405b(8).linear_flops_per_token / 209.7e-6,
            attention_flops=557e12,
            link_bytes_per_second=26e9,
            link_latency_seconds=30e-6,
        ),
        layer_overhead_seconds=(0.52 + 3 * 0.60 + 3.05) * 1e-3,
    )


def test_a_reason_is_a_few_words() -> None:
    seconds = {"pass_kv": 2.0, "pass_q": 1.01, "gather_kv": 1.0, "chain": 3.0, "sp_ntp": 1.015}
    turn = Turn(new_tokens=100, cached_tokens=9900, num_ranks=4)
    assert choose_fastest(turn, seconds) == Selection("pass_q", "fastest of five, a tie with gather-KV and SP-NTP")
    assert choose_fastest(turn, seconds | {"pass_q": 0.5}) == Selection("pass_q", "fastest of five")
    assert choose_fastest(turn, seconds, 0.7) == Selection("pass_kv", "all five tie")
    long = Turn(new_tokens=100, cached_tokens=1 << 20, num_ranks=4)
    assert choose_fastest(long, seconds) == Selection("pass_q", "fastest of three, a tie with SP-NTP")
    assert forced("pass_q") == Selection("pass_q", "the configuration sets it")


@given(new_tokens=st.integers(1, 200_000), cached_tokens=st.integers(0, 1_000_000), num_ranks=st.integers(2, 16))
def test_auto_takes_the_smaller_prediction_unless_it_is_a_tie(
    new_tokens: int, cached_tokens: int, num_ranks: int
) -> None:
    turn = Turn(new_tokens=new_tokens, cached_tokens=cached_tokens, num_ranks=num_ranks)
    model, rates = llama_405b(8), fitted_rates()
    seconds = {
        each: StepPredictor(model, rates, num_ranks).cost(each, new_tokens, cached_tokens).total_seconds
        for each in PREFILL_ALGORITHMS
        if each not in ("gather_kv", "chain") or new_tokens + cached_tokens <= GATHERED_TOKENS
    }
    best = min(seconds.values())
    first = next(each for each, value in seconds.items() if best >= 0.98 * value)
    assert fastest(turn, model, rates).algorithm == ("pass_kv" if num_ranks == 1 else first)


def test_a_ring_of_one_takes_pass_kv_because_nothing_is_sent() -> None:
    turn = Turn(new_tokens=1, cached_tokens=100_000, num_ranks=1)
    assert select("auto", turn, llama_405b(), fitted_rates()) == Selection(
        "pass_kv", "a ring of one rank sends no messages"
    )


def test_every_policy_is_selected_by_its_name() -> None:
    turn = Turn(new_tokens=100, cached_tokens=9900, num_ranks=4)
    first, *named = [select(policy, turn, llama_405b(), fitted_rates()) for policy in POLICIES]
    assert first.reason.startswith("fastest of five")
    assert [each.algorithm for each in named] == list(PREFILL_ALGORITHMS)


def test_unknown_policies_are_refused() -> None:
    turn = Turn(new_tokens=1, cached_tokens=0, num_ranks=2)
    with pytest.raises(ConfigError, match="allowed are auto, pass_kv, pass_q"):
        select("best", turn, llama_405b(), fitted_rates())
    with pytest.raises(ConfigError, match="algorithm is 'auto'"):
        forced("auto")


@pytest.mark.parametrize(
    ("new_tokens", "cached_tokens", "num_ranks", "field"),
    [(0, 5, 2, "new_tokens is 0"), (1, -1, 2, "cached_tokens is -1"), (1, 0, 0, "num_ranks is 0")],
)
def test_a_turn_without_new_tokens_or_ranks_is_refused(
    new_tokens: int, cached_tokens: int, num_ranks: int, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Turn(new_tokens=new_tokens, cached_tokens=cached_tokens, num_ranks=num_ranks)
