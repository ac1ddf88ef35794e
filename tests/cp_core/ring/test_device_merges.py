"""Merges by a GPU's control flow, with plain tensors in the place of its kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ringserve.cp_core.attention import partial as partials
from ringserve.cp_core.attention.partial import MAX_HELD_PARTS, Partial, finished_out
from ringserve.cp_core.cost.model import GATHER_KV, PASS_KV, PASS_Q
from ringserve.cp_core.ring import decode
from tests.cp_core.ring.test_decode import check as check_decode
from tests.cp_core.ring.test_prefill import SCALE, placed
from tests.cp_core.rings import prefill_on_threads
from tests.oracles import fp32_bound, largest, oracle_causal, random_tokens


class PlainKernels:
    """Merge kernels of plain tensor operations; `most` is the most parts of one launch."""

    MERGES_EARLY = True
    most = 0

    def merge_parts(
        self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [Partial(*each) for each in zip(outs, lses, strict=True)]
        self.most = max(self.most, len(parts))
        weights = torch.stack([part.lse for part in parts]).double().softmax(0).nan_to_num()[..., None]
        attended = torch.stack([torch.nan_to_num(finished_out(part)).double() for part in parts])
        lse = torch.stack([part.lse.double() for part in parts]).logsumexp(0).float()
        out = (weights * attended).sum(0)
        if into is None:
            return out.float(), lse
        return into.copy_(out), lse


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> PlainKernels:
    plain = PlainKernels()
    for module in (partials, decode):
        monkeypatch.setattr(module, "kernels_on", lambda device: plain)
    return plain


@pytest.mark.parametrize("algorithm", [PASS_KV, PASS_Q, GATHER_KV])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_prefill_merges_as_parts_come_and_matches_the_oracle(algorithm: str, size: int, kernels: PlainKernels) -> None:
    """Sequences with and without cached tokens, and one without new ones; parts cover all rows or some."""
    order = list(range(size))
    sequences = [
        placed(70, [], order, seed=1),
        placed(33, [position % size for position in range(40)], order[::-1], seed=2),
        placed(0, [0] * 5, order, seed=3),
        placed(3, [size - 1] * 9, order, seed=4),
    ]
    outs = prefill_on_threads(sequences, size, algorithm, SCALE).outs
    for sequence, out in zip(sequences, outs, strict=True):
        right = oracle_causal(sequence.tokens, SCALE)[sequence.layout.start :]
        assert largest(out.double() - right) <= 2 * fp32_bound(sequence.tokens, SCALE)
    if algorithm != PASS_Q:
        # What is held, and the two ranges of one more source.
        assert 0 < kernels.most <= MAX_HELD_PARTS + 2


@pytest.mark.parametrize("size", [1, 3])
def test_every_decode_variant_merges_with_the_kernel(size: int, kernels: PlainKernels) -> None:
    sequences = [random_tokens(length, seed=length) for length in (1, 64, 7, 130)]
    check_decode(sequences, [[position % size for position in range(each.q.shape[0])] for each in sequences], size)
    assert kernels.most == size
