"""Journal's writer: a thread that writes in one transaction all records that came while it wrote the last one."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.journal.schema import Mark

log = logging.getLogger(__name__)

MAX_BATCH = 512
"""Most records of one transaction."""

Write = Callable[[sqlite3.Connection], None]
Entry = tuple[Write, "asyncio.Future[None]"]


class GroupCommit:
    """Thread that writes records in order of arrival. The futures of a transaction resolve when it is committed.

    If a transaction fails, each of its records is written again in a transaction of its own, so that a bad record fails
    alone.
    """

    def __init__(self, database: sqlite3.Connection, mark: Mark) -> None:
        self._database = database
        self._mark = mark
        self._waiting: SimpleQueue[Entry | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, write: Write) -> asyncio.Future[None]:
        """Write a record. The future raises Unavailable if that failed; the error is logged, too."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_log_failure)
        self._waiting.put((write, done))
        return done

    def close(self) -> None:
        """Write waiting rows and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, is_last = [first], False
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                entry = self._waiting.get()
                if entry is None:
                    is_last = True
                    break
                batch.append(entry)
            self._write(batch)
            if is_last:
                return

    def _write(self, batch: Sequence[Entry]) -> None:
        error = self._try_write(batch)
        if error is not None and len(batch) > 1:
            for entry in batch:
                _resolve([entry], self._try_write([entry]))
        else:
            _resolve(batch, error)

    def _try_write(self, batch: Sequence[Entry]) -> Exception | None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for write, _ in batch:
                write(self._database)
            (count,) = self._database.execute(
                "UPDATE facts SET value = value + 1 WHERE name = 'transactions' RETURNING value"
            ).fetchone()
            self._database.execute("COMMIT")
        except Exception as error:  # whatever it is, the router hears of it, and the thread goes on
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            return error
        try:
            self._mark.advance(self._mark.epoch, count)
        except OSError as error:  # the records are written; only the losses of a later damage would be miscounted
            log.warning("router.journal: the number of transactions could not be noted: %s", error)
        return None


def _resolve(batch: Sequence[Entry], error: Exception | None) -> None:
    """Resolve the futures of a batch, each in its caller's event loop."""
    for loop in {done.get_loop() for _, done in batch}:
        own = [done for _, done in batch if done.get_loop() is loop]
        try:
            loop.call_soon_threadsafe(_set, own, error)
        except RuntimeError:
            continue  # the loop has closed: the router has ended


def _set(futures: Sequence[asyncio.Future[None]], error: Exception | None) -> None:
    for done in futures:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(Unavailable(f"router.journal: a record could not be written: {error}"))


def _log_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("%s", error)
