"""A full disk is reported as full, not as damage, and loses no acknowledged record."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.errors import ConfigError, DiskFull, Unavailable
from ringserve.orchestration.journal import journal as journals
from ringserve.orchestration.journal import schema
from ringserve.orchestration.journal.journal import SqliteJournal
from tests.orchestration.journal.records import begun, committed


def limit_pages(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """Let SQLite find no room for more pages, as on a full disk."""
    connect = schema.connect

    def limited(path: Path) -> sqlite3.Connection:
        database = connect(path)
        database.execute(f"PRAGMA max_page_count={pages}")
        return database

    monkeypatch.setattr(schema, "connect", limited)
    monkeypatch.setattr(journals, "connect", limited)


def test_a_journal_that_cannot_begin_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_pages(monkeypatch, 2)
    for _ in range(2):  # the first attempt has released the lock
        with pytest.raises(DiskFull, match=f"router.journal: the disk of {tmp_path} is full"):
            SqliteJournal(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_mark_that_finds_no_room_is_a_full_disk_and_another_error_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(error: int) -> None:
        def write(*_: Any) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "pwrite", write)

    fail(number)
    with pytest.raises(DiskFull):
        SqliteJournal(tmp_path)
    fail(errno.EROFS)
    with pytest.raises(ConfigError, match="cannot be written: Read-only file system"):
        SqliteJournal(tmp_path)


async def test_what_was_acknowledged_is_there_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        limit_pages(patch, 40)
        journal = SqliteJournal(tmp_path)
        written = 0

        async def fill() -> None:
            nonlocal written
            for number in range(1000):
                await journal.begun(begun(f"turn-{number}", f"c-{number}", [number] * 500, 0))
                await journal.committed(committed(f"turn-{number}", [7] * 100))
                written += 1

        with pytest.raises(Unavailable, match=r"could not be written: .*full"):
            await fill()
        journal.close()
    assert written > 0
    again = SqliteJournal(tmp_path)
    found = {each.conversation_id: again.tokens_of(each.conversation_id).tolist() for each in again.conversations()}
    again.close()
    assert found == {f"c-{number}": [number] * 500 + [7] * 100 for number in range(written)}
