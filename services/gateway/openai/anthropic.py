"""Anthropic's Messages API (`/v1/messages`): requests become chat requests, answers become content blocks.

The HTTP application uses it; a `MessageAnswer` holds the state of one answer. Fields, blocks and events are those that
https://docs.anthropic.com/en/api/messages describes. Thinking blocks from earlier answers are left out of the history.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ringserve.cp_core.errors import ContextTooLong, InvalidRequest, Unavailable
from ringserve.mapping import enum_name
from ringserve.services.gateway.openai import models
from ringserve.services.gateway.openai.errors import error_body, http_status
from ringserve.services.gateway.openai.models import FIRST_FAULT, MAX_TOOLS, Arguments, Inert, Text, Texts, TopK, Whole
from ringserve.services.gateway.openai.responses import Json
from ringserve.services.gateway.openai.tools import AnswerForm, CallPiece, CallStart, Said, Thought
from ringserve.services.rpc.answer import message_dict
from ringserve.v1 import inference_pb2

PREFIX = "/v1/messages"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error type by HTTP status. Any other status is `invalid_request_error` below 500 and `api_error` from 500 on."""
STOP_REASONS = {"length": "max_tokens"}
"""Anthropic's stop reason by the contract's finish reason. A matched stop string or a tool call takes precedence."""

# --- requests --------------------------------------------------------------------------------------------------------


class TextBlock(models.OpenFields):
    type: Literal["text"]
    text: Text


class CallBlock(models.OpenFields):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Arguments = Field(default_factory=dict)


class ResultBlock(models.OpenFields):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[list[TextBlock], FIRST_FAULT] | None = None
    is_error: bool | None = None


class ThoughtBlock(models.OpenFields):
    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextBlock | CallBlock | ResultBlock | ThoughtBlock, Field(discriminator="type")]


class InputMessage(models.OpenFields):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], FIRST_FAULT]


class InputTool(models.OpenFields):
    """Tool of the client. Tools that Anthropic runs itself have another `type`."""

    type: Literal["custom"] = "custom"
    name: models.FunctionName
    description: Any = None
    input_schema: Json
    strict: bool | None = None


class InputToolChoice(models.OpenFields):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(models.OpenFields):
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(models.OpenFields):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(models.OpenFields):
    format: OutputFormat | None = None
    effort: Text | None = None


class Metadata(models.OpenFields):
    user_id: Text | None = None


class CountRequest(models.Fields):
    """Messages whose tokens are counted."""

    model: models.Name
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=models.MAX_MESSAGES, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], FIRST_FAULT] | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Annotated[Thinking | None, Field(description="For chat templates that know `enable_thinking`.")] = None
    mcp_servers: models.EmptyList = None
    cache_control: Inert = None
    context_management: Inert = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, Field(description="Earlier name of output_config.format.")] = None


class MessagesRequest(CountRequest):
    """Messages that are answered."""

    max_tokens: Whole
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    stop_sequences: Texts | None = None
    metadata: Metadata | None = None
    container: models.Unserved = None
    inference_geo: Inert = None
    service_tier: Inert = None


class MessagesErrorShape(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    type: Literal["error"]
    error: MessagesErrorShape


class TokenCount(BaseModel):
    input_tokens: int


def chat_body(asked: CountRequest) -> Json:
    """Return the request as the body of a chat in OpenAI's shape. Raises InvalidRequest.

    Example: a user's message with a `tool_result` and a text becomes a message of role tool and one of role user.
    """
    system = _join(asked.system) if asked.system else ""
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in asked.messages:
        messages += _chat_messages(message)
    body: Json = {"model": asked.model, "messages": messages}
    if asked.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    **({"description": tool.description} if tool.description else {}),
                    "parameters": tool.input_schema,
                    **({"strict": tool.strict} if tool.strict is not None else {}),
                },
            }
            for tool in asked.tools
        ]
    if (choice := asked.tool_choice) is not None and asked.tools:
        if choice.type == "tool" and not choice.name:
            raise InvalidRequest("tool_choice.name: none given; it is required with type 'tool'")
        named = {"type": "function", "function": {"name": choice.name}}
        body["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        if choice.disable_parallel_tool_use:
            body["parallel_tool_calls"] = False
    if asked.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": asked.thinking.type != "disabled"}
    output = asked.output_config or OutputConfig()
    if (form := output.format or asked.output_format) is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output.effort is not None:
        body["reasoning_effort"] = output.effort
    if isinstance(asked, MessagesRequest):
        given = {name: getattr(asked, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        given |= {"stop": asked.stop_sequences or None, "user": asked.metadata.user_id if asked.metadata else None}
        body |= {name: value for name, value in given.items() if value is not None}
    return body


def _chat_messages(message: InputMessage) -> list[Json]:
    """Return a message as chat messages: results of tools first, as templates want them, then its texts and calls."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[Json] = []
    calls: list[Json] = []
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, ResultBlock):
            content = _join(block.content or "")
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, CallBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, TextBlock):
            texts.append(block)
    if texts or calls or not found:
        own: Json = {"role": message.role, "content": _join(texts)}
        found.append(own | ({"tool_calls": calls} if calls else {}))
    return found


def _join(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


# --- answers ---------------------------------------------------------------------------------------------------------


class MessageAnswer:
    """Answer to one request: a block for each text and each call, as one message or as stream events."""

    def __init__(self, model_name: str, form: AnswerForm) -> None:
        """Read thoughts and tool calls from the text as `form` says."""
        self._model_name = model_name
        self._reader = form.make_reader()
        self._blocks: list[Json] = []
        self._is_open = False
        self._sent_characters = 0
        self._held: list[Json] = []
        self._name = ""
        self._complete: inference_pb2.GenerateComplete | None = None

    @property
    def ends_with(self) -> bytes:
        """Line to send after the last event. Anthropic's streams have none."""
        return b""

    def events(self, place: int, response: inference_pb2.GenerateResponse) -> list[Json]:
        """Return the stream events for one response. The opening event waits for the first token: clients time it."""
        if response.HasField("start"):
            start = response.start
            self._name = start.request_id
            opening = self._message() | {"usage": _usage(start.prompt_tokens, start.cached_tokens, 0)}
            extra = {"conversation_id": start.conversation_id, "plan": message_dict(start.plan)}
            self._held = [{"type": "message_start", "message": opening | {"ringserve": extra}}]
            return []
        held, self._held = self._held, []
        if response.HasField("chunk"):
            self._sent_characters += len(response.chunk.text)
            return held + self._events_of(self._reader.push(response.chunk.text))
        self._complete = response.complete
        rest = self._reader.push(response.complete.text[self._sent_characters :])
        is_cut = response.complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        events = self._events_of([*rest, *self._reader.finish(is_cut=is_cut)])
        return held + events + self._close()

    def last_events(self) -> list[Json]:
        """Return the events after the answer. Raises Unavailable if it is incomplete."""
        whole = self.whole()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [
            {"type": "message_delta", "delta": delta, "usage": whole["usage"], "ringserve": whole["ringserve"]},
            {"type": "message_stop"},
        ]

    def failure(self, error: Exception) -> list[Json]:
        """Return the events that end a stream with an error."""
        return [anthropic_error(error)]

    def whole(self) -> Json:
        """Return the whole message. Raises Unavailable if the answer is incomplete."""
        complete = self._complete
        if complete is None:
            raise Unavailable("the stream ended without a completion")
        reason = STOP_REASONS.get(enum_name(inference_pb2.FinishReason, complete.finish_reason), "end_turn")
        if complete.HasField("matched_stop_str"):
            reason = "stop_sequence"
        elif reason == "end_turn" and self._reader.calls:
            reason = "tool_use"
        usage = complete.usage
        return self._message() | {
            "content": [self._shown(block) for block in self._blocks],
            "stop_reason": reason,
            "stop_sequence": complete.matched_stop_str if complete.HasField("matched_stop_str") else None,
            "usage": _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            "ringserve": {"plan": message_dict(complete.plan), "token_ids": list(complete.output_ids)},
        }

    def _message(self) -> Json:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @staticmethod
    def _shown(block: Json) -> Json:
        """Return a finished block; the arguments of a call that was cut are shown as an empty object."""
        if block["type"] != "tool_use":
            return block
        try:
            arguments = json.loads(block["input"] or "{}")
        except ValueError:
            arguments = {}
        return block | {"input": arguments if isinstance(arguments, dict) else {}}

    def _events_of(self, said: Sequence[Said]) -> list[Json]:
        return [event for each in said for event in self._events_of_part(each)]

    def _events_of_part(self, said: Said) -> list[Json]:
        match said:
            case CallStart():
                call = {"type": "tool_use", "id": said.call_id, "name": said.name}
                return [*self._close(), *self._open(call | {"input": ""}, call | {"input": {}})]
            case CallPiece():
                self._blocks[-1]["input"] += said.text
                return [self._delta({"type": "input_json_delta", "partial_json": said.text})]
            case Thought():
                opening = self._open_as({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += said.text
                return [*opening, self._delta({"type": "thinking_delta", "thinking": said.text})]
            case _:
                opening = self._open_as({"type": "text", "text": ""})
                self._blocks[-1]["text"] += said
                return [*opening, self._delta({"type": "text_delta", "text": said})]

    def _open_as(self, empty: Json) -> list[Json]:
        """Open a block of a kind, unless one is open."""
        if self._is_open and self._blocks[-1]["type"] == empty["type"]:
            return []
        return [*self._close(), *self._open(dict(empty), empty)]

    def _open(self, block: Json, shown: Json) -> list[Json]:
        self._blocks.append(block)
        self._is_open = True
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": shown}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        """End the open block, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _usage(prompt: int, cached: int, completion: int) -> Json:
    """Return the usage. Unlike OpenAI's, `input_tokens` leaves out cached tokens."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def anthropic_error(error: BaseException) -> Json:
    """Return an error in Anthropic's shape. Agents shorten their history at the words "prompt is too long"."""
    status = http_status(error)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error_body(error, PREFIX)["error"]["message"]
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
