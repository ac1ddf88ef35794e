"""Sections about rings and their pools, prefill, decode and KV.

A role has a first pool, and may have further ones by name: rings of other sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.rings import PrefillScheduling

POOL_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
MAX_POOLS = 16
"""Further pools of a role at most: each is part of the names of its rings, and so of metrics' labels."""


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Further pool: `rings` rings of `cp` ranks of `tp` processes. The rest is that of its role.

    A process takes one unit of `resource` from its Ray node; empty takes the role's (`ray.prefill_resource`).
    """

    rings: int = 1
    cp: int = 1
    tp: int = 1
    threads_per_rank: int = 1
    resource: str = ""


PoolsByName = Mapping[str, PoolConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Pool with all that its rings need to know. `name` is empty for a role's first pool.

    `num_before` rings of the role are in pools before this one: they take the metrics ports below.
    """

    role: str
    name: str
    rings: int
    cp: int
    tp: int
    threads_per_rank: int
    max_waiting: int
    resource: str
    num_before: int

    @property
    def key(self) -> str:
        """Key of the pool in the configuration."""
        return f"{self.role}.pools.{self.name}" if self.name else self.role

    @property
    def num_threads(self) -> int:
        """Threads of all its rings together."""
        return self.rings * self.cp * self.tp * self.threads_per_rank

    def ring_name(self, number: int) -> str:
        """Return the name of a ring, unique as names of pools begin with a letter."""
        return "-".join((self.role, *([self.name] if self.name else []), str(number)))


def pools_of(role: str, first: PoolConfig, further: PoolsByName, *, max_waiting: int) -> tuple[Pool, ...]:
    """Return the role's pools: the first one, then the others by name."""
    pools: list[Pool] = []
    num_before = 0
    for name, each in (("", first), *sorted(further.items())):
        pools.append(
            Pool(
                role=role,
                name=name,
                rings=each.rings,
                cp=each.cp,
                tp=each.tp,
                threads_per_rank=each.threads_per_rank,
                max_waiting=max_waiting,
                resource=each.resource or first.resource,
                num_before=num_before,
            )
        )
        num_before += each.rings
    return tuple(pools)


def check_names(role: str, further: PoolsByName) -> None:
    """Check the names of further pools. Raises ConfigError."""
    for name in further:
        if not POOL_NAME.fullmatch(name):
            raise ConfigError(
                f"{role}.pools: {name!r} is no name of a pool; allowed are up to 16 of a-z and 0-9, a letter first"
            )
    if len(further) > MAX_POOLS:
        raise ConfigError(f"{role}.pools: {len(further)} pools are too many; allowed are {MAX_POOLS}")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Prefill rings: `rings` of `cp` ranks, which share the tokens; each rank is `tp` processes, which share the heads.

    `pools` are further rings of other sizes, by name; their other settings are these. A step computes at most
    `chunk_tokens` new tokens and `step_budget` work units. One unit is the cost of a token's matrix products; attention
    counts relative to it. 0 takes the work of `chunk_tokens` tokens without a prefix.

    A step aims to take at most `step_seconds`, by the rates that the ring measured at its start: about as long as a
    short prompt may wait for a step of others; 0 sets no limit. In a step of a lone turn on CPUs each layer aims to
    take at most as long, as shorter turns run between its layers. Long prompts are cut accordingly, into chunks of at
    least `min_chunk_tokens`. New prompts of one step with at most `whole_tokens` tokens lie whole on a rank each,
    without messages, where that loads the ranks evenly. `ageing_seconds` of waiting make up for one step of priority.
    A ring whose queue holds `max_queue_work` work units refuses more.
    """

    rings: int = 1
    cp: int = 2
    tp: int = 1
    chunk_tokens: int = 4096
    step_budget: float = 0.0
    step_seconds: float = 0.15
    min_chunk_tokens: int = 256
    whole_tokens: int = 512
    ageing_seconds: float = 10.0
    max_queue_work: float = 50e6
    max_waiting: int = 256
    threads_per_rank: int = 1
    pools: PoolsByName = field(default_factory=dict)

    @property
    def scheduling(self) -> PrefillScheduling:
        return PrefillScheduling(
            step_budget=self.step_budget,
            step_seconds=self.step_seconds,
            min_chunk_tokens=self.min_chunk_tokens,
            whole_tokens=self.whole_tokens,
            ageing_seconds=self.ageing_seconds,
            max_queue_work=self.max_queue_work,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Decode rings: `rings` of `cp` ranks of `tp` processes, and those of `pools`.

    Each ring decodes up to `max_batch` turns. `variant` is how a ring decodes its batch: every rank all of it
    (`gather`), each rank a part (`pass_q`), or the one predicted to be faster (`auto`). With `helix` the ring's ranks
    share the weights behind attention: each reads only its part of them, and `tp` is 1. `auto` takes helix where a ring
    predicts it to be faster when it starts. A turn begins with KV room for `headroom_tokens` of its answer and grows;
    where no room is left the youngest turn is preempted and resumed later.

    A ring computes up to `max_direct_tokens` new tokens of a turn whose other KV it retains (0: none), where that is
    predicted to be sooner than by a prefill ring and to delay its batch by at most `max_direct_seconds`.
    """

    rings: int = 1
    cp: int = 2
    tp: int = 1
    max_batch: int = 32
    max_waiting: int = 256
    threads_per_rank: int = 1
    pools: PoolsByName = field(default_factory=dict)
    variant: str = "auto"
    headroom_tokens: int = 128
    max_direct_tokens: int = 128
    max_direct_seconds: float = 0.15


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """KV of every rank: `tokens_per_rank` tokens in blocks of `block_tokens`, of its own heads where `tp` is not 1.

    On whole GPUs `memory_fraction` gives KV that part of the memory that the weights leave, instead; 0 is
    `tokens_per_rank`. At most `kept_fraction` of it is retained between turns.

    Kernels that follow block tables need `block_tokens` to be a multiple of their page (256 on GPUs); otherwise runs of
    adjacent blocks are attended one by one.
    """

    block_tokens: int = 16
    tokens_per_rank: int = 65536
    memory_fraction: float = 0.0
    kept_fraction: float = 1.0

    @property
    def num_blocks(self) -> int:
        return self.tokens_per_rank // self.block_tokens


@dataclass(frozen=True, kw_only=True)
class KvTransferConfig:
    """KV on its way between rings.

    `carrier` moves it: `sockets`, `nixl`, or `auto`. `auto` is NIXL (`pip install 'ringserve[nixl]'`) between GPUs that
    cuda_ipc or RDMA reaches, and sockets on CPUs, beside `internal_tls`, where NIXL is not installed, and to ranks that
    NIXL does not reach; metrics count those. `nixl` by name also serves the host memory of CPUs, and a transfer to a
    rank that it does not reach fails. Each rank has 8 + 8 slots of `slot_bytes` on its device for NIXL.
    """

    carrier: str = "auto"
    slot_bytes: int = 16 << 20
