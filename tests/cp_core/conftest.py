from __future__ import annotations

from tests.one_core import ranks_are_threads

__all__ = ["ranks_are_threads"]
