"""Resources that processes of one user share on a machine: memory for what several ranks need alike, and cores.

Ranks use it when they load a model and in each step. The memory has no name in a file system and no owner: the kernel
frees it when the last process that holds it has ended, however that ends. A small file, locked while it is read or
written, lists the processes, and their descriptors, through which others can open the memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

LOCK_SECONDS = 60.0
"""Limit on the wait for another process that fills the memory."""
POLL_SECONDS = 0.01
MAX_GAP_SECONDS = 0.15
"""A pause ends at most this long after the start of the decode step before it. The next step may take up to 0.15 s more
than that one, because a prompt is computed on the same cores, and a stream should not wait longer than 0.3 s."""
FLOCK = "hhqqi0q"
"""`struct flock` of Linux on machines of 64 bits: type, whence, start, length, process."""
SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL")

# Descriptors by which other processes can open the memory, by its name; open until this process ends.
_shown: dict[str, int] = {}


def shared_bytes(key: str, num_bytes: int, fill: Callable[[Tensor], object]) -> Tensor | None:
    """Return `num_bytes`, as uint8, that `fill` has written here or in another process with the same `key`.

    The key must say everything that the bytes depend on. None if this system has no such memory, or not enough.
    Example: `shared_bytes("weights of m, packed", 1 << 20, lambda memory: memory.zero_())`.
    """
    if not hasattr(os, "memfd_create") or not num_bytes:
        return None
    name = f"ringserve-{hashlib.sha256(f'{key} {num_bytes}'.encode()).hexdigest()[:32]}"
    try:
        with _locked(shared_directory() / name) as holders:
            if name not in _shown:
                _remove_ended()
                found = next((fd for line in holders if (fd := _open(line, name, num_bytes)) is not None), None)
                _shown[name] = _filled(name, num_bytes, fill) if found is None else found
            holders.seek(0)
            others = [line for line in holders if not line.startswith(f"{os.getpid()} ") and _is_there(line, name)]
            holders.seek(0)
            holders.truncate()
            holders.writelines([*others, f"{os.getpid()} {_shown[name]}\n"])
        # Pages are shared until they are written to: a write by mistake stays here.
        return _view(_shown[name], num_bytes, mmap.MAP_PRIVATE)
    except (OSError, ValueError) as error:  # the latter for a file that another program has written to
        logger.info("packed weights are not shared with other processes: %s", error)
        return None


def shared_directory() -> Path:
    """Return the directory of resources that this user's processes share, which is theirs alone. Raises OSError."""
    path = Path(tempfile.gettempdir()) / f"ringserve-shared-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else")
    return path


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Open a file that no other process reads, writes or removes meanwhile. Raises OSError."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            else:
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.seek(0)
                    yield file
                    return
        time.sleep(POLL_SECONDS)


def _remove_ended() -> None:
    """Remove files in which no listed process holds the memory any more: nothing else does, and each model has some."""
    for path in shared_directory().glob("ringserve-*"):
        with suppress(OSError, ValueError), path.open() as file:
            # A process that waits for this lock checks, once it has it, that the file still exists.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not any(_is_there(line, path.name) for line in file):
                path.unlink()


def _is_there(line: str, name: str) -> bool:
    """Return True if a line of the file names a process that still shows the memory."""
    pid, fd = line.split()
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith(f"/memfd:{name}")
    return False


def _open(line: str, name: str, num_bytes: int) -> int | None:
    """Return a descriptor of another process's memory; None if that has ended."""
    if not _is_there(line, name):
        return None
    pid, fd = line.split()
    with suppress(OSError):
        found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(found).st_size == num_bytes:
            return found
        os.close(found)
    return None


def _filled(name: str, num_bytes: int, fill: Callable[[Tensor], object]) -> int:
    """Return a descriptor of new memory that is filled, and that nobody can write to any more. Raises OSError."""
    made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Raises OSError if there is too little memory; without it the first write would end the process by SIGBUS.
        os.posix_fallocate(made, 0, num_bytes)
        fill(_view(made, num_bytes, mmap.MAP_SHARED))
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, sum(getattr(fcntl, seal) for seal in SEALS))
    except BaseException:
        os.close(made)
        raise
    return made


def _view(fd: int, num_bytes: int, flags: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes, flags=flags), dtype=torch.uint8)


class SharedCores:
    """Tells decode ranks when prefill ranks compute on the same cores: these lock a byte of a file in each step.

    `group` names a set of ranks, all of one user, on the same cores; the byte that they lock is derived from it. The
    system frees the lock of a process that has ended.
    """

    def __init__(self, group: str) -> None:
        self._file: IO[bytes] | None = None
        self._byte = int.from_bytes(hashlib.sha256(group.encode()).digest()[:7])
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

        The step before took `seconds`, and steps get `least_share` of the time. Example: with 0.25 a step of 0.03 s is
        followed by a pause of 0.09 s.
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
