"""Responses that follow each other by their ids, by OpenAI's client: each request has only what is new."""

import argparse
import os

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
options = parser.parse_args()

with OpenAI(base_url=options.url, api_key=os.environ.get("RINGSERVE_TOKEN", "none")) as client:
    model = next(iter(client.models.list())).id
    first = client.responses.create(model=model, input="Tell me of rings.", max_output_tokens=32)
    print(first.output_text)
    # Both requests follow the first response, and both reuse what was computed for it.
    for question in ("Why?", "Who has one?"):
        answer = client.responses.create(
            model=model, input=question, previous_response_id=first.id, max_output_tokens=16
        )
        assert answer.usage is not None
        print(answer.output_text)
        print(f"{answer.usage.input_tokens_details.cached_tokens} of {answer.usage.input_tokens} tokens were cached")
    client.responses.delete(first.id)
