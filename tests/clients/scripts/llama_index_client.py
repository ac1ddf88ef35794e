"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from checks import LONG, MODEL, QUESTION, URL, expect, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0.0,
    max_tokens=60,
    max_retries=0,
    context_window=8192,
)
asked = ChatMessage(role="user", content=QUESTION)


def chat() -> None:
    expect("Paris" in model.chat([asked]).message.content)


def stream() -> None:
    expect("Paris" in "".join(chunk.delta or "" for chunk in model.stream_chat([asked])))


def second_turn() -> None:
    first = model.chat([asked]).message
    expect(model.chat([asked, first, ChatMessage(role="user", content="And of Italy?")]).message.content)


def tools() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    tool = FunctionTool.from_defaults(add)
    answer = model.chat_with_tools([tool], user_msg="Add 2 and 3.", tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    expect(calls and calls[0].tool_name == "add", answer)


def long_prompt() -> None:
    try:
        model.chat([ChatMessage(role="user", content=LONG)])
    except Exception as error:
        expect("maximum context length" in str(error), error)
    else:
        raise AssertionError("a prompt that is too long was answered")


run(chat=chat, stream=stream, second_turn=second_turn, tools=tools, long_prompt=long_prompt)
