"""Several sequences in one call: the outputs of one call a sequence, in as many calls as a ring's messages ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.attention.torch_cuda import fills_gpu
from ringserve.cp_core.cost.model import CHAIN, GATHER_KV, PASS_KV, PASS_Q, SP_NTP
from ringserve.cp_core.layout.shards import cut_layout
from tests.cp_core.ring.test_chain import chains
from tests.cp_core.ring.test_prefill import SCALE, placed, steps
from tests.cp_core.rings import PlacedSequence, prefill_on_threads
from tests.cp_core.together import Together
from tests.oracles import fp32_bound, largest, oracle_causal


@given(
    step=steps(), algorithm=st.sampled_from([PASS_KV, PASS_Q, GATHER_KV, SP_NTP]), num_segments=st.sampled_from([1, 3])
)
@settings(max_examples=60, deadline=None)
def test_any_sequences_together_match_the_oracle(
    step: tuple[int, list[PlacedSequence]], algorithm: str, num_segments: int
) -> None:
    size, sequences = step
    segments = num_segments if algorithm == SP_NTP else 1
    outs = prefill_on_threads(sequences, size, algorithm, SCALE, Together(), num_segments=segments).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, SCALE)[sequence.layout.start :]
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)


@given(chain=chains(), few=st.sampled_from([0, 40]))
@settings(max_examples=25, deadline=None)
def test_any_chain_of_sequences_together_matches_the_oracle(
    chain: tuple[int, tuple[int, ...], list[PlacedSequence]], few: int
) -> None:
    size, order, sequences = chain
    outs = prefill_on_threads(sequences, size, CHAIN, SCALE, Together(few), order=order).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, SCALE)[sequence.layout.start :]
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)


@pytest.mark.parametrize(("algorithm", "calls"), [(SP_NTP, 6), (CHAIN, 15)])
def test_eight_sequences_take_a_few_calls_by_every_algorithm(algorithm: str, calls: int) -> None:
    """Three ranks: by SP-NTP two calls each; in a chain two for a rank's own keys, and two for each before it."""
    sequences = []
    for seed in range(8):
        each = placed(30 + seed, [0, 1, 2] * 5, [0, 1, 2], seed=seed)
        layout = cut_layout(15, (0, 9, 20, 30 + seed), range(3)) if algorithm == CHAIN else each.layout
        sequences.append(replace(each, layout=layout))
    backend = Together()
    outs = prefill_on_threads(sequences, 3, algorithm, SCALE, backend).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, SCALE)[sequence.layout.start :]
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)
    assert backend.num_alone == 0
    assert backend.num_together <= calls


def test_few_queries_are_a_call_for_each_sequence_unless_they_see_their_own_keys_alone() -> None:
    """Kernels for one sequence split its keys; in the causal call of a rank's own tokens there are few keys, too."""
    sequences = [placed(4, [0] * 50, [0], seed=seed) for seed in range(3)]
    backend = Together(few=12)
    prefill_on_threads(sequences, 1, PASS_KV, SCALE, backend)
    assert (backend.num_together, backend.num_alone) == (1, 3)


@pytest.mark.parametrize(
    ("queries", "num_heads", "is_full"), [([128] * 5, 32, True), ([1] * 4, 32, False), ([500], 33, True)]
)
def test_a_gpu_is_full_with_a_tile_of_queries_for_each_processor(
    queries: list[int], num_heads: int, is_full: bool
) -> None:
    assert fills_gpu(queries, num_heads) is is_full


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_calls_once_for_its_own_new_tokens_and_at_most_twice_for_those_of_each_other_rank(size: int) -> None:
    """Eight sequences; with cached tokens there is one more call for each rank that has any."""
    for cached, own in (([], 1), ([0, size - 1] * 8, 2)):
        sequences = [placed(20 + seed, cached, list(range(size)), seed=seed) for seed in range(8)]
        backend = Together()
        prefill_on_threads(sequences, size, PASS_KV, SCALE, backend)
        assert backend.num_alone == 0
        assert size <= backend.num_together <= size * (own + (size - 1) * (own + 1))


def test_a_cache_in_many_runs_is_attended_in_one_call() -> None:
    backend = Together()
    sequence = placed(9, [0] * 64, [0], run=4)
    (out,) = prefill_on_threads([sequence], 1, PASS_KV, SCALE, backend).outs
    right = oracle_causal(sequence.tokens, SCALE)[64:]
    assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)
    assert (backend.num_together, backend.num_alone) == (0, 2)
