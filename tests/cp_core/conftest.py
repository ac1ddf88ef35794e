"""Ranks of these tests are threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.one_core import on_one_core


@pytest.fixture(autouse=True, scope="module")
def _ranks_are_threads() -> Iterator[None]:
    with on_one_core():
        yield
