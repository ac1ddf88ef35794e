"""Answer that is parsed into a class, by OpenAI's client: the service holds the model to the class's JSON schema."""

import argparse
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
options = parser.parse_args()


class Review(BaseModel):
    """Opinion of a novel."""

    verdict: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


with OpenAI(base_url=options.url, api_key=os.environ.get("RINGSERVE_TOKEN", "none")) as client:
    model = next(iter(client.models.list())).id
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Judge this: 'I read the novel in one night.'"}],
        response_format=Review,
        temperature=0,
    )
    review = answer.choices[0].message.parsed
    assert review is not None
    print(f"{review.verdict}, {review.stars} of 5 stars")

    # vLLM's field for other forms than JSON: a regular expression, a list of texts or a grammar.
    chosen = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Is it a novel or a film?"}],
        extra_body={"structured_outputs": {"choice": ["a novel", "a film"]}},
        temperature=0,
    )
    print(chosen.choices[0].message.content)
