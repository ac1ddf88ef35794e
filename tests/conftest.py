from __future__ import annotations

import pytest

from tests.services.auth.certificates import Authority


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=2000, help="generated requests of tests/services/fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in two processes, those that start clusters stay in one, beside all others in the other: they
    share a cluster, and mostly wait.
    """
    for item in items:
        group = "clusters" if "e2e" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that our processes trust."""
    return Authority.make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that nobody trusts."""
    return Authority.make(tmp_path_factory.mktemp("tls") / "theirs")
