from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=2000, help="generated requests of tests/services/fuzz")
