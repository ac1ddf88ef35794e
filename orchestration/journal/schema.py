"""Journal tables, their version and checksums, and the lock that leaves a journal to one router.

A history is a chain of segments: each turn that ended well adds one, which holds the tokens [start, stop) and continues
the tokens before `start` of its parent. Forks share the chain. `refs` counts the conversations and segments that
continue a segment. A segment that nothing continues is deleted, and so are tokens at the end of a segment that no
history has any more. All segments of a chain have the same `sparsity` (NULL: exact): a turn of another sparsity begins
a new chain.

Each row has a checksum, which triggers write, and which `_repair` compares with the row when a journal is opened.
SQLite drops the end of a damaged log in silence, so the number of transactions is also in a file of its own, the
`Mark`. `SqliteJournal` opens its file here.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from shutil import disk_usage
from typing import Final

from filelock import FileLock, Timeout

from ringserve.cp_core.errors import ConfigError

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
LOCK_SECONDS = 5.0
"""Seconds to wait for a router that has just been killed to release the journal."""

NEEDED_BYTES = 128 << 10
"""With less free space, an error of SQLite counts as a full disk: its shared memory and log need about as much."""

VERSION = 5
"""Version of the tables and of the records in them; a journal of any other is refused."""
TABLES = """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE segments (
        id INTEGER PRIMARY KEY, parent INTEGER, start INTEGER NOT NULL, stop INTEGER NOT NULL, tokens BLOB NOT NULL,
        turn TEXT NOT NULL, refs INTEGER NOT NULL, sparsity BLOB,
        sum INTEGER);
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, segment INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_turns INTEGER NOT NULL,
        forked_from TEXT NOT NULL, ttl REAL NOT NULL, last_used REAL NOT NULL, sum INTEGER) WITHOUT ROWID;
    CREATE TABLE turns (
        id TEXT PRIMARY KEY, begun_at REAL NOT NULL, tokens BLOB NOT NULL, record BLOB NOT NULL, sum INTEGER);
    CREATE TABLE ended (
        number INTEGER PRIMARY KEY AUTOINCREMENT, turn TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL,
        kv_tokens INTEGER NOT NULL, answer BLOB NOT NULL, prompt_tokens INTEGER NOT NULL, seed TEXT NOT NULL,
        finish_reason TEXT NOT NULL, plan BLOB, sum INTEGER);
    CREATE INDEX ended_requests ON ended (request_id);
"""
"""Tokens have a column of their own beside `record`, so that a history is joined from them without decoding records."""
SUMMED: Final[Mapping[str, tuple[str, ...]]] = {
    "segments": ("id", "parent", "start", "stop", "tokens", "turn", "sparsity"),
    "conversations": ("id", "segment", "num_tokens", "num_turns", "forked_from", "ttl", "last_used"),
    "turns": ("id", "begun_at", "tokens", "record"),
    "ended": (
        *("number", "turn", "request_id", "kv_tokens", "answer", "prompt_tokens", "seed", "finish_reason", "plan"),
    ),
}
"""Columns that the checksum of each table covers, the key first."""
TEXTS: Final = frozenset({"id", "turn", "forked_from", "request_id", "seed", "finish_reason"})
"""Columns that are read as bytes for a checksum: damaged text may not be valid UTF-8."""


def make_sum(table: str) -> str:
    """Return the SQL expression that computes the checksum of a row of `table`."""
    return f"checksum({','.join(f'CAST({each} AS BLOB)' if each in TEXTS else each for each in SUMMED[table])})"


def make_triggers() -> str:
    """Return the triggers that write the checksums of new rows and of changed rows."""
    written = (
        f"CREATE TRIGGER {table}_{event.split()[0]} AFTER {event} ON {table} BEGIN "
        f"UPDATE {table} SET sum = {make_sum(table)} WHERE {columns[0]} = NEW.{columns[0]}; END;"
        for table, columns in SUMMED.items()
        for event in ("INSERT", f"UPDATE OF {','.join(columns)}")
    )
    return "".join(written)


def checksum(*values: object) -> int:
    """Return the CRC-32 of a row: any single flipped bit changes it. SQL calls this function."""
    total = 0
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        total = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), total))
    return total


def take_lock(directory: Path) -> FileLock:
    """Make the directory and lock it for this process. Raises ConfigError if another router has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(directory / "lock", thread_local=False)
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise ConfigError(
            f"router.journal: another router writes to {directory}; give each router a directory of its own"
        ) from error
    except OSError as error:
        raise ConfigError(f"router.journal: {directory} cannot be written: {error.strerror}") from error
    return lock


def journal_path(directory: Path, fingerprint: str) -> Path:
    """Return the path of the journal of the model with this fingerprint.

    Each model has its own journal, because the same token ids mean other texts for another model. Example:
    `journal-12a7db946949a525.sqlite`.
    """
    return directory / ("-".join(filter(None, ("journal", fingerprint))) + ".sqlite")


def lacks_space(directory: Path, error: BaseException | None) -> bool:
    """Return whether an error, or its cause, means that the disk of a directory is full.

    SQLite has several error codes for a full disk, one for each of its files that it extends.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, sqlite3.Error):
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            return is_full or disk_usage(directory).free < NEEDED_BYTES
        error = error.__cause__
    return False


class Mark:
    """Epoch and number of transactions of a journal, in a file beside it: they show how much a damaged journal lost.

    A transaction is counted after its commit and before its record is acknowledged, without a flush to the disk. So the
    file never counts more transactions than were committed, and at most one fewer after the death of the router.
    """

    FORM: Final = struct.Struct("<QQI")

    def __init__(self, path: Path) -> None:
        """Read the file, or begin one. Raises OSError."""
        self._file = os.open(path.with_suffix(".mark"), os.O_RDWR | os.O_CREAT, 0o600)
        self.epoch = self.count = 0
        content = os.pread(self._file, self.FORM.size, 0)
        if len(content) == self.FORM.size:
            epoch, count, total = self.FORM.unpack(content)
            if total == checksum(epoch, count):
                self.epoch, self.count = epoch, count

    def advance(self, epoch: int, count: int) -> None:
        """Write the epoch and number of transactions of the journal. Raises OSError."""
        self.epoch, self.count = epoch, count
        os.pwrite(self._file, self.FORM.pack(epoch, count, checksum(epoch, count)), 0)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_journal(path: Path, mark: Mark) -> sqlite3.Connection:
    """Open a journal in a locked directory for writing, with tables of this version and without damaged rows.

    A file that SQLite cannot read is kept under another name, and a new journal begins. What is lost is logged by name,
    or by number if the names are lost too. Raises ConfigError for a file of another version or one that cannot be used.
    """
    others = sorted(other.name for other in path.parent.glob("journal*.sqlite") if other != path)
    if others and not path.exists():
        log.info(
            "router.journal: the model is not the one before, so a new journal %s begins without conversations; %s "
            "stays for the earlier model",
            path,
            ", ".join(others),
        )
    if mark.count and not (path.exists() and path.stat().st_size):
        _set_aside(path, mark, "is missing or empty")
    try:
        try:
            return _open(path, mark)
        except sqlite3.OperationalError:
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            _set_aside(path, mark, f"is damaged ({error})")
            return _open(path, mark)
    except sqlite3.Error as error:
        raise ConfigError(
            f"router.journal: {path} cannot be used: {error}; move it away to begin without conversations"
        ) from error


def _open(path: Path, mark: Mark) -> sqlite3.Connection:
    with ExitStack() as on_failure:
        database = on_failure.enter_context(closing(connect(path)))
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")
        database.execute("PRAGMA journal_mode=WAL")
        _create_tables(database, path)
        ((found,),) = database.execute("PRAGMA integrity_check(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[-1])
        (count,) = database.execute("SELECT value FROM facts WHERE name = 'transactions'").fetchone() or (None,)
        if not isinstance(count, int):
            raise sqlite3.DatabaseError("it lacks the number of its transactions")
        if count < mark.count:
            log.error(
                "router.journal: %s lacks the last %d of its %d transactions: it was damaged, or is an older copy; "
                "conversations are as they were before those transactions",
                path,
                mark.count - count,
                mark.count,
            )
        _repair(database, path)
        on_failure.pop_all()
    return database


def _set_aside(path: Path, mark: Mark, why: str) -> None:
    """Keep a damaged journal under another name. The new one has no transactions yet."""
    name = f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    while path.with_name(name).exists():  # another one of the same second
        name += "-again"
    for suffix in ("", "-wal"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(path.with_name(name + suffix))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    log.error(
        "router.journal: %s %s; what is left of its %d transactions is kept as %s, and a new journal begins without "
        "conversations",
        path,
        why,
        mark.count,
        name,
    )
    mark.advance(mark.epoch, 0)


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that commits each statement outside BEGIN and COMMIT at once.

    Threads may use it in turn, one at a time.
    """
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.create_function("checksum", -1, checksum, deterministic=True)
    return database


def _create_tables(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise ConfigError(
            f"router.journal: {path} is of version {version} and this ringserve reads version {VERSION} alone; move it "
            f"away to begin without conversations, or give another directory"
        )
    if version == 0:
        if database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise sqlite3.DatabaseError("it has tables and no version")
        begin = "INSERT INTO facts VALUES ('transactions', 0);"
        database.executescript(f"BEGIN;{TABLES};{make_triggers()}{begin}PRAGMA user_version={VERSION};COMMIT;").close()
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(TABLES + make_triggers()).close()
        if _schema_of(fresh) != _schema_of(database):
            raise sqlite3.DatabaseError("its tables differ from this version's")


def _schema_of(database: sqlite3.Connection) -> list[tuple[str, str]]:
    query = "SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    return database.execute(query).fetchall()


def _repair(database: sqlite3.Connection, path: Path) -> None:
    """Drop every damaged row, and each conversation with a damaged segment; log their names."""
    damaged = {
        table: {
            key
            for (key,) in database.execute(
                f"SELECT CAST({columns[0]} AS BLOB) FROM {table} WHERE sum IS NOT {make_sum(table)}"
            )
        }
        for table, columns in SUMMED.items()
    }
    sound = _find_sound_segments(database, damaged["segments"])
    lost = {
        name
        for name, segment, num_tokens in database.execute(
            "SELECT CAST(id AS BLOB), segment, num_tokens FROM conversations"
        )
        if name in damaged["conversations"] or not 0 < num_tokens <= sound.get(segment, 0)
    }
    for what, names in (("conversation", lost), ("running turn", damaged["turns"])):
        for name in sorted(names):
            log.error("router.journal: %s %r is damaged in %s, and dropped", what, name.decode(errors="replace"), path)
    if damaged["ended"]:
        log.error("router.journal: answers of %d turns are damaged in %s, and dropped", len(damaged["ended"]), path)
    if not any((lost, *damaged.values())):
        return
    database.execute("BEGIN IMMEDIATE")
    for table, keys in (("conversations", lost), ("turns", damaged["turns"]), ("ended", damaged["ended"])):
        database.executemany(
            f"DELETE FROM {table} WHERE CAST({SUMMED[table][0]} AS BLOB) = ?", [(key,) for key in keys]
        )
    database.execute(
        "WITH RECURSIVE used(id) AS (SELECT segment FROM conversations UNION "
        "SELECT parent FROM segments JOIN used USING (id) WHERE parent IS NOT NULL) "
        "DELETE FROM segments WHERE id NOT IN used"
    )
    database.execute(
        "UPDATE segments SET refs = (SELECT count(*) FROM segments c WHERE c.parent = segments.id) + "
        "(SELECT count(*) FROM conversations c WHERE c.segment = segments.id)"
    )
    database.execute("COMMIT")


def _find_sound_segments(database: sqlite3.Connection, damaged: set[bytes]) -> dict[int, int]:
    """Return the end of each segment whose whole chain is undamaged; the chain has the tokens [0, end)."""
    rows = database.execute("SELECT id, parent, start, stop, length(tokens) FROM segments ORDER BY start").fetchall()
    sound = dict[int, int]()
    # A parent begins before its children, so it has been seen.
    for segment, parent, start, stop, num_bytes in rows:
        reached = 0 if parent is None else sound.get(parent, -1)
        is_whole = stop > start and num_bytes == TOKEN_BYTES * (stop - start)
        if (
            str(segment).encode() not in damaged
            and is_whole
            and (start == 0 if parent is None else 0 < start <= reached)
        ):
            sound[segment] = stop
    return sound
