"""Predictions for turns whose decode ring computes the prompt itself."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.placement.kv_locations import WantedTurn
from ringserve.orchestration.placement.planner import Planner
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.protocol.plans import RingAlternative


class DirectOffer(NamedTuple):
    """Predicted times of a turn whose decode ring computes the prompt.

    `is_too_long`: it would delay the ring's batch for longer than is allowed; then it is only for turns that ask.
    """

    alternative: RingAlternative
    is_too_long: bool


class DirectPlacer:
    """Predictions for turns whose decode ring computes the prompt."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def offer(
        self, turn: WantedTurn, prefill: RegisteredRing, decode: RegisteredRing, now: float
    ) -> DirectOffer | None:
        """Predict a turn, to be compared with the way over `prefill`.

        Return None if the decode ring may not compute the prompt, or lacks the KV.
        """
        ring, retained = decode.registration, turn.retained_on(decode)
        if not self._may(turn) or not retained or turn.num_tokens - retained > ring.max_direct_tokens:
            return None
        seconds = self._planner.compare_direct(turn.num_tokens, retained, ring, prefill.registration)
        alternative = RingAlternative(
            ring=decode.name,
            num_ranks=ring.num_ranks,
            tp=ring.tp,
            queue_seconds=decode.queue_seconds(now),
            move_seconds=0.0,
            prefill_seconds=seconds,
            stall_seconds=seconds * decode.num_turns,
        )
        step = self._planner.predict_direct(turn.num_tokens, retained, ring)
        return DirectOffer(alternative, is_too_long=step > ring.max_direct_seconds)

    def _may(self, turn: WantedTurn) -> bool:
        if turn.algorithm is not None:
            return turn.asks_for_direct
        return not turn.refused_direct and self._planner.may_choose_direct

    def handoff_seconds(self, turn: WantedTurn, prefill: RegisteredRing, decode: RegisteredRing) -> float:
        """Return the seconds of the new tokens' hand-off, which a decode ring that computes them saves."""
        new_tokens = turn.num_tokens - turn.retained_on(decode)
        return self._planner.predict_move(new_tokens, prefill.registration, decode.registration)


def refuse_direct(turn: WantedTurn, max_tokens: int) -> NoReturn:
    """Refuse a turn that asks for its decode ring to compute more than any can, at most `max_tokens`.

    Raises InvalidRequest.
    """
    retained = 0 if turn.decode is None else min(turn.match_tokens, turn.decode.num_tokens)
    raise InvalidRequest(
        f"algorithm: {turn.algorithm} is for up to {max_tokens} new tokens (decode.max_direct_tokens) after KV that "
        f"the conversation's decode ring retains; this turn has {turn.num_tokens - retained} after {retained}"
    )
