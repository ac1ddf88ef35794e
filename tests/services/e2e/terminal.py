"""A command in the foreground of a terminal, and the Ctrl-C that ends it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.e2e.cluster import Family, Ringserve
from tests.waiting import WAIT_SECONDS


class Foreground:
    """A running command with a process group of its own. `output` is what it printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._process = process
        self._path = path
        self._family = Family(process.pid)
        self._num_printed = 0

    @property
    def output(self) -> str:
        return self._path.read_text(errors="replace")

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def interrupt(self) -> int:
        """Ctrl-C: to everyone in the foreground, as a terminal does. Returns the exit status."""
        self._family.look()
        self._num_printed = len(self.output)
        os.killpg(self._process.pid, signal.SIGINT)
        return self._process.wait(WAIT_SECONDS)

    def check_nothing_is_left(self) -> None:
        """No process, no directory, and no stack trace in what the user saw after the Ctrl-C."""
        self._family.wait_gone()
        assert not any(directory.exists() for directory in self._family.temporary_directories())
        assert "Traceback" not in self.output[self._num_printed :], self.output

    def kill(self) -> None:
        """Whatever the test came to, the machine is cleared."""
        self._family.kill()
        self._process.wait(WAIT_SECONDS)


@contextmanager
def started(ringserve: Ringserve, directory: Path, *arguments: str) -> Iterator[Foreground]:
    """Run a command in the foreground; what it prints goes to a file in `directory`."""
    path = directory / "terminal.txt"
    command = Foreground(ringserve.start(*arguments, output=path), path)
    try:
        yield command
    finally:
        command.kill()
