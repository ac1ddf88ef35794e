from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.services.auth.certificates import Authority


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=2000, help="generated requests of tests/services/fuzz")


# How long an example takes tells how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of a file share what it made, and stay in one process. Those that share a cluster all stay in one.

    `--dist loadgroup` would do, but for pytest 9.2, whose node ids xdist 3.8 adds no groups to.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "shared cluster" if "/e2e/test_" in path else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that our processes trust."""
    return Authority.make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that nobody trusts."""
    return Authority.make(tmp_path_factory.mktemp("tls") / "theirs")
