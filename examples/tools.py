"""Call of a tool and the answer that follows, by OpenAI's client. The model's chat template must take tools."""

import argparse
import json
import os

from openai import OpenAI
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionMessageParam,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
options = parser.parse_args()

CHAIRS = {"kitchen": 4, "hall": 12}
TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "count_chairs",
        "description": "Count the chairs of a room.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": list(CHAIRS)}},
            "required": ["room"],
            "additionalProperties": False,
        },
    },
}

with OpenAI(base_url=options.url, api_key=os.environ.get("RINGSERVE_TOKEN", "none")) as client:
    model = next(iter(client.models.list())).id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How many chairs has the hall?"}]
    # With "required" even the smallest model calls a tool; leave it out if the model is to decide.
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    call = (asked.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    room = json.loads(call.function.arguments)["room"]
    print(f"{call.function.name}({room!r}) is {CHAIRS[room]}")

    made: ChatCompletionMessageFunctionToolCallParam = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
    messages += [
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call.id, "content": str(CHAIRS[room])},
    ]
    told = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=32, temperature=0
    )
    print(told.choices[0].message.content)
