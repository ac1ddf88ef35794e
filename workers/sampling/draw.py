"""A token drawn from the logits of one position.

The draw is keyed by (seed, position) and nothing else, so a sequence gets the same tokens on a ring of any size, in any
batch, and again after its turn was moved to another ring.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workers.sampling.parameters import Sampling
from workers.sampling.processors import Logits, filtered

SIXTY_FOUR_BITS = 0xFFFF_FFFF_FFFF_FFFF


def draw(logits: Logits, sampling: Sampling, position: int) -> int:
    """The token to stand at `position`, from [V] processed logits whose largest is finite."""
    scaled = logits - logits.max()
    # A temperature near 0 makes of any distance an infinite one, which is what it should be.
    with np.errstate(over="ignore"):
        scaled /= sampling.temperature
    if not sampling.filters:
        # In place: pages that are new each time cost more than the arithmetic.
        np.exp(scaled, out=scaled)
        return pick(np.cumsum(scaled, out=scaled), sampling.seed, position)
    scaled = filtered(scaled, sampling)
    possible = np.flatnonzero(scaled > -np.inf)
    return int(possible[pick(np.cumsum(np.exp(scaled[possible])), sampling.seed, position)])


def draw_plain(logits: npt.NDArray[np.float64], samplings: list[Sampling], positions: list[int]) -> list[int]:
    """`draw` of rows [R, V] that no filter applies to, all at once; the same tokens."""
    scaled = logits - logits.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        scaled /= np.array([[sampling.temperature] for sampling in samplings])
    cumulative = np.cumsum(np.exp(scaled), axis=1)
    return [
        pick(row, sampling.seed, position)
        for row, sampling, position in zip(cumulative, samplings, positions, strict=True)
    ]


def pick(cumulative: npt.NDArray[np.float64], seed: int, position: int) -> int:
    """Inverse of a cumulative distribution [V] in token order, which need not end at 1."""
    # Philox is counter-based: seed and position are its key, so no state is carried from token to token.
    key = ((position & SIXTY_FOUR_BITS) << 64) | (seed & SIXTY_FOUR_BITS)
    uniform = np.random.Generator(np.random.Philox(key=key)).random()
    # side="right" never lands on a token of probability zero.
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
