"""Frames of a KV connection, their encoding, and the cutting of KV into frames.

A frame is prefix, msgpack header and raw payload. Every value is checked before it is used.

    prefix    magic "RSKV", version, header length, payload length: 20 bytes, big endian
    header    msgpack map: kind, key, and the fields of that kind
    payload   only of a layer frame: K[T,K,D] of all pieces, one after the other, then V[T,K,D]

T tokens of the frame, K its KV heads, D head dimension. The source sends `layer`, `settle` and `abandon`, the
destination `settled`, `refused` and `leave`. A frame that breaks these rules raises TransferError, and its connection
ends. A layer frame may carry the checksum of its payload. Bytes that changed under way, or in the source's cache during
the send, are then refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from cp_core.errors import TransferError
from cp_core.layout.reshard import KvPiece
from workers.kv.cache import MAX_COPIES, KvCache, SlotRun, runs_of, slots_of
from workers.protocol.transfers import TransferKey

MAGIC = b"RSKV"
VERSION = 1
PREFIX = struct.Struct("!4sB3xIQ")

# Limits of the memory that a peer can claim: at most 32768 pieces of 16 bytes in a header, a payload in one read.
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 16 << 20
MAX_PIECES = 1 << 15
MAX_TEXT = 1 << 10
MAX_NUMBER = 1 << 40

Column = npt.NDArray[np.int64]


class Kind(StrEnum):
    """Kind of a frame. `settle` asks for confirmation of all layer frames of a transfer sent before it."""

    LAYER = "layer"
    SETTLE = "settle"
    ABANDON = "abandon"
    SETTLED = "settled"
    REFUSED = "refused"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class LayerFrame:
    """KV of some tokens of one layer. Piece i is positions [starts[i], starts[i] + counts[i]), ascending."""

    key: TransferKey
    layer: int
    dtype: str
    head_start: int
    head_stop: int
    starts: Column
    counts: Column
    checksum: int | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def num_heads(self) -> int:
        return self.head_stop - self.head_start


@dataclass(frozen=True, slots=True)
class SettleFrame:
    """Request of the source to confirm everything sent so far."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class AbandonFrame:
    """Notice that the source has abandoned the transfer."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class SettledFrame:
    """Confirmation that everything since the last `settled` is in the destination's cache, with its payload bytes."""

    key: TransferKey
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class RefusedFrame:
    """Refusal of all further frames of a transfer. `is_stale`: it names another incarnation of the destination."""

    key: TransferKey
    is_stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveFrame:
    """Request of the destination to end this connection if it carries nothing: others need its place."""


TransferFrame = LayerFrame | SettleFrame | AbandonFrame | SettledFrame | RefusedFrame
Frame = TransferFrame | LeaveFrame


def checksum_of(payload: Iterable[memoryview]) -> int:
    """Return the CRC-32 of the buffers, one after the other: about 0.25 s a GB on one core, without the GIL."""
    checksum = 0
    for buffer in payload:
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def encode(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Encode prefix and header of a frame whose payload of `payload_bytes` follows."""
    fields: dict[str, Any] = {}
    if not isinstance(frame, LeaveFrame):
        fields["key"] = [frame.key.transfer_id, frame.key.attempt, frame.key.source, frame.key.destination]
    match frame:
        case LayerFrame():
            pieces = np.stack([frame.starts, frame.counts], axis=1).astype("<i8").tobytes()
            heads = [frame.head_start, frame.head_stop]
            fields |= {"kind": Kind.LAYER, "layer": frame.layer, "dtype": frame.dtype, "heads": heads, "pieces": pieces}
            if frame.checksum is not None:
                fields |= {"checksum": frame.checksum}
        case SettleFrame():
            fields |= {"kind": Kind.SETTLE}
        case AbandonFrame():
            fields |= {"kind": Kind.ABANDON, "reason": frame.reason[:MAX_TEXT]}
        case SettledFrame():
            fields |= {"kind": Kind.SETTLED, "payload_bytes": frame.payload_bytes}
        case RefusedFrame():
            fields |= {"kind": Kind.REFUSED, "stale": frame.is_stale, "reason": frame.reason[:MAX_TEXT]}
        case LeaveFrame():
            fields |= {"kind": Kind.LEAVE}
    header: bytes = msgpack.packb(fields)
    return PREFIX.pack(MAGIC, VERSION, len(header), payload_bytes) + header


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Decode a prefix -> (header bytes, payload bytes). Raises TransferError for a prefix not ours or out of bounds."""
    magic, version, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise TransferError(f"not a KV frame: it begins with {bytes(magic)!r}")
    if version != VERSION:
        raise TransferError(f"KV frame of version {version}, this is version {VERSION}")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise TransferError(f"KV frame with a header of {header_bytes} bytes: allowed are 1 to {MAX_HEADER_BYTES}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"KV frame with a payload of {payload_bytes} bytes: allowed are {MAX_PAYLOAD_BYTES}")
    return int(header_bytes), int(payload_bytes)


def decode_header(header: bytes | bytearray | memoryview, payload_bytes: int) -> Frame:
    """Decode a header -> its frame. Raises TransferError, naming the field, where it is not as `encode` makes it."""
    try:
        value = msgpack.unpackb(header)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise TransferError(f"KV frame with a broken header: {error}") from error
    if not isinstance(value, dict):
        raise TransferError("KV frame whose header is not a map")
    fields = _Fields(value)
    kind = fields.text("kind")
    if payload_bytes and kind != Kind.LAYER:
        raise TransferError(f"KV frame of kind {kind!r} with a payload of {payload_bytes} bytes")
    if kind == Kind.LEAVE:
        return LeaveFrame()
    key = fields.key()
    match kind:
        case Kind.LAYER:
            head_start, head_stop = fields.heads()
            starts, counts = fields.pieces()
            layer, dtype, checksum = fields.number("layer"), fields.text("dtype"), fields.checksum()
            return LayerFrame(key, layer, dtype, head_start, head_stop, starts, counts, checksum)
        case Kind.SETTLE:
            return SettleFrame(key)
        case Kind.ABANDON:
            return AbandonFrame(key, fields.text("reason"))
        case Kind.SETTLED:
            return SettledFrame(key, fields.number("payload_bytes"))
        case Kind.REFUSED:
            return RefusedFrame(key, fields.flag("stale"), fields.text("reason"))
        case _:
            raise TransferError(f"KV frame of unknown kind {kind!r}")


class _Fields:
    """Reader of a header map that checks every value."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        return self._text(name, self._values.get(name))

    def number(self, name: str) -> int:
        return self._number(name, self._values.get(name))

    def checksum(self) -> int | None:
        return None if self._values.get("checksum") is None else self.number("checksum")

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise TransferError(f"KV frame whose {name!r} is no flag")
        return value

    def key(self) -> TransferKey:
        transfer_id, attempt, source, destination = self._list("key", 4)
        return TransferKey(
            self._text("key", transfer_id),
            self._number("key", attempt),
            self._text("key", source),
            self._text("key", destination),
        )

    def heads(self) -> tuple[int, int]:
        start, stop = (self._number("heads", item) for item in self._list("heads", 2))
        if start >= stop:
            raise TransferError(f"KV frame of heads [{start}, {stop})")
        return start, stop

    def pieces(self) -> tuple[Column, Column]:
        """Return (starts, counts): ascending, not overlapping, none empty."""
        value = self._values.get("pieces")
        if not isinstance(value, bytes) or not value or len(value) % 16 or len(value) > 16 * MAX_PIECES:
            raise TransferError(f"KV frame whose 'pieces' are not 1 to {MAX_PIECES} pairs")
        pairs = np.frombuffer(value, dtype="<i8").astype(np.int64).reshape(-1, 2)
        starts, counts = pairs[:, 0].copy(), pairs[:, 1].copy()
        if starts.min() < 0 or starts.max() > MAX_NUMBER or counts.min() < 1 or counts.max() > MAX_NUMBER:
            raise TransferError("KV frame with a piece out of bounds")
        if (starts[1:] < starts[:-1] + counts[:-1]).any():
            raise TransferError("KV frame whose pieces are not ascending")
        return starts, counts

    def _list(self, name: str, length: int) -> list[Any]:
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise TransferError(f"KV frame whose {name!r} is not a list of {length}")
        return value

    @staticmethod
    def _text(name: str, value: object) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise TransferError(f"KV frame whose {name!r} is no text of at most {MAX_TEXT} characters")
        return value

    @staticmethod
    def _number(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
            raise TransferError(f"KV frame whose {name!r} is no number in 0 to {MAX_NUMBER}")
        return value


# --- cutting ---------------------------------------------------------------------------------------------------------


# Payload bytes of one frame: large enough that its fixed cost is negligible, small enough to stay in a CPU cache in the
# receiver's staging buffer (docs/decisions/0003-kv-carrier.md).
FRAME_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Content of one frame and its slots here, the same for every layer. `heads` counts this rank's heads from 0."""

    starts: Column
    counts: Column
    head_start: int
    head_stop: int
    heads: slice
    runs: tuple[SlotRun, ...]

    def of_layer(self, key: TransferKey, layer: int, cache: KvCache, checksum: int | None = None) -> LayerFrame:
        """Return the frame of one layer."""
        return LayerFrame(
            key, layer, cache.dtype_name, self.head_start, self.head_stop, self.starts, self.counts, checksum
        )

    def payload(self, layer: int, cache: KvCache) -> list[memoryview]:
        """Return K, then V of the frame's tokens: the cache's own memory where possible, else one packed copy."""
        is_whole = self.heads == slice(0, cache.num_kv_heads)
        if is_whole and cache.device.type == "cpu" and len(self.runs) <= MAX_COPIES:
            views = cache.views(layer, self.runs)
            return [*(_bytes(view.k) for view in views), *(_bytes(view.v) for view in views)]
        packed = cache.read_runs(layer, self.runs, heads=self.heads)
        return [_bytes(packed.k.contiguous().cpu()), _bytes(packed.v.contiguous().cpu())]


def _bytes(tensor: torch.Tensor) -> memoryview:
    # As bytes, because numpy knows no bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class OutgoingPart:
    """Share of one source rank for one destination: pieces cut into frames."""

    def __init__(self, pieces: tuple[KvPiece, ...], blocks: tuple[int, ...], cache: KvCache) -> None:
        self._pieces = pieces
        self._blocks = blocks
        self._cache = cache

    @cached_property
    def frames(self) -> tuple[FrameLayout, ...]:
        """Frames of the pieces, cut once by the thread that sends the first layer: decode shards have a piece a token.

        Raises TransferError where a piece is not in this rank's blocks and heads, or pieces do not ascend.
        """
        return tuple(
            frame
            for heads in sorted({(piece.head_start, piece.head_stop) for piece in self._pieces})
            for frame in self._cut(*heads)
        )

    def _cut(self, head_start: int, head_stop: int) -> Iterator[FrameLayout]:
        cache = self._cache
        pieces = [piece for piece in self._pieces if (piece.head_start, piece.head_stop) == (head_start, head_stop)]
        counts = np.array([len(piece.tokens) for piece in pieces], dtype=np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(np.array([piece.tokens.start for piece in pieces], dtype=np.int64), counts) + within
        stored = np.repeat(np.array([piece.source_stored for piece in pieces], dtype=np.int64), counts) + within
        if (np.diff(positions) <= 0).any():
            raise TransferError(f"the pieces to send do not ascend from position {positions[0]} on")
        if stored.min() < 0 or stored.max() >= len(self._blocks) * cache.block_tokens:
            raise TransferError(
                f"{len(self._blocks)} blocks do not hold the stored indices {stored.min()} to {stored.max()}"
            )
        if head_start < cache.heads.start or head_stop > cache.heads.stop or head_start >= head_stop:
            raise TransferError(f"KV heads [{head_start}, {head_stop}) are not on this rank")
        slots = slots_of(self._blocks, stored, cache.block_tokens)
        heads = slice(head_start - cache.head_start, head_stop - cache.head_start)
        token_bytes = 2 * (head_stop - head_start) * cache.head_dim * cache.dtype.itemsize
        step = max(1, min(FRAME_BYTES // token_bytes, MAX_PIECES))
        for first in range(0, len(positions), step):
            # Runs of positions are pieces on the wire, runs of slots are views of memory: they need not coincide.
            spans = runs_of(positions[first : first + step])
            starts = np.array([span.start for span in spans], dtype=np.int64)
            lengths = np.array([len(span) for span in spans], dtype=np.int64)
            runs = runs_of(slots[first : first + step])
            yield FrameLayout(starts, lengths, head_start, head_stop, heads, runs)
