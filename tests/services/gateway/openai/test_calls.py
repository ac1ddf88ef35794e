"""Calls of tools in text: every form is read the same however the text is cut, and grammars allow what is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.gateway.openai.tools import (
    COHERE,
    DEEPSEEK,
    GEMMA,
    GLM,
    GRANITE,
    HERMES,
    LFM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    NEMOTRON,
    OLMO,
    PHI,
    PYTHON,
    QWEN,
    SEED,
    TEKKEN,
    AnswerForm,
    CallForm,
    CallPiece,
    CallReader,
    CallStart,
    Function,
    Thought,
    add_guidance,
    calls_grammar,
    close_schema,
    find_call_form,
    find_thoughts,
)
from ringserve.workers.sampling.grammar import Grammars
from tests.workers.sampling.grammars import byte_grammars

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [
    Function(name="weather", schema=add_guidance(WEATHER)),
    Function(name="now", schema=add_guidance({"type": "object"})),
]
CALLS = [("weather", '{"city": "K\\u00f6ln } ]"}'), ("now", '{"in": [{"a": "}"}]}')]
ANSWERS: dict[str, tuple[CallForm, str]] = {
    "hermes": (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\u00f6ln } ]"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {"in": [{"a": "}"}]}}\n</tool_call>',
    ),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "K\\u00f6ln } ]"}}, '
        '{"name": "now", "arguments": {"in": [{"a": "}"}]}}]',
    ),
    "tekken": (TEKKEN, '[TOOL_CALLS]weather[ARGS]{"city": "K\\u00f6ln } ]"}[TOOL_CALLS]now[ARGS]{"in": [{"a": "}"}]}'),
    "llama": (
        LLAMA,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "K\\u00f6ln } ]"}}; '
        '{"name": "now", "parameters": {"in": [{"a": "}"}]}}',
    ),
}


def deepseek(text: str) -> str:
    """Write the special tokens of a text with DeepSeek's own bars and spaces."""
    return re.sub(r"<\|[a-z ]+\|>", lambda found: found[0].replace("|", "\uff5c").replace(" ", "\u2581"), text)


LIST = '[{"name": "book", "arguments": {"city": "12", "days": [1, 2]}}, {"arguments": {}, "name": "now"}]'
WHOLE: dict[str, tuple[CallForm, str]] = {
    "qwen": (
        QWEN,
        "<tool_call>\n<function=book>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    "minimax": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="book">\n<parameter name="city">12</parameter>\n'
        '<parameter name="days">[1, 2]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "seed": (
        SEED,
        "<seed:tool_call>\n<function=book>\n<parameter=city>12</parameter>\n<parameter=days>[1, 2]</parameter>\n"
        "</function>\n</seed:tool_call><seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    "lfm": (LFM, '<|tool_call_start|>[book(city="12", days=[1, 2]), now()]<|tool_call_end|>'),
    "olmo": (OLMO, "<function_calls>\nbook(city='12', days=[1, 2])\nnow()\n</function_calls>"),
    "python": (PYTHON, "[book(city='12', days=[1, 2]), now()]"),
    "gemma": (
        GEMMA,
        '<|tool_call>call:book{city:<|"|>12<|"|>,days:[1,2]}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
    "deepseek": (
        DEEPSEEK,
        deepseek(
            '<|tool calls begin|><|tool call begin|>function<|tool sep|>book\n```json\n{"city": "12", "days": [1, 2]}\n'
            "```<|tool call end|>\n<|tool call begin|>now<|tool sep|>{}<|tool call end|><|tool calls end|>"
        ),
    ),
    "granite": (GRANITE, "<|tool_call|>" + LIST),
    "phi": (PHI, f"<|tool_call|>{LIST}<|/tool_call|>"),
    "nemotron": (NEMOTRON, f"<TOOLCALL>{LIST}</TOOLCALL>"),
    "cohere": (
        COHERE,
        '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "book", "parameters": {"city": "12", "days": [1, 2]}},'
        '\n  {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
}
BOOK = {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("length", [1, 7, 1000])
def test_calls_that_are_read_whole_have_values_of_their_schemas_types(name: str, length: int) -> None:
    form, text = WHOLE[name]
    before = "Yes." if form.opening else ""
    text = f"{before}\n{text}"
    reader = CallReader(form, {"book": BOOK})
    said = [each for at in range(0, len(text), length) for each in reader.push(text[at : at + length])]
    said += reader.finish()
    assert "".join(each for each in said if isinstance(each, str)) == before
    assert [(call.name, call.arguments) for call in reader.calls] == [
        ("book", '{"city": "12", "days": [1, 2]}'),
        ("now", "{}"),
    ]


@pytest.mark.parametrize("name", [*(name for name, (form, _) in WHOLE.items() if form.opening), "hermes"])
def test_a_call_that_was_cut_before_its_arguments_leaves_no_signs_in_the_text(name: str) -> None:
    form, text = (WHOLE | ANSWERS)[name]
    for length in range(len(form.opening), len(form.opening) + 12):
        reader = CallReader(form)
        said = [*reader.push("Yes. " + text[:length]), *reader.finish(is_cut=True)]
        assert "".join(each for each in said if isinstance(each, str)) == "Yes."


def read(form: CallForm, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of an answer and its calls, as its events tell them."""
    reader, text, calls = CallReader(form), "", list[list[str]]()
    for said in [each for piece in pieces for each in reader.push(piece)] + reader.finish():
        match said:
            case CallStart(place, call_id, name):
                assert (place, call_id) == (len(calls), reader.calls[place].call_id)
                calls.append([name, ""])
            case CallPiece(place, more):
                calls[place][1] += more
            case str():
                text += said
    assert [(call.name, call.arguments) for call in reader.calls] == [(name, given) for name, given in calls]
    return text, [(name, given) for name, given in calls]


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_calls_are_read_however_the_text_is_cut(name: str, data: st.DataObject) -> None:
    form, text = ANSWERS[name]
    before = data.draw(st.sampled_from(["", "Let me see.\n\n"] if form.opening else [""]))
    whole = before + text + data.draw(st.sampled_from(["", "\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(form, pieces) == (before.rstrip(), CALLS)


@pytest.mark.parametrize("form", [HERMES, MISTRAL, TEKKEN, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize(
    "text", ["", "Hi  there.\n", "{", '{"a": 1}', "<tool_", "[TOOL", " <tool_call>", "a [TOOL_CALLS] b"]
)
def test_text_that_only_looks_like_a_call_is_text_to_its_last_sign(form: CallForm, text: str) -> None:
    assert read(form, [text]) == (text, [])
    assert read(form, list(text)) == (text, [])


def test_calls_in_another_order_or_cut_off_are_read_as_far_as_they_go() -> None:
    other = '<tool_call>{"arguments": {"city": "Rom"}, "name": "weather"}</tool_call>'
    assert read(HERMES, list(other)) == ("", [("weather", '{"city": "Rom"}')])
    assert read(HERMES, [other[: -len("</tool_call>")]]) == ("", [("weather", '{"city": "Rom"}')])
    assert read(LLAMA, ['{"parameters": "{}", "name": "now"}']) == ("", [("now", "{}")])
    cut = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    assert read(HERMES, [cut]) == ("", [("weather", '{"city": "Ro')])
    broken = "See <tool_call>{oops}</tool_call> there"
    assert read(HERMES, list(broken)) == (broken, [])


@pytest.mark.parametrize(
    "text",
    ["[1, 2, 3]", "[f(1)]", "[f(a=open('x'))]", "[f(a=1), 2]", "[f(a=1", "[f(a=b)]; g(a=1)", "x = [f()]", "[" * 5000],
)
def test_python_that_is_no_list_of_calls_with_literals_is_text(text: str) -> None:
    """Nothing of it is executed."""
    assert read(PYTHON, [text]) == (text, [])
    assert read(LFM, [f"<|tool_call_start|>{text}<|tool_call_end|>"])[1] == []


def test_python_calls_take_literals_of_json_and_dotted_names() -> None:
    text = r"""[api.book(city="a\d", when={"day": null, "far": True}, is_paid=false, days=(1, -2.5))]"""
    given = r"""{"city": "a\\d", "when": {"day": null, "far": true}, "is_paid": false, "days": [1, -2.5]}"""
    assert read(PYTHON, list(text)) == ("", [("api.book", given)])


def test_strings_between_signs_of_gemma_hold_what_looks_like_keys() -> None:
    text = '<|tool_call>call:now{in:{text:<|"|>{a: "b", c: 1}\n<|"|>,n-1:true}}<tool_call|>'
    assert read(GEMMA, [text]) == ("", [("now", r'{"in": {"text": "{a: \"b\", c: 1}\n", "n-1": true}}')])


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES)
    assert reader.push("Hm. <tool_call>") == ["Hm."]
    assert reader.push('{"name": "now", "arguments"') == []
    (start, piece) = reader.push(': {"in"')
    assert start == CallStart(0, reader.calls[0].call_id, "now")
    assert piece == CallPiece(0, '{"in"')
    assert reader.push(": 3}") == [CallPiece(0, ": 3}")]
    assert [*reader.push("}\n</tool_call>"), *reader.finish()] == []
    assert len(CallReader(MISTRAL).push('[TOOL_CALLS][{"name": "f", "arguments": {')[0].call_id) == 9  # type: ignore[union-attr]


# --- grammars --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("calls"), 300)


def allows(grammars: Grammars, grammar: str, text: str) -> bool:
    """Return whether an answer may end after `text`."""
    grammars.check(grammar)
    mask = grammars.begin(grammar, text.encode()).mask()
    return mask is not None and bool(mask[257])


@pytest.mark.parametrize("name", ANSWERS)
def test_a_grammar_allows_calls_of_the_form_that_is_read(name: str, grammars: Grammars) -> None:
    form, text = ANSWERS[name]
    text = text.removeprefix("<|python_tag|>").partition("; ")[0]
    one, wrong = text, text.replace('"city"', '"town"')
    must = calls_grammar(form, FUNCTIONS, no_special, must_call=True, one_call=False)
    assert allows(grammars, must, one)
    assert not allows(grammars, must, wrong)
    assert not allows(grammars, must, "Hello")
    may = calls_grammar(form, FUNCTIONS, no_special, must_call=False, one_call=False)
    assert allows(grammars, may, one)
    assert allows(grammars, may, "Hello there")
    assert not allows(grammars, may, wrong)
    if form.opening:
        assert allows(grammars, may, "Well. " + one)
        single = calls_grammar(form, FUNCTIONS, no_special, must_call=True, one_call=True)
        assert not allows(grammars, single, one)  # of two calls
        told = calls_grammar(
            form, FUNCTIONS, no_special, must_call=False, one_call=False, text_schema=add_guidance(WEATHER)
        )
        assert allows(grammars, told, '{"city": "Rom"}')
        assert allows(grammars, told, one)
        assert not allows(grammars, told, "Hello")
    else:
        with pytest.raises(InvalidRequest, match="response_format: not allowed with tools"):
            calls_grammar(form, FUNCTIONS, no_special, must_call=False, one_call=False, text_schema=WEATHER)


def no_special(text: str) -> None:
    """Return None: the byte-level tokenizer has no token of its own for any sign of a call."""


def test_special_tokens_are_named_by_their_numbers(grammars: Grammars) -> None:
    assert grammars.special_token("<|user|>") == 258
    assert grammars.special_token("<tool_call>") is None
    numbers = {"<tool_call>": 258, "</tool_call>": 259}
    grammar = calls_grammar(HERMES, FUNCTIONS, numbers.get, must_call=False, one_call=False)
    grammars.check(grammar)
    call = [258, *b'\n{"name": "now", "arguments": {}}\n', 259]
    for tokens, is_whole in ((call, True), (call[:-1], False), ([*b"Hm. ", *call], True), ([*b"Hm."], True)):
        mask = grammars.begin(grammar, tokens).mask()
        assert mask is not None
        assert bool(mask[257]) is is_whole


# --- chat templates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tools>{% endif %}<tool_call>\n{'name': ", HERMES),
        ("{{ tools }}[TOOL_CALLS] [", MISTRAL),
        ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", TEKKEN),
        ("{{ tools }}<|start_header_id|>ipython{{ '\"parameters\": ' }}", LLAMA),
        ("{{ tools }}<tool_call>\n<function=f>", QWEN),
        ("{{ tools }}<tool_call>{name}<arg_key>", GLM),
        ("{{ tools }}<minimax:tool_call><invoke>", MINIMAX),
        ("{{ tools }}<seed:tool_call>\n<function=f>", SEED),
        ("{{ tools }}<|tool_call_start|>", LFM),
        ("{{ tools }}<function_calls>", OLMO),
        ("{{ tools }}[func_name1(params_name1=params_value1", PYTHON),
        ("{{ tools }}<|tool_call>call:", GEMMA),
        (deepseek("{{ tools }}<|tool call begin|>"), DEEPSEEK),
        ("{{ tools }}<|tool_call|>", GRANITE),
        ("{{ tools }}<|/tool|>", PHI),
        ("{{ tools }}<TOOLCALL>", NEMOTRON),
        ("{{ tools }}<|START_ACTION|>", COHERE),
        ("{{ tools }}", None),
    ],
)
def test_the_form_is_that_of_the_chat_template(template: str, form: CallForm | None) -> None:
    assert find_call_form(template) is form


def test_a_schema_of_too_many_levels_is_refused_in_a_sentence() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="schema: it is nested too deeply"):
        close_schema(schema)


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_a_template_without_tools_is_refused_in_a_sentence(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^tools: the chat template of this model takes no tools"):
        find_call_form(template)


PLAIN, OPENED = AnswerForm(has_thoughts=True), AnswerForm(has_thoughts=True, begins_in_thoughts=True)
THOUGHTS: dict[str, tuple[AnswerForm, str, str, str]] = {
    "whole": (
        PLAIN,
        "<think>\nIs 1 < 2? </b>\n</think>\n\nYes, <think> it is.",
        "Is 1 < 2? </b>",
        "Yes, <think> it is.",
    ),
    "without": (PLAIN, " <thin ice", "", " <thin ice"),
    "empty": (PLAIN, "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
    "opened": (OPENED, "\nHm.\n</think>Yes.", "Hm.", "Yes."),
    "cut": (OPENED, "Hm </thi", "Hm </thi", ""),
    "cut before": (PLAIN, "<thi", "", "<thi"),
    "cut after": (PLAIN, "<think>Hm</think>\n", "Hm", ""),
    "nothing": (OPENED, "", "", ""),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_read_the_same_however_the_text_is_cut(name: str) -> None:
    form, text, thoughts, answer = THOUGHTS[name]
    for length in range(1, len(text) + 2):
        reader = form.make_reader()
        said = [each for at in range(0, len(text), length) for each in reader.push(text[at : at + length])]
        said += reader.finish()
        assert "".join(each.text for each in said if isinstance(each, Thought)) == thoughts
        assert "".join(each for each in said if isinstance(each, str)) == answer


def test_calls_after_thoughts_are_calls() -> None:
    reader = AnswerForm(calls=HERMES, has_thoughts=True).make_reader()
    said = [*reader.push("<think><tool_call></think>\n" + ANSWERS["hermes"][1]), *reader.finish()]
    assert said[0] == Thought("<tool_call>")
    assert [(call.name, call.arguments) for call in reader.calls] == CALLS


@pytest.mark.parametrize(
    ("end", "form"),
    [
        ("<|im_start|>assistant\n", PLAIN),
        ("<|im_start|>assistant\n<think>\n", OPENED),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", AnswerForm()),
    ],
)
def test_the_end_of_the_prompt_tells_where_thoughts_begin(end: str, form: AnswerForm) -> None:
    assert find_thoughts("{% if enable_thinking %}<think>{{ x }}</think>{% endif %}", end) == form
