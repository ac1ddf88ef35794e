"""Journal of a router in a directory: a SQLite file in WAL mode. See `orchestration.protocol.journal` for the records.

Transactions are not flushed to the disk one by one (`synchronous=NORMAL`): a record that is acknowledged survives the
death of the router, and after a power cut the file is whole and lacks the last records (decision 0025). The router owns
the journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from filelock import FileLock

from ringserve.cp_core.errors import ConfigError, ConversationLost, DiskFull
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.journal.schema import (
    TOKEN_BYTES,
    Mark,
    connect,
    journal_path,
    lacks_space,
    make_sum,
    open_journal,
    take_lock,
)
from ringserve.orchestration.journal.writer import GroupCommit
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, StoredConversation
from ringserve.orchestration.protocol.plans import TurnPlan
from ringserve.orchestration.protocol.turns import BegunTurn, EndedAnswer
from ringserve.workers.protocol.encoding import Codec
from ringserve.workers.protocol.steps import FinishReason, TokenIds

RECORDS, PLANS, SPARSITIES = Codec(BegunRecord), Codec(TurnPlan), Codec(Sparsity)
NO_TOKENS: TokenIds = np.empty(0, dtype=np.int64)

MAX_ENDED = 4096
"""Most turns that ended well whose answers are remembered; the oldest are dropped."""
VACUUM_PAGES = 256
"""Most pages of the file that one deletion gives back to the file system."""


class SqliteJournal:
    """`JournalPort` over SQLite. Reads happen on the caller's thread, writes on one of the journal's own."""

    def __init__(self, directory: Path, fingerprint: str = "") -> None:
        """Lock the directory and begin an epoch in the journal of the model with this fingerprint.

        Raises DiskFull, and ConfigError if the journal cannot be used.
        """
        path = journal_path(directory, fingerprint)
        mark: Mark | None = None
        lock: FileLock | None = None
        try:
            lock = take_lock(directory)
            mark = Mark(path)
            database = open_journal(path, mark)
            # A leader must never see an epoch twice, not even after a power cut.
            database.execute("PRAGMA synchronous=FULL")
            (self.epoch,) = database.execute(
                "INSERT INTO facts VALUES ('epoch', ?1) ON CONFLICT DO UPDATE SET value = max(value + 1, ?1) "
                "RETURNING value",
                (mark.epoch + 1,),
            ).fetchone()
            (count,) = database.execute("SELECT value FROM facts WHERE name = 'transactions'").fetchone()
            mark.advance(self.epoch, count)
            database.execute("PRAGMA synchronous=NORMAL")
            self._database = database
            self._reader = connect(path)
        except BaseException as error:
            if mark is not None:
                mark.close()
            if lock is not None:
                lock.release()
            if lacks_space(directory, error):
                raise DiskFull(f"router.journal: the disk of {directory} is full") from error
            if isinstance(error, OSError):
                raise ConfigError(f"router.journal: {directory} cannot be written: {error.strerror}") from error
            raise
        self._lock = lock
        self._mark = mark
        self._writer = GroupCommit(database, mark)

    # --- records -----------------------------------------------------------------------------------------------------

    def begun(self, record: BegunRecord) -> Awaitable[None]:
        request = record.request
        # `reader` is not stored: a later router does not know the gateway's present reader, so it lets any of them
        # abort the turn.
        stored = replace(record, request=replace(request, token_ids=NO_TOKENS, reader="", resume=None))
        row = (record.turn_id, record.begun_at, _packed(request.token_ids), RECORDS.encode(stored))
        return self._writer.write(lambda db: _run(db, "INSERT OR REPLACE INTO turns VALUES (?,?,?,?,NULL)", row))

    def committed(self, record: CommittedRecord) -> Awaitable[None]:
        return self._writer.write(lambda db: _commit(db, record))

    def failed(self, turn_id: str) -> Awaitable[None]:
        return self._writer.write(lambda db: _run(db, "DELETE FROM turns WHERE id = ?", (turn_id,)))

    def forked(self, source_id: str, new: StoredConversation) -> Awaitable[None]:
        return self._writer.write(lambda db: _fork(db, source_id, new))

    def deleted(self, conversation_ids: Sequence[str]) -> Awaitable[None]:
        names = list(conversation_ids)
        return self._writer.write(lambda db: _delete(db, names))

    # --- reads -------------------------------------------------------------------------------------------------------

    def conversations(self) -> Iterable[StoredConversation]:
        query = (
            "SELECT c.id, c.num_tokens, c.num_turns, c.forked_from, c.ttl, c.last_used, s.turn, s.sparsity "
            "FROM conversations c JOIN segments s ON s.id = c.segment ORDER BY c.last_used"
        )
        for name, num_tokens, num_turns, forked_from, ttl, last_used, turn, sparsity in self._reader.execute(query):
            yield StoredConversation(
                conversation_id=name,
                num_tokens=num_tokens,
                num_turns=num_turns,
                forked_from=forked_from,
                ttl_seconds=ttl,
                last_used=last_used,
                last_turn=turn,
                sparsity=SPARSITIES.decode(sparsity) if sparsity else None,
            )

    def turns(self) -> Iterable[BegunRecord]:
        for tokens, data in self._reader.execute("SELECT tokens, record FROM turns ORDER BY begun_at").fetchall():
            record = RECORDS.decode(data)
            yield replace(record, request=replace(record.request, token_ids=_unpacked(tokens)))

    def ended(self) -> Iterable[tuple[str, int]]:
        rows: list[tuple[str, int]] = self._reader.execute(
            "SELECT turn, kv_tokens FROM ended ORDER BY number"
        ).fetchall()
        return rows

    def answer_of(self, request_id: str) -> BegunTurn | None:
        query = (
            "SELECT turn, answer, prompt_tokens, seed, plan, finish_reason FROM ended "
            "WHERE request_id = ? AND plan IS NOT NULL ORDER BY number DESC LIMIT 1"
        )
        row = self._reader.execute(query, (request_id,)).fetchone()
        if row is None:
            return None
        turn, answer, prompt_tokens, seed, plan, reason = row
        ended = EndedAnswer(token_ids=tuple(_unpacked(answer).tolist()), seed=int(seed))
        return BegunTurn(
            turn_id=turn,
            decode_endpoint="",
            prompt_tokens=prompt_tokens,
            plan=PLANS.decode(plan),
            ended=ended,
            max_tokens=len(ended.token_ids) if reason == FinishReason.LENGTH.value else 0,
        )

    def tokens_of(self, conversation_id: str) -> TokenIds:
        segment, stop = _head(self._reader, conversation_id)
        tokens = np.empty(stop, dtype=np.int64)
        while stop:
            # Checksums were compared when the journal was opened; the disk may have changed since.
            row = self._reader.execute(
                f"SELECT parent, start, tokens, sum IS {make_sum('segments')} FROM segments WHERE id = ?", (segment,)
            ).fetchone()
            if row is None or not row[3] or row[1] >= stop:
                raise ConversationLost(
                    f"conversation_id: the tokens of {conversation_id!r} are damaged in the journal; send the whole "
                    f"text under a new conversation_id"
                )
            segment, start, blob, _ = row
            tokens[start:stop] = np.frombuffer(blob, dtype="<i4", count=stop - start)
            stop = start
        return tokens

    def num_agreeing(self, conversation_id: str, turn_id: str) -> int:
        head = self._reader.execute("SELECT segment, num_tokens FROM conversations WHERE id = ?", (conversation_id,))
        segment, stop = head.fetchone() or (None, 0)
        while segment is not None:
            parent, start, turn = self._reader.execute(
                "SELECT parent, start, turn FROM segments WHERE id = ?", (segment,)
            ).fetchone()
            if turn == turn_id:
                return int(stop)
            segment, stop = parent, min(stop, start)
        return 0

    def close(self) -> None:
        """Write waiting rows, and let another router have the journal. Idempotent."""
        self._writer.close()
        with suppress(sqlite3.ProgrammingError):
            self._reader.close()
            self._database.close()
        self._mark.close()
        self._lock.release()


def _run(database: sqlite3.Connection, statement: str, values: Sequence[object]) -> None:
    database.execute(statement, values)


def _commit(database: sqlite3.Connection, record: CommittedRecord) -> None:
    """Move a turn from the running turns to its conversation's history. Idempotent."""
    row = database.execute("SELECT tokens, record FROM turns WHERE id = ?", (record.turn_id,)).fetchone()
    if row is None:
        return
    tokens, begun = row[0], RECORDS.decode(row[1])
    answer = _packed(record.answer)
    if begun.request.conversation_id:
        _append(database, begun, tokens + answer, record.ended_at)
    database.execute("DELETE FROM turns WHERE id = ?", (record.turn_id,))
    number = database.execute(
        "INSERT OR REPLACE INTO ended (turn, request_id, kv_tokens, answer, prompt_tokens, seed, finish_reason, plan) "
        "VALUES (?,?,?,?,?,?,?,?) RETURNING number",
        (
            record.turn_id,
            begun.request.request_id,
            record.kv_tokens,
            answer,
            begun.base_tokens + len(tokens) // TOKEN_BYTES,
            str(begun.request.sampling.seed),  # SQLite's integers have a sign
            record.finish_reason.value if record.finish_reason else "",
            PLANS.encode(_outline(record.plan)) if record.plan else None,
        ),
    ).fetchone()[0]
    database.execute("DELETE FROM ended WHERE number <= ?", (number - MAX_ENDED,))


def _append(database: sqlite3.Connection, begun: BegunRecord, tokens: bytes, ended_at: float) -> None:
    """Make the turn's conversation its first `base_tokens` tokens, followed by `tokens`."""
    conversation, base, sparse = begun.request.conversation_id, begun.base_tokens, begun.sparse
    row = database.execute("SELECT segment FROM conversations WHERE id = ?", (conversation,)).fetchone()
    before = None if row is None else int(row[0])
    parent = _holder(database, before, base)
    if parent is not None:
        database.execute("UPDATE segments SET refs = refs + 1 WHERE id = ?", (parent,))
    stop = base + len(tokens) // TOKEN_BYTES
    head = database.execute(
        "INSERT INTO segments (parent, start, stop, tokens, turn, refs, sparsity) VALUES (?,?,?,?,?,1,?)",
        (parent, base, stop, tokens, begun.turn_id, SPARSITIES.encode(sparse.sparsity) if sparse else None),
    ).lastrowid
    database.execute(
        "INSERT INTO conversations VALUES (?,?,?,1,'',?,?,NULL) ON CONFLICT DO UPDATE SET segment = excluded.segment, "
        "num_tokens = excluded.num_tokens, num_turns = num_turns + 1, ttl = excluded.ttl, "
        "last_used = excluded.last_used",
        (conversation, head, stop, begun.request.conversation_ttl_seconds or 0.0, ended_at),
    )
    if before is not None:
        _release(database, before)
    if parent is not None:
        _cut(database, parent, base)


def _holder(database: sqlite3.Connection, segment: int | None, num_tokens: int) -> int | None:
    """Return the segment of a chain that holds the last of its first `num_tokens` tokens; None for no tokens."""
    while segment is not None and num_tokens:
        parent, start = database.execute("SELECT parent, start FROM segments WHERE id = ?", (segment,)).fetchone()
        if start < num_tokens:
            return segment
        segment = parent
    return None


def _release(database: sqlite3.Connection, segment: int | None) -> None:
    """Take one reference from a segment. If it has none left, delete it and take one from its parent, and so on."""
    while segment is not None:
        parent, refs = database.execute("SELECT parent, refs FROM segments WHERE id = ?", (segment,)).fetchone()
        if refs > 1:
            database.execute("UPDATE segments SET refs = refs - 1 WHERE id = ?", (segment,))
            return
        database.execute("DELETE FROM segments WHERE id = ?", (segment,))
        segment = parent


def _cut(database: sqlite3.Connection, segment: int, stop: int) -> None:
    """Drop the tokens of a segment from `stop` on, if nothing refers to it but the segment that continues it there."""
    database.execute(
        "UPDATE segments SET stop = ?, tokens = substr(tokens, 1, (? - start) * ?) "
        "WHERE id = ? AND refs = 1 AND stop > ?",
        (stop, stop, TOKEN_BYTES, segment, stop),
    )


def _head(database: sqlite3.Connection, conversation_id: str) -> tuple[int, int]:
    head: tuple[int, int] = database.execute(
        "SELECT segment, num_tokens FROM conversations WHERE id = ?", (conversation_id,)
    ).fetchone()
    return head


def _fork(database: sqlite3.Connection, source_id: str, new: StoredConversation) -> None:
    source, _ = _head(database, source_id)
    segment = _holder(database, source, new.num_tokens)
    database.execute("UPDATE segments SET refs = refs + 1 WHERE id = ?", (segment,))
    database.execute(
        "INSERT INTO conversations VALUES (?,?,?,?,?,?,?,NULL)",
        (new.conversation_id, segment, new.num_tokens, new.num_turns, source_id, new.ttl_seconds, new.last_used),
    )


def _delete(database: sqlite3.Connection, conversation_ids: Sequence[str]) -> None:
    for name in conversation_ids:
        rows = database.execute("DELETE FROM conversations WHERE id = ? RETURNING segment", (name,)).fetchall()
        for (segment,) in rows:
            _release(database, segment)
    # Fetched to the end: the pragma frees one page for each row that is read.
    database.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()


def _packed(tokens: TokenIds) -> bytes:
    return np.asarray(tokens).astype("<i4").tobytes()


def _unpacked(blob: bytes) -> TokenIds:
    return np.frombuffer(blob, dtype="<i4").astype(np.int64)


def _outline(plan: TurnPlan) -> TurnPlan:
    """Return the part of a plan that a client sees once its turn has ended: no predictions, no chunks."""
    return replace(
        plan, cached_sources=(), chunks=(), predicted_prefill_seconds=0.0, alternatives=(), ring_alternatives=()
    )
