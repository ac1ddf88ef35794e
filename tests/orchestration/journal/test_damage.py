"""A damaged journal: each conversation is what it was, is what it was before and the log says so, or is dropped."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError, ConversationLost
from ringserve.orchestration.journal import schema
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.journal.schema import Mark, connect
from tests.orchestration.journal.records import FILE, begun, committed, fork

NAMES = tuple(f"conversation-{number}" for number in range(12))
Histories = dict[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.1)


async def write(journal: SqliteJournal) -> list[Histories]:
    """Write conversations of three turns each, every third of them forked -> the histories after each transaction."""
    states: list[Histories] = [{}]
    for turn in range(3):
        for number, name in enumerate(NAMES):
            history = states[-1].get(name, ())
            prompt, answer = [1000 * turn + number] * 40, [7 + number] * 25
            await journal.begun(begun(f"{name}-{turn}", name, prompt, len(history)))
            await journal.committed(committed(f"{name}-{turn}", answer))
            states += [states[-1], states[-1] | {name: (*history, *prompt, *answer)}]
    for name in NAMES[::3]:
        await journal.forked(name, fork(f"fork of {name}", 70))
        states.append(states[-1] | {f"fork of {name}": states[-1][name][:70]})
    return states


def read(journal: SqliteJournal) -> Histories:
    found: Histories = {}
    for each in journal.conversations():
        try:
            found[each.conversation_id] = tuple(journal.tokens_of(each.conversation_id).tolist())
        except ConversationLost:
            continue
    return found


def flip(target: Path, place: int) -> None:
    """Flip a bit of the byte at `place`: all eight in turn, as the steps are odd."""
    with target.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << place % 8]))


def cut(target: Path, length: int) -> None:
    with target.open("r+b") as file:
        file.truncate(length)


@pytest.mark.parametrize(
    ("suffix", "damage", "step"),
    [
        ("", flip, 1201),
        ("", cut, 3001),
        ("-wal", flip, 40009),
        ("-wal", cut, 40009),
        # The figures of decision 0025.
        pytest.param("", flip, 29, marks=pytest.mark.slow),
        pytest.param("", cut, 29, marks=pytest.mark.slow),
        pytest.param("-wal", flip, 203, marks=pytest.mark.slow),
        pytest.param("-wal", cut, 203, marks=pytest.mark.slow),
    ],
)
def test_a_damaged_journal_gives_no_other_tokens_and_loses_none_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, damage: Callable[[Path, int], None], step: int
) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    states = asyncio.run(write(journal))
    if suffix:  # as after a kill: what was written last is in the log alone
        shutil.copytree(tmp_path / "journal", tmp_path / "whole", ignore=shutil.ignore_patterns("*-shm", "lock"))
        journal.close()
    else:
        journal.close()
        shutil.copytree(tmp_path / "journal", tmp_path / "whole")
    outcomes = Counter[str]()
    for place in range(0, (tmp_path / "whole" / (FILE + suffix)).stat().st_size, step):
        copy = tmp_path / f"copy-{place}"
        shutil.copytree(tmp_path / "whole", copy)
        damage(copy / (FILE + suffix), place)
        caplog.clear()
        outcomes[open_damaged(copy, states, caplog)] += 1
        shutil.rmtree(copy)
    print(f"{damage.__name__} of journal{suffix} every {step} bytes: {dict(outcomes)}")
    assert outcomes.keys() & {"dropped by name", "rolled back", "set aside"}


def open_damaged(directory: Path, states: list[Histories], caplog: pytest.LogCaptureFixture) -> str:
    """Open a damaged journal, compare its histories and its log with what was written, and return what became of it."""
    try:
        damaged = SqliteJournal(directory)
    except ConfigError:
        return "refused"
    found = read(damaged)
    damaged.close()
    text = caplog.text
    if found == states[-1]:
        return "whole"
    if "lacks the last" in text:
        assert found in states
        return "rolled back"
    if "a new journal begins without conversations" in text:
        assert found == {}
        return "set aside"
    assert found.items() <= states[-1].items()
    # The log names a conversation as the file does, a flipped name included.
    assert len(states[-1]) - len(found) == text.count(" is damaged in ") - text.count("running turn")
    return "dropped by name"


def test_what_changes_on_the_disk_while_the_router_runs_is_no_answer(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    states = asyncio.run(write(journal))
    with closing(connect(tmp_path / FILE)) as other:
        other.execute("DROP TRIGGER segments_UPDATE")
        other.execute("UPDATE segments SET tokens = zeroblob(length(tokens)) WHERE turn = 'conversation-4-1'")
    assert set(states[-1]) - set(read(journal)) == {"conversation-4"}
    with pytest.raises(ConversationLost, match="'conversation-4' are damaged in the journal; send the whole"):
        journal.tokens_of("conversation-4")
    journal.close()


@pytest.mark.parametrize("ours", ["parent = id", "parent = 1000", "start = 1, stop = stop + 1"])
def test_a_chain_that_leads_nowhere_is_dropped_with_its_conversations_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ours: str
) -> None:
    journal = SqliteJournal(tmp_path)
    states = asyncio.run(write(journal))
    journal.close()
    with closing(connect(tmp_path / FILE)) as database:  # the triggers write the right checksums of wrong rows
        database.execute(f"UPDATE segments SET {ours} WHERE turn = 'conversation-3-0'")
    again = SqliteJournal(tmp_path)
    lost = {"conversation-3", "fork of conversation-3"}
    assert read(again) == {name: tokens for name, tokens in states[-1].items() if name not in lost}
    assert [record.message for record in caplog.records] == [
        f"router.journal: conversation {name!r} is damaged in {tmp_path / FILE}, and dropped" for name in sorted(lost)
    ]
    again.close()
    with closing(connect(tmp_path / FILE)) as database:
        assert not database.execute("SELECT id FROM segments WHERE refs = 0").fetchall()


def test_an_emptied_or_removed_journal_is_told_and_its_epochs_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = SqliteJournal(tmp_path)
    states = asyncio.run(write(journal))
    journal.close()
    (tmp_path / FILE).write_bytes(b"")
    emptied = SqliteJournal(tmp_path)
    assert (read(emptied), emptied.epoch) == ({}, 2)
    emptied.close()
    assert f"is missing or empty; what is left of its {len(states) - 1} transactions is kept" in caplog.text


def test_a_damaged_mark_counts_nothing(tmp_path: Path) -> None:
    mark = Mark(tmp_path / FILE)
    mark.advance(3, 70)
    mark.close()
    again = Mark(tmp_path / FILE)
    assert (again.epoch, again.count) == (3, 70)
    again.close()
    (file,) = tmp_path.glob("*.mark")
    content = bytearray(file.read_bytes())
    content[9] ^= 4
    file.write_bytes(content)
    damaged = Mark(tmp_path / FILE)
    assert (damaged.epoch, damaged.count) == (0, 0)
    damaged.close()
