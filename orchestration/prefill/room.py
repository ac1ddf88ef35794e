"""How much KV room a prompt may come to need on each rank, before anyone knows how it will be cut."""

from __future__ import annotations

from collections.abc import Sequence

from cp_core.layout.shards import level_counts

ROUNDING = 1
"""Tokens by which ranks that level out may differ from the common level."""


def most_held(held: Sequence[int], num_tokens: int) -> list[int]:
    """The most tokens that each rank may hold after `num_tokens` more, pulled or computed in chunks of any sizes.

    Every chunk gives each rank the same number of tokens, and one more to its emptiest ranks. So a rank gains no more
    than any emptier one does: at worst it rises as if all emptier ranks held as much as itself.
    """
    if not num_tokens:
        return list(held)
    most = []
    for own in held:
        raised = [max(own, other) for other in held]
        gains = level_counts(raised, num_tokens)
        most.append(max(own + gain for gain, other in zip(gains, raised, strict=True) if other == own) + ROUNDING)
    return most
