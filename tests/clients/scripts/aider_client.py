"""aider: a question about a file, whole and streamed, and one more with the conversation before it."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from checks import MODEL, URL, expect, run

DONE = "The copy is made."
WORK = Path(tempfile.mkdtemp(prefix="ringserve-aider-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)
ARGUMENTS = ["--model", f"openai/{MODEL}", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"]
ARGUMENTS += ["--no-git", "--yes-always", "--no-pretty", "--message", "What does note.txt say?", "note.txt"]


def ask(*arguments: str) -> Callable[[], None]:
    def check() -> None:
        environment = os.environ | {"HOME": str(WORK), "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [Path(sys.executable).with_name("aider"), *arguments, *ARGUMENTS],
            cwd=WORK,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        expect(DONE in done.stdout.splitlines(), done.stdout[-500:] + done.stderr[-500:])

    return check


(WORK / "note.txt").write_text("blue lamp\n")
run(stream=ask(), chat=ask("--no-stream"), second_turn=ask("--restore-chat-history"))
