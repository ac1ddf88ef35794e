"""Translation of HTTP request models to a GenerateRequest.

The HTTP application calls it. The models check shapes and types; `gateway.requests` checks the values, in the same code
as for gRPC requests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ringserve.cp_core.errors import InvalidRequest, NotFound
from ringserve.services.gateway.openai import models
from ringserve.services.gateway.openai.models import quote
from ringserve.services.gateway.openai.stored import Links, ResponseName, digest
from ringserve.services.gateway.openai.tools import Offer, close_schema, read_offer
from ringserve.services.gateway.requests import RequestReader
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.steps import TokenIds

log = logging.getLogger(__name__)

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default temperature. The gRPC default is 0."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default `max_tokens` for a completion. Chats and responses default to the room that is left."""
SAMPLING = {*models.SamplingFields.model_fields, "n", "max_tokens"}
"""Fields that have the same name in the contract's SamplingParams."""
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
PROMPT_MODES = {
    "auto": inference_pb2.PROMPT_MODE_UNSPECIFIED,
    "append": inference_pb2.PROMPT_MODE_APPEND,
    "whole_history": inference_pb2.PROMPT_MODE_WHOLE_HISTORY,
}
ROLES = {"developer": "system"}
"""Roles for which chat templates use another name."""

CHANGING = ("audio", "function_call", "images")
"""Fields of messages that are refused and never ignored: without them the message says something else."""
MAX_IGNORED = 1000
"""Names of ignored fields that are remembered, to log each once."""

TemplateMessage = dict[str, Any]
"""Chat message as templates take it, made from `models.Message`."""
Asked = TypeVar("Asked", bound=models.Fields)


@dataclass(frozen=True, kw_only=True)
class Template:
    """Chat template input that the gRPC contract has no fields for: calls, tools, or the client's own variables.

    `opens_answer` adds the tokens that begin an answer. `continues_last` lets the answer continue the last message.
    """

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, Any]]
    values: Mapping[str, Any]
    opens_answer: bool = True
    continues_last: bool = False

    def tokens(self, reader: RequestReader) -> TokenIds:
        """Return the prompt tokens. Raises InvalidRequest."""
        return reader.tokenize_template(
            self.messages,
            self.tools,
            self._num_characters,
            opens_answer=self.opens_answer,
            continues_last=self.continues_last,
            values=self.values,
        )

    def following_tokens(self, reader: RequestReader, last_token: int) -> TokenIds:
        """Return the tokens of messages that follow an answer ending in `last_token`. Raises InvalidRequest."""
        return reader.tokenize_following(self.messages, self.tools, self._num_characters, last_token, self.values)

    @property
    def _num_characters(self) -> int:
        return len(json.dumps([self.messages, self.tools], ensure_ascii=False))


@dataclass(frozen=True, kw_only=True)
class HttpTurn:
    """HTTP request for one turn, or for several turns that differ only in their prompts.

    With `counts_each` every event of a stream has the usage so far. With `separates_thoughts` the answer shows the
    model's thoughts apart from its content; with `hides_thoughts` it leaves them out. With `scores_only` only the
    prompt's log-probabilities are wanted: the turn computes one token, which is not sent.
    """

    requests: tuple[inference_pb2.GenerateRequest, ...]
    stream: bool
    include_usage: bool
    counts_each: bool = False
    has_token_ids: bool = False
    has_echo: bool = False
    scores_only: bool = False
    separates_thoughts: bool = True
    hides_thoughts: bool = False
    template: Template | None = None
    offer: Offer | None = None
    links: Links | None = None

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """Request for the first prompt."""
        return self.requests[0]

    @property
    def may_think(self) -> bool:
        """Return whether the answer may begin with thoughts that must be separated.

        It cannot if a constraint or a required call governs the whole answer.
        """
        is_bound = self.request.sampling_params.WhichOneof("constraint") or (self.offer and self.offer.must_call)
        return self.separates_thoughts and not is_bound


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Request to tokenize a text or chat. `has_names` asks for the tokenizer's token names too."""

    request: inference_pb2.GenerateRequest
    adds_special: bool
    opens_answer: bool
    has_names: bool
    template: Template | None


class HttpRequestReader:
    """Reader of HTTP requests for one model. Each method raises InvalidRequest, and NotFound for another model."""

    def __init__(
        self,
        model_name: str,
        count_ignored: Callable[[int], None] = lambda count: None,
        *,
        ignores_unknown: bool = False,
    ) -> None:
        self._model_name = model_name
        self._count_ignored = count_ignored
        self._ignores_unknown = ignores_unknown
        self._ignored: set[str] = set()

    def chat(self, body: Any) -> HttpTurn:
        asked = self._read(models.ChatRequest, body)
        functions = [tool.function for tool in asked.tools or ()]
        choice, allowed = asked.tool_choice, None
        if isinstance(choice, models.AllowedToolChoice):
            allowed = [tool.function.name for tool in choice.allowed_tools.tools]
            choice = choice.allowed_tools.mode
        called = choice.function if isinstance(choice, models.ToolChoice) else choice
        described = [tool["function"] for tool in body.get("tools") or ()]
        offer = read_offer(functions, described, called, allowed, one_call=asked.parallel_tool_calls is False)
        messages = self._messages(asked.messages)
        turn = _turn(asked, "response_format", asked.response_format)
        _put_chat(turn.request, messages, offer)
        if asked.logprobs:
            turn.request.sampling_params.logprobs = asked.top_logprobs or 0
        elif asked.top_logprobs:
            raise InvalidRequest("top_logprobs: only allowed with logprobs: true")
        return replace(
            turn,
            template=_template(asked, messages, offer, asked.reasoning_effort),
            offer=offer,
            separates_thoughts=asked.separate_reasoning is not False,
            hides_thoughts=asked.include_reasoning is False,
        )

    def response(self, body: Any) -> HttpTurn:
        body = self._with_functions(body, ("function",))
        asked = self._read(models.ResponseRequest, body)
        choice, tools, allowed = asked.tool_choice, body.get("tools") or [], None
        if isinstance(choice, models.AllowedItemToolChoice):
            allowed, choice = [tool.name for tool in choice.tools], choice.mode
        described = [{name: value for name, value in tool.items() if name != "type"} for tool in tools]
        offer = read_offer(asked.tools or (), described, choice, allowed, one_call=asked.parallel_tool_calls is False)
        told = [{"role": "system", "content": asked.instructions}] if asked.instructions is not None else []
        messages = _item_messages(asked)
        turn = _turn(asked, "text.format", asked.text.format if asked.text else None)
        _put_chat(turn.request, [*told, *messages], offer)
        previous = ResponseName.read(asked.previous_response_id or "")
        links = Links(
            previous=previous,
            is_stored=asked.store is not False and not asked.conversation_id,
            instructions=digest(asked.instructions) if asked.instructions else "",
            tools=digest(json.dumps(tools, sort_keys=True))
            if offer
            else "",  # without an offer the model sees no tools
        )
        turn = replace(turn, offer=offer, links=links)
        values = models.TemplateFields(chat_template_kwargs=asked.chat_template_kwargs)
        effort = (asked.reasoning or {}).get("effort")
        if previous is None:
            return replace(turn, template=_template(values, [*told, *messages], offer, effort))
        if asked.conversation_id:
            raise InvalidRequest("previous_response_id: not allowed with a conversation_id; leave one out")
        shown_tools = offer.described if offer else ()
        template = Template(messages=messages, tools=shown_tools, values=asked.chat_template_kwargs or {})
        return replace(turn, template=template)

    def messages(self, model: type[Asked], body: Any) -> Asked:
        """Read a request of Anthropic's Messages API. The caller turns it into a chat request."""
        return self._read(model, self._with_functions(body, (None, "custom")))

    def _with_functions(self, body: Any, kinds: Collection[str | None]) -> Any:
        """Leave out tools that only their vendor runs, if there are functions of the client (`kinds`) beside them."""
        tools = body.get("tools") if isinstance(body, dict) else None
        if not (self._ignores_unknown and isinstance(tools, list)):
            return body
        functions = [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in kinds]
        if not functions or len(functions) == len(tools):
            return body
        self._note_ignored([f"tools of type {tool.get('type')}" for tool in tools if tool not in functions])
        return body | {"tools": functions}

    def completion(self, body: Any) -> HttpTurn:
        asked = self._read(models.CompletionRequest, body)
        turn = replace(_turn(asked, "response_format", asked.response_format), has_echo=bool(asked.echo))
        turn.request.prompt_mode = PROMPT_MODES[asked.prompt_mode or "auto"]
        params = turn.request.sampling_params
        if not params.HasField("max_tokens"):
            params.max_tokens = COMPLETION_MAX_TOKENS
        elif asked.echo and params.max_tokens == 0:
            params.max_tokens = 1
            turn = replace(turn, scores_only=True)
        if asked.logprobs is not None:
            params.logprobs = asked.logprobs
        is_one = isinstance(asked.prompt, str) or not asked.prompt or isinstance(asked.prompt[0], int)
        prompts: Sequence[Any] = [asked.prompt] if is_one else asked.prompt
        _check_prompts(turn, len(prompts))
        requests = (_copy_with_prompt(turn.request, place, prompt) for place, prompt in enumerate(prompts))
        return replace(turn, requests=tuple(requests))

    def tokenization(self, body: Any) -> Tokenization:
        """Read a vLLM-style request for /tokenize."""
        asked = self._read(models.TokenizeRequest, body)
        functions = [tool.function for tool in asked.tools or ()]
        offer = read_offer(functions, [tool["function"] for tool in body.get("tools") or ()], None)
        request = inference_pb2.GenerateRequest()
        template = None
        if asked.messages is None:
            if asked.prompt is None:
                raise InvalidRequest("prompt: null is not allowed; give a string, or messages")
            request.text = asked.prompt
        else:
            messages = self._messages(asked.messages)
            _put_chat(request, messages, None)
            template = _template(asked, messages, offer)
            if asked.prompt is not None:
                raise InvalidRequest("prompt: not allowed with messages; leave one out")
            if asked.add_special_tokens:
                raise InvalidRequest(
                    "add_special_tokens: true is not allowed with messages; the chat template adds its own"
                )
        return Tokenization(
            request=request,
            adds_special=asked.add_special_tokens is not False,
            opens_answer=asked.add_generation_prompt is not False,
            has_names=bool(asked.return_token_strs),
            template=template,
        )

    def tokens(self, body: Any) -> list[int]:
        """Read a vLLM-style request for /detokenize."""
        return self._read(models.DetokenizeRequest, body).tokens

    def check_model(self, name: str) -> None:
        """Check that a request names the served model. Raises InvalidRequest, NotFound."""
        if not name:
            raise InvalidRequest(f"model: none given; served is {self._model_name!r}")
        if name != self._model_name:
            raise NotFound(f"model: there is no model {quote(name)}; served is {self._model_name!r}")

    def _read(self, model: type[Asked], body: Any) -> Asked:
        name = body.get("model") if isinstance(body, dict) else None
        if isinstance(body, dict) and (name == "" or (name is None and issubclass(model, models.HttpTurnRequest))):
            self.check_model("")
        asked = model.read(body, self._note_ignored if self._ignores_unknown else None)
        if name is not None:  # requests other than turns may omit the model
            self.check_model(name)
        return asked

    def _note_ignored(self, names: Sequence[str]) -> None:
        """Count ignored fields, and log each once."""
        self._count_ignored(len(names))
        new = [name for name in map(quote, names) if name not in self._ignored][: MAX_IGNORED - len(self._ignored)]
        if new:
            self._ignored.update(new)
            log.info("requests have fields that are not served and are ignored: %s", ", ".join(new))

    def _messages(self, given: Sequence[models.Message]) -> list[TemplateMessage]:
        """Return messages as chat templates take them. Raises InvalidRequest."""
        found = []
        for place, message in enumerate(given):
            # Empty fields may stay: a client may send back an answer's message, which has some.
            extra = {name: value for name, value in (message.model_extra or {}).items() if value not in (None, [], {})}
            refused = extra.keys() & CHANGING if self._ignores_unknown else extra
            for name in refused:
                value = extra[name]
                raise InvalidRequest(f"messages[{place}].{name[:60]}: {quote(value)} is not supported; leave it out")
            if extra:
                self._note_ignored([f"messages.{name}" for name in extra])
            found.append(_message(place, message))
        return found


def _turn(asked: models.HttpTurnRequest, format_name: str, response_format: models.ResponseFormat | None) -> HttpTurn:
    """Return a turn without its prompt. `format_name` is the field that holds `response_format`."""
    names = asked.model_fields_set & type(asked).model_fields.keys()  # without ignored fields
    known = {name: getattr(asked, name) for name in names}
    given = {name: value for name, value in known.items() if name in SAMPLING}
    for name in ("max_completion_tokens", "max_output_tokens"):
        if name in known:
            given["max_tokens"] = known[name]
    if isinstance(asked.stop, str):
        given["stop"] = [asked.stop]
    if asked.logit_bias is not None:
        given["logit_bias"] = {int(token): bias for token, bias in asked.logit_bias.items()}
    try:
        params = inference_pb2.SamplingParams(**{"temperature": DEFAULT_TEMPERATURE} | given)
    except ValueError as error:  # a number too large for its contract field
        raise InvalidRequest(f"sampling_params: {error}") from None
    if response_format is not None:
        _put_format(params, format_name, response_format)
    if (structure := asked.structure) is not None:
        if params.WhichOneof("constraint"):
            raise InvalidRequest(f"structured_outputs: not allowed with {format_name}; leave one out")
        _put_structure(params, structure)
    request = inference_pb2.GenerateRequest(
        sampling_params=params,
        cache_key=asked.prompt_cache_key or asked.user or "",
        **{name: value for name, value in known.items() if name in models.ContractFields.model_fields},
    )
    if isinstance(asked, models.TextRequest):
        if asked.prediction is not None:
            request.prediction = _join_text(asked.prediction.content)
        if asked.truncate_prompt_tokens is not None:
            request.truncate_prompt_tokens = asked.truncate_prompt_tokens
    if asked.cache_prompt is False:
        request.no_cache = True
    options = asked.stream_options
    if options is not None and options.model_fields_set and not asked.stream:
        raise InvalidRequest("stream_options: only allowed with stream: true")
    usage = bool(options and options.include_usage)
    return HttpTurn(
        requests=(request,),
        stream=bool(asked.stream),
        include_usage=usage,
        counts_each=usage and bool(options and options.continuous_usage_stats),
        has_token_ids=bool(asked.return_token_ids),
    )


# --- forms of answers ------------------------------------------------------------------------------------------------


def _put_format(params: inference_pb2.SamplingParams, name: str, given: models.ResponseFormat) -> None:
    # llama.cpp and others take a schema beside json_object, and some clients send it so.
    if given.type == "json_object" and given.schema_ is None:
        params.json_object = True
    elif given.type != "text":
        within, inner = (f"{name}.json_schema", given.json_schema) if given.json_schema else (name, given)
        schema = inner.schema_ if inner.strict or inner.schema_ is None else close_schema(inner.schema_)
        params.json_schema = _schema_text(f"{within}.schema", schema)
        params.lenient_schema = not inner.strict  # OpenAI's default: the answer may break the schema


def _put_structure(params: inference_pb2.SamplingParams, asked: models.StructuredOutputs) -> None:
    given = asked.model_dump(by_alias=True, exclude_none=True)
    if len(given) != 1 or not given.keys() <= set(STRUCTURES):
        raise InvalidRequest(
            f"structured_outputs: {quote(list(given))} is not allowed; give one of {', '.join(STRUCTURES)}"
        )
    ((name, value),) = given.items()
    match name:
        case "json":
            params.json_schema = value if isinstance(value, str) else _schema_text("structured_outputs.json", value)
        case "choice":
            params.choice.items.extend(value)
            params.choice.SetInParent()  # so that an empty list is refused by name later
        case _:
            setattr(params, name, value)


def _schema_text(name: str, schema: Mapping[str, Any] | None) -> str:
    """Return a JSON schema as text. Raises InvalidRequest, which names the field `name`."""
    if schema is None:
        raise InvalidRequest(f"{name}: null is not allowed; give a JSON schema")
    text = json.dumps(schema, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: holds half a surrogate pair, which is no character") from None
    return text


# --- messages --------------------------------------------------------------------------------------------------------


def _put_chat(request: inference_pb2.GenerateRequest, messages: Sequence[TemplateMessage], offer: Offer | None) -> None:
    """Put messages into a request, leaving out fields that the contract lacks."""
    request.chat.messages.extend(
        inference_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in messages
    )
    request.chat.SetInParent()  # so that an empty list is refused by name later
    if offer is not None:
        request.sampling_params.skip_special_tokens = False  # some of them begin calls


def _message(place: int, message: models.Message) -> TemplateMessage:
    """Return a message as chat templates take it. Raises InvalidRequest."""
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"messages[{place}].content: null is not allowed; give a string or a list of text parts")
    found: TemplateMessage = {"role": ROLES.get(message.role, message.role), "content": _join_text(message.content)}
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _call(call: models.MessageCall) -> TemplateMessage:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _join_text(content: models.Content | models.ItemContent | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _item_messages(asked: models.ResponseRequest) -> list[TemplateMessage]:
    """Return an input's messages. Consecutive calls become one message."""
    if isinstance(asked.input, str):
        return [{"role": "user", "content": asked.input}]
    messages: list[TemplateMessage] = []
    for item in asked.input:
        if isinstance(item, models.MessageItem):
            messages.append({"role": ROLES.get(item.role, item.role), "content": _join_text(item.content)})
        elif isinstance(item, models.CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, models.OutputItem):
            messages.append({"role": "tool", "content": _join_text(item.output), "tool_call_id": item.call_id})
    return messages


def _template(
    asked: models.TemplateFields,
    messages: Sequence[TemplateMessage],
    offer: Offer | None,
    effort: str | None = None,
) -> Template | None:
    """Return the chat template's input; None if it is only text messages. Raises InvalidRequest."""
    continues, given = bool(asked.continue_final_message), dict(asked.chat_template_kwargs or {})
    if effort not in (None, "none"):  # for templates that know it
        given.setdefault("reasoning_effort", effort)
    opens = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
    if continues and opens:
        raise InvalidRequest("add_generation_prompt: true is not allowed with continue_final_message; leave one out")
    if continues and messages and messages[-1]["role"] != "assistant":
        raise InvalidRequest("continue_final_message: only allowed if the last message is the assistant's")
    has_calls = any({"tool_calls", "tool_call_id"} & message.keys() for message in messages)
    if opens and not (given or offer or has_calls):
        return None
    tools = offer.described if offer else ()
    return Template(messages=messages, tools=tools, values=given, opens_answer=opens, continues_last=continues)


# --- prompts ---------------------------------------------------------------------------------------------------------


def _check_prompts(turn: HttpTurn, num_prompts: int) -> None:
    """Refuse options that are not allowed with several prompts or with `echo`. Raises InvalidRequest."""
    request = turn.request
    if num_prompts > models.MAX_PROMPTS:
        raise InvalidRequest(f"prompt: {num_prompts} are too many; at most {models.MAX_PROMPTS} are allowed")
    if num_prompts > 1 and request.conversation_id:
        raise InvalidRequest(f"prompt: {num_prompts} prompts cannot all continue one conversation; give one")
    if turn.has_echo and request.conversation_id:
        raise InvalidRequest("echo: true is not allowed with a conversation_id, whose history is not in the request")
    if turn.has_echo and request.sampling_params.HasField("logprobs"):
        if turn.stream:
            raise InvalidRequest("echo: true is not allowed with logprobs in a stream; leave one of the three out")
        request.sampling_params.prompt_logprobs = request.sampling_params.logprobs


def _copy_with_prompt(
    request: inference_pb2.GenerateRequest, place: int, prompt: str | list[int]
) -> inference_pb2.GenerateRequest:
    """Return a copy of a request for its prompt number `place`."""
    own = inference_pb2.GenerateRequest()
    own.CopyFrom(request)
    if place and own.request_id:
        own.request_id += f"#{place}"
    if isinstance(prompt, str):
        own.text = prompt
    else:
        own.tokenized.input_ids.extend(prompt)
        own.tokenized.SetInParent()
    return own
