"""Tools: the tools that a request offers, and tool calls in an answer's text (their forms, reader and grammar).

The reader also finds a model's thoughts at the beginning of an answer. The HTTP routes and `ringserve check` use
this module. A reader has the state of one answer; nothing else here has state.

The chat template tells a model's form, since it shows the model earlier calls in the same form:

    hermes     <tool_call> {"name": "f", "arguments": {...}} </tool_call>, on lines of their own: Qwen2.5, Qwen3, Hermes
    mistral    [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]: Mistral v0.3, Nemo
    tekken     [TOOL_CALLS]f[ARGS]{...}: later Mistral
    llama      {"name": "f", "parameters": {...}}: Llama 3.1 to 3.3
    qwen       <tool_call> <function=f> <parameter=a> 1 </parameter> </function> </tool_call>: Qwen3-Coder
    glm        <tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value> </tool_call>: GLM-4.5 and later
    minimax    <minimax:tool_call> <invoke name="f"> <parameter name="a">1</parameter> </invoke> ...: MiniMax-M2
    seed       qwen's, between <seed:tool_call> and </seed:tool_call>: Seed-OSS
    lfm        <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>: LFM2
    olmo       <function_calls> f(a=1) g() </function_calls>, one call a line: Olmo 3
    python     [f(a=1), g()]: templates for Llama 3.2 and 4 that ask for such calls
    gemma      <|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>: Gemma 4
    deepseek   a name and JSON between tokens such as <|tool call begin|>, with other bars and spaces: V3, R1
    granite    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]: Granite 3
    phi        the same, and <|/tool_call|>: Phi-4-mini
    nemotron   <TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>: Nemotron
    cohere     <|START_ACTION|>[{"tool_name": "f", "parameters": {...}}, ...]<|END_ACTION|>: Command R7B and later

From qwen on in this list, a call is passed on only once its text is whole; the forms above are streamed. qwen, glm,
minimax and seed write values as bare text, which becomes JSON by the schema of the function.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.openai import models
from ringserve.services.gateway.openai.models import quote
from ringserve.services.gateway.requests import ANY_OBJECT, JSON_OPTIONS, RequestReader, lenient_schema
from ringserve.v1 import inference_pb2

MAX_CALLS = 16
"""Calls in one constrained answer."""
MAX_HEAD = 512
"""Longest text before a call's arguments, in characters. Longer text is not a call."""
_NAME = r'"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"'


Arguments = dict[str, Any] | str


class WholeCalls(Protocol):
    """Reader of calls whose text is complete."""

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Arguments]]:
        """Return (name, arguments) of each call. `schemas` maps a function's name to the schema of its arguments.

        A text that is no call has none, or raises ValueError, SyntaxError, RecursionError or MemoryError.
        """


class JsonCalls:
    """Calls that are JSON objects, one or a list, with their fields in any order."""

    def read(self, text: str, _: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Arguments]]:
        found = json.loads(text)
        calls = []
        for call in found if isinstance(found, list) else [found]:
            name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
            given = call.get("arguments", call.get("parameters", {})) if name else None
            if not isinstance(name, str) or not isinstance(given, dict | str):
                return []
            calls.append((name, given))
        return calls


class PythonCalls:
    """Calls written as Python: `[f(a=1), g()]`, or one a line. Values are literals, of Python or of JSON."""

    def read(self, text: str, _: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Arguments]]:
        with warnings.catch_warnings():  # about escapes in the model's strings
            warnings.simplefilter("ignore")
            lines = ast.parse(text.strip()).body
        found = [line.value for line in lines if isinstance(line, ast.Expr)]
        nodes = [node for each in found for node in (each.elts if isinstance(each, ast.List) else [each])]
        calls = [node for node in nodes if isinstance(node, ast.Call) and not node.args]
        if len(found) < len(lines) or len(calls) < len(nodes):
            return []
        return [
            (ast.unparse(call.func), {each.arg: _literal(each.value) for each in call.keywords if each.arg})
            for call in calls
        ]


def _literal(node: ast.expr) -> Any:
    """Return a Python literal's value; `true`, `false` and `null` are JSON's. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(each) for key, each in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Calls as elements: `function` matches a call, with groups `name` and `body`.

    `read_body` gets a body and its function's schema.
    """

    function: re.Pattern[str]
    read_body: Callable[[str, Mapping[str, Any]], Arguments]

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Arguments]]:
        return [
            (call["name"], self.read_body(call["body"], schemas.get(call["name"], {})))
            for call in self.function.finditer(text)
        ]


def _parameters(pattern: str) -> Callable[[str, Mapping[str, Any]], Arguments]:
    """Return a function that reads a call's body. `pattern` matches a parameter, with groups `name` and `value`.

    A value is text unless its schema has another type.
    Example: `_parameters("<(?P<name>.*?)=(?P<value>.*?)>")("<a=1>", {})` is `{"a": "1"}`.
    """
    parameter = re.compile(pattern, re.DOTALL)

    def read(body: str, schema: Mapping[str, Any]) -> Arguments:
        properties = schema.get("properties", {})
        return {each["name"]: _typed(each["value"], properties.get(each["name"])) for each in parameter.finditer(body)}

    return read


def _read_json_body(body: str, _: Mapping[str, Any]) -> Arguments:
    json.loads(body)
    return body


def _read_gemma_body(body: str, _: Mapping[str, Any]) -> Arguments:
    """Read JSON whose keys are bare and whose strings stand between signs."""
    parts = body.split('<|"|>')
    parts[::2] = [re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    found: dict[str, Any] = json.loads("".join(parts))
    return found


def _typed(value: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else "string"
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """Form in which a model writes tool calls in text.

    `opening` begins a call, or the whole list if `is_list`; if it is empty, an answer that begins with one of `begins`
    is a call. `head` matches from the opening to the arguments. A grammar puts `before` before the name, `between`
    between name and arguments, and `after` after the arguments. `closing` ends a call, and `separator` stands between
    two calls. If not `is_json`, the name is written without quotes. `whole` reads calls that `head` does not match.
    """

    name: str
    opening: str
    head: re.Pattern[str]
    before: str = ""
    between: str = ""
    after: str = ""
    closing: str = ""
    whole: WholeCalls = field(default_factory=JsonCalls)
    separator: str = ""
    begins: tuple[str, ...] = ("{", ";")
    is_list: bool = False
    is_json: bool = True
    max_calls: int = MAX_CALLS

    @property
    def is_whole(self) -> bool:
        """True if calls are read when they are whole; then no grammar can constrain an answer to the form."""
        return self.head is NEVER

    def new_id(self) -> str:
        """Return a new call id. Mistral's templates accept only nine letters and digits."""
        letters = string.ascii_letters + string.digits
        if self.opening == "[TOOL_CALLS]":
            return "".join(secrets.choice(letters) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


NEVER = re.compile(r"(?!)")
"""Head of calls that are read when they are whole."""


def _json_head(before: str, arguments: str) -> re.Pattern[str]:
    return re.compile(rf'{before}\{{\s*{_NAME}\s*,\s*"{arguments}"\s*:\s*(?=\{{)', re.DOTALL)


HERMES = CallForm(
    name="hermes",
    opening="<tool_call>",
    head=_json_head(r"\s*", "arguments"),
    before='\n{"name": ',
    between=', "arguments": ',
    after="}\n",
    closing="</tool_call>",
    separator="\n",
)
MISTRAL = CallForm(
    name="mistral",
    opening="[TOOL_CALLS]",
    head=_json_head(r"[\s\[,]*", "arguments"),
    before='{"name": ',
    between=', "arguments": ',
    after="}",
    separator=", ",
    is_list=True,
)
TEKKEN = CallForm(
    name="tekken",
    opening="[TOOL_CALLS]",
    head=re.compile(r"\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{)"),
    before="",
    between="[ARGS]",
    after="",
    is_json=False,
)
LLAMA = CallForm(
    name="llama",
    opening="",
    head=_json_head(r"[\s;]*(?:<\|python_tag\|>)?\s*", "parameters"),
    before='{"name": ',
    between=', "parameters": ',
    after="}",
    max_calls=1,
)


def _whole_form(name: str, opening: str, closing: str, whole: WholeCalls, begins: tuple[str, ...] = ()) -> CallForm:
    return CallForm(name=name, opening=opening, closing=closing, head=NEVER, whole=whole, begins=begins)


_QWEN_CALLS = Elements(
    function=re.compile(r"<function=(?P<name>[^>\s]+)>(?P<body>.*?)</function>", re.DOTALL),
    read_body=_parameters(r"<parameter=(?P<name>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"),
)
_GLM_CALL = Elements(
    function=re.compile(r"\A\s*(?P<name>[\w.:-]+)\s*(?P<body>(?:<arg_key>.*)?)\Z", re.DOTALL),
    read_body=_parameters(r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
)
_MINIMAX_CALLS = Elements(
    function=re.compile(r'<invoke name="(?P<name>[^"]+)">(?P<body>.*?)</invoke>', re.DOTALL),
    read_body=_parameters(r'<parameter name="(?P<name>[^"]+)">(?P<value>.*?)</parameter>'),
)
_GEMMA_CALL = Elements(
    function=re.compile(r"\A\s*call:(?P<name>[\w.:-]+)\s*(?P<body>\{.*\})\s*\Z", re.DOTALL),
    read_body=_read_gemma_body,
)


def _deepseek(sign: str) -> str:
    """Return a special token of DeepSeek's tokenizers, which have bars and spaces of their own."""
    return "<|{}|>".format(sign.replace(" ", "\u2581")).replace("|", "\uff5c")


_DEEPSEEK_CALLS = (
    Elements(  # V3 and R1 write `function`, a sign, the name and fenced JSON; V3.1 the name, the sign, JSON
        function=re.compile(
            rf"{_deepseek('tool call begin')}(?:function{_deepseek('tool sep')})?(?P<name>[\w.:-]+)\s*"
            rf"(?:{_deepseek('tool sep')}|```json)\s*(?P<body>\{{.*?\}})\s*(?:```)?\s*{_deepseek('tool call end')}",
            re.DOTALL,
        ),
        read_body=_read_json_body,
    )
)
QWEN = _whole_form("qwen", "<tool_call>", "</tool_call>", _QWEN_CALLS)
GLM = _whole_form("glm", "<tool_call>", "</tool_call>", _GLM_CALL)
MINIMAX = _whole_form("minimax", "<minimax:tool_call>", "</minimax:tool_call>", _MINIMAX_CALLS)
SEED = _whole_form("seed", "<seed:tool_call>", "</seed:tool_call>", _QWEN_CALLS)
LFM = _whole_form("lfm", "<|tool_call_start|>", "<|tool_call_end|>", PythonCalls())
OLMO = _whole_form("olmo", "<function_calls>", "</function_calls>", PythonCalls())
PYTHON = _whole_form("python", "", "", PythonCalls(), begins=("[",))
GEMMA = _whole_form("gemma", "<|tool_call>", "<tool_call|>", _GEMMA_CALL)
DEEPSEEK = _whole_form("deepseek", _deepseek("tool calls begin"), _deepseek("tool calls end"), _DEEPSEEK_CALLS)
GRANITE = _whole_form("granite", "<|tool_call|>", "", JsonCalls())
PHI = _whole_form("phi", "<|tool_call|>", "<|/tool_call|>", JsonCalls())
NEMOTRON = _whole_form("nemotron", "<TOOLCALL>", "</TOOLCALL>", JsonCalls())
COHERE = _whole_form("cohere", "<|START_ACTION|>", "<|END_ACTION|>", JsonCalls())
SIGNS: Sequence[tuple[tuple[str, ...], CallForm]] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<seed:tool_call>",), SEED),
    (("<|tool_call_start|>",), LFM),
    (("<|tool_call>", "call:"), GEMMA),
    (("<tool_call>", "<function="), QWEN),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>",), HERMES),
    (("<function_calls>",), OLMO),
    (("[TOOL_CALLS]", "[ARGS]"), TEKKEN),
    (("[TOOL_CALLS]",), MISTRAL),
    ((_deepseek("tool call begin"),), DEEPSEEK),
    (("<|START_ACTION|>",), COHERE),
    (("<TOOLCALL>",), NEMOTRON),
    (("<|/tool|>",), PHI),
    (("<|tool_call|>",), GRANITE),
    (("[func_name1(",), PYTHON),
    (('"parameters": ', "ipython"), LLAMA),
    (('"parameters": ', "<|python_tag|>"), LLAMA),
)
"""Texts of a chat template, and the form if it has all of them; the first that fits counts."""


def find_call_form(template: str) -> CallForm | None:
    """Return the call form of a chat template, None if it is unknown. Raises InvalidRequest if it takes no tools."""
    if "tools" not in template:
        raise InvalidRequest("tools: the chat template of this model takes no tools; leave them out")
    return next((form for signs, form in SIGNS if all(sign in template for sign in signs)), None)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of an answer's call number `place`, from 0."""

    place: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More argument text for call number `place`."""

    place: int
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model wrote for itself, before its answer."""

    text: str


Said = str | CallStart | CallPiece | Thought
"""Answer part: text for the user, part of a call, or part of the model's thoughts."""


@dataclass(slots=True)
class ReadCall:
    """Call read so far; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerForm:
    """Answer form: thoughts between THINK and END_OF_THOUGHTS at its beginning, and tool calls.

    `schemas` describe the functions' arguments. If `has_thoughts`, the answer may have thoughts; if the prompt itself
    ends with THINK, the answer `begins_in_thoughts`.
    """

    calls: CallForm | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_thoughts: bool = False
    begins_in_thoughts: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the answer is all text."""
        return self.calls is None and not self.has_thoughts

    def make_reader(self) -> AnswerReader:
        """Return a reader for one answer."""
        return AnswerReader(self)


THINK, END_OF_THOUGHTS = "<think>", "</think>"
"""Signs around thoughts, as in Qwen3, DeepSeek-R1, GLM-4.5, MiniMax-M1 and many fine-tunes."""


def find_thoughts(template: str, prompt_end: str) -> AnswerForm:
    """Return the form of a chat's thoughts, by the chat template and the end of the prompt that it wrote.

    Example: with `enable_thinking` false the prompt of Qwen3 ends with THINK and END_OF_THOUGHTS.
    """
    end = prompt_end.rstrip()
    has_thoughts = END_OF_THOUGHTS in template and not end.endswith(END_OF_THOUGHTS)
    return AnswerForm(has_thoughts=has_thoughts, begins_in_thoughts=end.endswith(THINK))


class AnswerReader:
    """Reader of one growing answer: `push` returns the parts that are certain, `finish` the rest.

    An answer that does not begin with thoughts is read for calls alone. The empty lines around thoughts are dropped.
    """

    def __init__(self, form: AnswerForm) -> None:
        self._calls = CallReader(form.calls, form.schemas) if form.calls else None
        self._held = ""
        self._stage = "before" if form.has_thoughts else "after"
        if form.has_thoughts and form.begins_in_thoughts:
            self._stage = "opened"

    @property
    def calls(self) -> list[ReadCall]:
        return self._calls.calls if self._calls else []

    def push(self, text: str) -> list[Said]:
        """Add text, and return the parts that are certain."""
        if self._stage == "after":
            return self._answer(text)
        self._held += text
        if self._stage == "before":
            begin = self._held.lstrip()
            if begin.startswith(THINK):
                self._held, self._stage = begin.removeprefix(THINK), "opened"
            elif not THINK.startswith(begin):
                rest, self._held, self._stage = self._held, "", "after"
                return self._answer(rest)
            else:
                return []
        if self._stage == "opened":  # nothing of the thoughts has been returned yet
            self._held = self._held.lstrip()
            if not self._held:
                return []
            self._stage = "within"
        if self._stage == "within":
            return self._read_thoughts()
        self._held = self._held.lstrip()
        if not self._held:
            return []
        rest, self._held, self._stage = self._held, "", "after"
        return self._answer(rest)

    def finish(self, *, is_cut: bool = False) -> list[Said]:
        """Return the rest of an answer. Thoughts that were cut stay thoughts."""
        held, self._held = self._held, ""
        rest: list[Said] = []
        if self._stage == "within" and held.rstrip():
            rest = [Thought(held.rstrip())]
        elif self._stage == "before":
            rest = self._answer(held)
        return [*rest, *(self._calls.finish(is_cut=is_cut) if self._calls else ())]

    def _read_thoughts(self) -> list[Said]:
        end = self._held.find(END_OF_THOUGHTS)
        if end >= 0:
            thought, rest = self._held[:end].rstrip(), self._held[end + len(END_OF_THOUGHTS) :]
            self._held, self._stage = "", "ended"
            return [*([Thought(thought)] if thought else []), *self.push(rest)]
        certain = self._held[: len(self._held) - _overlap(self._held, END_OF_THOUGHTS)].rstrip()
        self._held = self._held[len(certain) :]
        return [Thought(certain)] if certain else []

    def _answer(self, text: str) -> list[Said]:
        if self._calls is not None:
            return self._calls.push(text)
        return [text] if text else []


class CallReader:
    """Reader of one growing answer: `push` returns the parts that are certain, `finish` the rest.

    Text that may become a call is held back. Text that begins like a call but is not one is returned as text, so no
    part of an answer is lost.
    """

    def __init__(self, form: CallForm, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._form = form
        self._schemas = schemas or {}
        self._held = ""
        self._opened = ""  # the opening tag of the call that may follow, with the spaces before it
        self._state: Callable[[], list[Said] | None] = self._read_text
        self._object = _JsonEnd()
        self._has_text = False
        self.calls: list[ReadCall] = []

    def push(self, text: str) -> list[Said]:
        """Add text, and return the parts that are certain."""
        self._held += text
        said: list[Said] = []
        while (more := self._state()) is not None:
            said += more
        return said

    def finish(self, *, is_cut: bool = False) -> list[Said]:
        """Return the rest of an answer. The beginning of a call is left out of an answer that `is_cut`."""
        if self._state == self._read_head:
            rest = self._whole_call(self._held)
            if not rest and not (is_cut and self._form.opening):
                rest = self._as_text(self._opened + self._held)
        elif self._state == self._read_text and not (self.calls and not self._held.strip()):
            rest = self._as_text(self._held)
        else:
            rest = []  # closing signs after the last call's arguments
        self._held = ""
        return rest

    # Each state returns the parts that it has read, or None if it needs more text.

    def _read_text(self) -> list[Said] | None:
        opening, held = self._form.opening, self._held
        if not opening:
            return self._read_bare_text()
        begin = held.find(opening)
        if begin >= 0:
            before, self._held = held[:begin].rstrip(), held[begin + len(opening) :]
            self._opened = held[len(before) : begin + len(opening)]
            self._state = self._read_head
            return self._as_text(before)
        certain = held[: len(held) - _overlap(held, opening)].rstrip()
        if not certain:
            return None
        self._held = held[len(certain) :]
        return self._as_text(certain)

    def _read_bare_text(self) -> list[Said] | None:
        """Read an answer whose calls have no opening: either it begins as a call, or it is all text."""
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        if not self._held or (not self._has_text and not start) or "<|python_tag|>".startswith(start):
            return None
        if not self._has_text and start.startswith(self._form.begins):
            self._opened, self._state = "", self._read_head
            return []
        text, self._held = self._held, ""
        return self._as_text(text)

    def _read_head(self) -> list[Said] | None:
        head = self._form.head.match(self._held)
        if head is not None:
            self._held = self._held[head.end() :]
            self._object = _JsonEnd()
            self._state = self._read_arguments
            return [self._begin_call(_unquoted(head["name"]))]
        closing, closed = self._form.closing, self._held.find(self._form.closing) if self._form.closing else -1
        if closed >= 0:  # `head` does not match: a form that is read whole, or fields in another order
            body, self._held = self._held[:closed], self._held[closed + len(closing) :]
            self._state = self._read_text
            return self._whole_call(body) or self._as_text(self._opened + body + closing)
        if len(self._held) <= MAX_HEAD or closing or self._form.is_whole:
            return None
        text, self._held = self._opened + self._held, ""
        self._state = self._read_text
        return self._as_text(text)

    def _read_arguments(self) -> list[Said] | None:
        if not self._held:
            return None
        end = self._object.find(self._held)
        piece, self._held = self._held[:end], self._held[len(self._held) if end is None else end :]
        if end is not None:
            self._state = self._read_end
        self.calls[-1].arguments += piece
        return [CallPiece(len(self.calls) - 1, piece)]

    def _read_end(self) -> list[Said] | None:
        """Skip a call's closing signs, up to the next call or text."""
        form = self._form
        if form.closing:
            _, closing, rest = self._held.partition(form.closing)
            if not closing:
                return None
            self._held, self._state = rest, self._read_text
            return []
        rest = self._held.lstrip("} \n\t,;")
        if rest.startswith("]") and form.is_list:
            self._held, self._state = rest[1:], self._read_text
            return []
        if not rest:
            return None
        is_next = rest.startswith("{") and form.is_json
        self._held, self._opened, self._state = rest, "", self._read_head if is_next else self._read_text
        return []

    def _as_text(self, text: str) -> list[Said]:
        self._has_text = self._has_text or bool(text)
        return [text] if text else []

    def _begin_call(self, name: str) -> CallStart:
        call = ReadCall(self._form.new_id(), name)
        self.calls.append(call)
        return CallStart(len(self.calls) - 1, call.call_id, name)

    def _whole_call(self, body: str) -> list[Said]:
        """Return the parts of a call whose text is complete, or of several; [] if the text is not a call."""
        try:
            found = self._form.whole.read(body, self._schemas)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return []
        return [said for name, given in found for said in self._say_call(name, given)]

    def _say_call(self, name: str, arguments: Arguments) -> list[Said]:
        start = self._begin_call(name)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.calls[-1].arguments = text
        return [start, CallPiece(start.place, text)]


@dataclass(slots=True)
class _JsonEnd:
    """Search for the end of a JSON object in text that arrives in pieces."""

    depth: int = 0
    is_string: bool = False
    is_escaped: bool = False

    def find(self, text: str) -> int | None:
        """Return the index after the object's end in the next piece; None if it does not end there."""
        for place, sign in enumerate(text):
            if self.is_escaped:
                self.is_escaped = False
            elif self.is_string:
                self.is_escaped = sign == "\\"
                self.is_string = sign != '"'
            elif sign == '"':
                self.is_string = True
            elif sign in "{[":
                self.depth += 1
            elif sign in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return place + 1
        return None


def _overlap(text: str, opening: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `opening`.

    Example: `_overlap("a <to", "<tool_call>")` is 3.
    """
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if text.endswith(opening[:n])), 0)


def _unquoted(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


# --- grammars --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Function:
    """Function that a model may call. If `is_strict`, its arguments always match `schema`."""

    name: str
    schema: dict[str, Any] = field(default_factory=dict)
    is_strict: bool = False


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    special: Callable[[str], int | None],
    *,
    must_call: bool,
    one_call: bool,
    text_schema: dict[str, Any] | None = None,
) -> str:
    """Return the Lark grammar of an answer that calls `functions`.

    `special` returns the id of a text that is one special token, else None. Unless `must_call`, the answer may also be
    any text, or JSON that matches `text_schema`. Raises InvalidRequest if JSON and calls would begin alike.
    """
    if text_schema is not None and not must_call and not form.opening:
        raise InvalidRequest(
            "response_format: not allowed with tools, as this model's calls begin like JSON; leave one out"
        )

    def sign(text: str) -> str:
        """Write a text as a terminal. Special tokens go in by id: llguidance does not find them in strings."""
        if not text:
            return ""
        number = special(text)
        return json.dumps(text) if number is None else f"<[{number}]>"

    is_special = bool(form.opening) and special(form.opening) is not None
    most = 1 if one_call else form.max_calls
    opening, separator = sign(form.opening), sign(form.separator)
    # Text may precede an optional call: the terminal `opened` takes that text and the opening. The first text that
    # looks like an opening is one.
    first = opening if must_call or is_special or not form.opening or text_schema is not None else "opened"
    call = f"{sign(form.before)} function {sign(form.after)} {sign(form.closing)}"
    again = "" if form.is_list else opening
    more = f"({separator} {again} {call}){{0,{most - 1}}}" if most > 1 else ""
    lines = [f'calls: {first} " [" {call} {more} "]"' if form.is_list else f"calls: {first} {call} {more}"]
    names = " | ".join(f"function_{place}" for place in range(len(functions)))
    lines.append(f"function: {names}")
    for place, each in enumerate(functions):
        name = each.name if form.between == "[ARGS]" else json.dumps(each.name, ensure_ascii=False)
        between = sign(form.between) if form.between == "[ARGS]" else json.dumps(form.between)
        lines.append(
            f"function_{place}: {json.dumps(name, ensure_ascii=False)} {between} %json {json.dumps(each.schema)}"
        )
    if must_call:
        start = ["start: calls"]
    elif text_schema is not None:
        start = [f"start: calls | %json {json.dumps(text_schema)}"]
    elif not form.opening:  # text that is not a call begins with another character
        start = ["start: calls | TEXT", r"TEXT: /([^{\s](.|\n)*)?/"]
    elif is_special:
        start = ["start: TEXT? | TEXT? calls", r"TEXT: /(.|\n)+/"]
    else:
        start = ["start: TEXT | calls", r"TEXT: /(.|\n)*/", f"opened[lazy]: TEXT {opening}"]
    return "\n".join(["%llguidance {}", *start, *lines, ""])


# --- offers -----------------------------------------------------------------------------------------------------------

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Tools that a request offers: `described` for the chat template, `functions` that the answer may call.

    The offer `is_narrowed` if the request lists the allowed tools; then calls are constrained to `functions`.
    """

    described: Sequence[Mapping[str, Any]]
    functions: Sequence[Function]
    must_call: bool
    one_call: bool
    is_narrowed: bool = False

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Schemas of the functions' arguments by name."""
        return {each.name: each.schema for each in self.functions}

    def check_unconstrained(self) -> None:
        """Check that the request does not constrain the calls, for a model whose form of calls has no grammar.

        Raises InvalidRequest.
        """
        if self.must_call or self.is_narrowed or any(each.is_strict for each in self.functions):
            raise InvalidRequest(
                "tools: calls of this model's chat template cannot be required or strict; those of Hermes and Qwen3, "
                "Mistral, and Llama 3 can"
            )

    def hold(self, params: inference_pb2.SamplingParams, form: CallForm, reader: RequestReader) -> None:
        """Constrain an answer to calls of the functions if the request asks for it. Raises InvalidRequest.

        A JSON constraint that the request has besides applies to the answer's text.
        """
        kind = params.WhichOneof("constraint")
        if kind not in (None, "json_schema", "json_object"):
            raise InvalidRequest(f"structured_outputs: {kind} is not allowed with tools; leave one out")
        schema = json.loads(params.json_schema) if kind == "json_schema" else ANY_OBJECT if kind else None
        is_bound = self.must_call or self.one_call or self.is_narrowed
        if not (kind or is_bound or any(each.is_strict for each in self.functions)):
            return
        params.grammar = calls_grammar(
            form,
            self.functions,
            reader.special_token,
            must_call=self.must_call,
            one_call=self.one_call,
            text_schema=None if schema is None else (lenient_schema if params.lenient_schema else add_guidance)(schema),
        )
        try:
            reader.check_constraint(params)
        except InvalidRequest as error:
            raise InvalidRequest(str(error).replace("sampling_params.grammar: ", "tools: ", 1)) from None


def add_guidance(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the gateway's JSON options for llguidance."""
    return {**schema, "x-guidance": JSON_OPTIONS}


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects allow only their listed properties, unless it says otherwise.

    Small models invent properties without end if a schema lets them. `close_schema` does not close `allOf`.
    Example: `{"properties": {"a": {}}}` gets `"additionalProperties": False`.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in {"properties", "$defs", "definitions"} & found.keys():
        if isinstance(found[name], dict):
            found[name] = {key: close_objects(value) for key, value in found[name].items()}
    for name in {"anyOf", "oneOf"} & found.keys():
        if isinstance(found[name], list):
            found[name] = [close_objects(value) for value in found[name]]
    if "items" in found:
        found["items"] = close_objects(found["items"])
    if "properties" in found and not {"anyOf", "oneOf", "$ref"} & found.keys():
        found.setdefault("additionalProperties", False)
    return found


def read_offer(
    tools: Sequence[models.Function],
    described: Sequence[Mapping[str, Any]],
    choice: str | models.Named | None,
    allowed: Collection[str] | None = None,
    *,
    one_call: bool = False,
) -> Offer | None:
    """Return the tools that an answer may call; None if there are none. Raises InvalidRequest.

    `described` holds the tools as the client wrote them: the model sees the client's order of fields. With
    `allowed`, the answer may call only functions of these names.
    """
    functions = [
        Function(
            name=tool.name,
            schema=(add_guidance if tool.strict else lenient_schema)(close_schema(tool.parameters or NO_PARAMETERS)),
            is_strict=bool(tool.strict),
        )
        for tool in tools
    ]
    names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"tools: {quote(names)} names a function twice; names must differ")
    named = choice.name if isinstance(choice, models.Named) else None
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None
    if named is not None and named not in names:
        raise InvalidRequest(f"tool_choice: there is no function {quote(named)} among the tools")
    if unknown := [name for name in allowed or () if name not in names]:
        raise InvalidRequest(f"tool_choice: there is no function {quote(unknown[0])} among the tools")
    if not tools:
        raise InvalidRequest("tool_choice: 'required' is not allowed without tools")
    return Offer(
        described=[{"type": "function", "function": each} for each in described],
        functions=[
            each for each in functions if named in (None, each.name) and (allowed is None or each.name in allowed)
        ],
        must_call=named is not None or choice == "required",
        is_narrowed=allowed is not None,
        one_call=one_call or named is not None,
    )


def close_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `close_objects` of a schema; a schema with `allOf` stays as it is. Raises InvalidRequest."""
    try:
        found: Mapping[str, Any] = schema if '"allOf"' in json.dumps(schema) else close_objects(schema)
    except RecursionError:
        raise InvalidRequest("schema: it is nested too deeply; allowed are fewer than 100 levels") from None
    return found
