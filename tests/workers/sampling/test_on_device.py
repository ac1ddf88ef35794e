"""Sampling by tensor operations, as on a GPU, beside the sampler of the host: the same tokens, and one read for all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.workers.sampling.on_device import ChosenRows
from ringserve.workers.sampling.parameters import NO_TOKEN, Sampled, SamplingParameters, TokenBias, TokenHistory
from ringserve.workers.sampling.sampler import RowSampler, choose_rows, sample_rows, sample_rows_on_device
from tests.workers.sampling.one_row import Row

LOGITS = st.lists(
    st.floats(-9, 9, width=32) | st.sampled_from([0.0, 3.0, 1e-30, 2e-30, -math.inf]), min_size=24, max_size=24
)
PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.sampled_from([0, 1, 3, 23, 24, 99]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    logit_bias=st.sampled_from([(), (), (TokenBias(2, 5.0),)]),
    logprobs=st.sampled_from([None, None, 2]),
)


@given(
    rows=st.lists(st.tuples(LOGITS, PARAMETERS, st.integers(0, 2**40)), min_size=1, max_size=5),
    broken=st.sampled_from([None, None, torch.nan, torch.inf]),
)
@settings(max_examples=150, deadline=None)
def test_any_rows_get_the_tokens_and_log_probabilities_that_the_host_gives_them(
    rows: list[tuple[list[float], SamplingParameters, int]], broken: float | None
) -> None:
    """Equal logits at every boundary, filters in any mixture, and one row that is broken."""
    logits = torch.tensor([[*values, 9.5] for values, _, _ in rows])
    if broken is not None:
        logits[-1, 4] = broken
    history = TokenHistory(num_generated=3, answer_ids=(1, 1, 2))
    sampled = [[Row(RowSampler(sampling, history), position) for _, sampling, position in rows] for _ in range(2)]
    assert sample_rows_on_device(sampled[0], logits) == sample_rows(sampled[1], logits)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_the_next_step_may_look_up_the_token_of_a_broken_row(broken: float, temperature: float) -> None:
    logits = torch.full((3, 40), 1.0)
    logits[1, 39] = broken
    chosen = ChosenRows(choose_rows([Row(RowSampler(SamplingParameters(temperature=temperature)), 7)] * 3, logits))
    assert chosen.token_ids.tolist()[1] == 0
    first, second, third = chosen.read()
    assert second == NO_TOKEN
    assert first == third == Sampled(int(chosen.token_ids[0]))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95])
def test_a_vocabulary_of_a_real_size_is_drawn_from_alike(top_p: float) -> None:
    logits = 3 * torch.randn(4, 32_000, generator=torch.Generator().manual_seed(2))
    for top_k in (0, 50):
        sampling = SamplingParameters(temperature=0.8, top_p=top_p, top_k=top_k, seed=5)
        rows = [Row(RowSampler(sampling), position) for position in range(4)]
        assert sample_rows_on_device(rows, logits) == sample_rows(rows, logits)


def test_all_rows_of_a_step_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    known = {
        name: getattr(torch.Tensor, name) for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu")
    }

    def watch(name: str) -> None:
        def counted(self: torch.Tensor, *arguments: object) -> object:
            reads.append(name)
            return known[name](self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, counted)

    for name in known:
        watch(name)
    drawn = SamplingParameters(temperature=0.5)
    kinds = [SamplingParameters(), drawn, replace(drawn, top_k=2), replace(drawn, top_p=0.5)]
    rows = [Row(RowSampler(each), 3) for each in kinds]
    assert len(sample_rows_on_device(rows, torch.randn(4, 50))) == 4
    assert reads == ["tolist"]
