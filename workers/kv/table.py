"""The transfers a destination rank knows of, whatever carries their bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

from cp_core.errors import RingserveError, StaleIncarnation, TransferError
from workers.kv.cache import KvCache
from workers.kv.incoming import IncomingTransfer, TransferState
from workers.protocol.steps import KvExpect, TransferKey, TransferReport

# Keys of ended transfers are remembered so that a late `expect` cannot revive one; so many, then the oldest go.
MAX_DROPPED = 1 << 14
# Sealed transfers answer `wait_sealed` until they are dropped. A leader need not: beyond so many the oldest go.
MAX_SEALED = 1 << 12


class TransferTable:
    """From `expect` to `drop`, every transfer into this cache. Any thread may call anything."""

    def __init__(self, cache: KvCache, incarnation: str) -> None:
        self._cache = cache
        self._incarnation = incarnation
        self._transfers: dict[TransferKey, IncomingTransfer] = {}
        self._dropped: OrderedDict[TransferKey, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """Transfers that may still receive bytes."""
        with self._lock:
            transfers = list(self._transfers.values())
        return sum(transfer.is_open for transfer in transfers)

    @property
    def stalled_seconds(self) -> float:
        """The longest time for which a transfer that has begun, and is not whole, got no byte; else 0."""
        with self._lock:
            transfers = list(self._transfers.values())
        return max((transfer.stalled_seconds for transfer in transfers), default=0.0)

    def expect(self, expect: KvExpect) -> None:
        """Open a transfer: from now on its frames are taken.

        Raises StaleIncarnation where it is meant for another life of this ring, TransferError where its key was used
        before or its blocks cannot hold it.
        """
        self._check_destination(expect.key)
        transfer = IncomingTransfer(expect, self._cache)
        with self._lock:
            if expect.key in self._transfers:
                raise TransferError(f"{transfer} is expected already")
            if expect.key in self._dropped:
                raise TransferError(f"{transfer} was dropped: a new attempt is needed")
            self._transfers[expect.key] = transfer
            if len(self._transfers) > MAX_SEALED:
                self._forget_sealed()

    def wait_sealed(self, key: TransferKey, timeout: float) -> TransferReport:
        """See `IncomingTransfer.wait_sealed`. Raises TransferError also for a transfer that is not known."""
        return self.find(key).wait_sealed(timeout)

    def drop(self, key: TransferKey) -> None:
        """Forget a transfer, whatever its state. After this returns nothing of it is written to the cache, ever."""
        with self._lock:
            transfer = self._transfers.pop(key, None)
            self._remember(key)
        if transfer is not None:
            transfer.abort(TransferError(f"{transfer} was dropped by its destination"))

    def find(self, key: TransferKey) -> IncomingTransfer:
        """The transfer of exactly this key. Raises StaleIncarnation or TransferError, saying what does not match."""
        self._check_destination(key)
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None:
                return transfer
            others = [other for other in self._transfers if other.transfer_id == key.transfer_id]
        for other in others:
            if other.source != key.source:
                raise StaleIncarnation(
                    f"transfer {key.transfer_id!r} is expected from {other.source!r}, not {key.source!r}"
                )
            raise TransferError(f"transfer {key.transfer_id!r} is at attempt {other.attempt}, not {key.attempt}")
        raise TransferError(f"transfer {key.transfer_id!r} attempt {key.attempt} is not expected here")

    def abort_all(self, error: RingserveError) -> None:
        """End every open transfer: the rank is stopping."""
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.abort(error)

    def _forget_sealed(self) -> None:
        """Let the older half of the sealed transfers go; the lock is held."""
        sealed = [key for key, transfer in self._transfers.items() if transfer.state is TransferState.SEALED]
        for key in sealed[: (len(sealed) + 1) // 2]:
            del self._transfers[key]
            self._remember(key)

    def _remember(self, key: TransferKey) -> None:
        self._dropped[key] = None
        while len(self._dropped) > MAX_DROPPED:
            self._dropped.popitem(last=False)

    def is_own(self, key: TransferKey) -> bool:
        """Whether the key names this life of the ring."""
        return key.destination == self._incarnation

    def _check_destination(self, key: TransferKey) -> None:
        if not self.is_own(key):
            # Our own name is not told: who does not know it may be a stranger.
            raise StaleIncarnation(f"transfer {key.transfer_id!r} is meant for {key.destination!r}, which is not here")
