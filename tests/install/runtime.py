"""OCI runtime for podman and buildah: runc, where the caller may raise no limits.

Container engines run it as a program. A container of podman asks for limits of open files and for an OOM score that
need CAP_SYS_RESOURCE. Root in a container of its own has no such capability, and runc then refuses to start.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

BUNDLE = ("--bundle", "-b")
PROCESS = ("--process", "-p")


def value_of(words: list[str], names: tuple[str, str]) -> str:
    """Return the value of an option of the runtime's command line, empty if it is not there."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in names:
            return following
        if word.startswith(f"{names[0]}="):
            return word.partition("=")[2]
    return ""


def relax(process: dict[str, Any]) -> None:
    """Remove from the description of a process what needs CAP_SYS_RESOURCE."""
    process.pop("rlimits", None)
    if process.get("oomScoreAdj", 0) < 0:
        del process["oomScoreAdj"]


def relax_file(words: list[str]) -> None:
    """Relax the process that a command line of the runtime begins, in the file that describes it."""
    if {"create", "run"} & set(words):
        file = Path(value_of(words, BUNDLE)) / "config.json"
        asked = json.loads(file.read_text())
        relax(asked["process"])
    elif "exec" in words and value_of(words, PROCESS):
        file = Path(value_of(words, PROCESS))
        asked = json.loads(file.read_text())
        relax(asked)
    else:
        return
    file.write_text(json.dumps(asked))


if __name__ == "__main__":
    relax_file(sys.argv[1:])
    os.execvp("runc", ["runc", *sys.argv[1:]])
