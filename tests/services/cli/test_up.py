"""State of a cluster from the first moment of `up` to its end, with a cluster that starts no process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringserve.cp_core.errors import NotFound, Unavailable
from ringserve.services.cli import up
from ringserve.services.cli.main import main, parse
from ringserve.services.cluster.state import (
    ClusterStage,
    ClusterState,
    end_cluster,
    read_record,
    read_state,
    require_state,
    started_after_boot,
    write_state,
)
from ringserve.services.cluster.stopping import StopRequest
from ringserve.services.config import Config
from tests.waiting import WAIT_SECONDS

WAITING = [sys.executable, "-c", "input()"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGSERVE_STATE", str(tmp_path / "state"))
    signals = SimpleNamespace(requested=threading.Event(), insisted=threading.Event())
    monkeypatch.setattr(up, "StopSignals", lambda: signals)
    monkeypatch.setattr(up, "set_up_logs", lambda *arguments: logging.getLogger())
    return tmp_path / "state"


class FakeCluster:
    """Cluster whose start tells two rings; `during` runs in the middle of it, `watching` in place of its life."""

    gateway_address, http_address, metrics_address, router_endpoint = "g:1", "h:2", "", "r:3"

    def __init__(self, during: Callable[[], None], watching: Callable[[], None]) -> None:
        self._during = during
        self._watching = watching
        self.rings_serving = 0
        self.is_stopped = False

    def __call__(
        self, config: object, progress: Callable[[str], None], *rest: object, **options: object
    ) -> FakeCluster:
        self._progress = progress
        return self

    def start(self) -> None:
        self._progress("starting Ray")
        self.rings_serving = 1
        self._progress("ring prefill-0 serves")
        self._during()

    def watch(self) -> None:
        self._watching()

    def drain(self, insisted: threading.Event) -> None:
        """Have no turns that could end."""

    def stop(self) -> None:
        self.is_stopped = True


def nothing() -> None:
    """Let the cluster go on."""


def ran(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    during: Callable[[], None] = nothing,
    watching: Callable[[], None] = nothing,
) -> int:
    cluster = FakeCluster(during, watching)
    monkeypatch.setattr("ringserve.services.cluster.local.LocalCluster", cluster)
    monkeypatch.setattr("ringserve.services.cli.up.can_fork", lambda config: False)
    try:
        return main([*arguments])
    finally:
        assert cluster.is_stopped


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_cluster_is_known_while_it_starts_and_when_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[ClusterState] = []

    def look() -> None:
        seen.append(require_state("default"))

    assert ran(monkeypatch, "up", during=look, watching=look) == 0
    starting, ready = seen
    assert (starting.stage, starting.rings_serving, starting.num_rings) == (ClusterStage.STARTING, 1, 2)
    assert starting.progress == ("starting Ray", "ring prefill-0 serves")
    assert (ready.stage, ready.gateway, ready.router) == (ClusterStage.READY, "g:1", "r:3")
    assert read_record("default") is None
    shown = capsys.readouterr()
    assert shown.err.splitlines()[:2] == ["ringserve: starting Ray", "ringserve: ring prefill-0 serves"]
    assert "ready, gateway at g:1, model builtin:tiny (stop with Ctrl-C" in shown.out
    assert "the weights of builtin:tiny are random, so its text means nothing" in shown.out


def test_serve_is_up_with_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "serve", str(tmp_path), "--set", "prefill.cp=1") == 0
    shown = capsys.readouterr().out
    assert f"ready, gateway at g:1, model {tmp_path} (stop with" in shown
    assert "random" not in shown


@pytest.mark.parametrize(
    ("cores", "given", "shape"),
    [
        (2, [], (1, 2, 1, 2)),
        (1, [], (1, 1, 1, 1)),
        (16, [], (1, 16, 1, 16)),
        (16, ["--set", "prefill.cp=4"], (4, 1, 1, 16)),
        (16, ["--set", "decode.threads_per_rank=3"], (1, 16, 2, 3)),
        (16, ["--tensor-parallel-size", "2"], (2, 1, 2, 1)),
        (16, ["--set", "decode.max_batch=7"], (1, 16, 1, 16)),
        (16, ["--set", "model.device=cuda"], (2, 1, 2, 1)),
        (16, ["--ray-address", "auto", "--set", "internal_tls.insecure=true"], (2, 1, 2, 1)),
    ],
)
def test_serve_sizes_rings_for_the_machine_unless_a_role_has_a_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, given: list[str], shape: tuple[int, ...]
) -> None:
    seen: list[Config] = []

    def serve(options: object, config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(up, "_serve", serve)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert main(["serve", str(tmp_path), *given]) == 0
    prefill, decode = seen[0].prefill, seen[0].decode
    assert (prefill.cp, prefill.threads_per_rank, decode.cp, decode.threads_per_rank) == shape


def test_serve_takes_the_commonest_options_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    def serve(options: object, config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(up, "_serve", serve)
    given = [
        "--served-model-name",
        "mine",
        "--dtype",
        "bfloat16",
        "--tensor-parallel-size",
        "3",
        "--max-num-seqs",
        "5",
        "--block-size",
        "32",
    ]
    assert main(["serve", str(tmp_path), *given, "--port", "8123", "--set", "decode.tp=1"]) == 0
    (config,) = seen
    assert (config.gateway.model_name, config.model.dtype, config.gateway.http) == (
        "mine",
        "bfloat16",
        "127.0.0.1:8123",
    )
    assert (config.prefill.tp, config.decode.tp, config.decode.max_batch) == (3, 1, 5)
    assert (config.kv_cache.block_tokens, config.model.path) == (32, str(tmp_path))


@pytest.mark.parametrize("given", [["--api-key", "secret"], ["--enforce-eager"], ["--max-model-len", "4096"]])
def test_an_option_of_vllm_without_a_key_of_its_own_says_what_is_there_instead(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), *given]) == 1
    told = capsys.readouterr().err
    instead = up.ELSEWHERE[given[0].removeprefix("--").replace("-", "_")]
    assert told == f"ringserve: {given[0]}: there is no such option: {instead}\n"
    assert "secret" not in told


def test_a_cluster_whose_router_dies_is_reported_with_the_reason_and_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    died = failing(Unavailable("the router died"))
    assert ran(monkeypatch, "up", "--detached-log", "/tmp/x.log", watching=died) == 1
    for _ in range(2):
        assert main(["status"]) == 1
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith("ringserve: the cluster 'default' ended by itself: the router died (log: /tmp/x.log)")
    assert main(["down"]) == 1
    with pytest.raises(NotFound, match="no cluster named 'default' runs here"):
        require_state("default")


@pytest.mark.parametrize("error", [Unavailable("Ray did not start"), StopRequest()])
def test_a_start_that_fails_or_is_stopped_leaves_no_state(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ran(monkeypatch, "up", during=failing(error))
    assert read_record("default") is None


def test_a_name_in_use_is_refused_and_its_state_stays(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    write_state(state_of(child))
    assert main(["up"]) == 1
    assert f"'default' runs already (pid {child.pid}, starting)" in capsys.readouterr().err
    assert require_state("default").pid == child.pid


# --- detached: the process that waits, and a child that stands for the cluster ---------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def state_of(process: subprocess.Popen[bytes], **fields: Any) -> ClusterState:
    return ClusterState(name="default", pid=process.pid, started=started_after_boot(process.pid), num_rings=2, **fields)


def detached(monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], then: Callable[[], None]) -> int:
    """Run `up --detach` with `process` as the cluster; `then` is done by another process, once the name is claimed."""
    monkeypatch.setattr(up, "_start_detached", lambda command, path: process)

    def act() -> None:
        claimed()
        then()

    other = threading.Thread(target=act)
    other.start()
    try:
        return main(["up", "--detach"])
    finally:
        other.join(WAIT_SECONDS)


def claimed() -> None:
    """Wait until the cluster that starts is known."""
    pause = threading.Event()
    while read_state("default") is None:
        assert not pause.wait(0.01)


def test_a_detached_start_shows_the_progress_of_the_cluster_and_its_log(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ("starting Ray", "ring prefill-0 serves")

    def become_ready() -> None:
        write_state(state_of(child, progress=told, stage=ClusterStage.READY, gateway="g:1", log=str(state / "l")))

    assert detached(monkeypatch, child, become_ready) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["ringserve: starting Ray", "ringserve: ring prefill-0 serves"]
    assert "ready, gateway at g:1, model builtin:tiny" in shown.out
    assert f"(pid {child.pid}, log {state / 'l'})" in shown.out


def test_down_ends_a_cluster_that_has_only_begun_to_start(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        end_cluster(require_state("default"), 30.0)

    assert detached(monkeypatch, child, end) == 1
    assert "the cluster did not start: it was told to end (log: " in capsys.readouterr().err
    # `end_cluster` may have taken the exit status in this process, so only the end is sure.
    child.wait(WAIT_SECONDS)
    assert read_record("default") is None


@pytest.mark.parametrize("as_json", [False, True])
def test_a_detached_start_that_fails_tells_the_reason_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
    child: subprocess.Popen[bytes],
    state: Path,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    lines = ["ringserve: starting Ray", "ringserve: Ray did not start: no room", "some other line"]

    def fail() -> None:
        text = "\n".join(json.dumps({"ts": "now", "message": line}) if as_json else line for line in lines)
        (state / "default.log").write_text(text)
        child.kill()

    assert detached(monkeypatch, child, fail) == 1
    assert "ringserve: the cluster did not start: Ray did not start: no room (log: " in capsys.readouterr().err
    assert read_record("default") is None


def test_the_process_of_a_detached_cluster_gets_every_option() -> None:
    words = ["--name", "x", "--set", "prefill.cp=1", "--no-gateway", "--drain-seconds", "3", "--config", "/tmp/x.yaml"]
    words.append("--leave-ranks")
    options = parse(["up", "--detach", "--detached-log", "/tmp/x.log", *words]).options
    again = parse(up._detached_command(options)[4:]).options
    assert again == replace(options, detach=False)


def test_a_log_is_cut_at_its_limit_and_what_came_before_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(up, "LOG_SECONDS", 0.01)
    log, stopped = tmp_path / "x.log", threading.Event()
    process = up._start_detached(["sh", "-c", "echo first; read line; echo last"], log)
    process.wait(WAIT_SECONDS)
    with log.open("ab") as writer:  # as a process of the cluster has it
        cutting = threading.Thread(target=up._bound_log, args=(log, stopped))
        cutting.start()
        for number in range(3):
            writer.write(b"%d" % number * 200)
            writer.flush()
            deadline = time.monotonic() + WAIT_SECONDS
            while log.stat().st_size and time.monotonic() < deadline:
                stopped.wait(up.LOG_SECONDS)
        writer.write(b"after")
        writer.flush()
        stopped.set()
        cutting.join(WAIT_SECONDS)
    assert log.read_bytes() == b"after"
    assert log.with_suffix(".log.1").read_bytes() == b"2" * 200
