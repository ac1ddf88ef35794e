"""Tables of the journal, their version, and the lock that leaves a journal to one router.

A history is a chain of segments: each turn that ended well adds one, which holds the tokens [start, stop) and continues
the tokens before `start` of its parent. Forks share the chain. `refs` counts the conversations and segments that
continue a segment; one without any is deleted, and so is a tail that nothing refers to any more. All segments of a
chain have KV of one `sparsity` (NULL: exact), since a turn of another continues no token of its conversation.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

from filelock import FileLock, Timeout

from ringserve.cp_core.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_SECONDS = 5.0
"""Seconds to wait for a router that has just been killed to release the journal."""

VERSION = 4
"""Version of the tables and of the records in them; a journal of any other is refused."""
TABLES = """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE segments (
        id INTEGER PRIMARY KEY, parent INTEGER, start INTEGER NOT NULL, stop INTEGER NOT NULL, tokens BLOB NOT NULL,
        turn TEXT NOT NULL, refs INTEGER NOT NULL, sparsity BLOB);
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, segment INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_turns INTEGER NOT NULL,
        forked_from TEXT NOT NULL, ttl REAL NOT NULL, last_used REAL NOT NULL) WITHOUT ROWID;
    CREATE TABLE turns (id TEXT PRIMARY KEY, begun_at REAL NOT NULL, tokens BLOB NOT NULL, record BLOB NOT NULL);
    CREATE TABLE ended (
        number INTEGER PRIMARY KEY AUTOINCREMENT, turn TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL,
        kv_tokens INTEGER NOT NULL, answer BLOB NOT NULL, prompt_tokens INTEGER NOT NULL, seed TEXT NOT NULL,
        finish_reason TEXT NOT NULL, plan BLOB);
    CREATE INDEX ended_requests ON ended (request_id);
"""
"""Tokens lie beside their record, so that a history is joined from them without decoding."""


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


def journal_path(directory: Path, fingerprint: str) -> Path:
    """Return the journal of the model with this fingerprint. Each model has its own: its token ids mean other texts.

    Example: `journal-12a7db946949a525.sqlite`.
    """
    return directory / ("-".join(filter(None, ("journal", fingerprint))) + ".sqlite")


def open_journal(path: Path) -> sqlite3.Connection:
    """Open a journal in a locked directory for writing, with tables of this version.

    Raises ConfigError for a file of another version, or that is no journal.
    """
    others = sorted(other.name for other in path.parent.glob("journal*.sqlite") if other != path)
    if others and not path.exists():
        log.info(
            "router.journal: the model is another one, so %s begins without conversations; %s stays for the model "
            "before",
            path,
            ", ".join(others),
        )
    try:
        with ExitStack() as on_failure:
            database = on_failure.enter_context(closing(connect(path)))
            database.execute("PRAGMA auto_vacuum=INCREMENTAL")
            database.execute("PRAGMA journal_mode=WAL")
            _create_tables(database, path)
            on_failure.pop_all()
    except sqlite3.Error as error:
        raise ConfigError(
            f"router.journal: {path} cannot be used: {error}; move it away to begin without conversations"
        ) from error
    return database


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that commits nothing by itself. Any one thread at a time may use it."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


def _create_tables(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise ConfigError(
            f"router.journal: {path} is of version {version} and this ringserve reads version {VERSION} alone; move it "
            f"away to begin without conversations, or give another directory"
        )
    if version == 0:
        database.executescript(f"BEGIN;{TABLES};PRAGMA user_version={VERSION};COMMIT;").close()
