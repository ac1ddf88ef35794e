"""A cluster that is told to stop while it starts, and a Ray that ends before its cluster does."""

from __future__ import annotations

import socket
import stat
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Never

import psutil
import pytest

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.cluster import local, state
from ringserve.services.cluster.fork_server import ForkServer
from ringserve.services.cluster.local import LocalCluster
from ringserve.services.cluster.stopping import StopRequest
from ringserve.services.config import config_from
from tests.waiting import WAIT_SECONDS

CONFIG = config_from({"gateway": {"listen": "127.0.0.1:0", "http": "", "metrics": ""}})
VANISHED = FileNotFoundError(2, "No such file or directory")


class FailingRay:
    """Start of Ray that fails each time with the next error, after `before` has seen Ray's directory."""

    def __init__(self, *errors: Exception, before: Callable[[Path], object] = lambda directory: None) -> None:
        self._errors = list(errors)
        self._before = before

    def __call__(self, num_cpus: int, namespace: str, directory: Path, forks: object, *, is_forwarding: bool) -> Never:
        assert (forks, is_forwarding) == (None, True)
        self._before(directory)
        raise self._errors.pop(0)


@pytest.fixture(autouse=True)
def _no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server of forks not start: Ray starts without it."""

    def fail(directory: Path) -> Never:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(state, "ForkServer", fail)


@pytest.mark.parametrize("error", [VANISHED, Unavailable("Ray did not start: it has ended")])
def test_an_error_after_ctrl_c_is_the_end_that_was_asked_for(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(local, "start_own_ray", FailingRay(error, before=lambda directory: stopped.set()))
    cluster = LocalCluster(CONFIG, stopped=stopped)
    with pytest.raises(StopRequest):
        cluster.start()
    cluster.stop()


def test_the_same_error_without_ctrl_c_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "start_own_ray", FailingRay(VANISHED))
    cluster = LocalCluster(CONFIG)
    with pytest.raises(FileNotFoundError):
        cluster.start()
    cluster.stop()


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_ray_that_is_slow_to_start_is_started_again(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, second = Unavailable("Ray did not start: it timed out"), FileNotFoundError("the second start")
    monkeypatch.setattr(local, "start_own_ray", FailingRay(slow, second))
    monkeypatch.setattr(local, "SLOW_START_SECONDS", 0.0 if is_slow else 25.0)
    cluster = LocalCluster(CONFIG)
    with pytest.raises((Unavailable, FileNotFoundError), match="second start" if is_slow else "timed out"):
        cluster.start()
    cluster.stop()


def test_only_its_user_reaches_the_files_and_sockets_of_a_clusters_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, int]] = []
    ray = FailingRay(VANISHED, before=lambda path: seen.append((path.parent, path.parent.stat().st_mode)))
    monkeypatch.setattr(local, "start_own_ray", ray)
    cluster = LocalCluster(CONFIG)
    with pytest.raises(FileNotFoundError):
        cluster.start()
    cluster.stop()
    ((directory, mode),) = seen
    assert stat.S_IMODE(mode) == 0o700
    assert not directory.exists()


def test_a_cluster_whose_ray_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_ended", lambda processes: "raylet")
    cluster = LocalCluster(CONFIG)
    monkeypatch.setattr(cluster, "_router", SimpleNamespace(process=None))
    with pytest.raises(Unavailable, match="Ray's raylet has ended, and all rings with it"):
        cluster.watch()
    cluster.stop()


def test_a_fork_server_that_has_ended_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "find_ended", lambda processes: "raylet")  # which ends the watch
    cluster = LocalCluster(CONFIG)
    forks = ForkServer(tmp_path)
    forks.process.kill()
    forks.process.wait(WAIT_SECONDS)
    monkeypatch.setattr(cluster._directory, "forks", forks)
    monkeypatch.setattr(cluster, "_router", SimpleNamespace(process=None))
    with pytest.raises(Unavailable, match="Ray's raylet"):
        cluster.watch()
    assert "the process that forks Ray's workers has ended" in caplog.text
    assert cluster._directory.forks is None
    cluster.stop()


@pytest.mark.parametrize("ended", ["raylet", ""])
def test_a_stop_waits_for_actors_only_while_ray_lives(
    ended: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal to the whole process group ends Ray's processes, too, while the actors are asked to stop."""
    found, freed, waited = iter(["", *[ended] * 9]), list[str](), list[float]()

    def wait(stops: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        waited.append(timeout)
        return [], stops

    stop = SimpleNamespace(remote=lambda: "stop")
    leader = SimpleNamespace(actor=SimpleNamespace(stop=stop), host=SimpleNamespace(name="prefill-0"))
    cluster = LocalCluster(CONFIG)
    monkeypatch.setattr(cluster, "_rings", SimpleNamespace(leaders=[leader]))
    monkeypatch.setattr(local, "find_ended", lambda processes: next(found, ended))
    monkeypatch.setattr(local, "free_places", freed.append)
    monkeypatch.setattr(local, "ACTORS_STOP_SECONDS", 0.05)
    monkeypatch.setattr(local, "ray", SimpleNamespace(wait=wait))
    cluster._stop_actors()
    assert "1 of 1 actors did not stop in time" in caplog.text
    if ended:
        assert len(waited) == 1
        assert not freed, "to ask a Ray that has ended takes a minute"
    else:
        assert freed == ["prefill-0"]
    cluster._directory.remove()


def test_files_of_ray_that_vanish_while_it_is_stopped_do_not_stop_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def vanish() -> None:
        raise VANISHED

    cluster = LocalCluster(CONFIG)
    monkeypatch.setattr(local, "ray", SimpleNamespace(is_initialized=lambda: True, shutdown=vanish))
    monkeypatch.setattr(local, "end_left_behind", lambda processes: None)
    cluster.stop()
    assert not cluster._directory.path.exists()
    assert "Ray ended with an error: [Errno 2] No such file or directory" in caplog.text


def test_only_children_that_are_of_ray_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[int]()
    cluster = LocalCluster(CONFIG)
    monkeypatch.setattr(state, "ForkServer", ForkServer)
    monkeypatch.setattr(local, "ray", SimpleNamespace(is_initialized=lambda: True, shutdown=lambda: None))
    monkeypatch.setattr(local, "end_left_behind", lambda processes: ended.extend(each.pid for each in processes))
    echo = ["sh", "-c", "cat; true"]  # a process with a child of its own
    with (
        subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as of_ray,
        subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        for process in (of_ray, other):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"\n"
        monkeypatch.setattr(local, "start_own_ray", lambda *_, **__: [psutil.Process(of_ray.pid)])
        cluster._start_ray()
        assert cluster._directory.forks is not None
        forks = cluster._directory.forks.process
        descendants = [each.pid for each in psutil.Process(of_ray.pid).children()]
        cluster.stop()
        assert len(descendants) == 1
        assert ended == [of_ray.pid, forks.pid, *descendants]
        assert forks.returncode is not None


def test_all_ports_that_are_taken_are_told_at_once_with_the_options_that_help() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        config = config_from({"gateway": {"listen": taken, "http": "", "metrics": taken}})
        cluster = LocalCluster(config)
        with pytest.raises(ConfigError) as refused:
            cluster.start()
        cluster.stop()
    assert str(refused.value) == (
        f"gateway.listen: cannot listen on {taken}: Address already in use; "
        f"gateway.metrics: cannot listen on {taken}: Address already in use; choose another port, or any free one "
        "with --set gateway.listen=127.0.0.1:0 --set gateway.metrics=127.0.0.1:0"
    )


def test_a_second_cluster_of_one_name_on_a_ray_cluster_is_refused_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The actors of one that has died end soon; those of one that runs do not."""
    seen: list[list[str]] = [["router-1-a", "decode-0.f/0/1"], ["decode-0.f/0/1"]]
    monkeypatch.setattr(local, "list_named_actors", lambda: seen.pop(0))
    monkeypatch.setattr(local, "JOIN_SECONDS", 0.0)
    insecure = replace(CONFIG.internal_tls, insecure=True)
    config = replace(CONFIG, ray=replace(CONFIG.ray, address="auto"), internal_tls=insecure)
    cluster = LocalCluster(config, name="chat")
    cluster._await_predecessor()
    assert not seen, "ranks are not waited for: they are taken over"
    monkeypatch.setattr(local, "list_named_actors", lambda: ["router-1-a", "prefill-0-1-a"])
    monkeypatch.setattr(local, "PREDECESSOR_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"--name: a cluster called 'chat' runs .* \(prefill-0-1-a, router-1-a\)"):
        cluster._await_predecessor()
    cluster.stop()


def test_rings_are_measured_one_after_another_and_one_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    futures: list[Future[None]] = []

    def measure() -> SimpleNamespace:
        futures.append(Future())
        return SimpleNamespace(future=lambda: futures[-1])

    leader = SimpleNamespace(actor=SimpleNamespace(measure=SimpleNamespace(remote=measure)))
    cluster = LocalCluster(CONFIG)
    monkeypatch.setattr(cluster, "_unmeasured", deque([leader, leader]))
    for _ in range(2):
        assert cluster._measure_next()
        assert len(futures) == 1
    futures[0].set_exception(Unavailable("it was rebuilt\nby somebody"))
    assert cluster._measure_next()
    assert len(futures) == 2
    futures[1].set_result(None)
    assert not cluster._measure_next()
    assert not cluster._measure_next()
    assert caplog.messages == ["a ring could not be measured, and its plans may be worse: it was rebuilt"]
    cluster.stop()
