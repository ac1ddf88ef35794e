"""Translation of OpenAI's JSON to a GenerateRequest.

Shapes and types are checked here; values where gRPC's are checked too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from ringserve.cp_core.errors import InvalidRequest, NotFound
from ringserve.services.gateway.openai.fields import (
    CACHE_KEYS,
    OURS,
    SAMPLING,
    boolean,
    integer,
    shown,
    text,
    token_ids,
    unknown_names,
)
from ringserve.services.gateway.openai.formats import FORMAT_FIELDS, put_constraint
from ringserve.services.gateway.openai.items import chat_of, links_of, renamed
from ringserve.services.gateway.openai.messages import Message, Template, has_calls, put_messages, read_messages
from ringserve.services.gateway.openai.stored import Links
from ringserve.services.gateway.openai.tools import TOOL_FIELDS, Offer, read_offer
from ringserve.v1 import inference_pb2

log = logging.getLogger(__name__)

DEFAULT_TEMPERATURE = 1.0
"""Default temperature of OpenAI. Over gRPC it is 0."""
COMPLETION_MAX_TOKENS = 16
"""Default `max_tokens` of a completion, OpenAI's. Those of chats and responses go on as far as there is room."""

COMMON = FORMAT_FIELDS | {"model", "stream", "stream_options"}
TEMPLATE_FIELDS = frozenset({"chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
CHAT = COMMON | TOOL_FIELDS | TEMPLATE_FIELDS | {"messages", "logprobs", "top_logprobs"}
COMPLETION = COMMON | {"prompt", "prompt_mode", "logprobs", "echo"}
TOKENIZE_FLAGS = frozenset({"add_special_tokens", "add_generation_prompt", "return_token_strs"})
TOKENIZE = TOKENIZE_FLAGS | TEMPLATE_FIELDS | {"model", "prompt", "messages", "tools"}
DETOKENIZE = frozenset({"model", "tokens"})
MAX_PROMPTS = 128
"""Prompts of one request for completions."""
MAX_NAMED = 20
"""Ignored fields that a log line names."""
PROMPT_MODES = {
    "auto": inference_pb2.PROMPT_MODE_UNSPECIFIED,
    "append": inference_pb2.PROMPT_MODE_APPEND,
    "whole_history": inference_pb2.PROMPT_MODE_WHOLE_HISTORY,
}


@dataclass(frozen=True, kw_only=True)
class HttpTurn:
    """Turn asked for over HTTP, or several that differ in their prompts, and the form of the answer."""

    requests: tuple[inference_pb2.GenerateRequest, ...]
    stream: bool
    include_usage: bool
    has_echo: bool = False
    template: Template | None = None
    offer: Offer | None = None
    links: Links | None = None

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """Request of the first prompt."""
        return self.requests[0]


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Text or chat whose tokens are asked for. `has_names` asks for the tokenizer's names of them."""

    request: inference_pb2.GenerateRequest
    adds_special: bool
    opens_answer: bool
    has_names: bool
    template: Template | None


class HttpRequestReader:
    """Reader of requests for one model."""

    def __init__(self, model_name: str, *, ignores_unknown: bool = False) -> None:
        self._model_name = model_name
        self._ignores_unknown = ignores_unknown

    def chat(self, body: Any) -> HttpTurn:
        """Read a request. Raises InvalidRequest, and NotFound for another model."""
        values = self._values(body, CHAT)
        turn, offer, messages = self._turn(values), read_offer(values), read_messages(values.get("messages"))
        put_messages(turn.request, messages)
        params = turn.request.sampling_params
        num_top = integer(32)("top_logprobs", values.get("top_logprobs", 0))
        if boolean("logprobs", values.get("logprobs", False)):
            params.logprobs = num_top
        elif num_top:
            raise InvalidRequest("top_logprobs: only allowed where logprobs is true")
        if offer is not None:
            params.skip_special_tokens = False  # some of them begin calls
        return replace(turn, template=_template(values, messages, offer), offer=offer)

    def response(self, body: Any) -> HttpTurn:
        """Read a request for a response as that of a chat. Raises InvalidRequest, and NotFound for another model."""
        try:
            chat = chat_of(body, keeps_unknown=self._ignores_unknown)
            links, turn = links_of(body), self.chat(chat)
        except InvalidRequest as error:
            raise renamed(error) from None
        if turn.offer is None:  # the model is shown no tools
            links = replace(links, tools="")
        if links.previous is None:
            return replace(turn, links=links)
        if turn.request.conversation_id:
            raise InvalidRequest("previous_response_id: not allowed with a conversation_id; leave one out")
        messages = read_messages(chat["messages"])[1 if links.instructions else 0 :]
        described = turn.offer.described if turn.offer else ()
        template = Template(messages=messages, tools=described, values=chat.get("chat_template_kwargs", {}))
        return replace(turn, links=links, template=template)

    def completion(self, body: Any) -> HttpTurn:
        """Read a request. Raises InvalidRequest, and NotFound for another model."""
        values = self._values(body, COMPLETION)
        prompts = _prompts(values.get("prompt"))
        turn = self._turn(values)
        mode = text("prompt_mode", values.get("prompt_mode", "auto"))
        if mode not in PROMPT_MODES:
            raise InvalidRequest(f"prompt_mode: {shown(mode)} is not allowed; use one of {', '.join(PROMPT_MODES)}")
        turn.request.prompt_mode = PROMPT_MODES[mode]
        if not turn.request.sampling_params.HasField("max_tokens"):
            turn.request.sampling_params.max_tokens = COMPLETION_MAX_TOKENS
        if "logprobs" in values:
            turn.request.sampling_params.logprobs = integer(32)("logprobs", values["logprobs"])
        turn = replace(turn, has_echo=boolean("echo", values.get("echo", False)))
        _check_prompts(turn, len(prompts))
        return replace(
            turn, requests=tuple(_with_prompt(turn.request, place, *each) for place, each in enumerate(prompts))
        )

    def tokenization(self, body: Any) -> Tokenization:
        """Read a request for tokens, in vLLM's shape. Raises InvalidRequest, and NotFound for another model."""
        values = self._plain_values(body, TOKENIZE)
        flags = {name: boolean(name, values[name]) for name in TOKENIZE_FLAGS if name in values}
        request = inference_pb2.GenerateRequest()
        is_chat = "messages" in values
        messages = read_messages(values["messages"]) if is_chat else []
        template = _template(values, messages, read_offer(values))
        if is_chat:
            put_messages(request, messages)
        else:
            request.text = text("prompt", values.get("prompt"))
        if is_chat and "prompt" in values:
            raise InvalidRequest("prompt: not allowed with messages; leave one out")
        if is_chat and flags.get("add_special_tokens"):
            raise InvalidRequest(
                "add_special_tokens: true is not allowed with messages; the chat template adds its own"
            )
        return Tokenization(
            request=request,
            adds_special=flags.get("add_special_tokens", True),
            opens_answer=flags.get("add_generation_prompt", True),
            has_names=flags.get("return_token_strs", False),
            template=template if is_chat else None,
        )

    def tokens(self, body: Any) -> list[int]:
        """Read a request for the text of tokens. Raises InvalidRequest, and NotFound for another model."""
        return token_ids("tokens", self._plain_values(body, DETOKENIZE).get("tokens"))

    def _values(self, body: Any, own: frozenset[str]) -> dict[str, Any]:
        """Return the fields of a turn that are not null."""
        values = _given(body)
        self._note_unknown(unknown_names(values, own))
        self.check_model(text("model", values.get("model", "")))
        return values

    def _plain_values(self, body: Any, own: frozenset[str]) -> dict[str, Any]:
        """Return the fields of a request that is no turn. It need not name the model."""
        values = _given(body)
        self._note_unknown([name for name in values if name not in own])
        if "model" in values:
            self.check_model(text("model", values["model"]))
        return values

    def _note_unknown(self, names: list[str]) -> None:
        """Log unknown fields, or refuse them. Raises InvalidRequest."""
        if names and not self._ignores_unknown:
            raise InvalidRequest(f"{names[0][:60]}: there is no such field")
        if names:
            log.info("ignored fields of a request: %s", ", ".join(shown(name) for name in names[:MAX_NAMED]))

    def check_model(self, name: str) -> None:
        """Check the name of the model. Raises InvalidRequest, NotFound."""
        if not name:
            raise InvalidRequest(f"model: none given; served is {self._model_name!r}")
        if name != self._model_name:
            raise NotFound(f"model: there is no model {shown(name)}; served is {self._model_name!r}")

    def _turn(self, values: dict[str, Any]) -> HttpTurn:
        request = inference_pb2.GenerateRequest(
            sampling_params=_sampling(values),
            cache_key=next(filter(None, [text(name, values.get(name, "")) for name in CACHE_KEYS]), ""),
            **{name: read(name, values[name]) for name, read in OURS.items() if name in values},
        )
        put_constraint(request.sampling_params, values)
        stream = boolean("stream", values.get("stream", False))
        options = values.get("stream_options", {})
        if not isinstance(options, dict):
            raise InvalidRequest(f"stream_options: {shown(options)} is not allowed; give an object")
        if options and not stream:
            raise InvalidRequest("stream_options: only allowed where stream is true")
        # include_obfuscation pads events against eavesdroppers who measure them; its absence changes no answer.
        known = {"include_usage", "include_obfuscation"}
        self._note_unknown([f"stream_options.{name}" for name in options if name not in known])
        usage = options.get("include_usage")
        include_usage = usage is not None and boolean("stream_options.include_usage", usage)
        return HttpTurn(requests=(request,), stream=stream, include_usage=include_usage)


def _given(body: Any) -> dict[str, Any]:
    """Return the fields that are not null."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def _template(values: dict[str, Any], messages: list[Message], offer: Offer | None) -> Template | None:
    """Return the input of the chat template, where it is more than messages of text. Raises InvalidRequest."""
    given = values.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise InvalidRequest(f"chat_template_kwargs: {shown(given)} is not allowed; give an object")
    continues = boolean("continue_final_message", values.get("continue_final_message", False))
    opens = boolean("add_generation_prompt", values.get("add_generation_prompt", not continues))
    if continues and opens:
        raise InvalidRequest("add_generation_prompt: true is not allowed with continue_final_message; leave one out")
    if continues and messages[-1:] and messages[-1]["role"] != "assistant":
        raise InvalidRequest("continue_final_message: only allowed where the last message is the assistant's")
    if opens and not (given or offer or has_calls(messages)):
        return None
    return Template(
        messages=messages,
        tools=offer.described if offer else (),
        values=given,
        opens_answer=opens,
        continues_last=continues,
    )


def _sampling(values: dict[str, Any]) -> inference_pb2.SamplingParams:
    given: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE}
    for name, (field, read) in SAMPLING.items():
        if name in values:
            given[field] = read(name, values[name])
    try:
        return inference_pb2.SamplingParams(**given)
    except ValueError as error:  # a number that only fits in more bits than the contract has for it
        raise InvalidRequest(f"sampling_params: {error}") from None


def _prompts(prompt: Any) -> list[tuple[str, Any]]:
    """Return the prompts of a completion by their names: a text or token ids, or a list of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt: {len(prompt)} prompts are too many; at most {MAX_PROMPTS} are allowed")
        named = [(f"prompt[{place}]" if len(prompt) > 1 else "prompt", each) for place, each in enumerate(prompt)]
    else:
        named = [("prompt", prompt)]
    for name, each in named:
        if not isinstance(each, str | list):
            raise InvalidRequest(f"{name}: {shown(each)} is not allowed; give a string or a list of token ids")
    return named


def _check_prompts(turn: HttpTurn, num_prompts: int) -> None:
    """Check what goes with several prompts, and with an echo. Raises InvalidRequest."""
    request = turn.request
    if num_prompts > 1 and request.conversation_id:
        raise InvalidRequest(f"prompt: {num_prompts} prompts cannot all continue one conversation; give one")
    if turn.has_echo and request.conversation_id:
        raise InvalidRequest("echo: true is not allowed with a conversation_id, whose history is not in the request")
    if turn.has_echo and request.sampling_params.HasField("logprobs"):
        if turn.stream:
            raise InvalidRequest("echo: true is not allowed with logprobs in a stream; leave one of the three out")
        request.sampling_params.prompt_logprobs = request.sampling_params.logprobs


def _with_prompt(
    request: inference_pb2.GenerateRequest, place: int, name: str, prompt: str | list[Any]
) -> inference_pb2.GenerateRequest:
    """Return a request for one of its prompts."""
    own = inference_pb2.GenerateRequest()
    own.CopyFrom(request)
    if place and own.request_id:
        own.request_id += f"#{place}"
    if isinstance(prompt, str):
        own.text = text(name, prompt)
    else:
        own.tokenized.input_ids.extend(token_ids(name, prompt))
        own.tokenized.SetInParent()
    return own
