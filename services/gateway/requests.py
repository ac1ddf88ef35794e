"""Reads a GenerateRequest: every field is checked here, and an error names field, value and what is allowed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np

from cp_core.errors import InvalidRequest
from orchestration.protocol.turns import MAX_PRIORITY, PromptMode, TurnRequest
from ringserve.v1 import inference_pb2
from services.gateway.sampling_params import check_vocabulary, num_completions, read_sampling
from services.gateway.text import TextCodec
from services.rpc.wire.turns import prompt_mode_from
from workers.protocol.steps import Algorithm, ModelInfo, TokenIds

MAX_ID_LENGTH = 256
MAX_TTL_SECONDS = 1e9
MAX_MESSAGES = 4096
"""Of one chat: the chat template runs over all of them."""
MAX_ABORTS = 1024
"""Requests that one call may end: the router looks for each."""
ROLES = ("system", "user", "assistant", "tool")


class RequestReader:
    """Knows the model's vocabulary and tokenizer, and the longest a turn may take."""

    def __init__(self, model: ModelInfo, codec: TextCodec, max_seconds: float) -> None:
        self._model = model
        self._codec = codec
        self._max_seconds = max_seconds

    def read(self, request: inference_pb2.GenerateRequest, seconds_left: float | None) -> TurnRequest:
        """`seconds_left` is the client's own deadline. Raises InvalidRequest."""
        mode = prompt_mode_from(request.prompt_mode)
        if mode is None:
            raise InvalidRequest(f"prompt_mode: {request.prompt_mode} is not one of 0, 1, 2")
        if request.WhichOneof("input") == "chat":
            if mode is PromptMode.APPEND:
                raise InvalidRequest("prompt_mode: chat messages are the whole history; APPEND needs text or token ids")
            mode = PromptMode.WHOLE_HISTORY
        answers = num_completions(request.sampling_params)
        if request.conversation_id and answers > 1:
            raise InvalidRequest(
                f"sampling_params.n: {answers} answers cannot all continue one conversation; allowed with a "
                f"conversation_id is 1"
            )
        deadline = self._max_seconds if seconds_left is None else min(seconds_left, self._max_seconds)
        return TurnRequest(
            request_id=identifier("request_id", request.request_id) or f"req-{uuid.uuid4().hex[:16]}",
            conversation_id=identifier("conversation_id", request.conversation_id),
            prompt_mode=mode,
            token_ids=self._prompt(request),
            sampling=read_sampling(request.sampling_params, self._model),
            deadline_seconds=max(deadline, 0.001),
            conversation_ttl_seconds=_time_to_live(request),
            wait=request.wait,
            priority=_priority(request.priority),
            algorithm=_algorithm(request.algorithm),
        )

    def _prompt(self, request: inference_pb2.GenerateRequest) -> TokenIds:
        kind = request.WhichOneof("input")
        if kind == "text":
            ids = self._codec.encode(request.text)
        elif kind == "chat":
            ids = self._codec.encode_chat(_messages(request.chat))
        elif kind == "tokenized":
            ids = np.fromiter(request.tokenized.input_ids, dtype=np.int64)
        else:
            raise InvalidRequest("input: none given; send text, tokenized or chat")
        if not len(ids):
            raise InvalidRequest(f"input.{kind}: the prompt has 0 tokens, at least 1 is needed")
        # Also of a text: a tokenizer may know tokens that the model has no embedding for.
        check_vocabulary(
            "input.tokenized.input_ids" if kind == "tokenized" else f"input.{kind}", ids, self._model.vocab_size
        )
        return ids


def _time_to_live(request: inference_pb2.GenerateRequest) -> float | None:
    if not request.HasField("conversation_ttl_seconds"):
        return None
    seconds = request.conversation_ttl_seconds
    if not 0 <= seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(
            f"conversation_ttl_seconds: {seconds} is out of range; allowed are 0 (never) to {MAX_TTL_SECONDS:g}"
        )
    if not request.conversation_id:
        raise InvalidRequest(f"conversation_ttl_seconds: {seconds:g} is given without a conversation_id")
    return seconds


def identifier(field: str, value: str) -> str:
    """A name that a client chose. Raises InvalidRequest."""
    if len(value) > MAX_ID_LENGTH:
        raise InvalidRequest(f"{field}: {len(value)} characters are too many; at most {MAX_ID_LENGTH} are allowed")
    if not value.isprintable():
        raise InvalidRequest(f"{field}: {value!r} holds characters that cannot be printed")
    return value


def named(field: str, value: str) -> str:
    """As `identifier`, of something that has to be named. Raises InvalidRequest."""
    if not value:
        raise InvalidRequest(f"{field}: '' is not allowed; name a conversation")
    return identifier(field, value)


def requests_to_abort(names: Sequence[str]) -> list[str]:
    """Raises InvalidRequest."""
    if len(names) > MAX_ABORTS:
        raise InvalidRequest(f"request_ids: {len(names)} are too many; at most {MAX_ABORTS} are allowed")
    return [identifier(f"request_ids[{place}]", name) for place, name in enumerate(names)]


def _priority(value: int) -> int:
    if abs(value) > MAX_PRIORITY:
        raise InvalidRequest(f"priority: {value} is out of range; allowed are -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return value


def _algorithm(value: str) -> Algorithm | None:
    if not value:
        return None
    if value not in tuple(Algorithm):
        raise InvalidRequest(f"algorithm: {value!r} is unknown; allowed are {', '.join(Algorithm)}, or none to choose")
    return Algorithm(value)


def _messages(chat: inference_pb2.ChatInput) -> list[tuple[str, str]]:
    if not chat.messages:
        raise InvalidRequest("input.chat.messages: none given; at least 1 is needed")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"input.chat.messages: {len(chat.messages)} are too many; at most {MAX_MESSAGES} are allowed"
        )
    for place, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"input.chat.messages[{place}].role: {message.role!r} is not allowed; use one of {', '.join(ROLES)}"
            )
    return [(message.role, message.content) for message in chat.messages]
