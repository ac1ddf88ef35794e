"""Where the processes of a ring meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Network(Protocol):
    """What a rank's process and the one that measures do before the rank opens anything: enter, connect, settle.

    It is pickled into every rank's process.
    """

    @property
    def host(self) -> str:
        """The address of rank 0, as the ranks see it."""
        ...

    def enter(self) -> None:
        """In the rank's process, first of all. Raises Unavailable."""
        ...

    def connect(self, rank: int, pid: int) -> None:
        """In the measuring process, when the rank's has entered. Raises Unavailable."""
        ...

    def settle(self, rank: int) -> None:
        """In the rank's process, when it is connected. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Loopback:
    """This machine's own: there is nothing to do."""

    host: str = "127.0.0.1"

    def enter(self) -> None:
        """See Network."""

    def connect(self, rank: int, pid: int) -> None:
        """See Network."""

    def settle(self, rank: int) -> None:
        """See Network."""
