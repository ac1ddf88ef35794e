"""Time to first token of a chat about a document by OpenAI's plain client: nothing tells the service what to cache."""

import argparse
import os
import time

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--lines", type=int, default=150, help="lines of the document")
options = parser.parse_args()

run = time.strftime("%c")  # another document each time, so that the first turn finds nothing
document = "\n".join(f"{run}: room {number} has {number * 7 % 11} chairs." for number in range(options.lines))


def ask(client: OpenAI, what: str, messages: list[ChatCompletionMessageParam]) -> str:
    """Ask for the next answer, print its time to first token, and return its text."""
    began, ttft, text = time.perf_counter(), 0.0, ""
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            ttft = ttft or time.perf_counter() - began
            text += event.choices[0].delta.content
        if event.usage is not None:
            cached = event.usage.prompt_tokens_details.cached_tokens if event.usage.prompt_tokens_details else 0
            print(f"{what}: {event.usage.prompt_tokens} prompt tokens, {cached} cached, TTFT {1e3 * ttft:.0f} ms")
    return text


with OpenAI(base_url=options.url, api_key=os.environ.get("RINGSERVE_TOKEN", "none")) as client:
    model = next(iter(client.models.list())).id
    chat: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"{document}\nHow many chairs has room 3?"}]
    said = ask(client, "first turn", chat)
    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "And room 4?"}]
    ask(client, "second turn", chat)
    ask(client, "another chat", [{"role": "user", "content": f"{document}\nWhich room has no chair?"}])
