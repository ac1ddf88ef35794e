"""Clients that hold conversations of several turns, one after the other, for as long as a test wants load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from ringserve.client import Client, Sampling
from ringserve.cp_core.errors import RingserveError
from ringserve.services.offline.reference import Reference, StockModel
from tests.services.e2e.cluster import wait_until
from tests.waiting import START_SECONDS
from tests.workers.models import random_tokens

PAUSE_SECONDS = 0.4
"""Between two turns of a client: the machine has rings to start meanwhile."""
MAX_TOKENS = 8
TURNS = 6
"""Number of turns in one conversation."""
FIRST_TOKENS, MORE_TOKENS = 40, 5
CERTAIN_LEAD = 1e-4
"""In logits. Of two tokens that are nearer either may win, by the order in which a ring adds: one turn in thousands."""


@dataclass(frozen=True)
class Turn:
    """A turn that was answered: the whole prompt, and its tokens."""

    conversation: str
    prompt: Sequence[int]
    token_ids: Sequence[int]


class Talker:
    """One client. It says the whole history with every turn, so that a turn may safely be asked for again.

    `errors` are the turns that failed although the client had tried them again as it may.
    """

    def __init__(self, client: Client, name: str) -> None:
        self.turns: list[Turn] = []
        self.errors: list[RingserveError] = []
        self._client = client
        self._name = name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            self._converse(f"{self._name}-{number}", number)
            number += 1

    def _converse(self, conversation: str, number: int) -> None:
        history = random_tokens(FIRST_TOKENS, seed=number)
        for turn in range(TURNS):
            answer = self.ask(conversation, history)
            if answer is None or self._stopped.wait(PAUSE_SECONDS):
                return
            history = [*history, *answer.token_ids, *random_tokens(MORE_TOKENS, seed=turn)]

    def ask(self, conversation: str, history: Sequence[int]) -> Turn | None:
        try:
            answer = self._client.ask(
                list(history),
                conversation_id=conversation,
                mode="whole_history",
                sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
                timeout=START_SECONDS,  # it may wait for a ring that starts
            )
        except RingserveError as error:
            self.errors.append(error)
            return None
        self.turns.append(Turn(conversation, history, answer.token_ids))
        return self.turns[-1]

    def stop(self) -> None:
        """Let the turn that runs end."""
        self._stopped.set()
        self._thread.join(START_SECONDS)

    def go_on(self) -> Turn:
        """One turn more of the latest conversation. Raises what keeps it from being answered."""
        latest = self.turns[-1]
        turn = self.ask(latest.conversation, [*latest.prompt, *latest.token_ids, *random_tokens(MORE_TOKENS)])
        if turn is None:
            raise self.errors[-1]
        return turn

    def close(self) -> None:
        self._client.close()


@cache
def _expected(stock: StockModel, prompt: tuple[int, ...]) -> Reference:
    """Return the answer of stock transformers. Clients of all tests hold the same conversations, so most are known."""
    return stock.greedy(prompt, MAX_TOKENS)


def under_load(connect: Callable[[], Client], count: int, work: Callable[[], None], stock: StockModel) -> None:
    """Do `work` while `count` clients talk, each answered once before, and let each go on once more after it.

    No turn may fail, and every token must be that of stock transformers.
    """
    talkers = [Talker(connect(), f"talker-{number}") for number in range(count)]
    try:
        try:
            wait_until(lambda: all(talker.turns or talker.errors for talker in talkers), "all talk", START_SECONDS)
            work()
        finally:
            for talker in talkers:
                talker.stop()
        errors = [repr(error) for talker in talkers for error in talker.errors]
        assert not errors, errors
        for talker in talkers:
            assert len(talker.turns) > 1
            talker.go_on()
            for turn in talker.turns:
                expected = _expected(stock, tuple(turn.prompt))
                if expected.smallest_lead > CERTAIN_LEAD:
                    assert list(turn.token_ids) == expected.token_ids, turn
    finally:
        for talker in talkers:
            talker.close()
