"""LangChain's ChatOpenAI."""

from __future__ import annotations

from checks import LONG, MODEL, QUESTION, URL, expect, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=60, max_retries=0)
asked = HumanMessage(QUESTION)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    is_capital: bool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def chat() -> None:
    expect("Paris" in model.invoke([asked]).content)


def stream() -> None:
    expect("Paris" in "".join(chunk.content for chunk in model.stream([asked])))


def second_turn() -> None:
    expect(model.invoke([asked, model.invoke([asked]), HumanMessage("And of Italy?")]).content)


def tools() -> None:
    question = HumanMessage("Add 2 and 3.")
    message = model.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke([question])
    (call,) = message.tool_calls
    expect(call["name"] == "add", message)
    result = ToolMessage("5", tool_call_id=call["id"])
    expect(model.bind_tools([add]).invoke([question, message, result]).response_metadata)


def structured() -> None:
    expect(isinstance(model.with_structured_output(City, method="json_schema").invoke([asked]), City))


def long_prompt() -> None:
    try:
        model.invoke([HumanMessage(LONG)])
    except Exception as error:
        expect("maximum context length" in str(error), error)
    else:
        raise AssertionError("a prompt that is too long was answered")


run(chat=chat, stream=stream, second_turn=second_turn, tools=tools, structured=structured, long_prompt=long_prompt)
