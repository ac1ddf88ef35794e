"""Journal against a model, with a crash after every byte of its log."""

import asyncio
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.orchestration.journal.journal import SqliteJournal
from tests.orchestration.journal.records import FILE, begun, committed, fork

NAMES = ("a", "b", "c")
Operation = tuple[str, str, str, int, int]
State = dict[str, tuple[int, ...]]
operations = st.tuples(
    st.sampled_from(("turn", "begin", "commit", "fail", "fork", "delete")),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.integers(0, 30),
    st.integers(1, 600),
)


class Model:
    """Model of a journal: the tokens of conversations, and the turns that run (name, base, prompt)."""

    def __init__(self) -> None:
        self.conversations: State = {}
        self.running: dict[str, tuple[str, int, tuple[int, ...]]] = {}
        self.count = 0

    @property
    def state(self) -> tuple[State, tuple[str, ...]]:
        return dict(self.conversations), tuple(sorted(self.running))

    async def apply(self, journal: SqliteJournal, operation: Operation) -> None:
        kind, name, other, place, length = operation
        history = self.conversations.get(name, ())
        turn_id = next((each for each, (of, _, _) in self.running.items() if of == name), "")
        if kind == "begin" and not turn_id:
            turn_id = self._begin(name, min(place, len(history)), length)
            _, base, prompt = self.running[turn_id]
            await journal.begun(begun(turn_id, name, prompt, base))
        elif kind == "commit" and turn_id:
            name, base, prompt = self.running.pop(turn_id)
            answer = tuple(range(9000, 9000 + length))
            self.conversations[name] = self.conversations.get(name, ())[:base] + prompt + answer
            await journal.committed(committed(turn_id, answer))
        elif kind == "fail" and turn_id:
            del self.running[turn_id]
            await journal.failed(turn_id)
        elif kind == "fork" and history and other not in self.conversations and not self._runs(other):
            num_tokens = max(1, min(place, len(history)))
            self.conversations[other] = history[:num_tokens]
            await journal.forked(name, fork(other, num_tokens))
        elif kind == "delete" and history and not turn_id:
            del self.conversations[name]
            await journal.deleted([name])

    def _begin(self, name: str, base: int, length: int) -> str:
        self.count += 1
        turn_id = f"turn-{self.count}"
        self.running[turn_id] = (name, base, tuple(range(100 * self.count, 100 * self.count + length)))
        return turn_id

    def _runs(self, name: str) -> bool:
        return any(of == name for of, _, _ in self.running.values())


def state_of(journal: SqliteJournal) -> tuple[State, tuple[str, ...]]:
    stored = {
        each.conversation_id: tuple(journal.tokens_of(each.conversation_id).tolist())
        for each in journal.conversations()
    }
    return stored, tuple(sorted(record.turn_id for record in journal.turns()))


def check_references(directory: Path) -> None:
    """Check that each segment counts its users, and that nothing is stored that no conversation reaches."""
    database = sqlite3.connect(directory / FILE)
    rows = database.execute(
        "SELECT refs, (SELECT count(*) FROM segments c WHERE c.parent = s.id) + "
        "(SELECT count(*) FROM conversations c WHERE c.segment = s.id) FROM segments s"
    ).fetchall()
    database.close()
    assert all(refs == users > 0 for refs, users in rows), rows


@settings(max_examples=25, deadline=None)
@given(st.lists(operations, max_size=25), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_after_a_crash_at_any_byte_all_is_there_that_was_acknowledged_and_nothing_half(
    steps: Sequence[Operation], crashes: Sequence[float]
) -> None:
    with TemporaryDirectory() as name:
        directory, copy = Path(name, "journal"), Path(name, "copy")
        SqliteJournal(directory).close()  # the tables are in the file now, not in its log
        acknowledged, whole = asyncio.run(_run(directory, copy, steps))
        for share in (*crashes, 1.0):
            log_bytes = int(share * whole)
            after = Path(name, f"after {log_bytes}")
            shutil.copytree(copy, after, dirs_exist_ok=True)
            with (after / f"{FILE}-wal").open("r+b") as log:
                log.truncate(log_bytes)
            expected = [state for size, state in acknowledged if size <= log_bytes]
            journal = SqliteJournal(after)
            assert state_of(journal) == (expected[-1] if expected else ({}, ()))
            journal.close()
            check_references(after)


def _single_writes(steps: Sequence[Operation]) -> Iterator[Operation]:
    for kind, name, other, place, length in steps:
        for single in ("begin", "commit") if kind == "turn" else (kind,):
            yield single, name, other, place, length


async def _run(
    directory: Path, copy: Path, steps: Sequence[Operation]
) -> tuple[list[tuple[int, tuple[State, tuple[str, ...]]]], int]:
    """Return the length of the log and the model's state after each step, and the length of the whole log."""
    model, journal = Model(), SqliteJournal(directory)
    log, acknowledged = directory / f"{FILE}-wal", []
    for step in _single_writes(steps):
        await model.apply(journal, step)
        acknowledged.append((log.stat().st_size, model.state))
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*-shm", "lock"))
    whole = log.stat().st_size
    journal.close()
    return acknowledged, whole
