"""Chat of two turns by OpenAI's client; one extra field lets the first turn stay cached."""

import argparse
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
options = parser.parse_args()

with OpenAI(base_url=options.url, api_key=os.environ.get("RINGSERVE_TOKEN", "none")) as client:
    model = next(iter(client.models.list())).id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of rings."}]
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=32,
        stream=True,
        extra_body={"conversation_id": "openai-example"},
    )
    said = ""
    for event in stream:
        piece = event.choices[0].delta.content or ""
        said += piece
        print(piece, end="", flush=True)
    print()

    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, extra_body={"conversation_id": "openai-example"}
    )
    print(answer.choices[0].message.content)
    plan = (answer.model_extra or {})["ringserve"]["plan"]
    print(f"{plan['algorithm']}: {plan['reason']}")
    print(f"{plan['cached_tokens']} prompt tokens were cached")
