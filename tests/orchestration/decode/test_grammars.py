"""Answers keep to their grammar on rings of every size and variant, and whatever happens to them on the way."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from llguidance import grammar_from
from torch import Tensor
from transformers import LogitsProcessor

from ringserve.cp_core.cost.decode import GATHER, HELIX, VARIANTS
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.turns import LostTurn, TokensEvent
from ringserve.workers.model.builtin import END_TOKEN_ID, EOS_TOKEN_ID
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs, TokenSequence
from tests.orchestration.decode.test_sampling import OpenAiPenalties
from tests.orchestration.service import Service, is_idle
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.models import Oracle, add_text, random_tokens

ENDS = (EOS_TOKEN_ID, END_TOKEN_ID)
WORDS = tuple(f"{first}{second}{third}" for first in ("ab", "bba") for second in "xyzé" for third in ("", "end", "!!"))
GRAMMAR = grammar_from("choice", json.dumps(WORDS))
SAMPLING = SamplingParameters(max_tokens=12, stop_token_ids=ENDS, grammar=GRAMMAR)


class OneOf(LogitsProcessor):  # type: ignore[misc]
    """Mask of the tokens that go on with one of WORDS, found without any grammar."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = bytes(input_ids[0, self._num_prompt :].tolist())
        following = {word.encode()[len(said)] for word in WORDS if word.encode()[: len(said)] == said != word.encode()}
        masked = scores.new_full(scores.shape, -float("inf"))
        allowed = [*following, *(ENDS if said.decode(errors="ignore") in WORDS else ())]
        masked[:, allowed] = scores[:, allowed]
        return masked


@pytest.fixture(scope="module")
def path(model_paths: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(model_paths["llama_gqa"], target)
    return add_text(target)


def expected(oracle: Oracle, prompt: Sequence[int], presence: float = 0.0) -> list[int]:
    """Return the greedy answer of transformers under the mask, one token longer each time, up to its end."""
    tokens: list[int] = []
    while not tokens or tokens[-1] not in ENDS:
        processors = [OpenAiPenalties(len(prompt), presence, 0.0), OneOf(len(prompt))]
        tokens = oracle.generate(prompt, len(tokens) + 1, processors)
    return tokens


@pytest.mark.parametrize(("num_prefill", "num_decode", "variant"), [(1, 1, GATHER), *((3, 2, v) for v in VARIANTS)])
async def test_greedy_answers_are_those_of_transformers_under_the_mask(
    num_prefill: int, num_decode: int, variant: str, path: Path, oracles: Mapping[str, Oracle]
) -> None:
    """Rows with and without a grammar, with penalties and without, share the batch."""
    oracle = oracles["llama_gqa"]
    prompts = [random_tokens(length, seed=length) for length in (1, 3, 30)]
    async with Service(path, num_prefill, num_decode, decode_variant=variant) as service:
        samplings = [SAMPLING, replace(SAMPLING, presence_penalty=2.0, logprobs=1), SamplingParameters(max_tokens=9)]
        answers = [service.answer(service.request(each, sampling=how)) for each in prompts for how in samplings]
        found = await asyncio.gather(*answers)
    for place, prompt in enumerate(prompts):
        held, penalised, plain = found[3 * place : 3 * place + 3]
        assert held.token_ids == expected(oracle, prompt)
        assert penalised.token_ids == expected(oracle, prompt, 2.0)
        assert plain.token_ids == oracle.greedy(prompt, 9)
        assert held.finished.finish_reason is FinishReason.STOP
        assert all(isinstance(each, TokenLogprobs) for each in penalised.logprobs)


async def test_drawn_answers_are_words_and_the_same_for_every_ring(path: Path) -> None:
    samplings = [replace(SAMPLING, temperature=3.0, seed=seed, top_k=seed % 3 * 20) for seed in range(8)]
    seen: list[list[list[int]]] = []
    for num_prefill, num_decode, variant in [(1, 1, GATHER), (2, 3, PASS_Q), (3, 2, HELIX)]:
        async with Service(path, num_prefill, num_decode, decode_variant=variant) as service:
            requests = [service.request(random_tokens(33), sampling=sampling) for sampling in samplings]
            seen.append([answer.token_ids for answer in await asyncio.gather(*map(service.answer, requests))])
    assert all(each == seen[0] for each in seen)
    words = [bytes(tokens[:-1]).decode() for tokens in seen[0]]
    assert set(words) <= set(WORDS)
    assert len(set(words)) > 3


async def test_an_answer_goes_on_in_its_grammar_after_a_preemption(path: Path) -> None:
    """Two long answers do not fit: one is preempted in the middle, prefilled again, and ends as if it had stayed."""
    grammar = grammar_from("regex", "([a-f]{3}[0-9]{2}){9}")
    sampling = SamplingParameters(temperature=1.0, max_tokens=60, stop_token_ids=ENDS, grammar=grammar)
    samplings = [replace(sampling, seed=seed) for seed in range(4)]

    async def run(service: Service) -> list[list[int]]:
        requests = [service.request(random_tokens(20, seed=each.seed), sampling=each) for each in samplings]
        return [answer.token_ids for answer in await asyncio.gather(*map(service.answer, requests))]

    async with Service(path, 2, 2, num_blocks=128, decode_blocks=20, headroom_tokens=8) as service:
        free = service.free_blocks()
        found = await run(service)
        assert service.decode.num_preemptions > 0
        await is_idle(service, free)
    async with Service(path, 2, 2) as service:
        assert found == await run(service)
    assert {len(tokens) for tokens in found} == {46}


async def test_a_resumed_turn_goes_on_after_the_tokens_that_its_client_has(path: Path) -> None:
    prompt = random_tokens(30)
    async with Service(path, 2, 2) as service:
        request = service.request(prompt, sampling=replace(SAMPLING, temperature=1.0, seed=3))
        whole = (await service.answer(request)).token_ids
        for count in (1, 3):
            lost = LostTurn(token_ids=tuple(whole[:count]), prompt_tokens=len(prompt))
            resumed = replace(request, request_id=f"resumed-{count}", resume=lost)
            begun = await service.router.begin_turn(resumed)
            async with aclosing(service.peers.decode(begun.decode_endpoint).stream_turn(begun.turn_id, count)) as read:
                rest = [event.token_ids async for event in read if isinstance(event, TokensEvent)]
            assert [token for tokens in rest for token in tokens] == whole[count:]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_turn_waits_alone_while_its_ring_reads_the_tokenizer(
    role: str, path: Path, oracles: Mapping[str, Oracle]
) -> None:
    prompt, oracle, may_read = random_tokens(30), oracles["llama_gqa"], threading.Event()

    def held_up(read: Callable[[], str]) -> str:
        assert may_read.wait(WAIT_SECONDS), "the test lets it read"
        return read()

    async with Service(path, 1, 2) as service:
        for rank in (service.prefill_ranks if role == "prefill" else service.decode_ranks).made:
            grammars = rank.worker.parts.model.grammars
            grammars._read_tokenizer = partial(held_up, grammars._read_tokenizer)
        structured = asyncio.create_task(service.answer(service.request(prompt, sampling=SAMPLING)))
        await eventually(lambda: bool(service.decode.num_turns))
        plain = await service.answer(service.request(prompt, max_tokens=9))
        assert plain.token_ids == oracle.greedy(prompt, 9)
        assert not structured.done()
        may_read.set()
        assert (await structured).token_ids == expected(oracle, prompt)


async def test_masks_that_leave_no_token_fail_their_turn_alone(path: Path) -> None:
    async with Service(path, 1, 2) as service:
        banned = TokenSequence((98,)), TokenSequence((97, 97))
        sampling = SamplingParameters(max_tokens=5, allowed_ids=(97, 98), banned=banned)
        with pytest.raises(InvalidRequest, match="allowed_token_ids: no token can follow the 1 tokens of the answer"):
            await service.answer(service.request(random_tokens(9), sampling=sampling))
        assert len((await service.answer(service.request(random_tokens(9), max_tokens=3))).token_ids) == 3


async def test_a_grammar_that_becomes_too_complex_fails_its_turn_alone(path: Path) -> None:
    """The gateway cannot foresee it: the first masks of the grammar are small."""
    schema = {"type": "object", "properties": {f"field{number}": {"type": "integer"} for number in range(1500)}}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    async with Service(path, 1, 2) as service:
        sampling = replace(SAMPLING, grammar=grammar, max_tokens=40)
        broken, held = await asyncio.gather(
            service.answer(service.request(random_tokens(9), sampling=sampling)),
            service.answer(service.request(random_tokens(9), sampling=SAMPLING)),
            return_exceptions=True,
        )
    assert isinstance(broken, InvalidRequest)
    assert "the grammar has become too complex" in str(broken)
    assert not isinstance(held, BaseException)
    assert bytes(held.token_ids[:-1]).decode() in WORDS
