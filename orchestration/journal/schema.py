"""Tables of the journal, their version, and the lock that leaves a journal to one router.

A history is a chain of segments: each turn that ended well adds one, which holds the tokens [start, stop) and continues
the tokens before `start` of its parent. Forks share the chain. `refs` counts the conversations and segments that
continue a segment; one without any is deleted, and so is a tail that nothing refers to any more. All segments of a
chain have KV of one `sparsity` (empty: exact), since a turn of another continues no token of its conversation.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from filelock import FileLock, Timeout

from ringserve.cp_core.errors import ConfigError

FILE = "journal.sqlite"
LOCK_SECONDS = 5.0
"""Seconds to wait for a router that has just been killed to release the journal."""

VERSIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE segments (
        id INTEGER PRIMARY KEY, parent INTEGER, start INTEGER NOT NULL, stop INTEGER NOT NULL, tokens BLOB NOT NULL,
        turn TEXT NOT NULL, refs INTEGER NOT NULL);
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, segment INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_turns INTEGER NOT NULL,
        forked_from TEXT NOT NULL, ttl REAL NOT NULL, last_used REAL NOT NULL) WITHOUT ROWID;
    CREATE TABLE turns (
        id TEXT PRIMARY KEY, request_id TEXT NOT NULL, conversation TEXT NOT NULL, base INTEGER NOT NULL,
        tokens BLOB NOT NULL, request TEXT NOT NULL, prefill_ring TEXT NOT NULL, prefill_incarnation TEXT NOT NULL,
        decode_ring TEXT NOT NULL, decode_incarnation TEXT NOT NULL, attempt INTEGER NOT NULL, begun_at REAL NOT NULL);
    CREATE TABLE ended (
        number INTEGER PRIMARY KEY AUTOINCREMENT, turn TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL,
        conversation TEXT NOT NULL, answer BLOB NOT NULL, finish_reason TEXT NOT NULL, kv_tokens INTEGER NOT NULL,
        ended_at REAL NOT NULL);
    """,
    """
    ALTER TABLE ended ADD COLUMN prompt_tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE ended ADD COLUMN seed TEXT NOT NULL DEFAULT '';
    ALTER TABLE ended ADD COLUMN plan TEXT NOT NULL DEFAULT '';
    CREATE INDEX ended_requests ON ended (request_id);
    """,
    "ALTER TABLE segments ADD COLUMN sparsity TEXT NOT NULL DEFAULT '';",
)
"""Scripts that lead from one version of the tables to the next. A release only appends to them."""


def take_lock(directory: Path) -> FileLock:
    """Make the directory and lock it for this process. Raises ConfigError where another router has it."""
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


def open_journal(directory: Path, model: str) -> sqlite3.Connection:
    """Open the journal of a locked directory for writing, with tables of this version. `model` made its token ids.

    Raises ConfigError for a file of a later version, of another model, or that is no journal.
    """
    path = directory / FILE
    try:
        database = connect(directory)
        database.execute("PRAGMA auto_vacuum=INCREMENTAL")
        database.execute("PRAGMA journal_mode=WAL")
        _migrate(database, path)
        _check_model(database, path, model)
    except sqlite3.Error as error:
        raise ConfigError(
            f"router.journal: {path} cannot be used: {error}; move it away to begin without conversations"
        ) from error
    return database


def connect(directory: Path) -> sqlite3.Connection:
    """Return a connection that commits nothing by itself. Any one thread at a time may use it."""
    return sqlite3.connect(directory / FILE, isolation_level=None, check_same_thread=False)


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(VERSIONS):
        raise ConfigError(
            f"router.journal: {path} is of version {version} and this ringserve knows versions up to {len(VERSIONS)}; "
            f"upgrade it, or give another directory"
        )
    for number, script in enumerate(VERSIONS[version:], start=version + 1):
        with closing(database.executescript(f"BEGIN;{script};PRAGMA user_version={number};COMMIT;")):
            pass


def _check_model(database: sqlite3.Connection, path: Path, model: str) -> None:
    database.execute("INSERT OR IGNORE INTO facts VALUES ('model', ?)", (model,))
    (known,) = database.execute("SELECT value FROM facts WHERE name = 'model'").fetchone()
    if known != model:
        raise ConfigError(
            f"router.journal: {path} has conversations with model {known}, and this router serves {model}; "
            f"give another directory"
        )
