"""Settings of one ring, as its leader gets them. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from cp_core.transport.peer_tls import PeerTls


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillScheduling:
    """How a prefill ring shares its steps; see `services.config.PrefillConfig` for what each key means to a user."""

    step_budget: float = 0.0
    step_seconds: float = 0.0
    min_chunk_tokens: int = 256
    fuse: bool = True
    interleave: bool = True
    ageing_seconds: float = 10.0
    max_queue_work: float = 50e6


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """One ring. Times in seconds; `capacity` is `num_blocks` blocks of `block_tokens` tokens on every rank, of which
    at most `kept_fraction` are kept between turns.

    `num_ranks` ranks share the tokens; each of them is `tp` processes that share the heads, and so hold the same tokens
    by the same block table. `listen_host` is where ranks listen; empty: each at the address of its node. With `tls`
    they take each other only by certificates.
    """

    role: str
    name: str
    num_ranks: int
    tp: int = 1
    model_path: str
    dtype: str = "float32"
    device: str = "cpu"
    attention_backend: str = "auto"
    ring_transport: str = "auto"
    num_blocks: int
    block_tokens: int = 16
    kept_fraction: float = 1.0
    kv_checksums: bool = True
    num_threads: int = 1
    listen_host: str = "127.0.0.1"
    tls: PeerTls | None = None
    max_batch: int = 32
    decode_variant: str = "auto"
    continuous: bool = True
    preemption: bool = True
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
    watch_interval: float = 1.0
    attach_timeout: float = 30.0
    announce_interval: float = 2.0
    drain_interval: float = 0.2
    retry_pause: float = 0.5

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.tp
