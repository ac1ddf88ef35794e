"""instructor, in its modes of tools and of JSON schemas."""

from __future__ import annotations

import instructor
import openai
from checks import MODEL, URL, expect, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
asked = [{"role": "user", "content": "Paris is the capital of France."}]


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


def by(mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    found = patched.chat.completions.create(
        model=MODEL, messages=asked, response_model=City, max_retries=0, max_tokens=200, temperature=0
    )
    expect(isinstance(found, City), found)


run(tools=lambda: by(instructor.Mode.TOOLS), structured=lambda: by(instructor.Mode.JSON_SCHEMA))
