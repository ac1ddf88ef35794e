"""HTTP request bodies as pydantic models: OpenAI's fields, vLLM's, and ringserve's own.

The reader of HTTP requests uses the models, and the OpenAPI document is made from them. The models check shapes and
types; `gateway.requests` checks values, as it does for gRPC. To serve a contract sampling parameter over HTTP, add one
line to `SamplingFields`. `Fields.read` turns a body into a model, and pydantic's errors into one sentence.

`extra="forbid"` refuses unknown fields; `read` with `note_ignored` is the one switch that ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.turns import MAX_PRIORITY
from ringserve.services.gateway.requests import MAX_MESSAGES

MAX_PROMPTS = 128
"""Prompts per completion request. `HttpRequestReader` checks it, since pydantic would blame the first prompt."""
MAX_TOOLS = 128
MAX_CALLS = 128
"""Calls in one history message."""
MAX_LIMIT = 1000
"""Conversations per list page."""
MAX_FIELDS = 4096
"""Fields per body and per object in it. Without a limit, pydantic collects an error for every unknown field."""
MAX_NAMED = 20
"""Ignored fields that a log line names, and allowed fields that an error lists."""


class Fields(BaseModel):
    """JSON object in a request. Only the model's fields are allowed; null means that a field is not given."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @classmethod
    def read(cls, body: Any, note_ignored: Callable[[list[str]], None] | None = None) -> Self:
        """Parse a body. Raises InvalidRequest, whose sentence names the field, its value and the allowed values.

        With `note_ignored` unknown fields are ignored, and their names are given to it.

        Example: `CompletionRequest.read({"model": "m", "prompt": ["a", 7]})` raises "prompt[1]: 7 is not allowed; give
        a string or a list".
        """
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        for name, value in [("the body", body), *body.items()]:
            if isinstance(value, dict) and len(value) > MAX_FIELDS:
                raise InvalidRequest(f"{name[:60]}: {len(value)} fields are too many; at most {MAX_FIELDS} are allowed")
        required = {name: None for name, field in cls.model_fields.items() if field.is_required()}
        given = required | {name: value for name, value in body.items() if value is not None}
        try:
            asked = cls.model_validate(given, extra="allow" if note_ignored else None)
        except ValidationError as error:
            raise InvalidRequest(_sentence(cls, given, error)) from None
        if note_ignored and (ignored := asked._unknown_names()):
            note_ignored(ignored[:MAX_NAMED])
        return asked

    def _unknown_names(self) -> list[str]:
        names = list(self.model_extra or ())
        for name, value in self:
            if isinstance(value, Fields) and value.model_config["extra"] == "forbid":
                names += [f"{name}.{each}" for each in value._unknown_names()]
        return names


class OpenFields(Fields):
    """JSON object that may have fields unknown to ringserve; they are ignored."""

    model_config = ConfigDict(extra="ignore")


class SchemaMaker(GenerateJsonSchema):
    """JSON schema generator that leaves out field titles and null defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        is_null = schema.get("default") is None
        return self.generate_inner(schema["schema"]) if is_null else super().default_schema(schema)


def quote(value: Any) -> str:
    """Quote a value for an error message: JSON, or a string in single quotes, cut to 60 characters.

    Example: `quote("a")` is "'a'", and `quote([1, None])` is "[1, null]".
    """
    pieces = json.JSONEncoder().iterencode(value)  # lazily: a value may have many megabytes
    try:
        words = repr(value[:60]) if isinstance(value, str) else "".join(islice(pieces, 60))
    except RecursionError:
        return "a value of many levels"
    return words if len(words) <= 60 else f"{words[:56]} ..."


# --- error sentences -------------------------------------------------------------------------------------------------

ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number that fits in 64 bits",
    "greater_than_equal": "{ge} or more",
    "int_type": "a whole number",
    "less_than_equal": "{le} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_type": "a string",
    "too_short": "a list of at least {min_length} items",
    "string_unicode": "valid Unicode text, without a lone surrogate",
    "union_tag_invalid": "one of {expected_tags}",
}
"""Allowed values, by pydantic error type."""


def _sentence(model: type[Fields], body: dict[str, Any], error: ValidationError) -> str:
    """Describe the first invalid field in one sentence.

    Each union member reports its own faults. The most deeply nested counts; of several, the one whose path sorts last.
    Faults at the same place are joined with "or".
    """
    faults = error.errors(include_url=False, include_input=False)
    faults = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    paths = [_client_path(body, fault) for fault in faults]
    path = max(paths, key=lambda each: (len(each), each))
    fault = faults[paths.index(path)]
    name = "".join(f"[{part}]" if str(part).isdigit() else f".{part}"[:60] for part in path).removeprefix(".")
    value: Any = body
    for part in path:
        value = value.get(part) if isinstance(value, dict) else value[part]
    if fault["loc"][-1:] == ("[key]",):
        value = path[-1]
    if fault["type"] == "extra_forbidden":
        fields = [field.alias or each for each, field in model.model_fields.items()]
        listed = len(fields) <= MAX_NAMED and len(path) == 1
        return f"{name}: there is no such field; {'allowed are ' + ', '.join(fields) if listed else 'leave it out'}"
    if fault["type"] == "missing":
        return f"{name}: none given; it is required"
    if fault["type"] == "too_long":
        return f"{name}: {len(value)} are too many; at most {fault['ctx']['max_length']} are allowed"
    if fault["type"] == "none_required":
        return f"{name}: {quote(value)} is not supported; leave it out"
    words = [
        ALLOWED.get(each["type"], each["msg"]).format_map(each.get("ctx", {}))
        for each, place in zip(faults, paths, strict=True)
        if place == path
    ]
    return f"{name or 'the body'}: {quote(value)} is not allowed; give {' or '.join(dict.fromkeys(words))}"


def _client_path(body: Any, fault: ErrorDetails) -> tuple[str | int, ...]:
    """Return a fault's path in the client's body: pydantic's path without its names for union members."""
    path: list[str | int] = []
    value = body
    for part in fault["loc"]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            path.append(part)
            value = value[part]  # type: ignore[index]
    if fault["type"] == "missing":
        path.append(fault["loc"][-1])
    if fault["type"] == "union_tag_invalid":
        path.append("type")
    return tuple(path)


# --- values ----------------------------------------------------------------------------------------------------------


def _check_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "no characters") from None
    return text


def _allow_only(allowed: bool | int) -> BeforeValidator:
    """Return a check that allows one value of exactly its type: in Python 0 equals False, and 1 equals True."""

    def check(given: Any) -> Any:
        if given is not None and (given != allowed or type(given) is not type(allowed)):
            raise PydanticCustomError("literal_error", "", {"expected": json.dumps(allowed)})
        return given

    return BeforeValidator(check)


def _to_whole(given: Any) -> Any:
    """Return 16 for 16.0, as clients without whole numbers write it."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _parse_arguments(given: Any) -> Any:
    """Parse a call's arguments. Clients send them as JSON text; templates take objects.

    Text that is not a JSON object stays text: `max_tokens` may have cut a call that the history repeats.
    """
    if not isinstance(given, str):
        return given or {}
    try:
        parsed = json.loads(given) if given else {}
    except (ValueError, RecursionError):
        return _check_characters(given)
    return parsed if isinstance(parsed, dict) else given


Json = dict[str, Any]
Text = Annotated[str, AfterValidator(_check_characters)]
Name = Annotated[str, Field(min_length=1), AfterValidator(_check_characters)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
Whole = Annotated[int, Field(ge=0, le=2**32 - 1), BeforeValidator(_to_whole)]
FIRST_FAULT = Field(fail_fast=True)
"""Stop at a long list's first fault."""
Tokens = Annotated[list[Whole], FIRST_FAULT]
Texts = Annotated[list[Text], FIRST_FAULT]
Prompts = Annotated[list[Text | Tokens], Field(fail_fast=True, json_schema_extra={"maxItems": MAX_PROMPTS})]
TopK = Annotated[int, Field(ge=-1, le=2**32 - 1), AfterValidator(lambda given: max(given, 0))]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float],
    Field(json_schema_extra={"additionalProperties": False}),
]
"""Biases by token id, as a string: JSON keys are strings."""
Arguments = Annotated[Json | str, BeforeValidator(_parse_arguments, json_schema_input_type=str | Json | None)]
NOT_SERVED = Field(description="Not served.")
Unserved = Annotated[None, NOT_SERVED]
Off = Annotated[Annotated[Literal[False], _allow_only(False)] | None, NOT_SERVED]
EmptyList = Annotated[Annotated[list[Any], Field(max_length=0)] | None, NOT_SERVED]
TextOnly = Annotated[list[Literal["text"]], Field(min_length=1, max_length=1, fail_fast=True)]
Inert = Annotated[Any, Field(description="Without effect.")]


# --- parts of requests -----------------------------------------------------------------------------------------------


class TextPart(OpenFields):
    type: Literal["text"]
    text: Text


class ItemPart(OpenFields):
    type: Literal["input_text", "output_text", "text"]
    text: Text


Content = Text | Annotated[list[TextPart], FIRST_FAULT]
ItemContent = Text | Annotated[list[ItemPart], FIRST_FAULT]


class CalledFunction(OpenFields):
    name: Text
    arguments: Arguments = Field(default_factory=dict)


class MessageCall(OpenFields):
    id: Text = ""
    function: CalledFunction


class Message(Fields):
    """Chat message with content or calls. `HttpRequestReader` refuses other fields unless they are empty."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "anyOf": [
                {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
                {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
            ]
        },
    )
    role: Text
    content: Content | None = None
    name: Inert = None  # speaker's name, for templates with several speakers
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None


Messages = Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class Function(OpenFields):
    name: FunctionName
    description: Any = None
    parameters: Json | None = None
    strict: bool | None = None


class Kind(OpenFields):
    type: Literal["function"]


class Tool(Kind):
    function: Function


class ItemTool(Function, Kind):
    pass


class Named(OpenFields):
    name: Text


class ToolChoice(Kind):
    function: Named


class ItemToolChoice(Named, Kind):
    pass


class NamedTool(Kind):
    function: Named


class AllowedTools(OpenFields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolChoice(OpenFields):
    """Choice among some of the tools; the model is shown all of them, so that the prompt stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class AllowedItemToolChoice(OpenFields):
    """Form of `AllowedToolChoice` in responses."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ItemToolChoice], Field(max_length=MAX_TOOLS, fail_fast=True)]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ItemTools = Annotated[list[ItemTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ChoiceMode = Annotated[
    Literal["none", "auto", "required"], BeforeValidator(lambda given: "required" if given == "any" else given)
]


class NamedSchema(OpenFields):
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(NamedSchema):
    """Answer format. Chats put the schema under `json_schema`, responses beside `type`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """Answer format as vLLM's clients write it: exactly one field. Other fields are refused unless they are null."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"minProperties": 1, "additionalProperties": {"type": "null"}}
    )
    json_: Json | Text | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Prediction(Fields):
    """Text that the answer probably repeats."""

    type: Literal["content"]
    content: Content


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Inert = None  # OpenAI pads events so that eavesdroppers cannot measure them


# --- requests --------------------------------------------------------------------------------------------------------


class SamplingFields(Fields):
    """Sampling parameters with the contract's names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    stop: Text | Texts | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    max_draft_tokens: Whole | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None


class ContractFields(Fields):
    """GenerateRequest fields that OpenAI's requests lack; OpenAI's clients send them as `extra_body`."""

    conversation_id: Text | None = None
    request_id: Text | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    no_cache: bool | None = None
    expected_tokens: Whole | None = None
    max_loss: float | None = None
    max_ttft: float | None = None


class HttpTurnRequest(SamplingFields, ContractFields):
    """Fields that every turn request has."""

    model: Name
    stream: Annotated[bool | None, Field(description="Answer with server-sent events.")] = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    prompt_cache_key: Text | None = None
    user: Text | None = None
    metadata: Inert = None
    safety_identifier: Inert = None
    prompt_cache_options: Inert = None
    prompt_cache_retention: Inert = None
    service_tier: Inert = None
    # Fields of vLLM and others that would change the answer: they are never ignored.
    images: EmptyList = None
    logits_processors: EmptyList = None
    thinking: Unserved = None
    use_beam_search: Off = None

    @property
    def structure(self) -> StructuredOutputs | None:
        """Answer form, also as older clients of vLLM write it: `guided_json` and its kin."""
        older = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        given = {name: value for name, value in older.items() if value is not None}
        if not given:
            return self.structured_outputs
        if self.structured_outputs is not None:
            raise InvalidRequest(f"guided_{next(iter(given))}: not allowed with structured_outputs; leave one out")
        return StructuredOutputs.model_validate(given)


class TextRequest(HttpTurnRequest):
    """Fields that chats and completions share. Unserved fields accept only the value that changes nothing."""

    n: Whole | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    response_format: ResponseFormat | None = None
    audio: Unserved = None
    best_of: Annotated[Annotated[Literal[1], _allow_only(1)] | None, NOT_SERVED] = None
    function_call: Annotated[Literal["none"] | None, NOT_SERVED] = None
    functions: EmptyList = None
    moderation: Unserved = None
    modalities: Annotated[TextOnly | None, NOT_SERVED] = None
    prediction: Annotated[Prediction | None, Field(description="Text that the answer probably repeats.")] = None
    reasoning_effort: Annotated[Text | None, Field(description="For chat templates that know it.")] = None
    store: Off = None
    suffix: Annotated[Literal[""] | None, NOT_SERVED] = None
    verbosity: Inert = None
    web_search_options: Unserved = None


class TemplateFields(Fields):
    """Fields for the chat template."""

    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(TextRequest, TemplateFields):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    echo: Off = None
    tools: Tools | None = None
    tool_choice: ChoiceMode | ToolChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Annotated[bool | None, Field(description="False leaves the model's thoughts out.")] = None
    separate_reasoning: Annotated[bool | None, Field(description="False leaves thoughts in the content.")] = None


class CompletionRequest(TextRequest):
    prompt: Text | Tokens | Prompts
    prompt_mode: Literal["auto", "append", "whole_history"] | None = None
    logprobs: Whole | None = None
    echo: bool | None = None


class MessageItem(OpenFields):
    type: Literal["message"] = "message"
    role: Text
    content: ItemContent


class CallItem(OpenFields):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Arguments = Field(default_factory=dict)


class OutputItem(OpenFields):
    type: Literal["function_call_output"]
    call_id: Text
    output: ItemContent


class ReasoningItem(OpenFields):
    """Thoughts of an earlier answer, which are no part of the history."""

    type: Literal["reasoning"]


Item = Annotated[
    MessageItem | CallItem | OutputItem | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(lambda item: {"type": "message"} | item if isinstance(item, dict) else item),
]


class TextOptions(OpenFields):
    format: ResponseFormat | None = None
    verbosity: Inert = None


class ResponseRequest(HttpTurnRequest):
    input: Text | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Whole | None = None
    previous_response_id: Text | None = None
    text: TextOptions | None = None
    tools: ItemTools | None = None
    tool_choice: ChoiceMode | ItemToolChoice | AllowedItemToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None
    store: bool | None = None
    background: Off = None
    include: Inert = None  # asks for details that no answer here has
    reasoning: Annotated[Json | None, Field(description="`effort` is for chat templates that know it.")] = None
    truncate_prompt_tokens: Unserved = None
    # Nothing is cut: an input that is too long is refused in both cases.
    truncation: Literal["disabled", "auto"] | None = None


class TokenizeRequest(TemplateFields):
    """Text or chat to tokenize, in vLLM's shape."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    model: Name | None = None
    tokens: Tokens


class ForkRequest(Fields):
    forked_from: Text
    id: Text
    at_token: Whole | None = None


class ConversationsQuery(Fields):
    """Page of the caller's conversations: ids that begin with `prefix` and sort after `after`."""

    prefix: Text = ""
    after: Text = ""
    limit: Annotated[int, Field(strict=False, ge=1, le=MAX_LIMIT)] = 100


# --- answers ---------------------------------------------------------------------------------------------------------


class TokensAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextAnswer(BaseModel):
    prompt: str


class VersionAnswer(BaseModel):
    version: str


class ErrorShape(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorShape
