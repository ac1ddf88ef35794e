"""Mailbox between a ring's leader and the decode loop of its first rank: commands in, events out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ringserve.cp_core.errors import Unavailable
from ringserve.views import RingRates
from ringserve.workers.protocol.decode_commands import (
    AdmitSequence,
    ComputePrompt,
    DecodeCommand,
    DecodeEvent,
    DecodeEvents,
    GrowSequence,
    RemoveSequence,
)


class DecodeMailbox:
    """Queue of commands for the next step boundary, and of events for the leader.

    Events are numbered from 0. `poll(after)` returns the events from `after` on and drops earlier ones, so a poll whose
    answer was lost may be repeated.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._changed = threading.Condition()
        self._commands: list[DecodeCommand] = []
        self._admitted: set[str] = set()
        self._events: list[DecodeEvent] = []
        self._first_event = 0
        self._wants_rates = False
        self._rates: list[RingRates] = []
        self._closed: str | None = None

    def submit(self, commands: Sequence[DecodeCommand]) -> None:
        """Queue commands for the next step boundary. Raises Unavailable once the loop has ended.

        Removing or growing a sequence that has just finished is no error. Admissions are checked here, so that a wrong
        one fails its caller and not the ring.
        """
        with self._changed:
            self._check_open()
            expected = set(self._admitted)
            for command in commands:
                if isinstance(command, RemoveSequence):
                    expected.discard(command.sequence_id)
                if isinstance(command, ComputePrompt):
                    assert len(command.token_ids), f"{command.sequence_id!r} has no new token"
                if not isinstance(command, AdmitSequence):
                    continue
                _check_admission(command)
                assert command.sequence_id not in expected, f"{command.sequence_id!r} is in the batch already"
                expected.add(command.sequence_id)
            assert len(expected) <= self._max_batch, f"{len(expected)} sequences exceed a batch of {self._max_batch}"
            self._admitted = expected
            self._commands.extend(commands)
            self._changed.notify_all()

    def poll(self, after: int, timeout: float) -> DecodeEvents:
        """Return events from cursor `after` on, waiting up to `timeout` seconds for the first one.

        Raises Unavailable once the loop has ended and every event was fetched.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            assert self._first_event <= after <= self._last_event, f"cursor {after} was never given or is forgotten"
            del self._events[: after - self._first_event]
            self._first_event = after
            while not self._events:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return DecodeEvents(start=after, stop=self._last_event, events=tuple(self._events))

    def take(self, timeout: float) -> list[DecodeCommand]:
        """Take all commands; wait up to `timeout` seconds for one, for the end, or for `ask_rates`.

        Tables that grow do not end the wait: only a step has use for them.
        """
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(self._has_news, timeout)
            taken, self._commands = self._commands, []
            return taken

    def _has_news(self) -> bool:
        has_other = any(not isinstance(command, GrowSequence) for command in self._commands)
        return has_other or self._closed is not None or self._wants_rates

    def take_growth(self) -> list[GrowSequence] | None:
        """Take all commands if each lets a table grow; None if a step boundary has anything else to do."""
        with self._changed:
            growth = [command for command in self._commands if isinstance(command, GrowSequence)]
            if len(growth) < len(self._commands) or self._wants_rates or self._closed is not None:
                return None
            self._commands = []
            return growth

    def post(self, events: Sequence[DecodeEvent]) -> None:
        """Queue events for the leader."""
        with self._changed:
            self._events.extend(events)
            self._admitted.difference_update(event.sequence_id for event in events if event.has_left)
            self._changed.notify_all()

    def ask_rates(self, timeout: float) -> RingRates:
        """Let the loop measure the ring between two steps, and wait `timeout` seconds for it. Raises Unavailable."""
        with self._changed:
            self._check_open()
            self._wants_rates = True
            self._rates.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rates or self._closed is not None, timeout)
            if not self._rates:
                self._check_open()
                raise Unavailable(f"the decode loop measured nothing within {timeout:.1f} s")
            return self._rates[0]

    def take_question(self) -> bool:
        """Return True if rates are asked for, once for each `ask_rates`."""
        with self._changed:
            wanted, self._wants_rates = self._wants_rates, False
            return wanted

    def answer_rates(self, rates: RingRates) -> None:
        """Answer `ask_rates`."""
        with self._changed:
            self._rates.append(rates)
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """End the queue: later calls raise Unavailable with this reason, or with an earlier one."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def _last_event(self) -> int:
        return self._first_event + len(self._events)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Unavailable(self._closed)


def _check_admission(command: AdmitSequence) -> None:
    sampling = command.sampling
    assert command.history.num_generated < sampling.max_tokens, f"{command.sequence_id!r} has all its tokens already"
    assert command.token_id not in sampling.stop_token_ids, f"{command.sequence_id!r} has stopped already"
    assert sum(command.held) == command.position, f"{command.sequence_id!r} lacks KV before its newest token"
