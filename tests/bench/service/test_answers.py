"""The table of answers, without a service."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from bench.service.answers import TURNS, Found, converse
from ringserve.client.results import Answer


def test_every_answer_counts_that_has_the_tokens_of_transformers() -> None:
    """One answer differs, and one is empty; each turn has the whole history."""
    asked: list[tuple[str, int, str | None]] = []

    def ask(conversation: str, history: Sequence[int], algorithm: str | None) -> Answer:
        asked.append((conversation, len(history), algorithm))
        return Answer(token_ids=() if len(asked) == 3 else (1, 2))

    def follow(prompt: Sequence[int], answer: Sequence[int]) -> Any:
        return SimpleNamespace(token_ids=[1, 3] if len(asked) == 2 else list(answer))

    assert converse(ask, follow, 50) == Found(equal=22, turns=24, algorithms=())
    first, second, _, fourth = asked[: len(TURNS)]
    assert first == ("answers-0", TURNS[0], "pass_kv")
    assert second == ("answers-0", TURNS[0] + 2 + TURNS[1], None)
    assert fourth[1:] == (sum(TURNS) + 4, "pass_kv")
    assert asked[-1][0] == "answers-5"
