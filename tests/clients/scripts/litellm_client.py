"""LiteLLM, by both of its providers for such servers."""

from __future__ import annotations

import litellm
from checks import LONG, MODEL, QUESTION, URL, expect, run
from pydantic import BaseModel, Field

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
PROVIDERS = ("openai", "hosted_vllm")


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def complete(provider: str, messages: list, **options: object) -> object:
    return litellm.completion(
        model=f"{provider}/{MODEL}", api_base=f"{URL}/v1", api_key="none", messages=messages, num_retries=0, **options
    )


def chat() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, asked, temperature=0, max_tokens=20)
        expect("Paris" in answer.choices[0].message.content, answer)


def stream() -> None:
    for provider in PROVIDERS:
        chunks = complete(provider, asked, temperature=0, max_tokens=20, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        expect("Paris" in text, text)


def second_turn() -> None:
    for provider in PROVIDERS:
        first = complete(provider, asked, max_tokens=20)
        again = [*asked, first.choices[0].message, {"role": "user", "content": "And of Italy?"}]
        expect(complete(provider, again, max_tokens=20).usage.completion_tokens)


def tools() -> None:
    for provider in PROVIDERS:
        messages = [{"role": "user", "content": "Add 2 and 3."}]
        first = complete(provider, messages, tools=[TOOL], tool_choice="required", max_tokens=200)
        message = first.choices[0].message
        expect(message.tool_calls and message.tool_calls[0].function.name == "add", first)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
        expect(complete(provider, [*messages, message, *results], tools=[TOOL], max_tokens=20).choices)


def structured() -> None:
    answer = complete("openai", asked, response_format=City, max_tokens=200, temperature=0)
    City.model_validate_json(answer.choices[0].message.content)


def long_prompt() -> None:
    for provider in PROVIDERS:
        try:
            complete(provider, [{"role": "user", "content": LONG}], max_tokens=30)
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError("a prompt that is too long was answered")


run(chat=chat, stream=stream, second_turn=second_turn, tools=tools, structured=structured, long_prompt=long_prompt)
