"""KV transfers between ranks that are threads of one process, without sockets, for tests and newcomers."""

from __future__ import annotations

import threading

import torch

from ringserve.cp_core.errors import RingserveError, TransferError, Unavailable
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import OutgoingPart, checksum_of
from ringserve.workers.kv.incoming import TransferTable
from ringserve.workers.kv.sender import KvSender, OutgoingTransfer


class InProcessReceiver(TransferTable):
    """`KvReceiver` without sockets. Senders of the same network reach it by `endpoint`."""

    def __init__(self, cache: KvCache, incarnation: str, endpoint: str) -> None:
        super().__init__(cache, incarnation)
        self.endpoint = endpoint
        self.dtype = cache.dtype

    def close(self) -> None:
        """Abort all open transfers with Unavailable."""
        self.abort_all(Unavailable("the KV receiver is closed"))


class InProcessLane:
    """`Lane` without a connection: when a call returns, KV has arrived or was refused."""

    def __init__(self, receiver: InProcessReceiver, cache: KvCache) -> None:
        self._receiver = receiver
        self._cache = cache

    def send_layer(self, transfer: OutgoingTransfer, part: OutgoingPart, layer: int, ready: torch.Event | None) -> None:
        """See `Lane.send_layer`. `ready` is not needed, because this thread has just queued the work."""
        if not transfer.is_sending:
            return
        transfer.begin_part(self._receiver.endpoint)
        sent = 0
        try:
            for layout in part.frames():
                payload = bytearray(b"".join(layout.payload(layer, self._cache)))
                frame = layout.of_layer(transfer.key, layer, self._cache, checksum_of([memoryview(payload)]))
                incoming = self._receiver.find(transfer.key)
                incoming.admit(frame, len(payload))
                incoming.store(frame, torch.frombuffer(payload, dtype=self._receiver.dtype))
                sent += len(payload)
            transfer.sent_part(sent)
        except RingserveError as error:
            transfer.fail(error)

    def settle(self, transfer: OutgoingTransfer) -> None:
        """Confirm at once, since everything sent has arrived."""
        transfer.confirmed(self._receiver.endpoint)

    def release(self, transfer: OutgoingTransfer) -> None:
        """Tell the destination. No block is read between calls."""
        try:
            self._receiver.find(transfer.key).abort(TransferError(f"{transfer} was abandoned by its source"))
        except RingserveError:
            # The destination has dropped the transfer already.
            return

    def close(self) -> None:
        """Do nothing, since there is no thread and no connection."""


class InProcessNetwork:
    """Network inside one process: senders find receivers by endpoint."""

    def __init__(self) -> None:
        self._receivers: dict[str, InProcessReceiver] = {}
        self._lock = threading.Lock()

    def receiver(self, cache: KvCache, incarnation: str) -> InProcessReceiver:
        with self._lock:
            endpoint = f"in-process:{len(self._receivers)}"
            self._receivers[endpoint] = InProcessReceiver(cache, incarnation, endpoint)
            return self._receivers[endpoint]

    def sender(self, cache: KvCache, incarnation: str) -> KvSender:
        def open_lane(endpoint: str) -> InProcessLane:
            with self._lock:
                if endpoint not in self._receivers:
                    raise Unavailable(f"the KV receiver at {endpoint} cannot be reached")
                return InProcessLane(self._receivers[endpoint], cache)

        return KvSender(cache, incarnation, open_lane=open_lane)
