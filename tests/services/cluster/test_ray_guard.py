"""Error messages for a Ray that does not start. The guard of a running Ray: tests/services/e2e/own/test_secure.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Never

import psutil
import pytest
from ray._private import ray_logging
from ray._private import worker as ray_worker

from ringserve.cp_core.errors import Unavailable
from ringserve.services.cluster import ray_guard
from tests.waiting import WAIT_SECONDS

WAIT_FOR_INPUT = [sys.executable, "-c", "input()"]


def test_a_ray_that_does_not_start_is_told_in_one_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_others, left = subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE), []

    def init(**options: object) -> Never:
        left.append(subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE))
        raise Exception("The node timed out.\n  in some file, line 3")  # as bare as Ray's own

    monkeypatch.setattr("ray.init", init)
    for name in ("_make_token", "tame_output"):  # both are for the rest of a process's life
        monkeypatch.setattr(ray_guard, name, lambda: None)
    monkeypatch.setattr(ray_guard, "END_SECONDS", 0.1)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(Unavailable) as caught:
        ray_guard.start_own_ray(1, "test", tmp_path)
    assert str(caught.value) == "Ray did not start: The node timed out."
    (process,) = left
    process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert of_others.poll() is None
    of_others.communicate(b"\n", timeout=WAIT_SECONDS)


@pytest.mark.parametrize(("name", "found"), [("raylet", "raylet"), ("gcs_server", "gcs_server"), ("monitor", "")])
def test_a_process_of_ray_that_ends_is_found_if_no_actor_lives_without_it(
    tmp_path: Path, name: str, found: str
) -> None:
    program = tmp_path / name
    program.symlink_to(shutil.which("cat") or "")
    processes = [subprocess.Popen([path], stdin=subprocess.PIPE) for path in (program, "cat")]
    watched = [psutil.Process(process.pid) for process in processes]
    try:
        assert ray_guard.find_ended(watched) == ""
        watched[0].kill()
        deadline = time.monotonic() + WAIT_SECONDS
        while watched[0].status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
        assert ray_guard.find_ended(watched) == found
        processes[0].wait()
        assert ray_guard.find_ended(watched) == found, "also after Ray has waited for it"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("source", ["raylet", "autoscaler"])
def test_lines_of_ray_itself_reach_the_log_and_not_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, source: str
) -> None:
    monkeypatch.setitem(vars(ray_logging), "RAY_DEDUP_LOGS", vars(ray_logging)["RAY_DEDUP_LOGS"])
    monkeypatch.setitem(vars(ray_worker), "print_worker_logs", ray_worker.print_worker_logs)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "0")
    ray_guard.tame_output()
    caplog.set_level("DEBUG")
    data = {"ip": "127.0.0.1", "localhost": "127.0.0.1", "is_err": True}
    for pid, line in ((source, "Error: No available node types"), (17, "ring prefill-0 serves")):
        ray_worker.print_to_stdstream(data | {"pid": pid, "lines": [line]}, ignore_prefix=False)
    assert capsys.readouterr().err == "(pid=17) ring prefill-0 serves\n"
    assert "Ray: Error: No available node types" in caplog.text


SHOW_RAY = """
import sys
from pathlib import Path
import psutil
import ray
from ringserve.services.cluster import ray_guard
from ringserve.services.cluster.ray_guard import start_own_ray

if len(sys.argv) > 2:
    ray_guard.AGENT_PORTS = ("OF_ANOTHER_RAY",)
start_own_ray(1, "test", Path(sys.argv[1]))

@ray.remote
def where():
    import psutil
    return psutil.__file__

print(ray.get(where.remote()))
for process in psutil.Process().children(recursive=True):
    print(*process.cmdline())
ray.shutdown()
"""
"""Program that prints where its own Ray finds psutil, and then the command of each process of Ray."""


@pytest.mark.parametrize("can_be_told", [True, False])
def test_an_own_ray_takes_no_library_from_the_folder_of_the_command_and_starts_nothing_unused(
    can_be_told: bool, tmp_path: Path
) -> None:
    """A Ray that cannot be told that its agents have no ports starts them."""
    (tmp_path / "psutil.py").write_text("raise RuntimeError('imported from the folder of the command')")
    temporary = Path(tempfile.mkdtemp(dir="/tmp", prefix="ray-"))  # paths of Ray's sockets must be short
    try:
        shown = subprocess.run(
            [sys.executable, "-P", "-c", SHOW_RAY, temporary, *([] if can_be_told else ["other"])],
            cwd=tmp_path,
            env=os.environ | {"RAY_worker_niceness": "0"},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    assert shown.returncode == 0, shown.stderr
    library, *commands = shown.stdout.splitlines()
    assert Path(library).parent.name == "psutil"
    assert any("log_monitor.py" in each for each in commands), "it forwards what ranks print"
    assert not [each for each in commands if "dashboard.py" in each or "/monitor.py" in each]
    # The command line of the raylet contains the commands of its agents.
    assert any("agent/main.py" in each for each in commands) is not can_be_told, commands
