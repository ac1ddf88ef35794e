"""Errors have one sentence and the right status, and the service continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids, wait_until
from tests.workers.models import random_tokens

LONG = 4000
"""Tokens of an answer that no test waits for."""


def text(prompt: str, **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=prompt, **fields)  # type: ignore[arg-type]


def sampling(**fields: object) -> inference_pb2.GenerateRequest:
    return text("hello", sampling_params=inference_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def chat(role: str, **fields: object) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role=role, content="hello")
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput(messages=[message]), **fields)  # type: ignore[arg-type]


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Status and sentence of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value  # also a grpc.Call, which its type does not say
    details = error.details() or ""
    assert details, "no sentence"
    assert "\n" not in details
    assert "Traceback" not in details
    assert 'File "' not in details
    code: grpc.StatusCode = error.code()
    return code, details


BAD_REQUESTS = {
    "no input": (inference_pb2.GenerateRequest(), "input: none given"),
    "empty text": (text(""), "input.text"),
    "no token": (ids([]), "input.tokenized"),
    "token outside the vocabulary": (ids([1, 300]), "input.tokenized[1]: token 300"),
    "no message": (inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput()), "input.chat.messages"),
    "unknown role": (chat("wizard"), "input.chat.messages[0].role: 'wizard'"),
    "chat appended": (chat("user", prompt_mode=inference_pb2.PROMPT_MODE_APPEND), "prompt_mode"),
    "unknown prompt mode": (text("hello", prompt_mode=7), "prompt_mode: 7"),
    "negative temperature": (sampling(temperature=-0.5), "sampling_params.temperature: -0.5"),
    "temperature is no number": (sampling(temperature=float("nan")), "sampling_params.temperature: nan"),
    "no token wanted": (sampling(max_tokens=0), "sampling_params.max_tokens: 0"),
    "too many tokens wanted": (sampling(max_tokens=9000), "sampling_params.max_tokens: 9000"),
    "stop token outside the vocabulary": (sampling(stop_token_ids=[300]), "sampling_params.stop_token_ids[0]"),
    "too many stop tokens": (sampling(stop_token_ids=range(257)), "sampling_params.stop_token_ids: 257"),
    "long conversation id": (text("hello", conversation_id="x" * 257), "conversation_id: 257"),
    "unprintable request id": (text("hello", request_id="a\nb"), "request_id: 'a\\nb'"),
    "longer than the model's positions": (ids([1] * 8190, max_tokens=6), "8190 prompt tokens and max_tokens 6"),
}


@pytest.mark.parametrize(("request_", "said"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_bad_field_is_refused_by_name(
    inference: Inference, request_: inference_pb2.GenerateRequest, said: str
) -> None:
    code, details = refusal(lambda: list(inference.stream(request_)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in details


def test_a_conversation_that_is_not_there_is_not_found(inference: Inference) -> None:
    append = ids([1, 2], conversation="nobody", mode=inference_pb2.PROMPT_MODE_APPEND)
    for call in (
        lambda: inference.conversation("nobody"),
        lambda: inference.delete("nobody"),
        lambda: list(inference.stream(append)),
    ):
        code, details = refusal(call)
        assert code is grpc.StatusCode.NOT_FOUND
        assert "conversation" in details
    code, details = refusal(lambda: inference.conversation(""))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("conversation_id")


def test_a_conversation_answers_one_turn_at_a_time_and_names_the_one_that_runs(inference: Inference) -> None:
    request = ids(random_tokens(20), max_tokens=LONG, conversation="busy", request_id="the-first")
    with inference.running(request):
        assert inference.conversation("busy").running_request_id == "the-first"
        for call in (
            lambda: list(inference.stream(ids([1], conversation="busy"))),
            lambda: inference.delete("busy"),
            lambda: list(inference.stream(ids([1], request_id="the-first"))),
        ):
            code, details = refusal(call)
            assert code is grpc.StatusCode.ABORTED
            assert "the-first" in details
    wait_until(inference.is_idle, "the cancelled turn is over")
    code, _ = refusal(lambda: inference.conversation("busy"))  # its only turn never finished
    assert code is grpc.StatusCode.NOT_FOUND


def test_abort_ends_a_running_stream_as_cancelled_and_reports_ids_it_does_not_know(inference: Inference) -> None:
    with inference.running(ids(random_tokens(20), max_tokens=LONG, request_id="to-abort")) as call:
        answer = inference.abort("to-abort", "never-heard-of")
        assert (list(answer.aborted), list(answer.unknown)) == (["to-abort"], ["never-heard-of"])
        code, details = refusal(lambda: list(call))
        assert code is grpc.StatusCode.CANCELLED
        assert "aborted" in details
    assert list(inference.abort("to-abort").unknown) == ["to-abort"]


def test_a_turn_aborted_while_it_prefills_ends_as_cancelled(inference: Inference) -> None:
    with inference.running(ids(random_tokens(6000), max_tokens=5, request_id="early"), tokens=0) as call:
        assert list(inference.abort("early").aborted) == ["early"]
        assert refusal(lambda: list(call))[0] is grpc.StatusCode.CANCELLED


def test_a_deadline_ends_the_turn_everywhere(inference: Inference, stock: StockModel) -> None:
    free = inference.free_blocks()
    for prompt in (20, 6000):  # while it decodes; while it prefills
        request = ids(random_tokens(prompt), max_tokens=2000)
        code, _ = refusal(lambda request=request: list(inference.stream(request, seconds=0.7)))  # type: ignore[misc]
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: inference.free_blocks() == free, "the KV of the late turn is free")
    prompt_ids = random_tokens(20)
    assert list(inference.answer(ids(prompt_ids)).output_ids) == stock.greedy(prompt_ids, 6).token_ids


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "hello", "--conversation", "nobody", "--mode", "append"], "there is no conversation"),
        (["--prompt", "hello", "--temperature", "-1"], "sampling_params.temperature: -1"),
        (["--prompt", "hello", "--max-tokens", "-1"], "--max-tokens: -1 is out of range; allowed are 1 to 4294967295"),
        (["--prompt-ids", "{directory}/none.json"], "cannot be read"),
        (["--prompt-ids", "{directory}/words.json"], "[0]: 'word' is no token id"),
        (["--messages", "{directory}/words.json"], "message 0: 'word' is not allowed; a message is"),
        (["--prompt", "hello", "--timeout", "0.001"], "deadline"),
    ],
)
def test_generate_exits_with_one_and_one_sentence(
    cluster: Cluster, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "words.json").write_text(json.dumps(["word"]))
    words = [argument.format(directory=tmp_path) for argument in arguments]
    finished = cluster.ringserve.run("generate", "--target", cluster.gateway, "--json", *words)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr.startswith("ringserve: ")
    assert said in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
