"""A forked worker is like one that Ray starts. Where a server cannot fork, Ray starts the worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringserve.orchestration.ring import actors
from ringserve.services.cluster import fork_server
from ringserve.services.cluster.fork_server import OUTPUT_VARIABLE, RAYLET, SOCKET_VARIABLE, ForkServer
from tests.waiting import WAIT_SECONDS

SERVER = """
import socket, sys
from ringserve.services.cluster import fork_server
fork_server._load = sys.stdin.readline if "waits" in sys.argv else lambda: None
fork_server._load_ray = lambda: None
if "threads" in sys.argv:
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
fork_server.serve(socket.socket(fileno=int(sys.argv[1])))
"""
"""Server that imports nothing."""
WORKER = """
import json, os, signal, sys
read = sys.stdin.read()
told = {"arguments": sys.argv[1:], "environment": dict(os.environ), "directory": os.getcwd(), "read": read}
ids = {"parent": os.getppid(), "group": os.getpgid(0), "process": os.getpid()}
child_signal = signal.getsignal(signal.SIGCHLD)
print(json.dumps(told | ids | {"child_signal": child_signal, "script": __file__, "name": __name__}))
print("to standard error", file=sys.stderr)
sys.exit(3)
"""


class Server:
    """Server in a process of its own, which holds its standard input, and the environment of what asks it."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.path = directory / "forks"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen()
            command = (sys.executable, "-c", SERVER, str(listener.fileno()), *words)
            self.log = directory / "server.log"
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stderr=log, pass_fds=(listener.fileno(),)
                )
        self.environment = os.environ | {SOCKET_VARIABLE: str(self.path), RAYLET: "77", "OF_THIS": "worker"}

    def end(self) -> int:
        """End its parent's hold on it; return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_SECONDS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.kill()
    server.end()


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    """Return the command by which Ray would start a worker that tells what it is."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, fork_server.__file__, str(script), "--id=8", "--language=PYTHON"]


def run(command: list[str], environment: dict[str, str], directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        command,
        env=environment,
        cwd=directory,
        input="a question",
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.stderr == "to standard error\n"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_forked_worker_has_everything_of_the_process_that_ray_started(
    server: Server, worker: list[str], tmp_path: Path
) -> None:
    told = run(worker, server.environment, tmp_path)
    assert told["arguments"] == ["--id=8"]
    assert told["script"] == worker[2]
    assert told["name"] == "__main__"
    assert told["read"] == "a question"
    assert told["directory"] == str(tmp_path)
    assert told["environment"] == {key: value for key, value in server.environment.items() if key != SOCKET_VARIABLE}
    assert told["parent"] == server.process.pid
    assert told["group"] == told["process"]
    assert told["child_signal"] == signal.SIG_DFL
    assert run(worker, server.environment | {"OF_THIS": "other"}, tmp_path)["environment"]["OF_THIS"] == "other"
    _, left = psutil.wait_procs(psutil.Process(server.process.pid).children(), WAIT_SECONDS)
    assert left == [], "of none that has ended remains what nobody waits for"


@pytest.mark.parametrize("lack", ["server", "plain environment", "raylet", "one thread"])
def test_without_a_fork_a_worker_starts_as_ray_starts_it(
    lack: str, server: Server, worker: list[str], tmp_path: Path
) -> None:
    environment = dict(server.environment)
    if lack == "server":
        server.process.kill()
        server.end()
    elif lack == "raylet":
        run(worker, environment, tmp_path)
        environment[RAYLET] = "78"
    elif lack == "one thread":
        (tmp_path / "other").mkdir()
        threads = Server(tmp_path / "other", "threads")
        environment = threads.environment
    else:
        worker += ['--serialized-runtime-env-context={"env_vars": {"ONE": "1"}}']
    told = run(worker, environment, tmp_path)
    assert told["parent"] == os.getpid()
    assert told["arguments"] == ["--id=8"]
    assert told["environment"].get("ONE") == ("1" if lack == "plain environment" else None)
    if lack == "one thread":
        assert threads.end() == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_writes_where_the_starter_does_forked_or_not(is_there: bool, server: Server, tmp_path: Path) -> None:
    """It has the file beside Ray's, and takes it when it becomes an actor."""
    if not is_there:
        server.process.kill()
        server.end()
    script, said = tmp_path / "worker.py", f"of {'a fork' if is_there else 'Ray'}"
    script.write_text(
        f"import sys\nfrom ringserve.orchestration.ring.actors import write_as_starter\n"
        f"import signal\nassert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN\n"
        f"print('for a file of Ray')\nwrite_as_starter()\nprint({said!r}, flush=True)\n"
        f"print({said!r}, file=sys.stderr)\nwrite_as_starter()"
    )
    done = subprocess.run(
        [sys.executable, fork_server.__file__, str(script), "--language=PYTHON"],
        env=server.environment | {OUTPUT_VARIABLE: str(server.log)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert (done.stdout, done.stderr) == ("for a file of Ray\n", "")
    if is_there:
        psutil.wait_procs(psutil.Process(server.process.pid).children(), WAIT_SECONDS)
    assert server.log.read_text().splitlines() == [said, said]
    assert actors.OUTPUT_VARIABLE == OUTPUT_VARIABLE


def test_a_worker_that_has_given_up_is_not_forked(worker: list[str], tmp_path: Path) -> None:
    server = Server(tmp_path, "waits")
    request = {"arguments": worker[2:], "environment": server.environment, "directory": str(tmp_path)}
    with (tmp_path / "output").open("w+") as output:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(server.path))
            data = json.dumps(request).encode()
            socket.send_fds(asking, [data[:1]], [output.fileno()] * 3)
            asking.sendall(data[1:])
        assert server.process.stdin is not None
        server.process.stdin.write(b"\n")
        server.process.stdin.flush()
        other = run(worker, server.environment, tmp_path)
        assert other["parent"] == server.process.pid, "it has come to the next request"
        assert server.end() == 0
        assert output.read() == ""


def test_the_server_imports_what_workers_do_with_one_thread_and_ends_with_its_parent(tmp_path: Path) -> None:
    parent = f"""
import sys
from pathlib import Path
from ringserve.services.cluster.fork_server import ForkServer
print(ForkServer(Path({str(tmp_path)!r})).process.pid, flush=True)
sys.stdin.read()
"""
    script = tmp_path / "worker.py"
    names = ("torch", "transformers", "ringserve.workers.rank.worker", "ringserve.services.cluster.running", "ray")
    script.write_text(f"import os, sys; print([name in sys.modules for name in {names}], os.getppid())")
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        server = psutil.Process(pid)
        said, deadline = "", time.monotonic() + WAIT_SECONDS
        while not said.endswith(f" {pid}\n"):  # on a busy machine it may import for longer than a worker waits
            assert time.monotonic() < deadline, said
            said = subprocess.run(
                [sys.executable, fork_server.__file__, str(script), "--language=PYTHON"],
                env=os.environ | {SOCKET_VARIABLE: str(tmp_path / "forks"), RAYLET: "77"},
                capture_output=True,
                text=True,
                timeout=WAIT_SECONDS,
            ).stdout
        assert said == f"{[True] * len(names)} {pid}\n"
        process.kill()
        server.wait(WAIT_SECONDS)


def test_a_server_is_closed_more_than_once(tmp_path: Path) -> None:
    server = ForkServer(tmp_path)
    server.close()
    server.close()
    assert server.process.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
