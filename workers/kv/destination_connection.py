"""The source's end of one connection: the caller sends frames, a thread of its own hears the replies."""

from __future__ import annotations

import logging
import threading

from cp_core.errors import ConfigError, StaleIncarnation, TransferError, Unavailable
from cp_core.transport.peer_tls import PeerTls, reason_of
from workers.kv.frames import Frame, RefusedFrame, SettledFrame, encode
from workers.kv.outgoing import OutgoingTransfer
from workers.kv.sockets import call
from workers.protocol.steps import TransferKey

logger = logging.getLogger(__name__)

# How long an idle connection is listened to before looking whether it is broken.
IDLE_SECONDS = 5.0


class DestinationConnection:
    """One TCP connection to a KV receiver, from construction until `is_broken`.

    One thread at a time may send; `break_off` may be called from any thread. When the connection ends, every transfer
    that it carried and that is not confirmed fails.
    """

    def __init__(
        self, endpoint: str, *, connect_seconds: float, stall_seconds: float, tls: PeerTls | None = None
    ) -> None:
        """Raises Unavailable for a malformed endpoint, and where nobody answers, or not who should."""
        self._endpoint = endpoint
        try:
            self._stream = call(endpoint, connect_seconds, stall_seconds, tls)
        except OSError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be reached: {reason_of(error)}") from error
        except ConfigError as error:
            raise Unavailable(f"the KV receiver at {endpoint} cannot be called: {error}") from error
        self._lock = threading.Lock()
        self._carried: dict[TransferKey, tuple[OutgoingTransfer, int]] = {}
        self._end_reason: str | None = None
        self._hearing = threading.Thread(target=self._hear, name=f"kv-replies-{endpoint}", daemon=True)
        self._hearing.start()

    @property
    def is_broken(self) -> bool:
        with self._lock:
            return self._end_reason is not None

    def carry(self, transfer: OutgoingTransfer) -> bool:
        """Bind a transfer's fate to this connection. False where the connection is broken already."""
        with self._lock:
            if self._end_reason is not None:
                return False
            self._carried.setdefault(transfer.key, (transfer, 0))
            return True

    def send(self, frame: Frame, payload: list[memoryview]) -> None:
        """Send one frame. Raises Unavailable when the connection breaks or stalls: it is of no use then."""
        payload_bytes = sum(buffer.nbytes for buffer in payload)
        with self._lock:
            if frame.key in self._carried:
                transfer, before = self._carried[frame.key]
                self._carried[frame.key] = (transfer, before + payload_bytes)
        try:
            self._stream.send([memoryview(encode(frame, payload_bytes)), *payload])
        except OSError as error:
            raise self._end(reason_of(error)) from error

    def forget(self, transfer: OutgoingTransfer) -> bool:
        """Unbind a transfer that is given up. Whether it was bound."""
        with self._lock:
            return self._carried.pop(transfer.key, None) is not None

    def break_off(self, reason: str) -> None:
        """End the connection; a `send` in progress returns at once with an error."""
        self._end(reason)

    def join(self, seconds: float) -> None:
        self._hearing.join(seconds)

    def _hear(self) -> None:
        reason = "it was broken off"
        try:
            while not self.is_broken:
                if self._stream.wait_readable(IDLE_SECONDS):
                    frame, _ = self._stream.receive_frame()
                    self._take(frame)
        except OSError as error:
            reason = reason_of(error)
        except TransferError as error:
            reason = str(error)
        finally:
            self._end(reason)
            self._stream.close()

    def _take(self, frame: Frame) -> None:
        if not isinstance(frame, SettledFrame | RefusedFrame):
            raise TransferError(f"a destination sent {type(frame).__name__}")
        with self._lock:
            transfer, payload_bytes = self._carried.pop(frame.key, (None, 0))
        if transfer is None:
            # Given up here while the reply was on its way.
            return
        if isinstance(frame, RefusedFrame):
            refusal = StaleIncarnation if frame.is_stale else TransferError
            transfer.fail(refusal(frame.reason))
        elif frame.payload_bytes != payload_bytes:
            transfer.fail(TransferError(f"{transfer}: {frame.payload_bytes} of {payload_bytes} bytes arrived"))
        else:
            transfer.confirmed(self._endpoint)

    def _end(self, reason: str) -> Unavailable:
        """End the connection once; returns why it ended, which need not be this reason."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            carried, self._carried = self._carried, {}
            error = Unavailable(f"the KV receiver at {self._endpoint} is gone: {self._end_reason}")
        self._stream.shut()
        for transfer, _ in carried.values():
            transfer.fail(error)
        return error
