"""States, events and settings of rings, for leaders, the router and the services that start rings. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ringserve.workers.protocol.ranks import RankSettings

ROLES = ("prefill", "decode")
AWAY = "away"
"""State that operators see of a ring that has left and is to return."""
LOST = "lost"
"""State that operators see of a ring whose leader cannot be reached."""
HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats, unless settings say otherwise."""
LOST_SECONDS = 3.0
"""Seconds without a heartbeat after which its sender counts as lost, unless settings say otherwise."""


class RingState(StrEnum):
    """States of a ring as its leader sees it; `orchestration.ring.life` draws the transitions."""

    STARTING = "starting"
    READY = "ready"
    REBUILDING = "rebuilding"
    CLOSED = "closed"


class RingStanding(StrEnum):
    """Standing of a ring with the router. AWAY has drained and left, STARTING has not announced itself yet."""

    READY = "ready"
    DRAINING = "draining"
    AWAY = "away"
    LOST = "lost"
    STARTING = "starting"


@dataclass(frozen=True, kw_only=True, slots=True)
class RingEvent:
    """Event for whatever started a ring: it has drained, is wanted again or parked, or its leader is silent.

    A ring that is wanted again starts when the nodes at the addresses `leaving_nodes` are gone. A leader that has not
    announced its ring for `silent_seconds` is to be replaced; 0: the event is another one. `parked`: the router itself
    has drained the ring, because the load did not need it. If another router takes its place, the ring must be started
    again, because that router does not know of it. False: the router has brought the ring back. None: the event is
    another one.
    """

    ring: str
    leaving_nodes: tuple[str, ...] = ()
    silent_seconds: float = 0.0
    parked: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillScheduling:
    """How turns share a prefill ring's steps; `services.config.PrefillConfig` explains each key to users."""

    step_budget: float = 0.0
    step_seconds: float = 0.0
    min_chunk_tokens: int = 256
    whole_tokens: int = 512
    ageing_seconds: float = 10.0
    max_queue_work: float = 50e6


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """Settings of a ring of `num_ranks` ranks that share the tokens. Times in seconds.

    Each rank is asked for a heartbeat every `watch_interval`, and is lost after `lost_timeout` without one.

    At most `kept_fraction` of the ranks' blocks are retained between turns. With `measures_at_start` the ring computes
    a few steps before it serves, which make its rates more exact.
    """

    role: str
    name: str
    num_ranks: int
    ranks: RankSettings
    kept_fraction: float = 1.0
    headroom_tokens: int = 128
    max_direct_tokens: int = 0
    max_direct_seconds: float = 0.15
    max_waiting: int = 256
    chunk_tokens: int = 4096
    prefill_scheduling: PrefillScheduling = field(default_factory=PrefillScheduling)
    start_timeout: float = 120.0
    step_timeout: float = 300.0
    control_timeout: float = 20.0
    transfer_timeout: float = 60.0
    stuck_timeout: float = 60.0
    watch_interval: float = HEARTBEAT_SECONDS
    lost_timeout: float = LOST_SECONDS
    attach_timeout: float = 30.0
    orphan_timeout: float = 10.0
    announce_interval: float = HEARTBEAT_SECONDS
    drain_interval: float = 0.2
    retry_pause: float = 0.5
    measures_at_start: bool = False

    @property
    def num_processes(self) -> int:
        """Processes of all ranks."""
        return self.num_ranks * self.ranks.tp
