"""Rendezvous of a rank with its ring and its tensor-parallel ring: all ranks open endpoints, then all connect.

A rank's worker calls it. `RingJoining` owns the endpoints until `close`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.connect import RingStore, connect_ring
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.ring_backend import select_ring_backend
from ringserve.cp_core.transport.socket_mesh import Rendezvous, RingListener, connect_mesh, parse_endpoint
from ringserve.cp_core.transport.socket_ring import SocketRing
from ringserve.cp_core.transport.staged import for_device
from ringserve.workers.protocol.ranks import RankEndpoints, RankSpec, RingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankRings:
    """Rings of one rank: `tokens` joins the ranks with other tokens, `heads` those with other heads, if there are any.

    `control` and `control_heads` join the same ranks for host tensors: headers of a loop and sampled tokens. They are
    the same rings if those carry host tensors. NCCL does not, and its messages would wait for the GPU, so sockets are
    used beside it.
    """

    tokens: RingTransport
    heads: RingTransport | None
    control: RingTransport
    control_heads: RingTransport | None

    @classmethod
    def of(
        cls, tokens: RingTransport, heads: RingTransport | None = None, control: RingTransport | None = None
    ) -> RankRings:
        """Return rings that carry both kinds of messages; `control` carries host messages if `tokens` does not."""
        return cls(tokens, heads, control or tokens, heads)

    @property
    def header_hops(self) -> tuple[RingTransport, ...]:
        """Rings of a header's path: that of the ranks with the first heads, then each rank's tensor-parallel ring."""
        if self.control_heads is None:
            return (self.control,)
        return (self.control, self.control_heads) if self.control_heads.rank == 0 else (self.control_heads,)

    @property
    def all(self) -> tuple[RingTransport, ...]:
        """Every ring once, data rings first."""
        rings = [each for each in (self.tokens, self.heads, self.control, self.control_heads) if each is not None]
        return tuple(dict.fromkeys(rings))


class RingJoining:
    """Joining in two calls: `open`, then `join` with the endpoints of all ranks. `close` is allowed in any state.

    Ranks connect by sockets to each other's endpoints and refuse any peer without the ring's secret. With NCCL these
    sockets carry only control messages; NCCL finds its peers by a torch store, which checks no secret, and does not
    encrypt.
    """

    def __init__(self, spec: RankSpec) -> None:
        """Choose the transport. Raises ConfigError if it does not support the device."""
        self._spec = spec
        self._settings = settings = spec.settings
        self.backend = select_ring_backend(
            settings.ring_transport, torch.device(settings.device).type, settings.gpus_per_rank
        )
        self._listeners: dict[str, RingListener] = {}
        self._store: RingStore | None = None
        if settings.tls is not None and self.backend != "sockets" and spec.num_ranks > 1:
            logger.warning("ring %s uses %s, which does not encrypt its messages", spec.ring, self.backend)

    def open(self) -> RankEndpoints:
        """Open the endpoints that the other ranks connect to. Raises Unavailable."""
        spec, host = self._spec, self._settings.listen_host
        store = ""
        if self.backend != "sockets" and spec.rank == 0 and spec.num_ranks > 1:
            self._store = RingStore(host)
            store = f"{host}:{self._store.port}"
        sizes = {"tokens": spec.cp, "heads": spec.tp}
        self._listeners = {name: RingListener(host) for name, size in sizes.items() if size > 1}
        return RankEndpoints(store=store, **{name: each.endpoint for name, each in self._listeners.items()})

    def join(self, ring: RingSpec) -> RankRings:
        """Join the rings of this rank; collective.

        Raises Unavailable if the other ranks do not connect within the ring's timeout or do not know its secret.
        """
        spec = self._spec
        column = [spec.tp * cp_rank + spec.tp_rank for cp_rank in range(spec.cp)]
        tokens = self._connect(ring, "tokens", spec.tp_rank, column)
        if spec.tp == 1:
            return RankRings(tokens[0], None, tokens[1], None)
        row = range(spec.cp_rank * spec.tp, (spec.cp_rank + 1) * spec.tp)
        heads = self._connect(ring, "heads", spec.cp_rank, row)
        return RankRings(tokens[0], heads[0], tokens[1], heads[1])

    def _connect(
        self, ring: RingSpec, kind: str, index: int, members: Sequence[int]
    ) -> tuple[RingTransport, RingTransport]:
        """Return the rings of the ranks `members` for data and for control messages, which are often the same.

        `members` are ranks of the whole ring. `index` tells their ring from others of its `kind`.
        """
        name, rank, seconds = f"{ring.name}/{kind}-{index}", members.index(self._spec.rank), ring.timeout_seconds
        if len(members) == 1:
            alone = InProcessRing(1, seconds).transports[0]
            return alone, alone
        control = self._connect_sockets(ring, kind, name, members)
        if self.backend == "sockets":
            return control, control
        try:
            return self._connect_in_store(ring, name, rank, len(members)), control
        except BaseException:
            control.close()
            raise

    def _connect_sockets(self, ring: RingSpec, kind: str, name: str, members: Sequence[int]) -> RingTransport:
        rank, seconds = members.index(self._spec.rank), ring.timeout_seconds
        rendezvous = Rendezvous(
            name=name,
            rank=rank,
            endpoints=tuple(getattr(ring.endpoints[member], kind) for member in members),
            secret=ring.secret,
            timeout_seconds=seconds,
            tls=self._settings.tls,
        )
        try:
            sockets = SocketRing(rank, seconds, connect_mesh(self._listeners[kind], rendezvous))
        except Unavailable as error:
            raise Unavailable(f"rank {rank} cannot join ring {name!r} of {len(members)}: {error}") from error
        return for_device(sockets, torch.device(self._settings.device))

    def _connect_in_store(self, ring: RingSpec, name: str, rank: int, size: int) -> RingTransport:
        host, port = parse_endpoint(ring.endpoints[0].store)
        return connect_ring(
            host,
            port,
            name,
            rank,
            size,
            ring.timeout_seconds,
            self.backend,
            store=self._store,
            device=self._settings.device,
        )

    def close(self) -> None:
        """Close the endpoints. The store stays with the rings that need it."""
        for listener in self._listeners.values():
            listener.close()
