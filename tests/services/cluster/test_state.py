"""The files that say which clusters run here: true for living ones, gone with dead ones."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringserve.cp_core.errors import ConfigError, NotFound, Unavailable
from ringserve.services.cluster import state as cluster_state
from ringserve.services.cluster.state import (
    ClusterStage,
    ClusterState,
    RayDirectory,
    claim_name,
    clear_abandoned,
    end_cluster,
    find_process,
    read_record,
    read_state,
    remove_state,
    require_ready,
    require_state,
    secret_of,
    started_after_boot,
    state_directory,
    write_state,
)
from tests.waiting import WAIT_SECONDS


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGSERVE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a folder whose path leaves room for the names of a Ray's sockets, which pytest's do not."""
    with tempfile.TemporaryDirectory(prefix="rs-", dir=cluster_state.SHORT_DIRECTORY) as path:
        yield Path(path)


def state_of(process: psutil.Process, name: str = "default") -> ClusterState:
    started = started_after_boot(process.pid)
    ready = ClusterStage.READY
    return ClusterState(
        name=name, pid=process.pid, started=started, stage=ready, gateway="g:1", router="r:1", log="/tmp/x.log"
    )


def starting(process: psutil.Process) -> ClusterState:
    started = started_after_boot(process.pid)
    return ClusterState(name="default", pid=process.pid, started=started, num_rings=4, rings_serving=2)


def test_a_running_cluster_is_found_again() -> None:
    state = state_of(psutil.Process())
    write_state(state)
    assert read_state("default") == require_state("default") == require_ready("default") == state
    assert state.is_running


def test_a_number_that_belongs_to_another_process_now_is_not_the_cluster() -> None:
    state = state_of(psutil.Process())
    write_state(dataclasses.replace(state, started=state.started - 3600))
    assert read_state("default") is None
    with pytest.raises(NotFound, match=r"'default' ended by itself: its process was killed \(log: /tmp/x.log\); start"):
        require_state("default")


def test_a_cluster_that_is_starting_can_be_ended_but_not_called() -> None:
    write_state(starting(psutil.Process()))
    assert require_state("default").stage is ClusterStage.STARTING
    with pytest.raises(Unavailable, match="'default' is starting, 2 of 4 rings; 'ringserve status' says when"):
        require_ready("default")


def test_a_start_that_was_killed_is_told() -> None:
    process = psutil.Process()
    write_state(dataclasses.replace(starting(process), started=started_after_boot(process.pid) - 3600))
    with pytest.raises(NotFound, match="ended by itself: its process was killed while it was starting; start it"):
        require_state("default")


def test_a_cluster_that_ended_by_itself_is_told_with_its_reason_until_its_name_is_taken() -> None:
    state = state_of(psutil.Process())
    write_state(dataclasses.replace(state, stage=ClusterStage.ENDED, reason="the router died"))
    assert read_state("default") is None
    with pytest.raises(NotFound, match=r"'default' ended by itself: the router died \(log: /tmp/x.log\)"):
        require_ready("default")
    claim_name(starting(psutil.Process()))
    assert require_state("default").rings_serving == 2


def test_a_name_is_claimed_by_one_process_and_again_by_the_same(child: subprocess.Popen[bytes]) -> None:
    claim_name(starting(psutil.Process(child.pid)))
    with pytest.raises(ConfigError, match=rf"'default' runs already \(pid {child.pid}, starting\); choose another"):
        claim_name(starting(psutil.Process()))
    claim_name(starting(psutil.Process(child.pid)))
    assert require_state("default").pid == child.pid


def test_of_two_that_claim_a_name_at_once_the_later_is_refused(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, first = os.link, starting(psutil.Process(child.pid))

    def lose(*arguments: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        claim_name(first)
        link(*arguments)

    monkeypatch.setattr(os, "link", lose)
    with pytest.raises(ConfigError, match="runs already"):
        claim_name(starting(psutil.Process()))
    assert require_state("default") == first


def test_a_cluster_is_found_after_somebody_has_set_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(state_of(psutil.Process()))
    boot = psutil.boot_time()
    began = psutil.Process().create_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: boot + 3600)  # which is how the kernel shows it
    assert psutil.Process().create_time() == pytest.approx(began + 3600)
    assert require_state("default").is_running


def test_a_process_that_ended_is_not_the_cluster() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(ended.pid)
    started = started_after_boot(ended.pid)
    assert find_process(ended.pid, started) == process
    ended.communicate(b"\n", timeout=WAIT_SECONDS)
    assert find_process(ended.pid, started) is None


def test_a_process_nobody_has_waited_for_yet_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        process = psutil.Process(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.status() == psutil.STATUS_ZOMBIE
        assert find_process(child.pid, started_after_boot(child.pid)) is None
    finally:
        child.kill()
        child.wait(WAIT_SECONDS)


def test_no_cluster_is_an_error_that_says_what_to_do() -> None:
    assert read_state("default") is None
    with pytest.raises(NotFound, match="no cluster named 'default' runs here; start one with 'ringserve up'"):
        require_state("default")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": "x"}', "\x00", '{"pid": "one"}'])
def test_a_file_that_was_cut_off_counts_for_nothing(directory: Path, content: str) -> None:
    directory.mkdir()
    (directory / "default.json").write_text(content)
    assert read_record("default") is None
    claim_name(starting(psutil.Process()))
    assert require_state("default").pid == os.getpid()


def test_removing_is_idempotent_and_clusters_are_apart(directory: Path) -> None:
    for name in ("one", "two"):
        write_state(state_of(psutil.Process(), name))
    for _ in range(2):
        remove_state("one")
    assert [path.name for path in directory.iterdir()] == ["two.json"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a.b", "-", "a b"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        read_state(name)


def test_the_directory_follows_the_environment() -> None:
    assert state_directory({"RINGSERVE_STATE": "/s", "XDG_STATE_HOME": "/x"}) == Path("/s")
    assert state_directory({"XDG_STATE_HOME": "/x"}) == Path("/x/ringserve")
    assert state_directory({}) == Path.home() / ".local/state/ringserve"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ignores SIGTERM, and waits for its standard input."""
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
        process.stdout.readline()
        yield process
        process.kill()


VANISHED = [psutil.NoSuchProcess(1), FileNotFoundError(2, "No such file or directory"), ProcessLookupError(3, "gone")]


@pytest.mark.parametrize("error", VANISHED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["status", "create_time", "children", "terminate"])
def test_a_cluster_that_ends_by_itself_at_any_step_of_its_end_has_ended(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    state = state_of(psutil.Process(child.pid))

    def vanish(self: psutil.Process, *arguments: Any, **options: Any) -> Any:
        child.kill()
        child.wait(WAIT_SECONDS)
        raise error

    monkeypatch.setattr(psutil.Process, step, vanish)
    assert end_cluster(state, 30.0) is False
    monkeypatch.undo()
    assert not state.is_running


def test_a_cluster_that_ignores_its_end_is_killed(child: subprocess.Popen[bytes]) -> None:
    state = state_of(psutil.Process(child.pid))
    assert end_cluster(state, 0.05) is True
    assert not state.is_running


def test_what_outlives_the_process_of_a_cluster_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Processes of Ray that are still starting outlive their cluster.
    monkeypatch.setattr(cluster_state, "GRACE_SECONDS", 0.05)
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as parent:  # type: ignore[call-overload]
        parent.stdout.readline()
        process = psutil.Process(parent.pid)
        (left,) = process.children()
        assert end_cluster(state_of(process), 30.0) is False
        assert not left.is_running()


def test_sockets_of_a_ray_have_short_names_whatever_the_folder_for_temporary_files(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS each user has a folder with a name of 49 characters."""
    long_path = tmp_path / ("a" * 50)
    long_path.mkdir()
    for chosen, used in ((long_path, cluster_state.SHORT_DIRECTORY), (short_path, short_path)):
        monkeypatch.setattr(tempfile, "tempdir", str(chosen))
        ray = RayDirectory()
        assert ray.path.parent == used
        ray.remove()


def test_what_a_killed_starter_of_a_ray_left_is_ended_and_removed(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    """Of processes that write into its directory alone, and once the starter has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    own = RayDirectory()
    (short_path / "ringserve-another").mkdir()
    code = "from ringserve.services.cluster.state import RayDirectory; print(RayDirectory().path)"
    environment = os.environ | {"TMPDIR": str(short_path)}
    starter = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    left = Path(starter.stdout.strip())
    with (left / "agent.log").open("w") as log:
        agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    with (left / "agent.log").open() as log:
        reader = subprocess.Popen(["sleep", "600"], stdin=log)
    clear_abandoned()
    reader.terminate()
    assert reader.wait(WAIT_SECONDS) == -signal.SIGTERM, "it was killed before"
    agent.communicate(timeout=WAIT_SECONDS)
    assert agent.returncode == -signal.SIGKILL
    assert child.poll() is None
    assert not left.exists()
    assert own.path.stat().st_mode & 0o777 == 0o700
    assert sorted(short_path.iterdir()) == sorted([own.path, short_path / "ringserve-another"])
    own.remove()
    own.remove()
    assert not own.path.exists()


def test_a_process_of_another_user_is_named(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(psutil.Process(child.pid))

    def refuse(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "terminate", refuse)
    with pytest.raises(Unavailable, match=f"cluster 'default': process {child.pid} belongs to another user"):
        end_cluster(state, 1.0)


def test_a_file_that_cannot_be_used_is_named_with_the_reason(directory: Path) -> None:
    (directory / "default.json").mkdir(parents=True)
    for act, tried in ((read_state, "read"), (remove_state, "removed")):
        with pytest.raises(ConfigError, match=rf"RINGSERVE_STATE: .*default.json cannot be {tried}: Is a directory"):
            act("default")
    with pytest.raises(ConfigError, match=r"RINGSERVE_STATE: .*default.json cannot be written: "):
        write_state(state_of(psutil.Process()))


def test_a_full_disk_keeps_no_reason_from_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(psutil.Process())
    write_state(state)
    write_text = Path.write_text

    def fail(path: Path, *arguments: Any, **options: Any) -> int:
        write_text(path, "{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    for reason in ("the disk is full, and this is a long reason", "short"):
        write_state(dataclasses.replace(state, reason=reason))
        found = read_record(state.name)
        assert found is not None
        assert found.reason == reason
        assert [path.name for path in directory.iterdir()] == [f"{state.name}.json"]


def test_a_file_that_vanishes_before_it_is_read_or_removed_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(state_of(psutil.Process()))
    read = Path.read_text

    def vanish(self: Path, *arguments: Any, **options: Any) -> str:
        self.unlink()
        return read(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", vanish)
    assert read_state("default") is None
    remove_state("default")


def test_a_secret_is_read_by_its_owner_alone_and_found_by_the_router(directory: Path) -> None:
    state = dataclasses.replace(state_of(psutil.Process()), router="127.0.0.1:5", secret="a secret")
    claim_name(state)
    write_state(state)
    (path,) = directory.glob("*.json")
    assert path.stat().st_mode & 0o077 == 0
    assert secret_of("127.0.0.1:5") == "a secret"
    assert secret_of("127.0.0.1:6") is None
    assert "a secret" not in repr(read_state("default")), "it is in no log"
