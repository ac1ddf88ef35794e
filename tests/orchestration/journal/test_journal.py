import asyncio
import dataclasses
import multiprocessing
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.orchestration.journal import schema
from ringserve.orchestration.journal.journal import MAX_ENDED, SqliteJournal
from ringserve.workers.protocol.steps import FinishReason
from tests.orchestration.journal.records import FILE, PLAN, SPARSE, begun, committed, fork
from tests.waiting import WAIT_SECONDS


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.1)


async def turn(
    journal: SqliteJournal, name: str, turn_id: str, prompt: list[int], answer: list[int], base: int
) -> None:
    await asyncio.gather(
        journal.begun(begun(turn_id, name, prompt, base)), journal.committed(committed(turn_id, answer))
    )


def tokens(journal: SqliteJournal, name: str) -> list[int]:
    return [int(token) for token in journal.tokens_of(name)]


def num_rows(directory: Path, table: str) -> int:
    with closing(sqlite3.connect(directory / FILE)) as database:
        (count,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


def num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


async def test_a_conversation_outlives_its_router(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await turn(journal, "c", "t1", [1, 2], [3], base=0)
    await turn(journal, "c", "t2", [4], [5, 6], base=3)
    journal.close()
    later = SqliteJournal(tmp_path)
    assert later.epoch == journal.epoch + 1
    (known,) = later.conversations()
    assert dataclasses.astuple(known) == ("c", 6, 2, "", 5.0, 200.0, "t2", None)
    assert tokens(later, "c") == [1, 2, 3, 4, 5, 6]
    assert list(later.ended()) == [("t1", 1), ("t2", 2)]
    assert not list(later.turns())
    later.close()


async def test_a_turn_that_has_not_ended_is_remembered_as_it_was_begun(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    record = begun("t1", "c", [1, 2], base=0)
    await asyncio.gather(journal.begun(record), journal.begun(begun("t2", "", [9])), journal.failed("t2"))
    journal.close()
    later = SqliteJournal(tmp_path)
    (known,) = later.turns()
    assert known.request.token_ids.tolist() == [1, 2]
    # Arrays have no single truth value, and Python 3.13 compares dataclasses field by field.
    assert known.request.prediction.tolist() == []
    without_tokens = {"token_ids": None, "prediction": None}
    assert dataclasses.asdict(known) | {"request": dataclasses.asdict(known.request) | without_tokens} == (
        dataclasses.asdict(record) | {"request": dataclasses.asdict(record.request) | without_tokens}
    )
    later.close()


async def test_a_fork_copies_no_tokens_and_outlives_its_source(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await turn(journal, "c", "t1", list(range(1_000_000)), [7], base=0)
    before = num_rows(tmp_path, "segments")
    size = num_bytes(tmp_path)
    for number in range(20):
        await journal.forked("c", fork(f"f{number}", 500_000))
    assert num_bytes(tmp_path) - size < 4_000_000, "copies would take 80 MB"
    assert num_rows(tmp_path, "segments") == before
    await journal.deleted(["c"])
    assert tokens(journal, "f3") == list(range(500_000))
    await journal.deleted([f"f{number}" for number in range(20)])
    assert num_rows(tmp_path, "segments") == 0
    journal.close()


async def test_a_history_that_is_cut_back_leaves_nothing_behind(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await turn(journal, "c", "t0", list(range(1000)), [1], base=0)
    for number in range(50):
        await turn(journal, "c", f"t{number + 1}", list(range(1000)), [2], base=10 + number)
    assert tokens(journal, "c")[-1001:] == [*range(1000), 2]
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        (stored,) = database.execute("SELECT sum(length(tokens)) FROM segments").fetchone()
    assert stored == 4 * len(tokens(journal, "c"))
    journal.close()


async def test_agreement_counts_what_later_turns_have_left_of_a_turn(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await turn(journal, "c", "t1", list(range(10)), [1, 2], base=0)
    await turn(journal, "c", "t2", [5], [6], base=8)
    await journal.forked("c", fork("f", 9))
    assert [journal.num_agreeing("c", name) for name in ("t1", "t2", "another")] == [8, 10, 0]
    assert [journal.num_agreeing("f", name) for name in ("t1", "t2")] == [8, 9]
    assert journal.num_agreeing("unknown", "t1") == 0
    journal.close()


async def test_an_end_that_is_told_twice_counts_once(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await turn(journal, "c", "t1", [1], [2], base=0)
    await journal.committed(committed("t1", [2]))
    await journal.committed(committed("never begun", [2]))
    assert tokens(journal, "c") == [1, 2]
    assert next(iter(journal.conversations())).num_turns == 1
    journal.close()


async def test_answers_of_ended_turns_are_bounded(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    writes = [
        write
        for number in range(MAX_ENDED + 10)
        for write in (journal.begun(begun(f"t{number}", "", [1])), journal.committed(committed(f"t{number}", [2])))
    ]
    await asyncio.gather(*writes)
    assert len(list(journal.ended())) == MAX_ENDED
    assert num_rows(tmp_path, "turns") == 0
    journal.close()


async def test_a_record_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    failing = journal.forked("unknown", fork("f", 1))
    good = journal.begun(begun("t1", "c", [1]))
    await good
    with pytest.raises(Unavailable, match=r"router\.journal"):
        await failing
    assert [record.turn_id for record in journal.turns()] == ["t1"]
    journal.close()


def _hold(directory: Path, held: Callable[[], None], until: Callable[[], None]) -> None:
    journal = SqliteJournal(directory)
    held()
    until()
    journal.close()


def test_a_second_router_is_told_who_has_the_journal(tmp_path: Path) -> None:
    # No fork: this process has threads, and one of them may hold a lock that nobody would release in the child.
    context = multiprocessing.get_context("spawn")
    held, free = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held.set, free.wait), daemon=True)
    holder.start()
    try:
        assert held.wait(WAIT_SECONDS)
        with pytest.raises(ConfigError, match=r"router\.journal: another router writes to"):
            SqliteJournal(tmp_path)
    finally:
        free.set()
        holder.join(WAIT_SECONDS)
    SqliteJournal(tmp_path).close()


async def test_each_model_has_a_journal_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    first = SqliteJournal(tmp_path, "one")
    await first.begun(begun("t1", "c", [1]))
    first.close()
    assert not caplog.records
    other = SqliteJournal(tmp_path, "two")
    assert not list(other.turns())
    other.close()
    assert "journal-two.sqlite begins without conversations; journal-one.sqlite stays" in caplog.text
    caplog.clear()
    again = SqliteJournal(tmp_path, "one")
    assert [record.turn_id for record in again.turns()] == ["t1"]
    again.close()
    assert not caplog.records


@pytest.mark.parametrize("version", [3, 99])
def test_a_journal_of_another_version_is_refused_with_its_file_and_the_way_out(tmp_path: Path, version: int) -> None:
    SqliteJournal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        database.execute(f"PRAGMA user_version={version}")
    with pytest.raises(ConfigError, match=rf"{FILE} is of version {version} .* move it away"):
        SqliteJournal(tmp_path)


def test_a_file_that_is_no_journal_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text(content := "no database at all, of any version" * 10)
    SqliteJournal(tmp_path).close()
    (kept,) = tmp_path.glob("*.damaged-*")
    assert kept.read_text() == content
    assert f"is damaged (file is not a database); what is left of its 0 transactions is kept as {kept.name}" in (
        caplog.text
    )


def test_every_damaged_file_is_kept_also_of_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    contents = ["no database at all" * 10, "nor is this one" * 10, "nor this" * 20]
    for content in contents:
        (tmp_path / FILE).write_text(content)
        SqliteJournal(tmp_path).close()
    assert sorted(path.read_text() for path in tmp_path.glob("*.damaged-*")) == sorted(contents)


async def test_a_journal_remembers_which_turns_and_conversations_are_approximate(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await asyncio.gather(
        journal.begun(replace(begun("t1", "c", [1, 2]), sparse=SPARSE)),
        journal.begun(replace(begun("t2", "running", [1, 2]), sparse=SPARSE)),
        journal.committed(committed("t1", [3])),
        journal.forked("c", fork("f", 2)),
    )
    await turn(journal, "exact", "t3", [1, 2], [3], base=0)
    journal.close()
    later = SqliteJournal(tmp_path)
    known = {each.conversation_id: each.sparsity for each in later.conversations()}
    assert known == {"c": SPARSE.sparsity, "f": SPARSE.sparsity, "exact": None}
    assert [each.sparse for each in later.turns()] == [SPARSE]
    # An exact turn continues nothing of it; afterwards the turn's KV agrees with nothing.
    await turn(later, "c", "t4", [1, 2, 3, 4], [5], base=0)
    assert (later.num_agreeing("c", "t1"), later.num_agreeing("f", "t1")) == (0, 2)
    assert {each.conversation_id: each.sparsity for each in later.conversations()}["c"] is None
    later.close()


async def test_the_plan_of_an_ended_approximate_turn_says_so(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await journal.begun(replace(begun("t1", "c", [1, 2]), sparse=SPARSE))
    await journal.committed(replace(committed("t1", [3]), plan=replace(PLAN, sparse=SPARSE)))
    answer = journal.answer_of("request of t1")
    assert answer is not None
    assert answer.plan.sparse == SPARSE
    journal.close()


@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.LENGTH, 2), (FinishReason.STOP, 0)])
async def test_an_ended_answer_tells_its_bound_where_it_ended_there(
    tmp_path: Path, reason: FinishReason, expected: int
) -> None:
    journal = SqliteJournal(tmp_path)
    await journal.begun(begun("t1", "c", [1, 2]))
    await journal.committed(replace(committed("t1", [3, 4]), plan=PLAN, finish_reason=reason))
    answer = journal.answer_of("request of t1")
    assert answer is not None
    assert answer.max_tokens == expected
    journal.close()
