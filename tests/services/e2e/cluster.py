"""A real cluster as tests see it: commands that are run, processes that come and go, calls over gRPC."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from ringserve.client import RingInfo, ServerInfo
from ringserve.client.results import MAPPER
from ringserve.services.cli.main import main
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.waiting import START_SECONDS, WAIT_SECONDS

Call = Any
"""A running stream: an iterator of GenerateResponse that is also a grpc.Call, for which gRPC's stubs have no name."""
ROOT = Path(__file__).resolve().parents[3]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Return when `condition` holds; fail the test, saying `what` did not come, after `seconds`."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        pause.wait(0.02)


@dataclass(frozen=True)
class Ringserve:
    """The console program, with directories of its own instead of the user's, and its modules in the folders `code`."""

    directory: Path
    code: tuple[Path, ...] = (ROOT / "proto",)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGSERVE_")}
        return inherited | {
            "RINGSERVE_STATE": str(self.directory / "state"),
            "RINGSERVE_CACHE": str(self.directory / "cache"),
            "PYTHONPATH": os.pathsep.join(map(str, self.code)),
            "COLUMNS": "200",
            # Ray would let its workers have what other processes leave: beside other tests that is next to nothing.
            "RAY_worker_niceness": "0",
            # It has 60 s by default to import what a rank needs.
            "RAY_worker_register_timeout_seconds": f"{START_SECONDS:g}",
            # What these tests expect to be pulled must not depend on how fast this machine is today.
            "RINGSERVE_ROUTER__MISSING_KV": "pull",
            # Nor that it goes over a prefill ring: the decode ring computes what is asked of it, and nothing else.
            "RINGSERVE_DECODE__MAX_DIRECT_SECONDS": "0",
            # Spares take seconds to load, beside the rings of the other tests. The shared cluster has them.
            "RINGSERVE_GATEWAY__SPARE": "false",
            "RINGSERVE_ROUTER__SPARE": "false",
            # A busy machine must not make a healthy process look lost; one that is frozen stays so.
            "RINGSERVE_TIMEOUTS__LOST": "10",
            "RINGSERVE_TIMEOUTS__START": f"{START_SECONDS / 2:g}",
            **{f"RINGSERVE_TIMEOUTS__{name}": f"{WAIT_SECONDS:g}" for name in ("CONTROL", "TRANSFER", "STUCK", "STEP")},
        }

    def run(self, *arguments: str, typed: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in this process, with `typed` on its standard input and further variables of its environment.

        No interpreter has to start for it, which would take longer than the command.
        """
        printed, errors = io.StringIO(), io.StringIO()
        with (
            patch.dict(os.environ, self.environment | variables, clear=True),
            patch("sys.stdin", io.StringIO(typed)),
            redirect_stdout(printed),
            redirect_stderr(errors),
        ):
            try:
                status = main(arguments)
            except SystemExit as end:  # of help or the version
                status = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, status, printed.getvalue(), errors.getvalue())

    def run_process(
        self, *arguments: str, typed: str = "", seconds: float = WAIT_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in a process and a folder of its own, with `typed` on its standard input.

        The process also leads a new session, because Linux divides cores among sessions first. In the session of the
        tests, ranks (nice value 15) would get a thirtieth of a core while three tests compute.
        """
        return subprocess.run(
            [sys.executable, "-m", "ringserve.services.cli.main", *arguments],
            cwd=self.directory,
            env=self.environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            start_new_session=True,
        )

    def start(self, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own, as a terminal does; what it prints goes to `output`."""
        with output.open("wb") as target:
            return subprocess.Popen(
                [sys.executable, "-m", "ringserve.services.cli.main", *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Family:
    """Process, its descendants, and all processes that share a session with one of them, also those that have ended."""

    def __init__(self, pid: int) -> None:
        self._sessions = {pid}
        self._seen: set[psutil.Process] = set()
        self.look()

    def look(self) -> None:
        """Add the processes that run now."""
        for process in psutil.process_iter():
            try:
                ancestors = {parent.pid for parent in process.parents()}
                session = os.getsid(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
            if session in self._sessions or ancestors & self._sessions:
                self._seen.add(process)
                self._sessions.add(session)

    def alive(self) -> list[str]:
        """Those that still run, by command."""
        self.look()
        return [" ".join(_command(process)) for process in self._seen if is_alive(process)]

    def wait_gone(self, seconds: float = WAIT_SECONDS) -> None:
        """Nothing of it may be left."""
        wait_until(lambda: not self.alive(), f"processes still run: {self.alive()}", seconds)

    def kill(self) -> None:
        """End all that still run, at once."""
        self.look()
        for process in self._seen:
            if is_alive(process):
                process.kill()

    def temporary_directories(self) -> set[Path]:
        """Those in which Ray keeps its sessions."""
        words = (word for process in self._seen for word in _command(process))
        return {
            Path(*Path(word.partition("=")[2]).parts[:3])
            for word in words
            if word.startswith(("--session-dir=", "--log_dir=", "--raylet_socket_name="))
        }


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs: one that has ended and is not yet reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def pid_at(endpoint: str) -> int:
    """Return the id of the process that listens at HOST:PORT."""
    port = int(endpoint.rpartition(":")[2])
    found = (
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    )
    pid = next(found)
    assert pid is not None
    return pid


class Inference:
    """Client of a cluster's gateway, one call a method."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.channel = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def stream(self, request: inference_pb2.GenerateRequest, seconds: float = WAIT_SECONDS) -> Call:
        return self.stub.Generate(request, timeout=seconds)

    def answer(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateComplete:
        """Run a turn to its end."""
        last: inference_pb2.GenerateResponse
        *_, last = self.stream(request)
        assert last.HasField("complete"), last
        return last.complete

    @contextmanager
    def running(self, request: inference_pb2.GenerateRequest, tokens: int = 1) -> Iterator[Call]:
        """Yield a running turn that has sent at least `tokens` tokens (0: its plan); cancel it at the end."""
        call = self.stream(request)
        try:
            for response in call:
                if response.chunk.completion_tokens >= tokens:
                    break
            yield call
        finally:
            call.cancel()

    def info(self) -> ServerInfo:
        found = self.stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=WAIT_SECONDS)
        return MAPPER.from_message(ServerInfo, found)

    def ring(self, role: str) -> RingInfo:
        return next(ring for ring in self.info().rings if ring.role == role)

    def conversation(self, conversation_id: str) -> inference_pb2.GetConversationResponse:
        request = inference_pb2.GetConversationRequest(conversation_id=conversation_id)
        return self.stub.GetConversation(request, timeout=WAIT_SECONDS)

    def delete(self, conversation_id: str) -> None:
        request = inference_pb2.DeleteConversationRequest(conversation_id=conversation_id)
        self.stub.DeleteConversation(request, timeout=WAIT_SECONDS)

    def abort(self, *request_ids: str) -> inference_pb2.AbortResponse:
        return self.stub.Abort(inference_pb2.AbortRequest(request_ids=request_ids), timeout=WAIT_SECONDS)

    def free_blocks(self) -> list[int]:
        """Free KV blocks of every rank of both rings."""
        return [rank.free_blocks for ring in self.info().rings for rank in ring.kv_usage]

    def is_idle(self) -> bool:
        """Return True if no turn runs or waits anywhere, and every ring serves."""
        info = self.info()
        return not info.running_turns and all(
            ring.state == "ready"
            and not ring.num_requests_running
            and not ring.num_requests_waiting
            and not any(rank.active_blocks for rank in ring.kv_usage)
            for ring in info.rings
        )


@contextmanager
def idle_after(gateway: str) -> Iterator[Inference]:
    """Yield a client of the gateway; after its use the cluster becomes idle, with all rings ready."""
    inference = Inference(gateway)
    try:
        yield inference
        wait_until(inference.is_idle, f"the cluster is not idle: {inference.info()}")
    finally:
        inference.channel.close()


def ids(
    prompt: Iterable[int],
    *,
    max_tokens: int = 6,
    conversation: str = "",
    request_id: str = "",
    mode: inference_pb2.PromptMode.ValueType = inference_pb2.PROMPT_MODE_UNSPECIFIED,
    temperature: float = 0.0,
    seed: int | None = None,
    stops: Sequence[int] = (),
) -> inference_pb2.GenerateRequest:
    """Return the request of a turn whose prompt is token ids."""
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=inference_pb2.TokenizedInput(input_ids=prompt),
        conversation_id=conversation,
        prompt_mode=mode,
        sampling_params=inference_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stops
        ),
    )


@dataclass(frozen=True)
class Cluster:
    """A cluster that `ringserve up` started."""

    ringserve: Ringserve
    name: str
    gateway: str
    http: str
    metrics: str
    router: str
    pid: int


def scrape(cluster: Cluster) -> Mapping[str, float]:
    """Return every sample of the gateway by name{label=value,...}."""
    with urllib.request.urlopen(f"http://{cluster.metrics}/metrics", timeout=WAIT_SECONDS) as answer:
        body = answer.read().decode()
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def options_of(model_path: Path) -> list[str]:
    """Return common settings of test clusters: little memory, any free ports, many short prefill steps."""
    values = {
        "model.path": model_path,
        "gateway.listen": "127.0.0.1:0",
        "gateway.http": "127.0.0.1:0",
        "gateway.metrics": "127.0.0.1:0",
        "prefill.cp": 2,
        "prefill.chunk_tokens": 64,
        "decode.cp": 2,
        "kv_cache.tokens_per_rank": 16384,
        # Requests without a conversation leave no KV: tests compare blocks and moves before and after them.
        "router.retain_prompts": "false",
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@contextmanager
def running_cluster(ringserve: Ringserve, name: str, model_path: Path, *options: str) -> Iterator[Cluster]:
    """Start a cluster in the background; end it with `ringserve down`, after which nothing of it may be left.

    A test may have ended it already.
    """
    ready = ringserve.directory / f"{name}.json"
    up = ringserve.run_process(
        *("up", "--detach", "--name", name, "--ready-file", str(ready)),
        *options_of(model_path),
        *options,
        seconds=START_SECONDS,
    )
    assert up.returncode == 0, up.stderr
    cluster = Cluster(ringserve, **json.loads(ready.read_text()))
    family = Family(cluster.pid)
    try:
        yield cluster
    finally:
        family.look()
        try:
            if psutil.pid_exists(cluster.pid):
                down = ringserve.run("down", "--name", name)
                assert down.returncode == 0, down.stderr
            family.wait_gone()
        finally:
            family.kill()  # a cluster that did not end is a failure here, and must not be one of other tests
    assert not any(directory.exists() for directory in family.temporary_directories())


def kill(pid: int) -> None:
    """End a process as the kernel does when memory runs out."""
    os.kill(pid, signal.SIGKILL)
