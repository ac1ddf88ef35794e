"""Several sequences in one call: the outputs of one call a sequence, in as many calls as a ring's messages ask for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_core.attention.partial import Partial
from cp_core.attention.torch_cpu import TorchCpuFlash
from cp_core.cost.model import GATHER_KV, PASS_KV, PASS_Q
from tests.cp_core.ring.test_prefill import SCALE, placed, steps
from tests.cp_core.rings import PlacedSequence, prefill_on_threads
from tests.oracles import fp32_bound, largest, oracle_causal


class Together(TorchCpuFlash):
    """Backend that takes several sequences in a call, and counts its calls."""

    def __init__(self) -> None:
        self.num_together = self.num_alone = 0

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        self.num_alone += 1
        return super().partial_attention(q, k, v, causal=causal, scale=scale)

    def attend_many(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float,
    ) -> Partial:
        self.num_together += 1
        assert min(*queries, *keys) > 0
        assert (sum(queries), sum(keys), sum(keys)) == (q.shape[0], k.shape[0], v.shape[0])
        parts = [
            TorchCpuFlash().partial_attention(q_thd, k_skd, v_skd, causal=causal, scale=scale)
            for q_thd, k_skd, v_skd in zip(
                q.split(list(queries)), k.split(list(keys)), v.split(list(keys)), strict=True
            )
        ]
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


@given(step=steps(), algorithm=st.sampled_from([PASS_KV, PASS_Q, GATHER_KV]))
@settings(max_examples=60, deadline=None)
def test_any_sequences_together_match_the_oracle(step: tuple[int, list[PlacedSequence]], algorithm: str) -> None:
    size, sequences = step
    outs = prefill_on_threads(sequences, size, algorithm, SCALE, Together()).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, SCALE)[sequence.layout.start :]
        assert largest(out.double() - right) <= fp32_bound(sequence.tokens, SCALE)


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
