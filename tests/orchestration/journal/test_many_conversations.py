"""A journal with many conversations. How long a router takes to know them is measured by `bench router --restart`."""

from contextlib import closing
from pathlib import Path

from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.journal.schema import connect
from tests.orchestration.journal.records import FILE

NUM_CONVERSATIONS = 10_000


def test_a_router_knows_every_conversation_of_a_large_journal(tmp_path: Path) -> None:
    SqliteJournal(tmp_path).close()
    blob = bytes(4 * 50)
    with closing(connect(tmp_path / FILE)) as database, database:
        database.execute("BEGIN")
        numbers = range(1, NUM_CONVERSATIONS + 1)
        segments = ((number, None, 0, 50, blob, f"turn {number}", 1, "") for number in numbers)
        database.executemany("INSERT INTO segments VALUES (?,?,?,?,?,?,?,?,NULL)", segments)
        rows = ((f"c{number}", number, 50, 1, "", 0.0, float(number)) for number in numbers)
        database.executemany("INSERT INTO conversations VALUES (?,?,?,?,?,?,?,NULL)", rows)
    journal = SqliteJournal(tmp_path)
    store = ConversationStore(NUM_CONVERSATIONS, journal=journal)
    assert len(store) == NUM_CONVERSATIONS
    tokens = store.get("c7").tokens
    assert tokens is not None
    assert store.get("c7").num_tokens == len(tokens) == 50
    journal.close()
