"""Journal of a router in a directory: a SQLite file in WAL mode. See `orchestration.protocol.journal` for the records.

Transactions are not flushed to the disk one by one (`synchronous=NORMAL`): a record that is acknowledged survives the
death of the router, and after a power cut the file is whole and lacks the last records (decision 0025).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.journal.schema import connect, open_journal, take_lock
from ringserve.orchestration.journal.writer import GroupCommit
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, RingIncarnation, StoredConversation
from ringserve.orchestration.protocol.plans import PromptMode, SparsePlan, TurnPlan
from ringserve.orchestration.protocol.turns import BegunTurn, EndedAnswer, KvQuota, TurnRequest
from ringserve.workers.protocol.decode_commands import FinishReason
from ringserve.workers.protocol.prefill_steps import Algorithm, TokenIds
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias

MAX_ENDED = 4096
"""Turns that ended well whose answer is remembered."""
TOKEN_BYTES = 4
VACUUM_PAGES = 256
"""Pages that one transaction which deletes gives back to the file system."""


class SqliteJournal:
    """`JournalPort` over SQLite. Reads happen on the caller's thread, writes on one of the journal's own."""

    def __init__(self, directory: Path, model: str = "") -> None:
        """Lock the directory and begin an epoch. Raises ConfigError where the journal cannot be used."""
        self._lock = take_lock(directory)
        try:
            database = open_journal(directory, model)
            # A leader must never see an epoch twice, not even after a power cut.
            database.execute("PRAGMA synchronous=FULL")
            (self.epoch,) = database.execute(
                "INSERT INTO facts VALUES ('epoch', 1) ON CONFLICT DO UPDATE SET value = value + 1 RETURNING value"
            ).fetchone()
            database.execute("PRAGMA synchronous=NORMAL")
            self._database = database
            self._reader = connect(directory)
        except BaseException:
            self._lock.release()
            raise
        self._writer = GroupCommit(database)

    # --- records -----------------------------------------------------------------------------------------------------

    def begun(self, record: BegunRecord) -> Awaitable[None]:
        request, prefill = record.request, record.prefill
        row = (
            record.turn_id,
            request.request_id,
            request.conversation_id,
            record.base_tokens,
            _packed(request.token_ids),
            _request_text(record),
            prefill.ring if prefill else "",
            prefill.incarnation if prefill else "",
            record.decode.ring,
            record.decode.incarnation,
            record.attempt,
            record.begun_at,
        )
        return self._writer.write(
            lambda db: _run(db, "INSERT OR REPLACE INTO turns VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", row)
        )

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
                sparsity=Sparsity(**json.loads(sparsity)) if sparsity else None,
            )

    def turns(self) -> Iterable[BegunRecord]:
        for row in self._reader.execute("SELECT * FROM turns ORDER BY begun_at").fetchall():
            turn_id, request_id, conversation, base, tokens, request, *rings, attempt, begun_at = row
            prefill_ring, prefill_incarnation, decode_ring, decode_incarnation = rings
            yield BegunRecord(
                turn_id=turn_id,
                request=_request_from(request_id, conversation, _unpacked(tokens), request),
                base_tokens=base,
                prefill=RingIncarnation(ring=prefill_ring, incarnation=prefill_incarnation) if prefill_ring else None,
                decode=RingIncarnation(ring=decode_ring, incarnation=decode_incarnation),
                attempt=attempt,
                begun_at=begun_at,
                sparse=_sparse_from(json.loads(request)),
            )

    def ended(self) -> Iterable[tuple[str, int]]:
        rows: list[tuple[str, int]] = self._reader.execute(
            "SELECT turn, kv_tokens FROM ended ORDER BY number"
        ).fetchall()
        return rows

    def answer_of(self, request_id: str) -> BegunTurn | None:
        query = (
            "SELECT turn, answer, prompt_tokens, seed, plan, finish_reason FROM ended "
            "WHERE request_id = ? AND plan != '' ORDER BY number DESC LIMIT 1"
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
            plan=_plan_from(plan),
            ended=ended,
            max_tokens=len(ended.token_ids) if reason == FinishReason.LENGTH.value else 0,
        )

    def tokens_of(self, conversation_id: str) -> TokenIds:
        segment, stop = _head(self._reader, conversation_id)
        tokens = np.empty(stop, dtype=np.int64)
        while stop:
            segment, start, blob = self._reader.execute(
                "SELECT parent, start, tokens FROM segments WHERE id = ?", (segment,)
            ).fetchone()
            tokens[start:stop] = np.frombuffer(blob, dtype="<i4", count=stop - start)
            stop = start
        return tokens

    def agreeing(self, conversation_id: str, turn_id: str) -> int:
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
        """Write what waits, and let another router have the journal. Idempotent."""
        self._writer.close()
        with suppress(sqlite3.ProgrammingError):
            self._reader.close()
            self._database.close()
        self._lock.release()


def _run(database: sqlite3.Connection, statement: str, values: Sequence[object]) -> None:
    database.execute(statement, values)


def _commit(database: sqlite3.Connection, record: CommittedRecord) -> None:
    """Move a turn from those that run to its conversation's history. Idempotent."""
    row = database.execute(
        "SELECT request_id, conversation, base, tokens, request FROM turns WHERE id = ?", (record.turn_id,)
    ).fetchone()
    if row is None:
        return
    request_id, conversation, base, tokens, request = row
    answer, values = _packed(record.answer), json.loads(request)
    if conversation:
        _append(database, conversation, base, tokens + answer, record, values)
    database.execute("DELETE FROM turns WHERE id = ?", (record.turn_id,))
    reason = record.finish_reason.value if record.finish_reason else ""
    number = database.execute(
        "INSERT OR REPLACE INTO ended (turn, request_id, conversation, answer, finish_reason, kv_tokens, ended_at, "
        "prompt_tokens, seed, plan) VALUES (?,?,?,?,?,?,?,?,?,?) RETURNING number",
        (
            record.turn_id,
            request_id,
            conversation,
            answer,
            reason,
            record.kv_tokens,
            record.ended_at,
            base + len(tokens) // TOKEN_BYTES,
            str(values["sampling"]["seed"]),
            _plan_text(record.plan) if record.plan else "",
        ),
    ).fetchone()[0]
    database.execute("DELETE FROM ended WHERE number <= ?", (number - MAX_ENDED,))


def _append(
    database: sqlite3.Connection,
    conversation: str,
    base: int,
    tokens: bytes,
    record: CommittedRecord,
    request: dict[str, Any],
) -> None:
    """Let a conversation continue its first `base` tokens with others."""
    row = database.execute("SELECT segment FROM conversations WHERE id = ?", (conversation,)).fetchone()
    before = None if row is None else int(row[0])
    parent = _holder(database, before, base)
    if parent is not None:
        database.execute("UPDATE segments SET refs = refs + 1 WHERE id = ?", (parent,))
    stop, sparse = base + len(tokens) // TOKEN_BYTES, _sparse_from(request)
    head = database.execute(
        "INSERT INTO segments (parent, start, stop, tokens, turn, refs, sparsity) VALUES (?,?,?,?,?,1,?)",
        (parent, base, stop, tokens, record.turn_id, json.dumps(asdict(sparse.sparsity)) if sparse else ""),
    ).lastrowid
    database.execute(
        "INSERT INTO conversations VALUES (?,?,?,1,'',?,?) ON CONFLICT DO UPDATE SET segment = excluded.segment, "
        "num_tokens = excluded.num_tokens, num_turns = num_turns + 1, ttl = excluded.ttl, "
        "last_used = excluded.last_used",
        (conversation, head, stop, request.get("ttl", 0.0), record.ended_at),
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
    """Take one reference from a segment; without any it is deleted, and its parent loses one."""
    while segment is not None:
        parent, refs = database.execute("SELECT parent, refs FROM segments WHERE id = ?", (segment,)).fetchone()
        if refs > 1:
            database.execute("UPDATE segments SET refs = refs - 1 WHERE id = ?", (segment,))
            return
        database.execute("DELETE FROM segments WHERE id = ?", (segment,))
        segment = parent


def _cut(database: sqlite3.Connection, segment: int, stop: int) -> None:
    """Drop the tokens of a segment from `stop` on, where the one that continues there is its only user."""
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
        "INSERT INTO conversations VALUES (?,?,?,?,?,?,?)",
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


def _request_text(record: BegunRecord) -> str:
    request = record.request
    return json.dumps(
        {
            "mode": request.prompt_mode,
            "sampling": asdict(request.sampling),
            "deadline": request.deadline_seconds,
            "ttl": request.conversation_ttl_seconds or 0.0,
            "priority": request.priority,
            "algorithm": request.algorithm,
            "trace_parent": request.trace_parent,
            "kv_quota": asdict(request.kv_quota) if request.kv_quota else None,
            "sparse": asdict(record.sparse) if record.sparse else None,
        }
    )


def _sparse_from(values: dict[str, Any]) -> SparsePlan | None:
    """Return the sparsity of a turn or plan; earlier releases wrote none."""
    return SparsePlan(**values["sparse"]) if values.get("sparse") else None


def _request_from(request_id: str, conversation_id: str, tokens: TokenIds, text: str) -> TurnRequest:
    values = json.loads(text)
    sampling = values["sampling"]
    sampling["logit_bias"] = tuple(TokenBias(**bias) for bias in sampling["logit_bias"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return TurnRequest(
        request_id=request_id,
        conversation_id=conversation_id,
        prompt_mode=PromptMode(values["mode"]),
        token_ids=tokens,
        sampling=SamplingParameters(**sampling),
        deadline_seconds=values["deadline"],
        conversation_ttl_seconds=values["ttl"],
        priority=values["priority"],
        algorithm=Algorithm(values["algorithm"]) if values["algorithm"] else None,
        trace_parent=values["trace_parent"],
        kv_quota=KvQuota(**values["kv_quota"]) if values["kv_quota"] else None,
    )


PLAN_FIELDS = ("reason", "new_tokens", "cached_tokens", "prefill_ring", "decode_ring", "prefill_ranks", "decode_ranks")


def _plan_text(plan: TurnPlan) -> str:
    """Return what a client is told of a plan whose turn has ended; predictions and chunks are not written."""
    told = {name: getattr(plan, name) for name in PLAN_FIELDS}
    sparse = asdict(plan.sparse) if plan.sparse else None
    return json.dumps({**told, "algorithm": plan.algorithm, "prompt_mode": plan.prompt_mode, "sparse": sparse})


def _plan_from(text: str) -> TurnPlan:
    values = json.loads(text)
    return TurnPlan(
        **{name: values[name] for name in PLAN_FIELDS},
        algorithm=Algorithm(values["algorithm"]),
        prompt_mode=PromptMode(values["prompt_mode"]),
        cached_sources=(),
        chunks=(),
        predicted_prefill_seconds=0.0,
        alternatives=(),
        sparse=_sparse_from(values),
    )
