"""Arithmetic of the benches."""

import pytest

from bench.report import Target
from bench.rings.attention import num_repeats
from bench.rings.decode import DecodeCase, fitting_cases
from bench.rings.operations import attention_flops, prefill_flops
from bench.rings.rounds import Contender, Sample, Series, alternate
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info


def test_causal_attention_counts_the_pairs_that_are_seen() -> None:
    seen = sum(3 + position + 1 for position in range(5))
    assert attention_flops(5, num_heads=2, head_dim=8, cached_tokens=3) == 4 * 2 * 8 * seen


def test_prefill_counts_two_operations_for_every_weight_of_the_layers_and_token() -> None:
    info = read_model_info(resolve_model_path("builtin:tiny"))
    embeddings = 2 * info.vocab_size * info.hidden_size
    in_layers = info.num_parameters - embeddings  # norms are in neither
    attention = info.num_layers * attention_flops(100, info.num_heads, info.head_dim)
    logits_of_the_last = 2 * info.vocab_size * info.hidden_size
    assert prefill_flops(info, 100) == 2 * 100 * in_layers + attention + logits_of_the_last


@pytest.mark.parametrize(
    ("is_at_least", "value", "is_met"), [(True, 2.0, True), (True, 1.9, False), (False, 1.9, True)]
)
def test_target_is_met_on_its_own_side_of_the_limit(is_at_least: bool, value: float, is_met: bool) -> None:
    target = Target("speed", value, 2.0, is_at_least)
    assert target.is_met is is_met
    assert str(target).endswith(": met" if is_met else ": MISSED")


def test_every_second_round_runs_backwards_so_that_nothing_is_always_first() -> None:
    order: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(name, 1, lambda: order.append(name) or [Sample(seconds=1.0)])  # type: ignore[func-returns-value]

    series = alternate([contender("a"), contender("b")], 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(each.rounds) for each in series.values()] == [3, 3]


def test_ring_is_as_slow_as_its_slowest_rank() -> None:
    contender = Contender("ring", 2, list)
    series = Series(contender, [[Sample(seconds=1.0), Sample(seconds=3.0)], [Sample(seconds=2.0), Sample(seconds=1.0)]])
    assert series.seconds == [3.0, 2.0]


def test_short_measurements_are_repeated_and_long_ones_are_not() -> None:
    assert num_repeats(1e12, ranks=2) == 1
    assert (num_repeats(2.5e8, ranks=1), num_repeats(2.5e8, ranks=2)) == (10, 20)
    assert num_repeats(1.0, ranks=2) == 50


def test_decode_case_whose_kv_does_not_fit_beside_that_of_the_other_rings_is_left_out() -> None:
    info = read_model_info(resolve_model_path("builtin:tiny"))
    small, large = DecodeCase(1024, 1, 8), DecodeCase(65536, 8, 8)
    free = 4 * large.kv_tokens() * info.kv_bytes_per_token
    assert fitting_cases(info, [1, 2], [small, large], free) == [small, large]
    assert fitting_cases(info, [1, 2, 3], [small, large], free) == [small]
