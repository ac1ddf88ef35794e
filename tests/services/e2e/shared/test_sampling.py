"""Sampling parameters of clients, through the gateway and the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringserve.services.gateway.text import REPLACEMENT, TextCodec
from ringserve.services.gateway.turn_stream import derive_seed
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids

PROMPT = "Names are bound by assignment, and then they are looked up in the innermost scope."
LENGTH = 40


@pytest.fixture(scope="module")
def answer(stock: StockModel, codec: TextCodec) -> list[int]:
    """Return the greedy answer to PROMPT."""
    return stock.greedy(codec.encode(PROMPT).tolist(), LENGTH).token_ids


@pytest.fixture(scope="module")
def stop(codec: TextCodec, answer: list[int]) -> str:
    """Return two characters in the middle of the answer."""
    whole = codec.decode(answer)
    pairs = (whole[place : place + 2] for place in range(8, len(whole) - 8))
    return next(pair for pair in pairs if pair.isprintable() and REPLACEMENT not in pair and whole.find(pair) >= 8)


def text(prompt: str = PROMPT, conversation: str = "", **params: object) -> inference_pb2.GenerateRequest:
    params = {"max_tokens": LENGTH} | params
    return inference_pb2.GenerateRequest(
        text=prompt,
        conversation_id=conversation,
        sampling_params=inference_pb2.SamplingParams(**params),  # type: ignore[arg-type]
    )


def test_a_stop_string_ends_the_answer_and_the_conversation_goes_on_from_there(
    cluster: Cluster, inference: Inference, stock: StockModel, codec: TextCodec, answer: list[int], stop: str
) -> None:
    """The tokens that were decoded meanwhile are forgotten, by the rings too."""
    whole = codec.decode(answer)
    begin = whole.index(stop)
    num_tokens = next(n for n in range(1, LENGTH + 1) if stop in codec.decode(answer[:n]))
    free = inference.free_blocks()
    responses = list(inference.stream(text(conversation="stops", stop=["never", stop])))
    complete = responses[-1].complete
    assert complete.text == whole[:begin] == "".join(response.chunk.text for response in responses)
    assert list(complete.output_ids) == answer[:num_tokens]
    assert [token for response in responses for token in response.chunk.token_ids] == answer[:num_tokens]
    assert (complete.finish_reason, complete.matched_stop_str) == (inference_pb2.FINISH_REASON_STOP, stop)
    prompt = codec.encode(PROMPT).tolist()
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (len(prompt), num_tokens)
    history = [*prompt, *answer[:num_tokens]]
    assert inference.conversation("stops").num_tokens == len(history)
    follow = inference.answer(ids([5, 6, 7], conversation="stops", mode=inference_pb2.PROMPT_MODE_APPEND))
    assert list(follow.output_ids) == stock.greedy([*history, 5, 6, 7], 6).token_ids
    assert follow.usage.cached_tokens == len(history) - 1
    inference.delete("stops")
    assert inference.free_blocks() == free


def test_the_stop_string_may_be_shown_and_an_answer_without_one_is_whole(
    cluster: Cluster, inference: Inference, codec: TextCodec, answer: list[int], stop: str
) -> None:
    whole = codec.decode(answer)
    shown = inference.answer(text(stop=[stop], include_stop_str_in_output=True))
    assert shown.text == whole[: whole.index(stop) + 2]
    never = inference.answer(text(stop=["never"]))
    assert (never.text, never.finish_reason, list(never.output_ids)) == (
        whole,
        inference_pb2.FINISH_REASON_LENGTH,
        answer,
    )
    assert not never.HasField("matched_stop_str")


def test_several_answers_have_their_own_seeds_and_each_can_be_had_alone(cluster: Cluster, inference: Inference) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_tokens": 12, "logprobs": 1}
    responses = list(inference.stream(text(n=3, seed=11, **params)))
    assert [response.WhichOneof("response") for response in responses].count("start") == 1
    assert responses[0].HasField("start")
    answers = {response.complete.index: response.complete for response in responses if response.HasField("complete")}
    assert sorted(answers) == [0, 1, 2]
    assert len({tuple(each.output_ids) for each in answers.values()}) == 3
    for index, each in answers.items():
        chunks = [response.chunk for response in responses if response.HasField("chunk")]
        assert [token for chunk in chunks if chunk.index == index for token in chunk.token_ids] == list(each.output_ids)
        assert each.seed == derive_seed(11, index)
        assert each.usage.completion_tokens == len(each.output_logprobs) == 12
        alone = inference.answer(text(seed=each.seed, **params))
        assert list(alone.output_ids) == list(each.output_ids)
        assert [item.logprob for item in alone.output_logprobs] == pytest.approx(
            [item.logprob for item in each.output_logprobs], abs=1e-4
        )


def test_the_command_line_takes_the_common_options(
    cluster: Cluster, inference: Inference, codec: TextCodec, answer: list[int], stop: str
) -> None:
    finished = cluster.ringserve.run(
        *("generate", "--target", cluster.gateway, "--json", "--prompt", PROMPT, "--max-tokens", str(LENGTH)),
        *("--stop", stop, "--logprobs", "2", "--prompt-logprobs", "0"),
    )
    assert finished.returncode == 0, finished.stderr
    printed = json.loads(finished.stdout)
    assert printed["matched_stop"] == stop
    assert printed["text"] == codec.decode(answer)[: codec.decode(answer).index(stop)]
    assert [each["token_id"] for each in printed["output_logprobs"]] == printed["token_ids"]
    assert all(each["rank"] == 1 and each["top"][0][0] == each["token_id"] for each in printed["output_logprobs"])
    assert [each["token_id"] for each in printed["prompt_logprobs"]] == codec.encode(PROMPT).tolist()[1:]
    finished = cluster.ringserve.run(
        *("generate", "--target", cluster.gateway, "--json", "--prompt", PROMPT, "--max-tokens", "4", "--n", "2"),
        *(
            "--temperature",
            "1",
            "--seed",
            "3",
            "--min-p",
            "0.01",
            "--repetition-penalty",
            "1.2",
            "--logit-bias",
            "65=-5",
        ),
    )
    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)["answers"]
    assert [(each["index"], len(each["token_ids"])) for each in answers] == [(0, 4), (1, 4)]
    refused = cluster.ringserve.run("generate", "--target", cluster.gateway, "--prompt", "x", "--logit-bias", "a=b")
    assert (refused.returncode != 0, "--logit-bias: 'a=b' is not ID=X" in refused.stderr) == (True, True)
