"""The destination's end of one connection: reads a source's frames, stores what is right, refuses the rest."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from cp_core.errors import RingserveError, StaleIncarnation, TransferError, Unavailable
from cp_core.transport.peer_tls import reason_of
from workers.kv.frames import (
    AbandonFrame,
    Frame,
    LayerFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    encode,
)
from workers.kv.incoming import IncomingTransfer
from workers.kv.sockets import KvStream
from workers.kv.table import TransferTable
from workers.protocol.steps import TransferKey

logger = logging.getLogger(__name__)

# How long an idle connection is waited for before looking whether the receiver has closed.
IDLE_SECONDS = 1.0
# Refusals are remembered until the source asks; of one that never does, the oldest are forgotten.
MAX_REFUSED = 1024


@dataclass(slots=True)
class _Share:
    """What this connection has brought of one transfer since its last `settle`."""

    transfer: IncomingTransfer
    payload_bytes: int = 0


class SourceConnection:
    """Serves one connection in the thread that calls `serve`, until it ends; `close` may be called from any thread.

    A refused frame is read to its end and forgotten, so the connection goes on with the next. A malformed one ends the
    connection: after it nobody knows where the next frame begins.

    Until it `is_known` a source has `greeting_seconds`. With TLS it is known by its certificate, without by a frame
    that names this life of the destination, which strangers do not know.
    """

    def __init__(
        self,
        stream: KvStream,
        peer: str,
        table: TransferTable,
        dtype: torch.dtype,
        *,
        greeting_seconds: float,
        is_private: bool,
    ) -> None:
        """`is_private`: the stream is a TLS connection whose handshake is still to be done."""
        self.is_known = False
        self._stream = stream
        self._peer = peer
        self._table = table
        self._dtype = dtype
        self._is_private = is_private
        self._stream.deadline = time.monotonic() + greeting_seconds
        self._is_closed = False
        self._shares: dict[TransferKey, _Share] = {}
        # What was refused since the source last asked: it is told once, not once a frame, so replies never pile up.
        self._refused: OrderedDict[TransferKey, RefusedFrame] = OrderedDict()
        # Grows to the largest frame of this peer, which `receive_frame` bounds.
        self._staging = torch.empty(0, dtype=torch.uint8)

    def serve(self) -> None:
        """Read frames until the connection ends; transfers it had begun and not settled are then aborted."""
        reason = "this receiver is closing"
        try:
            if self._is_private:
                self._stream.shake_hands()
                self._know()
            while not self._is_closed:
                if self._stream.wait_readable(IDLE_SECONDS):
                    frame, payload_bytes = self._stream.receive_frame()
                    self._take(frame, payload_bytes)
        except TransferError as error:
            reason = f"it broke the protocol: {error}"
            logger.warning("KV connection of %s is closed: %s", self._peer, error)
        except OSError as error:
            reason = reason_of(error)
            if not self.is_known:
                logger.warning("KV connection of %s is closed before it was known who calls: %s", self._peer, reason)
        finally:
            self._stream.close()
            for share in self._shares.values():
                share.transfer.abort(Unavailable(f"the source {self._peer} of {share.transfer} is gone: {reason}"))

    def close(self) -> None:
        """Make `serve` return soon."""
        self._is_closed = True
        self._stream.shut()

    def _know(self) -> None:
        self.is_known = True
        self._stream.deadline = None

    def _take(self, frame: Frame, payload_bytes: int) -> None:
        if not self.is_known and self._table.is_own(frame.key):
            self._know()
        match frame:
            case LayerFrame():
                self._take_layer(frame, payload_bytes)
            case SettleFrame():
                self._settle(frame.key)
            case AbandonFrame():
                self._abandon(frame)
            case _:
                raise TransferError(f"a source sent {type(frame).__name__}")

    def _take_layer(self, frame: LayerFrame, payload_bytes: int) -> None:
        try:
            transfer = self._table.find(frame.key)
            transfer.admit(frame, payload_bytes)
        except RingserveError as error:
            self._stream.discard(payload_bytes)
            self._refuse(frame.key, error)
            return
        # From here on the transfer dies with this connection.
        share = self._shares.setdefault(frame.key, _Share(transfer))
        if len(self._staging) < payload_bytes:
            self._staging = torch.empty(payload_bytes, dtype=torch.uint8)
        payload = self._staging[:payload_bytes]
        self._stream.receive_into(payload.numpy().data)
        try:
            transfer.store(frame, payload.view(self._dtype))
        except RingserveError as error:
            self._refuse(frame.key, error)
            return
        share.payload_bytes += payload_bytes

    def _settle(self, key: TransferKey) -> None:
        """Answer for all frames of this key since the last answer."""
        share = self._shares.pop(key, None)
        refused = self._refused.pop(key, None)
        if refused is not None:
            self._reply(refused)
            return
        try:
            if share is None:
                raise TransferError(f"nothing of transfer {key.transfer_id!r} came over this connection")
            # Not looked up in the table: a transfer that is sealed and forgotten since then did arrive.
            share.transfer.check_alive()
        except RingserveError as error:
            self._reply(refusal(key, error))
        else:
            self._reply(SettledFrame(key, share.payload_bytes))

    def _abandon(self, frame: AbandonFrame) -> None:
        self._refused.pop(frame.key, None)
        share = self._shares.pop(frame.key, None)
        if share is not None:
            reason = f"{share.transfer} was given up by its source {self._peer}: {frame.reason}"
            share.transfer.abort(TransferError(reason))

    def _refuse(self, key: TransferKey, error: RingserveError) -> None:
        if key in self._refused:
            return
        logger.warning("KV of %s is refused: %s", self._peer, error)
        while len(self._refused) >= MAX_REFUSED:
            self._refused.popitem(last=False)
        self._refused[key] = refusal(key, error)
        self._reply(self._refused[key])

    def _reply(self, frame: RefusedFrame | SettledFrame) -> None:
        self._stream.send([memoryview(encode(frame))])


def refusal(key: TransferKey, error: RingserveError) -> RefusedFrame:
    return RefusedFrame(key, isinstance(error, StaleIncarnation), str(error))
