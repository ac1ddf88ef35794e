"""KV transfers between rings: key, source ranks' sends, destination ranks' expectations.

Leaders send these data to ranks, whose KV senders and receivers act on them. Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.errors import RingserveError
from ringserve.cp_core.layout.reshard import KvPiece
from ringserve.cp_core.layout.shards import TokenRange


@dataclass(frozen=True, slots=True)
class TransferKey:
    """Name of one attempt of one transfer between incarnations of two rings. Other attempts' keys are stale."""

    transfer_id: str
    attempt: int
    source: str
    destination: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPair:
    """Command to copy block `source` to block `destination` in every layer of one rank's cache."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class KvPart:
    """Pieces that one source rank sends to one destination rank (endpoint HOST:PORT), for every layer."""

    endpoint: str
    pieces: tuple[KvPiece, ...]


@dataclass(frozen=True, slots=True)
class KvSend:
    """One source rank's share of a transfer. `blocks` is its own block table of the sequence."""

    key: TransferKey
    blocks: tuple[int, ...]
    parts: tuple[KvPart, ...]


@dataclass(frozen=True, slots=True)
class KvExpect:
    """One destination rank's share: positions `ranges`, ascending, go to stored indices from `stored_start` on.

    The rank seals the transfer when every (token, layer, head) has arrived exactly once. An empty share is sealed at
    once.
    """

    key: TransferKey
    ranges: tuple[TokenRange, ...]
    stored_start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """Result of one side of a transfer. `seconds` run from this rank's first byte to its last."""

    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KvEnd:
    """End of an incoming transfer on one rank: its report if it is sealed, else the error that aborted it."""

    key: TransferKey
    report: TransferReport | None = None
    error: RingserveError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvEnds:
    """Transfer ends on one rank. The next ends begin at number `stop`."""

    stop: int
    ends: tuple[KvEnd, ...]
