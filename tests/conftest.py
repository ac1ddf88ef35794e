from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.programs import count_missing
from tests.services.auth.certificates import Authority
from tests.waiting import WatchedLoop

# torch's threads spin while they wait for one another: beside other processes two of them took five times the processor
# time of one. This process has not loaded torch yet, and those that it starts inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=1000, help="generated requests of tests/services/gateway/fuzz")


# The time of an example depends on the machine's load, so it has no deadline. Each run takes the same examples, so that
# a commit always passes or fails alike; --hypothesis-profile=explore takes other examples in every run.
SLOW = [HealthCheck.too_slow]  # examples take long to draw on a busy machine
settings.register_profile("explore", deadline=None, derandomize=False, suppress_health_check=SLOW)
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.load_profile("any machine")


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Scheduler that runs the tests of a file in one process, and all tests of a shared cluster in one.

    `--dist loadgroup` does not work with pytest 9.2: xdist 3.8 does not change its node ids.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if not is_of_a_cluster(path):
            return path
        # More than two clusters at a time start slowly.
        return "the shared cluster" if "/e2e/shared/" in path else "other clusters"


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore the handlers that a command in the test's process has replaced: other tests send themselves signals."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Start faulthandler's timer again: pytest stops it, and that of the timeout, when a test fails."""
    seconds = float(item.config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(seconds, file=item.config.stash[fault_handler_stderr_fd_key], exit=True)


CLUSTER_SECONDS = 3600.0


def is_of_a_cluster(path: str) -> bool:
    return "/e2e/" in path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let one process compile the tests, which takes as long as their imports, and the others read its bytecode."""
    gc.disable()  # nothing that is imported or collected becomes garbage, and searches of it took a third of the time
    try:
        if sys.dont_write_bytecode:
            return (yield)
        with Path(__file__).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
            return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that the processes finish at about the same time.

    A cluster's first test waits for its start, on a machine that other tests use.
    """
    items.sort(key=lambda item: not is_of_a_cluster(item.nodeid))
    for item in items:
        if is_of_a_cluster(item.nodeid):
            item.add_marker(pytest.mark.timeout(CLUSTER_SECONDS))


def pytest_collection_finish() -> None:
    gc.freeze()  # objects of modules stay: a search for garbage among them is slow, and pytest searches often


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := count_missing(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, type[WatchedLoop]]:
    return {"watched": WatchedLoop}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Make the authority that ringserve's processes trust."""
    return Authority.make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Make an authority that no process trusts."""
    return Authority.make(tmp_path_factory.mktemp("tls") / "theirs")
