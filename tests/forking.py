"""Processes of tests that are forked from one that has imported already what takes seconds to import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

# What any of them imports: a test process has one server of forks, which imports nothing after its start.
IMPORTED = ["torch", "transformers", "ringserve.workers.model.loading", "ringserve.workers.kv.sender"]


def forking() -> ForkServerContext:
    """Return the context whose processes are forked so. The server has one thread, and no agent that a fork breaks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
