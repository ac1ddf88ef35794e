"""How the next token is chosen from the logits of one position.

The draw is keyed by (seed, position) and nothing else, so a sequence gets the same tokens on a ring of any size, in any
batch, and again after its turn was moved to another ring.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.steps import Sampling


def choose_token(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token to stand at `position`.

    logits: [vocabulary], any float dtype, of the position before. Raises FloatingPointError if one is NaN: a NaN means
    a broken model or cache, and no token chosen from it may reach a client.
    """
    if sampling.temperature == 0.0:
        # argmax takes NaN for the largest value, so looking at the winner finds any NaN; of equal values it takes the
        # first. The largest being infinite is as broken.
        token = int(torch.argmax(logits))
        if not torch.isfinite(logits[token]):
            raise FloatingPointError(f"the largest logit for position {position} is {float(logits[token])}")
        return token
    return _draw(logits.double().cpu().numpy(), sampling, position)


def _draw(logits: np.ndarray[tuple[int, ...], np.dtype[np.float64]], sampling: Sampling, position: int) -> int:
    """Inverse of the cumulative distribution of softmax(logits / temperature), in fp64 and token order."""
    highest = logits.max()
    if not np.isfinite(highest):
        raise FloatingPointError(f"the largest logit for position {position} is {highest}")
    cumulative = np.cumsum(np.exp((logits - highest) / sampling.temperature))
    # Philox is counter-based: seed and position are its key, so no state is carried from token to token.
    key = ((position & 0xFFFF_FFFF_FFFF_FFFF) << 64) | (sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
    uniform = np.random.Generator(np.random.Philox(key=key)).random()
    # side="right" never lands on a token of probability zero.
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
