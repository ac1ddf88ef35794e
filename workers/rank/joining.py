"""How a rank joins its ring, and with tensor parallelism its group: doors are opened first, then all ranks meet."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from cp_core.errors import Unavailable
from cp_core.transport.connect import RingStore, connect_ring
from cp_core.transport.inprocess import InProcessRing
from cp_core.transport.interface import RingTransport
from cp_core.transport.ring_backend import select_ring_backend
from cp_core.transport.socket_mesh import Rendezvous, RingListener, connect_mesh, parse_endpoint
from cp_core.transport.socket_ring import SocketRing
from workers.protocol.steps import RankDoors, RankSpec, RingSpec

logger = logging.getLogger(__name__)


class RingJoining:
    """`open`, then `join` with what all ranks have opened; `close` in any state.

    Ranks of sockets meet at each other's doors, and take nobody who does not know the ring's secret. Those of NCCL meet
    in a store of torch's, which guards nothing, and are not encrypted.
    """

    def __init__(self, spec: RankSpec) -> None:
        """Raises ConfigError for a transport that does not serve the device."""
        self._spec = spec
        self.backend = select_ring_backend(spec.ring_transport, torch.device(spec.device).type)
        self._doors: dict[str, RingListener] = {}
        self._store: RingStore | None = None
        if spec.tls is not None and self.backend != "sockets" and spec.num_ranks > 1:
            logger.warning("ring %s goes by %s, which does not encrypt its messages", spec.ring, self.backend)

    def open(self) -> RankDoors:
        """Open what others have to know of. Raises Unavailable."""
        spec = self._spec
        if self.backend != "sockets":
            is_host = spec.rank == 0 and spec.num_ranks > 1
            self._store = RingStore(spec.listen_host) if is_host else None
            return RankDoors(store=f"{spec.listen_host}:{self._store.port}" if self._store else "")
        rings = {"tokens": spec.cp, "heads": spec.tp}
        self._doors = {name: RingListener(spec.listen_host) for name, size in rings.items() if size > 1}
        return RankDoors(**{name: door.endpoint for name, door in self._doors.items()})

    def join(self, ring: RingSpec) -> tuple[RingTransport, RingTransport | None]:
        """(the ring of those with other tokens, the group of those with other heads); collective.

        Raises Unavailable if the others do not come within the ring's timeout, or are not who they should be.
        """
        spec = self._spec
        column = [spec.tp * cp_rank + spec.tp_rank for cp_rank in range(spec.cp)]
        tokens = self._meet(ring, "tokens", spec.tp_rank, column)
        if spec.tp == 1:
            return tokens, None
        return tokens, self._meet(
            ring, "heads", spec.cp_rank, range(spec.cp_rank * spec.tp, (spec.cp_rank + 1) * spec.tp)
        )

    def _meet(self, ring: RingSpec, kind: str, index: int, members: Sequence[int]) -> RingTransport:
        """The ring of `members`, ranks of the whole; `index` tells it from others of its kind."""
        name, rank, seconds = f"{ring.name}/{kind}-{index}", members.index(self._spec.rank), ring.timeout_seconds
        if len(members) == 1:
            return InProcessRing(1, seconds).transports[0]
        if self.backend != "sockets":
            return self._meet_in_store(ring, name, rank, len(members))
        rendezvous = Rendezvous(
            name=name,
            rank=rank,
            endpoints=tuple(getattr(ring.doors[member], kind) for member in members),
            secret=ring.secret,
            timeout_seconds=seconds,
            tls=self._spec.tls,
        )
        try:
            return SocketRing(rank, seconds, connect_mesh(self._doors[kind], rendezvous))
        except Unavailable as error:
            raise Unavailable(f"rank {rank} cannot join ring {name!r} of {len(members)}: {error}") from error

    def _meet_in_store(self, ring: RingSpec, name: str, rank: int, size: int) -> RingTransport:
        host, port = parse_endpoint(ring.doors[0].store)
        return connect_ring(
            host,
            port,
            name,
            rank,
            size,
            ring.timeout_seconds,
            self.backend,
            store=self._store,
            opens_store=False,
            device=self._spec.device,
        )

    def close(self) -> None:
        """Nobody can be met any more. The store stays with the rings that need it."""
        for door in self._doors.values():
            door.close()
