"""When a turn did what on a decode ring: what its traces are made of."""

from __future__ import annotations

from collections.abc import Sequence

from orchestration.decode.turn import DecodeTurn
from orchestration.protocol.tracing import Attributes, Stretch


def decode_stretches(turn: DecodeTurn, ring: str, ended: float) -> Sequence[Stretch]:
    """Of a turn that ends on `ring`, however far it came.

    A `migration` for every time that its KV came whole (from the first byte to the seal), or `queue` (from the
    reservation) and `prefill` where the ring itself computed the prompt; `hand-off` (from the first token, which the
    ring makes that computes the prompt, to the second), and `decode` (from there to the end).
    """
    where: Attributes = {"ringserve.ring": ring}
    found = list(turn.origins)
    if not turn.handoff_seconds:
        return found
    began = turn.first_token_at + turn.handoff_seconds
    decoded: Attributes = {**where, "ringserve.tokens": len(turn.tokens), "ringserve.attempts": turn.num_attempts}
    return [
        *found,
        Stretch(name="hand-off", began=turn.first_token_at, ended=began, attributes=where),
        Stretch(name="decode", began=began, ended=ended, attributes=decoded),
    ]
