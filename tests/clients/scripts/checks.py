"""Checks of a client's script, each told as one line of JSON. It imports nothing: every environment can run it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable

URL = os.environ["RINGSERVE_URL"]
MODEL = os.environ["RINGSERVE_MODEL"]
PAUSE_SECONDS = 20.0
QUESTION = "What is the capital of France? Answer in one word."
LONG = "word " * 9000
"""More than the model's 8,192 positions."""


def check(name: str, run: Callable[[], object]) -> None:
    """Run a check and tell "yes", or its error."""
    try:
        run()
        result = "yes"
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps({"check": name, "result": result}), flush=True)


def run(**uses: Callable[[], object]) -> None:
    """Check each use under its name, and the chat once more after a pause, as pooled connections meet it."""
    for name, use in uses.items():
        check(name.replace("_", " "), use)
    if "chat" in uses:
        time.sleep(PAUSE_SECONDS)  # the pause is what is tried
        check("pause", uses["chat"])


def expect(condition: object, what: object = "") -> None:
    """Raise AssertionError unless the condition holds; `assert` would not in an optimized interpreter."""
    if not condition:
        raise AssertionError(f"unexpected: {what!r}")
