"""Frames of a KV connection: their encoding, their layouts, and the packing and copying of their payloads.

A frame is a prefix, a msgpack header and a raw payload. Every value is checked before use.

    prefix    magic "RSKV", version, header length, payload length: 20 bytes, big endian
    header    msgpack map: kind, transfer key, and the fields of that kind
    payload   layer frames only: K[T,K,D] of all pieces, one after the other, then V[T,K,D], for each of its layers

Shapes: T tokens of the frame, K its KV heads, D head dimension. The source sends `layer`, `settle` and `abandon`, the
destination `settled`, `refused` and `leave`. A frame that breaks these rules raises TransferError and ends the
connection. A layer frame may carry its payload's checksum, so that bytes that changed in transit, or in the source's
cache during the send, are refused. The layouts of a transfer are the same for all layers.

The payload may instead lie in a slot of the source's memory, which the destination reads by NIXL. Such a source begins
with its `card`, and the destination answers `reached`. A layer frame then names the slot, and `read` frees it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ringserve.cp_core.errors import TransferError
from ringserve.cp_core.layout.reshard import KvPiece
from ringserve.workers.kv.cache import KvCache, SlotRun, runs_of, slots_of
from ringserve.workers.protocol.transfers import TransferKey

MAGIC = b"RSKV"
VERSION = 3
PREFIX = struct.Struct("!4sB3xIQ")

# Limits on memory that a peer can claim: at most 32768 pieces of 16 bytes in a header, and one payload per read.
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 16 << 20
MAX_PIECES = 1 << 15
MAX_TEXT = 1 << 10
MAX_NUMBER = 1 << 40
MAX_ADDRESS = (1 << 64) - 1
MAX_METADATA_BYTES = 1 << 16

Column = npt.NDArray[np.int64]
# Payload bytes per frame: large enough that the fixed cost is negligible, small enough that the receiver's staging
# buffer stays in a CPU cache (docs/decisions/0003-kv-carrier.md).
FRAME_BYTES = 1 << 20
# An odd number with well-spread bits, so that neighbouring words have very different weights.
WEIGHT = 0x3C6EF35F


class Kind(StrEnum):
    """Frame kind. `settle` asks to confirm all earlier layer frames of a transfer."""

    LAYER = "layer"
    SETTLE = "settle"
    ABANDON = "abandon"
    SETTLED = "settled"
    REFUSED = "refused"
    LEAVE = "leave"
    CARD = "card"
    REACHED = "reached"
    READ = "read"


class Reach(StrEnum):
    """Answer to a card. After any answer except REACHED, the source sends payloads after their headers.

    STALE: the card is for another incarnation. OFF: the destination has no NIXL agent. UNLIKE: the source's slots are
    on another type of device, or larger than the destination's. UNREACHED: NIXL could reach the source only by emulated
    RMA, which is forbidden.
    """

    REACHED = "reached"
    STALE = "stale"
    OFF = "off"
    UNLIKE = "unlike"
    UNREACHED = "unreached"


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Place of a payload at the source: the first `num_bytes` of out slot `number`, as of `generation`."""

    number: int
    generation: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LayerFrame:
    """KV of some tokens in `num_layers` layers from `layer` on.

    Piece i has positions [starts[i], starts[i] + counts[i]), ascending.
    """

    key: TransferKey
    layer: int
    dtype: str
    head_start: int
    head_stop: int
    starts: Column
    counts: Column
    checksum: int | None = None
    slot: SlotRef | None = None
    num_layers: int = 1

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + self.num_layers)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def num_heads(self) -> int:
        return self.head_stop - self.head_start


@dataclass(frozen=True, slots=True)
class SettleFrame:
    """Request to confirm everything sent so far."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class AbandonFrame:
    """Notice that the source has abandoned the transfer."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class SettledFrame:
    """Confirmation that everything since the last `settled` is in the destination's cache, with the payload bytes."""

    key: TransferKey
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class RefusedFrame:
    """Refusal of all further frames of a transfer. `is_stale`: the transfer names another destination incarnation."""

    key: TransferKey
    is_stale: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveFrame:
    """Request to end this connection if it is idle, because other sources need its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFrame:
    """A source's NIXL agent, slots and words, for the incarnation `destination`.

    `device` ("cpu" or "cuda") and `device_index` describe the slots' memory. The words are int64 in host memory, one
    per slot.
    """

    destination: str
    agent: str
    metadata: bytes
    device: str
    device_index: int
    slots_address: int
    words_address: int
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class ReachedFrame:
    """The destination's answer to a card."""

    reach: Reach
    reason: str


@dataclass(frozen=True, slots=True)
class ReadFrame:
    """Notice that the destination no longer needs a slot: the source may reuse it."""

    slot: int


TransferFrame = LayerFrame | SettleFrame | AbandonFrame | SettledFrame | RefusedFrame
Frame = TransferFrame | LeaveFrame | CardFrame | ReachedFrame | ReadFrame


def checksum_of(payload: Iterable[memoryview]) -> int:
    """Return 32 bits of XXH3 over all buffers: it reads them about as fast as memory gives them, without the GIL."""
    digest = xxhash.xxh3_64()
    for buffer in payload:
        digest.update(buffer)
    return digest.intdigest() & 0xFFFF_FFFF


def encode(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Encode the prefix and header of a frame. Its payload of `payload_bytes` follows."""
    fields: dict[str, Any] = {}
    if isinstance(frame, TransferFrame):
        fields["key"] = [frame.key.transfer_id, frame.key.attempt, frame.key.source, frame.key.destination]
    match frame:
        case LayerFrame():
            pieces = np.stack([frame.starts, frame.counts], axis=1).astype("<i8").tobytes()
            heads = [frame.head_start, frame.head_stop]
            layers = [frame.layer, frame.num_layers]
            fields |= {"kind": Kind.LAYER, "layers": layers, "dtype": frame.dtype, "heads": heads, "pieces": pieces}
            if frame.checksum is not None:
                fields |= {"checksum": frame.checksum}
            if frame.slot is not None:
                fields |= {"slot": [frame.slot.number, frame.slot.generation, frame.slot.num_bytes]}
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
        case CardFrame():
            fields |= {"kind": Kind.CARD} | asdict(frame)
        case ReachedFrame():
            fields |= {"kind": Kind.REACHED, "reach": frame.reach, "reason": frame.reason[:MAX_TEXT]}
        case ReadFrame():
            fields |= {"kind": Kind.READ, "slot": frame.slot}
    header: bytes = msgpack.packb(fields)
    return PREFIX.pack(MAGIC, VERSION, len(header), payload_bytes) + header


def decode_prefix(prefix: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Decode a prefix to (header bytes, payload bytes). Raises TransferError if it is invalid or out of bounds."""
    magic, version, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise TransferError(f"not a KV frame: it begins with {bytes(magic)!r}")
    if version != VERSION:
        raise TransferError(f"KV frame of version {version}, this is version {VERSION}")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise TransferError(f"KV frame with a header of {header_bytes} bytes: allowed are 1 to {MAX_HEADER_BYTES}")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"KV frame with a payload of {payload_bytes} bytes: allowed are 0 to {MAX_PAYLOAD_BYTES}")
    return int(header_bytes), int(payload_bytes)


def decode_header(header: bytes | bytearray | memoryview, payload_bytes: int) -> Frame:
    """Decode a header to its frame. Raises TransferError, naming the field, if `encode` makes no such header."""
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
    match kind:
        case Kind.LEAVE:
            return LeaveFrame()
        case Kind.CARD:
            return fields.card()
        case Kind.REACHED:
            return ReachedFrame(fields.reach(), fields.text("reason"))
        case Kind.READ:
            return ReadFrame(fields.number("slot"))
    key = fields.key()
    match kind:
        case Kind.LAYER:
            head_start, head_stop = fields.heads()
            starts, counts = fields.pieces()
            layer, num_layers = fields.layers()
            dtype, checksum = fields.text("dtype"), fields.checksum()
            slot = fields.slot()
            if slot is not None and payload_bytes:
                raise TransferError(f"KV frame with a slot and a payload of {payload_bytes} bytes")
            return LayerFrame(key, layer, dtype, head_start, head_stop, starts, counts, checksum, slot, num_layers)
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
            raise TransferError(f"KV frame whose {name!r} is not a boolean")
        return value

    def key(self) -> TransferKey:
        transfer_id, attempt, source, destination = self._list("key", 4)
        return TransferKey(
            self._text("key", transfer_id),
            self._number("key", attempt),
            self._text("key", source),
            self._text("key", destination),
        )

    def layers(self) -> tuple[int, int]:
        layer, num_layers = (self._number("layers", item) for item in self._list("layers", 2))
        if not num_layers:
            raise TransferError("KV frame of no layers")
        return layer, num_layers

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

    def slot(self) -> SlotRef | None:
        if self._values.get("slot") is None:
            return None
        number, generation, num_bytes = (self._number("slot", item) for item in self._list("slot", 3))
        if not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
            raise TransferError(f"KV frame of {num_bytes} bytes in a slot: allowed are 1 to {MAX_PAYLOAD_BYTES}")
        return SlotRef(number, generation, num_bytes)

    def reach(self) -> Reach:
        try:
            return Reach(self.text("reach"))
        except ValueError:
            raise TransferError(f"KV frame whose 'reach' is none of {', '.join(Reach)}") from None

    def card(self) -> CardFrame:
        metadata = self._values.get("metadata")
        if not isinstance(metadata, bytes) or not 0 < len(metadata) <= MAX_METADATA_BYTES:
            raise TransferError(f"KV frame whose 'metadata' are not 1 to {MAX_METADATA_BYTES} bytes")
        return CardFrame(
            destination=self.text("destination"),
            agent=self.text("agent"),
            metadata=metadata,
            device=self.text("device"),
            device_index=self.number("device_index"),
            slots_address=self._number("slots_address", self._values.get("slots_address"), MAX_ADDRESS),
            words_address=self._number("words_address", self._values.get("words_address"), MAX_ADDRESS),
            slot_bytes=self.number("slot_bytes"),
            num_slots=self.number("num_slots"),
        )

    def _list(self, name: str, length: int) -> list[Any]:
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise TransferError(f"KV frame whose {name!r} is not a list of {length}")
        return value

    @staticmethod
    def _text(name: str, value: object) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise TransferError(f"KV frame whose {name!r} is not a text of at most {MAX_TEXT} characters")
        return value

    @staticmethod
    def _number(name: str, value: object, most: int = MAX_NUMBER) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise TransferError(f"KV frame whose {name!r} is not an integer from 0 to {most}")
        return value


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Tokens of one frame and their slots here, the same for every layer. `heads` counts from this rank's first head.

    `index` has every slot of `runs`, as int64[T] on the cache's device, if there are too many runs to copy one by one.
    """

    starts: Column
    counts: Column
    head_start: int
    head_stop: int
    heads: slice
    runs: tuple[SlotRun, ...]
    index: torch.Tensor | None

    def of_layers(
        self, key: TransferKey, layers: range, cache: KvCache, checksum: int | None = None, slot: SlotRef | None = None
    ) -> LayerFrame:
        """Return the frame of some layers."""
        heads, num_layers = (self.head_start, self.head_stop), len(layers)
        return LayerFrame(
            key, layers.start, cache.dtype_name, *heads, self.starts, self.counts, checksum, slot, num_layers
        )

    def payload(self, layers: range, cache: KvCache) -> list[memoryview]:
        """Return K, then V of the frame's tokens in each layer: the cache's own memory if possible, else a packed copy.

        On a GPU, copies are queued on the current stream, and the bytes are valid when the stream has done them.
        """
        is_whole = self.heads == slice(0, cache.num_kv_heads)
        if is_whole and cache.device.type == "cpu" and self.index is None:
            found = (cache.views(layer, self.runs) for layer in layers)
            return [_bytes(each) for views in found for each in (*(v.k for v in views), *(v.v for v in views))]
        num_bytes = self.num_bytes(cache, len(layers))
        packed = self.pack(layers, cache, torch.empty(num_bytes, dtype=torch.uint8, device=cache.device))
        if cache.device.type == "cuda":
            packed = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True).copy_(packed, non_blocking=True)
        return [packed.numpy().data]

    def pack(self, layers: range, cache: KvCache, out: torch.Tensor) -> torch.Tensor:
        """Copy the payload to the start of `out` (bytes, on the cache's device) and return that part."""
        packed = out[: self.num_bytes(cache, len(layers))]
        both = packed.view(cache.dtype).view(len(layers), 2, -1, self.head_stop - self.head_start, cache.head_dim)
        for layer, (k, v) in zip(layers, both, strict=True):
            cache.copy_runs(layer, self.runs, k, v, heads=self.heads, index=self.index)
        return packed

    def num_bytes(self, cache: KvCache, num_layers: int = 1) -> int:
        """Return the payload bytes of `num_layers` layers."""
        return num_layers * int(self.counts.sum()) * _token_bytes(cache, self.head_start, self.head_stop)


def _token_bytes(cache: KvCache, head_start: int, head_stop: int) -> int:
    return 2 * (head_stop - head_start) * cache.head_dim * cache.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> memoryview:
    # As bytes, because numpy has no bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class OutgoingPart:
    """Pieces from one source rank to one destination, cut into frames."""

    def __init__(self, pieces: tuple[KvPiece, ...], blocks: tuple[int, ...], cache: KvCache) -> None:
        self._pieces = pieces
        self._blocks = blocks
        self._cache = cache
        self._cut_to = 0
        self._frames: tuple[FrameLayout, ...] = ()

    @property
    def layer_bytes(self) -> int:
        """Payload bytes of all pieces in one layer."""
        pieces = self._pieces
        return sum(len(each.tokens) * _token_bytes(self._cache, each.head_start, each.head_stop) for each in pieces)

    def frames(self, frame_bytes: int = FRAME_BYTES) -> tuple[FrameLayout, ...]:
        """Cut the pieces into frames of at most `frame_bytes`, or of one token.

        The first call cuts the frames for all layers, in the lane's thread and not in the step's: that can be slow,
        since decode shards may have a piece per token. Raises TransferError if a piece is not in this rank's blocks and
        heads, or if pieces do not ascend.
        """
        if frame_bytes != self._cut_to:
            heads = sorted({(piece.head_start, piece.head_stop) for piece in self._pieces})
            self._frames = tuple(frame for start, stop in heads for frame in self._cut(start, stop, frame_bytes))
            self._cut_to = frame_bytes
        return self._frames

    def _cut(self, head_start: int, head_stop: int, frame_bytes: int) -> Iterator[FrameLayout]:
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
        step = max(1, min(frame_bytes // _token_bytes(cache, head_start, head_stop), MAX_PIECES))
        for first in range(0, len(positions), step):
            # Runs of positions are pieces on the wire. Runs of slots are views of memory. They may differ.
            spans = runs_of(positions[first : first + step])
            starts = np.array([span.start for span in spans], dtype=np.int64)
            lengths = np.array([len(span) for span in spans], dtype=np.int64)
            runs = runs_of(slots[first : first + step])
            yield FrameLayout(starts, lengths, head_start, head_stop, heads, runs, cache.copy_index(runs))


class CopyStream:
    """GPU stream for one thread's copies, beside computation. On a CPU, copies are done when calls return."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self, ready: torch.Event | None = None) -> Iterator[None]:
        """Queue the `with` block's copies after event `ready`, and wait for them at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            yield
            self._stream.synchronize()


def digest_of(payload: torch.Tensor) -> int:
    """Return a payload's checksum: `checksum_of` on the host, `weighted_sum` on a GPU."""
    return checksum_of([payload.numpy().data]) if payload.device.type == "cpu" else weighted_sum(payload)


def weighted_sum(payload: torch.Tensor) -> int:
    """Return the sum modulo 2**32 of 4-byte words, each times an odd factor that depends on its position.

    Odd factors make every change of one word visible, and different factors make swapped words visible.
    """
    words = payload.view(torch.int32)
    weights = torch.arange(len(words), dtype=torch.int32, device=payload.device).mul_(WEIGHT).bitwise_or_(1)
    return int(weights.mul_(words).sum(dtype=torch.int64)) & 0xFFFF_FFFF
