"""The head: its health checks, and head.sh, Ray beside `ringserve up`, with small programs in their places."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from bench.chaos.nodes import HEALTH
from tests.helm.charts import CHART, pod_templates, render
from tests.waiting import WAIT_SECONDS

RAY = "ray start --head --block"
RINGSERVE = "ringserve up --config config.yaml --no-gateway --drain-seconds 30 --leave-ranks"
PROGRAM = """#!{python} -S
import os, signal, sys

signals = {{signal.SIGTERM, signal.SIGUSR1}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with open({started!r}, "a") as started:
    started.write(" ".join([str(os.getpid()), "{name}", *sys.argv[1:]]) + "\\n")
if signal.sigwait(signals) == signal.SIGUSR1:
    sys.exit(3)
with open({log!r}, "a") as log:
    log.write("{name} ends\\n")
"""


@dataclass(frozen=True)
class Head:
    """Running head, the processes of both programs by name, and the file that a program writes to at its end."""

    process: subprocess.Popen[bytes]
    programs: Mapping[str, int]
    log: Path
    starts: TextIO

    def fail(self, program: str) -> None:
        """Let a program end by itself."""
        os.kill(self.programs[program], signal.SIGUSR1)

    def next_start(self) -> tuple[int, str]:
        """Wait for the next start of a program -> (its process id, its command)."""
        pid, _, command = self.starts.readline().strip().partition(" ")
        return int(pid), command

    def end(self) -> tuple[int, list[str]]:
        """Wait for the head's end -> (its status, the programs that were told to end)."""
        return self.process.wait(WAIT_SECONDS), self.log.read_text().splitlines()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """Start the head, and return when both programs run."""
    log, started = tmp_path / "log", tmp_path / "started"
    log.touch()
    os.mkfifo(started)
    for name in ("ray", "ringserve"):
        path = tmp_path / name
        path.write_text(PROGRAM.format(python=sys.executable, log=str(log), started=str(started), name=name))
        path.chmod(0o755)
    with os.fdopen(os.open(started, os.O_RDWR)) as lines:  # to write as well: no program meets a closed end
        process = subprocess.Popen(
            ["/bin/bash", str(CHART / "files/head.sh"), "config.yaml", "30"],
            env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": RAY},
            start_new_session=True,
        )
        try:
            words = [lines.readline().strip().partition(" ") for _ in range(2)]
            commands = {command: int(pid) for pid, _, command in words}
            assert set(commands) == {RAY, RINGSERVE}
            yield Head(process, {"ray": commands[RAY], "ringserve": commands[RINGSERVE]}, log, lines)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_SECONDS)


def test_the_head_ends_as_failed_when_ray_does(head: Head) -> None:
    head.fail("ray")
    assert head.end() == (1, ["ringserve ends"])


def test_a_ringserve_that_ends_by_itself_is_started_again_beside_the_same_ray(head: Head) -> None:
    """A new head would cost every worker its Ray, and so its model."""
    head.fail("ringserve")
    second, command = head.next_start()
    assert command == RINGSERVE
    assert second != head.programs["ringserve"]
    head.process.send_signal(signal.SIGTERM)
    assert head.end() == (0, ["ringserve ends", "ray ends"])


def test_a_head_is_told_to_end_while_no_ringserve_runs(head: Head) -> None:
    head.fail("ringserve")
    head.process.send_signal(signal.SIGTERM)
    status, told = head.end()
    assert status == 0
    assert told in (["ray ends"], ["ringserve ends", "ray ends"])


def test_a_head_that_is_told_to_end_ends_the_rings_before_ray(head: Head) -> None:
    head.process.send_signal(signal.SIGTERM)
    assert head.end() == (0, ["ringserve ends", "ray ends"])


def test_the_head_takes_a_silent_node_for_dead_as_soon_as_that_of_chaos_runs_does() -> None:
    templates = pod_templates(render())
    health = {
        name: {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("RAY_health")}
        for name, template in templates.items()
        for container in template["spec"]["containers"]
    }
    assert health.pop("head") == HEALTH
    assert set(map(len, health.values())) == {0}
