"""Garbage collections of the router's process, which remembers a hundred thousand conversations and more.

A full collection looks at every object that has survived. With that many conversations it takes a second of processor
time, several on a busy machine, and finds next to nothing: a turn leaves no cycle behind. In that time the router looks
dead to those who wait for its heartbeats.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class FrozenSurvivors:
    """Freezer of objects that survive a full collection: later ones skip them. `close` ends that.

    An object that is no longer needed is freed all the same, unless it is part of a cycle. So once there are `growth`
    times as many frozen objects as after the last whole collection, the next full collection is whole: it looks at all
    objects. The time of every other depends only on new objects, and cycles hold no more memory than all other objects.
    The router has one.
    """

    def __init__(self, growth: float = 2.0) -> None:
        self.num_whole = 0
        self._growth = growth
        self._num_frozen = 0
        gc.callbacks.append(self._on_collection)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Run no collection in the context, and freeze what exists at its end: the state that a process loads."""
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
        gc.freeze()
        self._num_frozen = gc.get_freeze_count()

    def close(self) -> None:
        """Let the collector look at all objects again. Idempotent."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
            gc.unfreeze()

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "stop":
            gc.freeze()
            self._num_frozen = self._num_frozen or gc.get_freeze_count()
        elif self._num_frozen and gc.get_freeze_count() > self._growth * self._num_frozen:
            gc.unfreeze()
            self.num_whole += 1
            self._num_frozen = 0
