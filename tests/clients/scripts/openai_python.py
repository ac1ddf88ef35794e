"""OpenAI's client for Python."""

from __future__ import annotations

import openai
from checks import LONG, MODEL, QUESTION, URL, expect, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=asked, temperature=0, max_tokens=20)
    expect("Paris" in answer.choices[0].message.content, answer)


def stream() -> None:
    chunks = client.chat.completions.create(model=MODEL, messages=asked, temperature=0, max_tokens=20, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect("Paris" in text, text)


def second_turn() -> None:
    first = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=20)
    again = [*asked, first.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    expect(client.chat.completions.create(model=MODEL, messages=again, max_tokens=20).usage.completion_tokens)


def tools() -> None:
    messages = [{"role": "user", "content": "Add 2 and 3."}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    expect(call.function.name == "add", call)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    after = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=20)
    expect(after.choices[0].finish_reason in ("stop", "length", "tool_calls"), after)


def structured() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=asked, response_format=City, max_tokens=200, temperature=0
    )
    expect(isinstance(answer.choices[0].message.parsed, City), answer)


def long_prompt() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": LONG}], max_tokens=30)
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", error)
    else:
        raise AssertionError("a prompt that is too long was answered")


run(chat=chat, stream=stream, second_turn=second_turn, tools=tools, structured=structured, long_prompt=long_prompt)
