"""Descriptions of the router and of a ring's leader. The starter pickles them; an actor unpickles and calls them.

Calling a description builds the running router or leader, by the module `services.cluster.running`. Importing that
module takes a third of a second, and the starter does not need it. So it is imported by its name, when a description is
called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module

from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.sparse import SparseLosses
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.ring.actors import Hosted
from ringserve.services.config import Config
from ringserve.services.config.sections import Pool
from ringserve.workers.protocol.ranks import ModelInfo, RankSettings

RUNNING = "ringserve.services.cluster.running"


@dataclass(frozen=True, kw_only=True)
class RouterHost:
    """Router builder. Picklable: an actor calls it.

    Without a `journal` directory no conversation survives the router. In that directory each model has its own journal,
    found by the model's `fingerprint`.
    """

    config: Config
    model: ModelInfo
    fingerprint: str = ""
    profile: HardwareProfile | None = None
    journal: str = ""
    sparse_losses: SparseLosses | None = None

    def __call__(self) -> Hosted:
        router: Hosted = import_module(RUNNING).RunningRouter(self)
        return router


@dataclass(frozen=True, kw_only=True)
class LeaderHost:
    """Builder of the leader of one ring of a pool. Picklable.

    If `listen_host` is empty, the leader and the ranks listen at the addresses of their nodes. All ranks of a cluster
    refuse to load a model of another `fingerprint`; see `workers.model.info.read_fingerprint`. With `measures_at_start`
    the ring measures its steps before it serves; otherwise the starter calls the leader's `measure` later.
    """

    config: Config
    model_path: str
    fingerprint: str
    pool: Pool
    number: int
    router_endpoint: str
    listen_host: str = "127.0.0.1"
    measures_at_start: bool = True

    @property
    def name(self) -> str:
        return self.pool.ring_name(self.number)

    @property
    def role(self) -> str:
        return self.pool.role

    def __call__(self) -> Hosted:
        leader: Hosted = import_module(RUNNING).RunningLeader(self)
        return leader

    def resources(self) -> dict[str, float]:
        """Return the resources that one rank takes of a Ray node."""
        taken = {"CPU": float(self.settings().ranks.num_threads)}
        if self.config.model.device == "cuda":
            taken["GPU"] = self.config.model.gpus_per_rank
        return taken | ({self.pool.resource: 1.0} if self.pool.resource else {})

    def metrics_address(self) -> str:
        """Return the metrics address of this ring's leader; rings of one role take ports in a row."""
        metrics = self.config.metrics
        host, _, port = (metrics.prefill if self.role == "prefill" else metrics.decode).rpartition(":")
        return f"{host}:{int(port) and int(port) + self.pool.num_before + self.number}" if host else ""

    def _packs_head(self) -> bool:
        """Return whether ranks pack the output head. If it is the embedding too, the copy takes extra memory.

        Decode ranks gain by it in each step. Prefill ranks do it if a decode rank can share the copy: all ranks run on
        this machine, and some decode pool has the same tp and rings of one rank (ranks of larger rings may cut the
        weights further).
        """
        if self.role == "decode":
            return True
        others = self.config.pools_of("decode")
        return not self.config.ray.address and any(each.cp == 1 and each.tp == self.pool.tp for each in others)

    @property
    def shared_cores(self) -> str:
        """Key of the rings that share this machine's cores; "" if every ring has, or may have, cores of its own."""
        num_threads = sum(pool.num_threads for pool in self.config.pools)
        has_enough = num_threads <= len(os.sched_getaffinity(0))
        is_spread = self.config.ray.address or self.config.model.device != "cpu"
        return "" if is_spread or has_enough else f"service with its router at {self.router_endpoint}"

    def settings(self) -> RingSettings:
        config, timeouts, pool = self.config, self.config.timeouts, self.pool
        return RingSettings(
            role=self.role,
            name=self.name,
            num_ranks=pool.cp,
            ranks=RankSettings(
                model_path=self.model_path,
                fingerprint=self.fingerprint,
                dtype=config.model.dtype,
                device=config.model.device,
                gpus_per_rank=config.model.gpus_per_rank,
                attention_backend=config.model.attention_backend,
                ring_transport=config.model.ring_transport,
                tp=pool.tp,
                num_blocks=config.kv_cache.num_blocks,
                block_tokens=config.kv_cache.block_tokens,
                kv_memory_fraction=config.kv_cache.memory_fraction,
                kv_carrier=config.kv_carrier,
                kv_slot_bytes=config.kv_transfer.slot_bytes,
                num_threads=pool.threads_per_rank,
                listen_host=self.listen_host,
                tls=config.internal_tls.files,
                max_batch=config.decode.max_batch,
                cores=self.shared_cores,
                least_share=config.decode.least_share,
                drafts=self.role == "decode" and config.decode.drafts == "on",
                draft_model=config.decode.draft_model if self.role == "decode" else "",
                draft_context=config.decode.draft_context,
                decode_variant=config.decode.variant,
                packs_weights=True,
                packs_head=self._packs_head(),
                compile=config.model.compile,
                quantization=config.model.quantization,
            ),
            kept_fraction=config.kv_cache.kept_fraction,
            headroom_tokens=config.decode.headroom_tokens,
            max_direct_tokens=config.decode.max_direct_tokens,
            max_direct_seconds=config.decode.max_direct_seconds,
            max_waiting=pool.max_waiting,
            chunk_tokens=config.prefill.chunk_tokens,
            prefill_scheduling=config.prefill.scheduling,
            start_timeout=timeouts.start,
            step_timeout=timeouts.step,
            control_timeout=timeouts.control,
            transfer_timeout=timeouts.transfer,
            stuck_timeout=timeouts.stuck,
            announce_interval=timeouts.heartbeat,
            watch_interval=timeouts.heartbeat,
            lost_timeout=timeouts.lost,
            measures_at_start=self.measures_at_start,
        )
