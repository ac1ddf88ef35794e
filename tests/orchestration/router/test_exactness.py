"""Exactness: the tokens of every turn are those of stock transformers, whatever the rings and the algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.orchestration.protocol.plans import PromptMode
from tests.orchestration.conftest import KINDS
from tests.orchestration.service import BLOCK_TOKENS, Service
from tests.workers.models import WINDOWED, Oracle, random_tokens
from tests.workers.thread_ranks import RATES

RING_SIZES = (1, 2, 3)
LENGTHS = (1, 2, 5, 63, 64, 65, 257)
FEW_LENGTHS = (1, 5, 65)
"""Lengths for models after the first: what a ring makes of a length is the same for all."""
LONG = 2049
"""Tokens of a prompt that each pair of rings computes by one selector alone, the next pair by the next one."""
SELECTORS = (*PREFILL_ALGORITHMS, "auto")
LENGTHS_BY: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("pass_kv", "pass_q", "chain", "sp_ntp"), LENGTHS),
    "gather_kv": FEW_LENGTHS,
    "auto": FEW_LENGTHS,
}
FEW_LENGTHS_BY = {"pass_q": FEW_LENGTHS, "chain": (65,), "sp_ntp": (5,), "auto": (1,)}
"""Short prompts of models after the first: each length by one selector, and each other selector once."""
# Turn 2 begins after length + 5 tokens and turn 3 after 12 more: for most lengths not divisible by 2N.
FOLLOW_UPS = (7, 1)
MAX_TOKENS = 5

Script = list[tuple[list[int], list[int]]]
"""(new prompt tokens, the answer transformers gives) of each turn."""


@pytest.fixture(scope="module")
def script(oracles: Mapping[str, Oracle]):  # type: ignore[no-untyped-def]
    @cache
    def write(kind: str, length: int) -> Script:
        history: list[int] = []
        turns: Script = []
        for number, size in enumerate((length, *FOLLOW_UPS)):
            new = random_tokens(size, seed=100 * length + number)
            answer = oracles[kind].greedy([*history, *new], MAX_TOKENS)
            turns.append((new, answer))
            history += [*new, *answer]
        return turns

    return write


def _cases() -> Iterator[tuple[str, int, int, str]]:
    """Yield (model, sizes of both rings, selector of the long prompt).

    One model meets all pairs of sizes. Each other model meets every size of either ring, and together they meet every
    pair. Every size of the prefill ring meets most selectors.
    """
    first, *others = *KINDS, WINDOWED
    for number, (num_prefill, num_decode) in enumerate(itertools.product(RING_SIZES, RING_SIZES)):
        yield first, num_prefill, num_decode, SELECTORS[number % len(SELECTORS)]
    for shift, kind in enumerate(others):
        for number, num_prefill in enumerate(RING_SIZES):
            num_decode = RING_SIZES[(number + shift) % len(RING_SIZES)]
            yield kind, num_prefill, num_decode, SELECTORS[(number + 2 * shift) % len(SELECTORS)]


@pytest.mark.parametrize(("kind", "num_prefill", "num_decode", "long_by"), list(_cases()))
async def test_three_turns_give_the_tokens_of_transformers(  # type: ignore[no-untyped-def]
    kind: str, num_prefill: int, num_decode: int, long_by: str, model_paths: Mapping[str, Path], script
) -> None:
    # Before any ring starts: on a busy machine that takes longer than rings wait for each other.
    lengths_by = LENGTHS_BY if kind == KINDS[0] else FEW_LENGTHS_BY
    if num_prefill == 1:
        # On one rank nothing is selected: whatever the selector says, the same code computes the prompt.
        lengths_by = {name: lengths if name == "pass_q" else lengths[:1] for name, lengths in lengths_by.items()}
    turns = [(selector, length) for selector, lengths in lengths_by.items() for length in lengths]
    if kind == KINDS[0] and num_prefill > 1:
        # Each prefill ring computes each length by each selector for one decode ring; each pair meets each length.
        order = {name: place for place, name in enumerate([*lengths_by, *LENGTHS])}
        turns = [turn for turn in turns if sum(order[each] for each in turn) % len(RING_SIZES) + 1 == num_decode]
    turns.append((long_by, LONG))
    scripts = {length: script(kind, length) for _, length in turns}
    async with Service(model_paths[kind], num_prefill, num_decode) as service:
        before = service.free_blocks()
        for selector, length in turns:
            service.select(selector)
            await _converse(service, f"{selector}-{length}", scripts[length])
        service.check_integrity()
        for selector, length in turns:
            await service.router.delete_conversation(f"{selector}-{length}")
        assert service.free_blocks() == before


async def _converse(service: Service, name: str, script: Script) -> None:
    history = 0
    for number, (new, expected) in enumerate(script):
        mode = PromptMode.APPEND if history else PromptMode.WHOLE_HISTORY
        answer = await service.answer(service.request(new, conversation=name, mode=mode, max_tokens=MAX_TOKENS))
        assert answer.token_ids == expected, f"turn {number + 1} of {name}"
        plan = answer.begun.plan
        # All but the last sampled token, whose KV no ring has computed, comes from KV of earlier turns.
        assert plan.cached_tokens == max(0, history - 1), f"turn {number + 1} of {name}"
        selector = name.partition("-")[0]
        if selector != "auto" and plan.prefill_ranks > 1:
            assert plan.algorithm == selector
        history += len(new) + len(expected)
    for placement in (await service.router.get_conversation(name)).placements:
        held = [rank.num_tokens for rank in placement.ranks]
        # A chain gives tokens to fewer ranks where more would not pay, the emptiest ones.
        most = max(len(new) for new, _ in script) if selector in ("chain", "auto") else BLOCK_TOKENS
        assert max(held) - min(held) <= max(most, BLOCK_TOKENS), f"{placement.role} ring holds {held} tokens of {name}"


@pytest.mark.parametrize("temperature", [0.7, 1.5])
async def test_a_seed_gives_the_same_tokens_for_every_ring_size(
    temperature: float, model_paths: Mapping[str, Path]
) -> None:
    answers = []
    for num_prefill in RING_SIZES:
        for num_decode in RING_SIZES:
            async with Service(model_paths["llama_gqa"], num_prefill, num_decode) as service:
                request = service.request(random_tokens(65), max_tokens=24, temperature=temperature, seed=1234)
                answers.append((await service.answer(request)).token_ids)
    assert all(answer == answers[0] for answer in answers)
    assert len(set(answers[0])) > 4, "a hot model that repeats itself has not been sampled"


async def test_chunks_change_nothing(model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]) -> None:
    prompt = random_tokens(257)
    expected = oracles["llama_gqa"].greedy(prompt, MAX_TOKENS)
    for chunk_tokens in (1, 7, 64, 256, 257):
        async with Service(model_paths["llama_gqa"], 2, 3, chunk_tokens=chunk_tokens) as service:
            answer = await service.answer(service.request(prompt, max_tokens=MAX_TOKENS))
            assert answer.token_ids == expected, f"chunks of {chunk_tokens}"


async def test_an_edited_history_reuses_only_what_agrees(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        prompt = random_tokens(101)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids]
        for edited_at in (60, 3, 0):
            edited = [*history, 5, 6, 7]
            edited[edited_at] = (edited[edited_at] + 1) % 300
            answer = await service.answer(service.request(edited, conversation="c"))
            assert answer.begun.plan.cached_tokens == edited_at
            assert answer.token_ids == oracle.greedy(edited, MAX_TOKENS)
            history = [*edited, *answer.token_ids]
        again = await service.answer(service.request(history, conversation="c"))
        assert again.begun.plan.cached_tokens == len(history) - 1
        assert again.token_ids == oracle.greedy(history, MAX_TOKENS)
        service.check_integrity()


async def test_the_chunks_of_a_long_prompt_choose_their_own_algorithm(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    prompt, rates = random_tokens(800), replace(RATES, link_bytes_per_second=1e5)
    async with Service(model_paths["llama_gqa"], 2, 2, chunk_tokens=32, selector="auto", rates=rates) as service:
        answer = await service.answer(service.request(prompt, max_tokens=MAX_TOKENS))
        planned = answer.begun.plan.chunks
        # A chain sends nothing back, and no cached KV lies before a first chunk; for the last, nearly 800 cached tokens
        # make Q the smaller message.
        assert (planned[0].algorithm, planned[-1].algorithm) == ("chain", "pass_q")
        # Alone on its ring, the prompt is computed as it was planned; the further in, the shorter the chunks.
        assert answer.report.chunks == tuple(replace(chunk, num_turns=1) for chunk in planned)
        lengths = [len(chunk.tokens) for chunk in planned]
        assert (lengths[0], sum(lengths)) == (32, 800)
        assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
        assert answer.token_ids == oracles["llama_gqa"].greedy(prompt, MAX_TOKENS)
