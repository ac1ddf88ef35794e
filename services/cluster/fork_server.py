"""Process that has imported the modules of Ray's workers, and forks them: router, leaders and ranks of one machine.

Without it, each worker starts Python twice and imports Ray both times, then becomes an actor and imports the rest: two
to four seconds of processor time. A fork has imported everything, and shares that memory.

Ray runs this file in the place of its own `setup_worker.py`, once for each worker. It hands the worker's arguments,
environment and files to the server, and ends. If that is not possible, it does what Ray's file does.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # the folder of this file, some of whose modules are called like Python's own

# Only light modules here: each worker imports them before it asks for its fork.
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOCKET_VARIABLE = "RINGSERVE_FORK_SERVER"
"""Variable with the path of the server's socket."""
OUTPUT_VARIABLE = "RINGSERVE_WORKER_OUTPUT"
"""Variable with the path of the standard error of the process that starts Ray; unset if workers are not to write there.
In a worker it has the number of that open file instead, which `write_as_starter` takes.
"""
ANSWER_SECONDS = 45.0
"""Seconds that a worker waits for the server, which may still be importing, and the server for the rest of a request.
Ray gives a worker 60 s to start, and then starts another.
"""
MAX_WAITING = 64
"""Workers that wait for the server at a time; more start as Ray would start them."""
MODULES = (
    "ringserve.workers.rank.worker",
    "ringserve.orchestration.router.router",
    "ringserve.services.config",
    "ringserve.services.rpc.servicers",
)
RAY_MODULES = ("ray._private.workers.default_worker", "ringserve.services.cluster.running")
RAYLET, JOB = "RAY_RAYLET_PID", "RAY_JOB_ID"
NO_JOB = "ffffffff"
"""Job of a worker that Ray starts in advance, and may give to any job later."""
PYTHON = "--language=PYTHON"
CONTEXT = "--serialized-runtime-env-context"


class ForkServer:
    """Fork server handle, which ends with `close`, or with this process. Its forks do not end with it."""

    def __init__(self, directory: Path) -> None:
        """Start it. Its socket is made in `directory`, which only this user may enter. Raises OSError."""
        self.path = directory / "forks"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen(MAX_WAITING)
            self.process = subprocess.Popen(
                (sys.executable, "-P", "-m", __name__, str(listener.fileno())),
                stdin=subprocess.PIPE,
                process_group=0,  # Ctrl-C reaches the starter alone
                pass_fds=(listener.fileno(),),
            )

    def close(self) -> None:
        """End the server. Idempotent."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None, "it is a pipe"
        self.process.stdin.close()
        self.path.unlink(missing_ok=True)


def serve(listener: socket.socket) -> None:
    """Fork a worker for each request, until standard input ends. In a fork it returns when the worker has ended."""
    gc.disable()  # collections would find nothing
    _load()
    raylet = ""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            if any(key.fileobj is not listener for key, _ in selector.select()):
                return
            connection, _ = listener.accept()
            files: list[int] = []
            with connection, suppress(OSError, ValueError):
                connection.settimeout(ANSWER_SECONDS)
                request = _receive(connection, files)
                of_raylet = request["environment"].get(RAYLET, "")
                if not raylet:
                    raylet = of_raylet
                    os.environ.update(request["environment"] | {JOB: NO_JOB})
                    _load_ray()
                    gc.freeze()
                if of_raylet == raylet and len(os.listdir("/proc/self/task")) == 1:
                    # The answer comes first: if the worker has given up and starts by itself, sending fails.
                    connection.sendall(b"\n")
                    if not os.fork():
                        break
            for file in files:
                os.close(file)
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.enable()
    _become(request, files)


def _load() -> None:
    """Import the modules that do not import Ray. If an import fails, the workers import the rest themselves."""
    try:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads begin when it is imported
        os.environ.update(import_module("ringserve.workers.protocol.ranks").rank_variables(os.environ))
        for name in MODULES:
            import_module(name)
        import_module("ringserve.workers.model.hugging_face").prepare_conversions()
    except Exception as error:
        _tell(error)


def _load_ray() -> None:
    """Import Ray. It reads some variables only at its import, so the environment must be a worker's by now."""
    try:
        for name in RAY_MODULES:
            import_module(name)
    except Exception as error:
        _tell(error)


def _tell(error: Exception) -> None:
    print(f"ringserve: each of Ray's workers imports the rest by itself: {error}", file=sys.stderr, flush=True)


def _receive(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """Return a request, and append its standard input, output and error to `files`."""
    first, received, _, _ = socket.recv_fds(connection, 1, 3)
    files += received
    with connection.makefile("rb") as rest:
        request: dict[str, Any] = json.loads(first + rest.read())
    return request


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Be the worker of a request until it ends."""
    os.setpgid(0, 0)  # as workers that Ray starts
    if request["environment"].get(OUTPUT_VARIABLE):
        request["environment"][OUTPUT_VARIABLE] = str(os.dup(2))
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal with `tostop` stops other groups that write
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _is_forked(arguments: Sequence[str]) -> bool:
    """Let the server fork a worker with these arguments of Ray. Return False if it cannot."""
    path = os.environ.pop(SOCKET_VARIABLE, "")
    plain = [PYTHON, f"{CONTEXT}={{}}"]
    rest = [each for each in arguments if each not in plain]
    if not path or PYTHON not in arguments or any(each.startswith(CONTEXT) for each in rest):
        return False  # a runtime environment may want what a fork cannot give, such as another Python
    request = {"arguments": rest, "environment": dict(os.environ), "directory": os.getcwd()}
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(path)
        data = json.dumps(request).encode()
        socket.send_fds(connection, [data[:1]], [0, 1, 2])
        connection.sendall(data[1:])
        connection.shutdown(socket.SHUT_WR)
        return bool(connection.recv(1))
    return False


def main() -> None:
    """Be the server, with the number of its socket as the only argument, or the command that Ray runs for a worker."""
    arguments = sys.argv[1:]
    if len(arguments) == 1:
        serve(socket.socket(fileno=int(arguments[0])))
    elif not _is_forked(arguments):
        ray = find_spec("ray")
        assert ray is not None, "Ray runs this"
        assert ray.origin is not None, "it is a package"
        script = Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py"
        if path := os.environ.pop(OUTPUT_VARIABLE, ""):
            with suppress(OSError):  # it may be a socket, which cannot be opened: then only Ray's files get the output
                output = os.open(path, os.O_WRONLY | os.O_APPEND)
                os.set_inheritable(output, True)
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                os.environ[OUTPUT_VARIABLE] = str(output)
        os.execv(sys.executable, [sys.executable, str(script), *arguments])


if __name__ == "__main__":
    main()
