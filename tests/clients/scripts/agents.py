"""Coding agents: each copies a file by its tool, tells so, and does it again in the next turn of its conversation.

The model has a script (`tests/clients/scripted.py`), since no model that this machine computes follows their rules.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks import MODEL, URL, expect, run

ASKED = "Copy note.txt to copy.txt."
DONE = "The copy is made."
AGENT_SECONDS = 120.0
HOME = Path(tempfile.mkdtemp(prefix="ringserve-agent-"))
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
WORK = HOME / "work"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Agent by its file of settings in the home folder, and the arguments of its first turn and of the next one."""

    program: str
    settings: str
    text: str
    first: Sequence[str]
    following: Sequence[str]


CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CODEX_SETTINGS = f"""model = "{MODEL}"
model_provider = "ringserve"
[model_providers.ringserve]
name = "ringserve"
base_url = "{URL}/v1"
wire_api = "responses"
"""
CONTINUE_SETTINGS = {
    "name": "local",
    "version": "0.0.1",
    "schema": "v1",
    "models": [
        {
            "name": MODEL,
            "provider": "openai",
            "model": MODEL,
            "apiBase": f"{URL}/v1",
            "apiKey": "none",
            "roles": ["chat"],
            "capabilities": ["tool_use"],
        }
    ],
}
OPENCODE_SETTINGS = {
    "provider": {
        "ringserve": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
            "models": {MODEL: {"tool_call": True}},
        }
    }
}
AGENTS = {
    "@openai/codex": Agent(
        program="codex",
        settings=".codex/config.toml",
        text=CODEX_SETTINGS,
        first=("exec", *CODEX, ASKED),
        following=("exec", "resume", "--last", *CODEX, ASKED),
    ),
    "@anthropic-ai/claude-code": Agent(
        program="claude",
        settings=".claude/settings.json",
        text="{}",
        first=("-p", ASKED, "--allowedTools", "Bash"),
        following=("-p", ASKED, "--continue", "--allowedTools", "Bash"),
    ),
    "@continuedev/cli": Agent(
        program="cn",
        settings=".continue/config.yaml",
        text=json.dumps(CONTINUE_SETTINGS),
        first=("-p", ASKED, "--auto", "--config", str(HOME / ".continue/config.yaml")),
        following=("-p", ASKED, "--auto", "--resume", "--config", str(HOME / ".continue/config.yaml")),
    ),
    "opencode-ai": Agent(
        program="opencode",
        settings=".config/opencode/opencode.json",
        text=json.dumps(OPENCODE_SETTINGS),
        first=("run", "--model", f"ringserve/{MODEL}", "--auto", ASKED),
        following=("run", "--continue", "--model", f"ringserve/{MODEL}", "--auto", ASKED),
    ),
}
agent, folder = AGENTS[sys.argv[1]], Path(sys.argv[2])
ENVIRONMENT = os.environ | {
    "HOME": str(HOME),
    "PWD": str(WORK),
    "CODEX_HOME": str(HOME / ".codex"),
    "XDG_CONFIG_HOME": str(HOME / ".config"),
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
}


def ask(arguments: Sequence[str]) -> Callable[[], None]:
    """Return the check of one turn: the tool has run, and the agent's last words came."""

    def check() -> None:
        (WORK / "copy.txt").unlink(missing_ok=True)
        program = folder / "node_modules" / ".bin" / agent.program
        done = subprocess.run(
            [program, *arguments],
            cwd=WORK,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AGENT_SECONDS,
            check=False,
        )
        copied = WORK / "copy.txt"
        expect(copied.is_file() and copied.read_text() == "blue lamp\n", done.stderr[-500:] + done.stdout[-500:])
        expect(DONE in done.stdout, done.stdout[-500:])

    return check


WORK.mkdir()
(WORK / "note.txt").write_text("blue lamp\n")
settings = HOME / agent.settings
settings.parent.mkdir(parents=True)
settings.write_text(agent.text)
run(tools=ask(agent.first), second_turn=ask(agent.following))
