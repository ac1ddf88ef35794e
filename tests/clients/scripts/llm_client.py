"""`llm` of Simon Willison, with the server as one of its extra OpenAI models."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, QUESTION, URL, expect, run

home = tempfile.mkdtemp()
(Path(home) / "extra-openai-models.yaml").write_text(
    f"- model_id: ring\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  can_stream: true\n"
)
program = str(Path(sys.executable).with_name("llm"))


def llm(*words: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stderr[-300:])
    return done.stdout


def ask(*words: str) -> str:
    return llm("prompt", "-m", "ring", "-o", "temperature", "0", "-o", "max_tokens", "20", *words)


run(
    chat=lambda: expect("Paris" in ask("--no-stream", QUESTION)),
    stream=lambda: expect("Paris" in ask(QUESTION)),
    second_turn=lambda: expect(ask("-c", "And of Italy?")),
)
