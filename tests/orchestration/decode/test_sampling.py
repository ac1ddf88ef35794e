"""Tokens of every sampling are those of transformers, and the same for every ring size and batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ringserve.cp_core.cost.decode import GATHER, HELIX, STEP_VARIANTS, VARIANTS
from ringserve.cp_core.cost.model import PASS_Q
from ringserve.cp_core.errors import DeadlineExceeded, InvalidRequest, RingserveError, TurnCancelled
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.rings import RingState
from ringserve.orchestration.protocol.turns import EndingEvent, FinishedEvent, TokensEvent
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias, TokenLogprobs
from tests.orchestration.service import Service
from tests.waiting import WAIT_SECONDS, eventually, pass_time
from tests.workers.models import VOCAB_SIZE, Oracle, random_tokens

RING_SIZES = [(1, 1), (1, 3), (3, 2)]
LENGTHS = (1, 2, 65)
MAX_TOKENS = 12
STOPS = tuple(range(0, VOCAB_SIZE, 2))
BIASES = tuple(TokenBias(token, 3.0 if token % 3 else -7.5) for token in range(0, VOCAB_SIZE, 5))


class OpenAiPenalties(LogitsProcessor):  # type: ignore[misc]
    """Penalties as OpenAI defines them, over the tokens after the prompt; transformers lacks them."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[-1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


FEATURES: dict[str, SamplingParameters] = {
    "plain": SamplingParameters(),
    "logit_bias": SamplingParameters(logit_bias=BIASES),
    "repetition_penalty": SamplingParameters(repetition_penalty=1.8),
    "presence_and_frequency": SamplingParameters(presence_penalty=1.5, frequency_penalty=0.8),
    "min_tokens": SamplingParameters(min_tokens=7, stop_token_ids=STOPS),
    "everything": SamplingParameters(
        logit_bias=BIASES,
        repetition_penalty=0.7,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        min_tokens=5,
        stop_token_ids=STOPS,
    ),
}


@cache
def expected(oracle: Oracle, prompt: tuple[int, ...], sampling: SamplingParameters) -> list[int]:
    """Return greedy tokens of transformers' generate with the processors of this sampling: many rings answer alike."""
    processors: list[LogitsProcessor] = []
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[item.token_id], item.bias] for item in sampling.logit_bias]))
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(OpenAiPenalties(len(prompt), sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.min_tokens:
        processors.append(
            MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_tokens, list(sampling.stop_token_ids))
        )
    tokens = oracle.generate(prompt, MAX_TOKENS, processors)
    stop = next((place for place, token in enumerate(tokens) if token in sampling.stop_token_ids), len(tokens))
    return tokens[: stop + 1]


@pytest.mark.parametrize(("num_prefill", "num_decode"), RING_SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
async def test_greedy_tokens_are_those_of_transformers_with_every_processor(
    variant: str, num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """All turns share one batch, so that rows with and without a feature are side by side."""
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], num_prefill, num_decode, decode_variant=variant) as service:
        wanted, answers = [], []
        for length in LENGTHS:
            prompt = random_tokens(length, seed=length)
            for sampling in FEATURES.values():
                sampling = replace(sampling, max_tokens=MAX_TOKENS)
                answers.append(service.answer(service.request(prompt, sampling=sampling)))
                wanted.append(expected(oracle, tuple(prompt), sampling))
        found = [answer.token_ids for answer in await asyncio.gather(*answers)]
        assert found == wanted
        assert len({tuple(tokens) for tokens in found}) > len(LENGTHS) * 3, "features change what is said"


async def test_penalties_of_a_later_turn_look_at_the_whole_prompt(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Most of the prompt is cached and not computed again; its tokens still count."""
    sampling = replace(FEATURES["everything"], max_tokens=MAX_TOKENS, min_tokens=0, stop_token_ids=())
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        history: list[int] = []
        for number in range(3):
            new = random_tokens(21 + number, seed=number)
            history += new
            request = service.request(new, conversation="c", mode=PromptMode.APPEND if number else PromptMode.AUTO)
            answer = await service.answer(replace(request, sampling=sampling))
            assert answer.token_ids == expected(oracles["llama_gqa"], tuple(history), sampling)
            assert (answer.begun.plan.cached_tokens > 0) == (number > 0)
            history += answer.token_ids


async def test_draws_are_the_same_for_every_ring_size_variant_and_batch(model_paths: Mapping[str, Path]) -> None:
    samplings = [
        SamplingParameters(temperature=1.2, seed=number, max_tokens=16, **features)  # type: ignore[arg-type]
        for number, features in enumerate(
            [
                {},
                {"top_k": 20},
                {"top_p": 0.8},
                {"min_p": 0.05},
                {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "logprobs": 2},
                {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": BIASES, "logprobs": 0},
            ]
        )
    ]
    seen: list[list[list[int]]] = []
    for num_prefill, num_decode, variant in [(1, 1, GATHER), (2, 3, PASS_Q), (3, 2, HELIX), (1, 2, PASS_Q)]:
        async with Service(model_paths["llama_gqa"], num_prefill, num_decode, decode_variant=variant) as service:
            requests = [service.request(random_tokens(33), sampling=sampling) for sampling in samplings]
            together = [answer.token_ids for answer in await asyncio.gather(*map(service.answer, requests))]
            alone = [
                (await service.answer(service.request(random_tokens(33), sampling=sampling))).token_ids
                for sampling in samplings
            ]
            assert together == alone
            seen.append(together)
    assert all(each == seen[0] for each in seen)
    assert min(len(set(tokens)) for tokens in seen[0]) > 4


# --- log-probabilities -----------------------------------------------------------------------------------------------


def check_logprobs(found: Sequence[TokenLogprobs], logits: Tensor, tokens: Sequence[int], num_top: int) -> None:
    """Compare log probabilities of `tokens` with logits[T, V] of the positions before each."""
    wanted = torch.log_softmax(logits.double(), -1)
    assert [each.token_id for each in found] == list(tokens)
    for each, row in zip(found, wanted, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert each.rank == 1 + int((row > row[each.token_id]).sum())
        top = row.topk(num_top)
        assert list(each.top_ids) == top.indices.tolist()
        np.testing.assert_allclose(each.top_logprobs, top.values, atol=1e-4)


@pytest.mark.parametrize(("num_prefill", "num_decode"), RING_SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
async def test_log_probabilities_are_those_of_the_models_logits(
    variant: str, num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Rows without log probabilities, or with another number, share the batch; chunks are short, ranks may own none."""
    oracle = oracles["llama_gqa"]
    async with Service(
        model_paths["llama_gqa"], num_prefill, num_decode, decode_variant=variant, chunk_tokens=7
    ) as service:
        cases = [(length, num_top) for length in (1, 2, 30) for num_top in (None, 0, 3)]
        requests = [
            service.request(
                random_tokens(length),
                sampling=SamplingParameters(
                    max_tokens=6, temperature=1.0, seed=length, top_k=5, logprobs=num_top, prompt_logprobs=num_top
                ),
            )
            for length, num_top in cases
        ]
        answers = await asyncio.gather(*map(service.answer, requests))
    for (length, num_top), answer in zip(cases, answers, strict=True):
        prompt = random_tokens(length)
        if num_top is None:
            assert (answer.logprobs, answer.prompt_logprobs) == ([], ())
            continue
        logits = oracle.logits([*prompt, *answer.token_ids])
        check_logprobs(answer.logprobs, logits[length - 1 : -1], answer.token_ids, num_top)
        check_logprobs(answer.prompt_logprobs, logits[: length - 1], prompt[1:], num_top)


async def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_whole(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Cached tokens have no logits any more."""
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        prompt = random_tokens(40)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids, 7, 8]
        sampling = SamplingParameters(max_tokens=3, prompt_logprobs=1)
        request = service.request([7, 8], conversation="c", mode=PromptMode.APPEND, sampling=sampling)
        answer = await service.answer(request)
        assert answer.begun.plan.cached_tokens == 0
        check_logprobs(answer.prompt_logprobs, oracles["llama_gqa"].logits(history)[:-1], history[1:], 1)
        history += answer.token_ids
        third = await service.answer(service.request(history, conversation="c"))
        assert third.begun.plan.cached_tokens == len(history) - 1, "and retained as ever"
        assert third.token_ids == oracles["llama_gqa"].greedy(history, 5)
        service.check_integrity()


async def test_more_prompt_log_probabilities_than_a_message_holds_are_refused(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.orchestration.router.admission.MAX_PROMPT_LOGPROBS", 100)
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        await service.answer(service.request(random_tokens(25), sampling=SamplingParameters(prompt_logprobs=3)))
        with pytest.raises(InvalidRequest, match=r"prompt_logprobs: 3 for a prompt of 26 tokens make 104 .* 100"):
            await service.answer(service.request(random_tokens(26), sampling=SamplingParameters(prompt_logprobs=3)))


# --- turns that the reader ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 3), (3, 2)])
async def test_a_finished_turn_keeps_the_tokens_up_to_its_end_and_no_more(
    num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], num_prefill, num_decode) as service:
        free = service.free_blocks()
        for length, finish_after in [(1, 1), (30, 1), (30, 2), (41, 9), (41, 12)]:
            prompt, name, whole = random_tokens(length), f"{length}-{finish_after}", finish_after == 12
            # The ring is ahead of a slow reader, and must not come to the limit first.
            sampling = SamplingParameters(max_tokens=12 if whole else 60, ends_by_text=True)
            answer = await service.answer(
                service.request(prompt, conversation=name, sampling=sampling), finish_after=finish_after
            )
            assert answer.token_ids == oracle.greedy(prompt, finish_after)
            assert answer.finished.finish_reason is (FinishReason.LENGTH if whole else FinishReason.STOP)
            view = await service.router.get_conversation(name)
            assert view.num_tokens == length + finish_after
            on_decode = next(place for place in view.placements if place.role == "decode")
            assert on_decode.num_tokens == length + finish_after - 1
            service.check_integrity()
            history = [*prompt, *answer.token_ids, 3, 4]
            again = await service.answer(service.request([3, 4], conversation=name, mode=PromptMode.APPEND))
            assert again.begun.plan.cached_tokens == length + finish_after - 1
            assert again.token_ids == oracle.greedy(history, 5), "the KV is that of the tokens that count"
            await service.router.delete_conversation(name)
        assert service.free_blocks() == free


async def test_a_turn_that_ended_by_itself_waits_for_its_reader(model_paths: Mapping[str, Path]) -> None:
    """The turn decoded to its last token; the reader found a stop string long before."""
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        request = service.request(
            random_tokens(20), conversation="c", sampling=SamplingParameters(max_tokens=8, ends_by_text=True)
        )
        begun = await service.router.begin_turn(request)
        decode, tokens = service.peers.decode(begun.decode_endpoint), 0
        async for event in decode.stream_turn(begun.turn_id):
            match event:
                case EndingEvent():
                    assert (tokens, event.finish_reason) == (8, FinishReason.LENGTH)
                    await decode.finish_turn(begun.turn_id, 3)
                    await decode.finish_turn(begun.turn_id, 5)  # too late: the first call counts
                case TokensEvent():
                    tokens += len(event.token_ids)
                case FinishedEvent():
                    assert event.finish_reason is FinishReason.STOP
        assert (await service.router.get_conversation("c")).num_tokens == 23
        await decode.finish_turn(begun.turn_id, 3)  # over: harmless
        service.check_integrity()


async def test_only_tokens_that_exist_can_make_an_answer(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        free = service.free_blocks()
        request = service.request(random_tokens(9), sampling=SamplingParameters(max_tokens=4, ends_by_text=True))
        begun = await service.router.begin_turn(request)
        decode = service.peers.decode(begun.decode_endpoint)
        async for event in decode.stream_turn(begun.turn_id):
            if isinstance(event, EndingEvent):
                for wrong in (0, 5):
                    with pytest.raises(InvalidRequest, match=f"num_tokens: {wrong} is out of range; .* has 4 tokens"):
                        await decode.finish_turn(begun.turn_id, wrong)
                await decode.finish_turn(begun.turn_id, 4)
        assert service.free_blocks() == free


async def test_a_reader_that_leaves_before_it_says_where_the_answer_ends_aborts_the_turn(
    model_paths: Mapping[str, Path],
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        free = service.free_blocks()
        request = service.request(random_tokens(20), sampling=SamplingParameters(max_tokens=4, ends_by_text=True))
        begun = await service.router.begin_turn(request)
        decode = service.peers.decode(begun.decode_endpoint)
        async with aclosing(decode.stream_turn(begun.turn_id)) as events:
            async for event in events:
                if isinstance(event, EndingEvent):
                    break
        async with asyncio.timeout(WAIT_SECONDS):
            await decode.abort_turn(begun.turn_id, TurnCancelled("gone"))
        assert service.router.num_running == 0
        assert service.free_blocks() == free


async def test_turns_finished_anywhere_disturb_no_other(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    """Turns are finished while they wait for a place in the batch, with the first token, and beside cancelled turns."""
    prompt = random_tokens(33)
    expected = oracles["llama_gqa"].greedy(prompt, 14)
    async with Service(model_paths["llama_gqa"], 2, 3, max_batch=2) as service:
        free = service.free_blocks()

        async def one(number: int) -> None:
            sampling = SamplingParameters(max_tokens=14, ends_by_text=number % 4 != 3)
            finish_after = 1 + number % 5 if sampling.ends_by_text else None
            turn = asyncio.create_task(
                service.answer(service.request(prompt, sampling=sampling), finish_after=finish_after)
            )
            if number % 7 == 6:
                await asyncio.wait([turn], timeout=0.002 * number)
                turn.cancel()
                await asyncio.gather(turn, return_exceptions=True)
                return
            answer = await turn
            assert answer.token_ids == expected[: finish_after or 14]

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(one(number))
        await eventually(lambda: service.free_blocks() == free and not service.router.num_running)
        service.check_integrity()


async def test_a_reader_that_never_says_where_the_answer_ends_is_not_waited_for_beyond_the_deadline(
    model_paths: Mapping[str, Path],
) -> None:
    async with Service(model_paths["llama_gqa"], 1, 2) as service:
        free = service.free_blocks()
        request = service.request(
            random_tokens(9), sampling=SamplingParameters(max_tokens=3, ends_by_text=True), deadline=100.0
        )
        begun = await service.router.begin_turn(request)
        async with aclosing(service.peers.decode(begun.decode_endpoint).stream_turn(begun.turn_id)) as events:
            while not isinstance(await anext(events), EndingEvent):
                pass
            pass_time(100.0)
            with pytest.raises(DeadlineExceeded, match=r"within its deadline of 100\.0 s"):
                await anext(events)
        assert service.free_blocks() == free


async def test_tensor_parallel_rings_draw_and_score_the_same(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle, prompt = oracles["llama_gqa"], random_tokens(19)
    greedy = replace(FEATURES["everything"], max_tokens=MAX_TOKENS, logprobs=2, prompt_logprobs=2)
    for variant in STEP_VARIANTS:
        async with Service(
            model_paths["llama_gqa"], 2, 2, prefill_tp=2, decode_tp=2, decode_variant=variant
        ) as service:
            answer = await service.answer(service.request(prompt, sampling=greedy))
        assert answer.token_ids == expected(oracle, tuple(prompt), greedy)
        logits = oracle.logits([*prompt, *answer.token_ids])
        check_logprobs(answer.logprobs, logits[len(prompt) - 1 : -1], answer.token_ids, 2)
        check_logprobs(answer.prompt_logprobs, logits[: len(prompt) - 1], prompt[1:], 2)


async def test_a_ring_that_breaks_under_a_finished_turn_leaves_nothing_behind(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn ends either way; the ring is rebuilt and serves the next turn."""
    monkeypatch.setattr("ringserve.orchestration.router.registry.FAILOVER_SECONDS", 0.05)  # no gateway tells of the end
    async with Service(model_paths["llama_gqa"], 1, 2) as service:
        request = service.request(random_tokens(20), sampling=SamplingParameters(max_tokens=2000, ends_by_text=True))
        begun = await service.router.begin_turn(request)
        decode = service.peers.decode(begun.decode_endpoint)
        is_broken = False
        with contextlib.suppress(RingserveError):
            async for event in decode.stream_turn(begun.turn_id):
                if isinstance(event, TokensEvent) and not is_broken:
                    is_broken = True
                    await service.decode_ranks.made[1].kill()
                    await decode.finish_turn(begun.turn_id, 1)
        ring = service.decode.ring
        await eventually(
            lambda: ring.rebuilds == 1 and ring.state is RingState.READY and not service.router.num_running
        )
        assert service.decode.ring.pool.usage()[0].active_blocks == 0
        answer = await service.answer(service.request(random_tokens(20), max_tokens=3))
        assert len(answer.token_ids) == 3
        service.check_integrity()
