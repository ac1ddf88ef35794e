"""A journal with 100,000 conversations: how long a router takes to its first decision."""

import sqlite3
import time
from pathlib import Path

from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.journal.schema import FILE

NUM_CONVERSATIONS = 100_000
SECONDS = 5.0


def test_a_router_knows_a_hundred_thousand_conversations_within_seconds(tmp_path: Path) -> None:
    SqliteJournal(tmp_path).close()
    blob = bytes(4 * 50)
    with sqlite3.connect(tmp_path / FILE) as database:
        numbers = range(1, NUM_CONVERSATIONS + 1)
        segments = ((number, None, 0, 50, blob, f"turn {number}", 1, "") for number in numbers)
        database.executemany("INSERT INTO segments VALUES (?,?,?,?,?,?,?,?)", segments)
        rows = ((f"c{number}", number, 50, 1, "", 0.0, float(number)) for number in numbers)
        database.executemany("INSERT INTO conversations VALUES (?,?,?,?,?,?,?)", rows)
    began = time.process_time()
    journal = SqliteJournal(tmp_path)
    store = ConversationStore(NUM_CONVERSATIONS, journal=journal)
    seconds = time.process_time() - began
    print(f"{NUM_CONVERSATIONS} conversations in {seconds:.2f} s")
    assert len(store) == NUM_CONVERSATIONS
    tokens = store.get("c7").tokens
    assert tokens is not None
    assert store.get("c7").num_tokens == len(tokens) == 50
    assert seconds < SECONDS
    journal.close()
