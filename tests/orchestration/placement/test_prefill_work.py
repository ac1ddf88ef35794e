"""Work units, their inverse, and prompts cut by them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.cost.steps import StepLimits, WorkModel, cut
from ringserve.cp_core.layout.shards import TokenRange
from tests.orchestration.fake_ranks import MODEL

shapes = st.floats(1.0, 1e5).map(lambda pairs: WorkModel(pairs_per_token=pairs, flops_per_unit=1.0))


def test_the_work_of_a_prompt_is_its_flops() -> None:
    shape = MODEL.shape
    work = WorkModel.of_shape(shape)
    flops = 1000 * shape.linear_flops_per_token + shape.num_layers * shape.attention_flops(1000, 500)
    assert abs(work.work(1000, 500) * work.flops_per_unit / flops - 1) < 1e-12


@settings(deadline=None)
@given(work=shapes, first=st.integers(0, 10**6), second=st.integers(0, 10**6), cached=st.integers(0, 10**6))
def test_two_parts_of_a_prompt_cost_what_the_whole_costs(work: WorkModel, first: int, second: int, cached: int) -> None:
    parts = work.work(first, cached) + work.work(second, cached + first)
    whole = work.work(first + second, cached)
    assert abs(parts - whole) <= 1e-9 * whole


@settings(deadline=None)
@given(work=shapes, budget=st.floats(0.0, 1e9), cached=st.integers(0, 10**7))
def test_the_longest_chunk_fits_its_budget_and_one_token_more_does_not(
    work: WorkModel, budget: float, cached: int
) -> None:
    tokens = work.longest(budget, cached)
    assert work.work(tokens, cached) <= budget
    assert work.work(tokens + 1, cached) > budget


@settings(deadline=None)
@given(
    work=shapes,
    budget=st.floats(0.0, 1e5),
    chunk_tokens=st.integers(1, 5000),
    min_chunk=st.integers(1, 5000),
    start=st.integers(0, 10**6),
    length=st.integers(1, 5_000),
)
def test_a_prompt_is_cut_into_chunks_that_fit_and_cover_it(
    work: WorkModel, budget: float, chunk_tokens: int, min_chunk: int, start: int, length: int
) -> None:
    limits = StepLimits.of(work, step_budget=budget, chunk_tokens=chunk_tokens, min_chunk_tokens=min_chunk)
    chunks = cut(work, limits, TokenRange(start, start + length))
    position = start
    for chunk in chunks:
        assert chunk.start == position
        assert 1 <= len(chunk) <= limits.tokens
        assert work.work(len(chunk), chunk.start) <= limits.budget or len(chunk) <= limits.min_chunk
        assert chunk is chunks[-1] or len(chunk) >= limits.min_chunk
        position = chunk.stop
    assert position == start + length


def test_without_a_budget_a_step_may_do_what_its_tokens_cost_at_the_start_of_a_prompt() -> None:
    work = WorkModel.of_shape(MODEL.shape)
    limits = StepLimits.of(work, step_budget=0.0, chunk_tokens=1024, min_chunk_tokens=256)
    assert (limits.tokens, limits.min_chunk, limits.budget) == (1024, 256, work.work(1024, 0))
    lengths = [len(chunk) for chunk in cut(work, limits, TokenRange(0, 4096))]
    assert lengths[0] == 1024
    assert min(lengths[:-1]) == 256, "far into the prompt the least chunk counts"
