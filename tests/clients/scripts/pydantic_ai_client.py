"""pydantic-ai: agents with tools and typed answers."""

from __future__ import annotations

import asyncio

from checks import LONG, MODEL, QUESTION, URL, expect, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
GREEDY = {"temperature": 0.0, "max_tokens": 60}
agent = Agent(model, model_settings=GREEDY)


class City(BaseModel):
    name: str
    population: int | None = None


def chat() -> None:
    expect("Paris" in agent.run_sync(QUESTION).output)


def stream() -> None:
    async def run() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    expect("Paris" in asyncio.run(run()))


def second_turn() -> None:
    first = agent.run_sync(QUESTION)
    expect(agent.run_sync("And of Italy?", message_history=first.all_messages()).output)


def tools() -> None:
    # A typed answer is a demanded call. The model is too small to stop calling tools that it might call.
    typed = Agent(model, output_type=City, model_settings={"temperature": 0.0, "max_tokens": 200})
    expect(isinstance(typed.run_sync("Tell me about Paris.").output, City))


def structured() -> None:
    typed = Agent(model, output_type=NativeOutput(City), model_settings={"temperature": 0.0, "max_tokens": 200})
    expect(isinstance(typed.run_sync("Tell me about Paris.").output, City))


def long_prompt() -> None:
    try:
        agent.run_sync(LONG)
    except ModelHTTPError as error:
        expect("context_length_exceeded" in str(error.body), error.body)
    else:
        raise AssertionError("a prompt that is too long was answered")


run(chat=chat, stream=stream, second_turn=second_turn, tools=tools, structured=structured, long_prompt=long_prompt)
