"""What rank 0 of a decode ring tells the others before each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from cp_core.cost.decode_variant import GATHER, VARIANTS
from cp_core.transport.interface import RingTransport
from workers.decode.batch import BatchChange
from workers.decode.step_codec import decode_change, encode_change

LEADER = 0
HEARTBEAT_SECONDS = 1.0
# How long a follower believes in a leader it does not hear: many heartbeats, so that a busy machine is no death.
SILENCE_SECONDS = 15.0
UNCHANGED = BatchChange()


class HeaderKind(IntEnum):
    """A step border, a sign of life, the end of the loop, or a measurement of the ring between two steps."""

    STEP = 0
    IDLE = 1
    STOP = 2
    PROBE = 3


@dataclass(frozen=True, slots=True)
class Header:
    """`token_ids` were sampled from the last step, in the order of its rows; `change` then makes the next batch, which
    `variant` serves.
    """

    kind: HeaderKind
    token_ids: tuple[int, ...] = ()
    change: BatchChange = UNCHANGED
    variant: str = GATHER


class HeaderChannel:
    """Headers as one int64[4 + max_batch] (kind, variant, payload bytes, number of tokens, tokens) and, only where the
    batch changes, a msgpack payload. The fixed size lets followers wait for the next header without a word about it.

    `hops` are this rank's rings, in the order in which a header passes them: it comes by the first and goes on by the
    second. Beside the ring of rank 0 that is, with tensor parallelism, each cp rank's own tensor parallel group.
    """

    def __init__(self, hops: Sequence[RingTransport], max_batch: int, device: torch.device) -> None:
        self._hops = [hop for hop in hops if hop.size > 1]
        self._device = device
        self._size = 4 + max_batch

    def send(self, header: Header) -> None:
        """Rank 0 only."""
        if not self._hops:
            return
        payload = encode_change(header.change) if header.change else b""
        words = [header.kind, VARIANTS.index(header.variant), len(payload), len(header.token_ids), *header.token_ids]
        fixed = torch.tensor(words + [0] * (self._size - len(words)), dtype=torch.int64, device=self._device)
        self._pass(fixed)
        if payload:
            content = torch.from_numpy(np.frombuffer(payload, np.uint8).copy())
            self._pass(content.to(self._device))

    def receive(self) -> Header:
        """Every other rank. Raises Unavailable if nothing comes within SILENCE_SECONDS."""
        fixed = torch.empty(self._size, dtype=torch.int64, device=self._device)
        self._pass(fixed, SILENCE_SECONDS)
        kind, variant, payload_bytes, num_tokens, *words = fixed.tolist()
        change = UNCHANGED
        if payload_bytes:
            payload = torch.empty(payload_bytes, dtype=torch.uint8, device=self._device)
            self._pass(payload, SILENCE_SECONDS)
            change = decode_change(payload.cpu().numpy().tobytes())
        return Header(HeaderKind(kind), tuple(words[:num_tokens]), change, VARIANTS[variant])

    def _pass(self, tensor: torch.Tensor, timeout_seconds: float | None = None) -> None:
        for hop in self._hops:
            hop.broadcast(tensor, LEADER).wait(timeout_seconds)
