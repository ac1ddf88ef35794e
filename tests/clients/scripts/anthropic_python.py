"""Anthropic's client for Python."""

from __future__ import annotations

import anthropic
from checks import LONG, MODEL, QUESTION, URL, expect, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = [{"role": "user", "content": QUESTION}]
TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
GREEDY = {"temperature": 0.0}


def chat() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=asked, extra_body=GREEDY)
    expect("Paris" in answer.content[0].text, answer)


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=20, messages=asked, extra_body=GREEDY) as events:
        text = "".join(events.text_stream)
    expect("Paris" in text, text)


def second_turn() -> None:
    first = client.messages.create(model=MODEL, max_tokens=20, messages=asked)
    again = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And of Italy?"}]
    expect(client.messages.create(model=MODEL, max_tokens=20, messages=again).usage.output_tokens)


def tools() -> None:
    messages = [{"role": "user", "content": "Add 2 and 3."}]
    choice = {"type": "tool", "name": "add"}
    first = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL], tool_choice=choice)
    call = first.content[-1]
    expect(first.stop_reason == "tool_use" and call.name == "add", first)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=MODEL, max_tokens=20, messages=messages, tools=[TOOL])
    expect(after.stop_reason in ("end_turn", "max_tokens", "tool_use"), after)


def long_prompt() -> None:
    try:
        client.messages.create(model=MODEL, max_tokens=30, messages=[{"role": "user", "content": LONG}])
    except anthropic.BadRequestError as error:
        expect("prompt is too long" in str(error), error)
    else:
        raise AssertionError("a prompt that is too long was answered")


run(chat=chat, stream=stream, second_turn=second_turn, tools=tools, long_prompt=long_prompt)
