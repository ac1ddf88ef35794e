"""Cores that rings of one service share: while prompts are computed there, decode steps leave them most of the time."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from ringserve.workers.model.shared import shared_directory

logger = logging.getLogger(__name__)

MAX_GAP_SECONDS = 0.2
"""Limit on a pause and the step before it: text that comes five times a second is read as it comes."""
FLOCK = "hhqqi0q"
"""`struct flock` of Linux on machines of 64 bits: type, whence, start, length, process."""


class SharedCores:
    """Tells decode ranks when prefill ranks compute on the same cores: these lock a byte of a file in each step.

    `group` names the ranks that share cores, which are of one user: it gives the byte. With "" a rank shares none. The
    system frees the lock of a process that has ended.
    """

    def __init__(self, group: str) -> None:
        self._file: IO[bytes] | None = None
        self._byte = int.from_bytes(hashlib.sha256(group.encode()).digest()[:7])
        if not group:
            return
        try:
            self._file = (shared_directory() / "cores").open("a+b")
            self._is_taken()
        except (OSError, AttributeError) as error:  # the latter on systems other than Linux
            self.close()
            logger.warning("decode steps leave no time to prompts on the same cores: %s", error)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have decode ranks make pauses meanwhile."""
        if self._file is None:
            yield
            return
        self._lock(fcntl.F_RDLCK)  # all locks are of this kind: none waits
        try:
            yield
        finally:
            self._lock(fcntl.F_UNLCK)

    def pause_after(self, seconds: float, least_share: float) -> float:
        """Return the seconds until the next decode step: 0 while no prompt is computed.

        The step before took `seconds`, and steps get `least_share` of the time. Example: with 0.25 a step of 0.04 s is
        followed by a pause of 0.12 s.
        """
        if self._file is None or not self._is_taken():
            return 0.0
        return max(0.0, min(seconds * (1.0 / least_share - 1.0), MAX_GAP_SECONDS - seconds))

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock(self, kind: int) -> None:
        if self._file is not None:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, kind, os.SEEK_SET, self._byte, 1, 0))

    def _is_taken(self) -> bool:
        assert self._file is not None
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, self._byte, 1, 0)
        kind: int = struct.unpack(FLOCK, fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK
