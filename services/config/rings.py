"""Sections about rings: how prompts are computed, how answers are decoded, and their KV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cp_core.errors import ConfigError
from orchestration.protocol.settings import PrefillScheduling

POOL_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
MAX_POOLS = 16
"""Further ones of a role: each is part of the names of its rings, and so of metrics' labels."""


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """A further pool: `rings` rings of `cp` ranks of `tp` processes. All else it has in common with its role.

    A process takes one unit of `resource` from its Ray node; empty: of the role's (`ray.prefill_resource`).
    """

    rings: int = 1
    cp: int = 1
    tp: int = 1
    threads_per_rank: int = 1
    resource: str = ""


PoolsByName = Mapping[str, PoolConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One pool with all that its rings need to know. `name` is empty for a role's first pool.

    `num_before` rings of the role are in pools before this one: they have the metrics ports below.
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
        """Where it stands in the configuration."""
        return f"{self.role}.pools.{self.name}" if self.name else self.role

    @property
    def num_threads(self) -> int:
        """Of all its rings together."""
        return self.rings * self.cp * self.tp * self.threads_per_rank

    def ring_name(self, number: int) -> str:
        """No other ring has it: names of pools begin with a letter."""
        return "-".join((self.role, *([self.name] if self.name else []), str(number)))


def pools_of(role: str, first: PoolConfig, further: PoolsByName, *, max_waiting: int) -> tuple[Pool, ...]:
    """The role's pools, the first one first, the others by name, however they were written down."""
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
    """Raises ConfigError."""
    for name in further:
        if not POOL_NAME.fullmatch(name):
            raise ConfigError(
                f"{role}.pools: {name!r} is no name of a pool; allowed are up to 16 of a-z and 0-9, a letter first"
            )
    if len(further) > MAX_POOLS:
        raise ConfigError(f"{role}.pools: {len(further)} pools are too many; allowed are {MAX_POOLS}")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Prefill rings: `rings` of `cp` ranks, which share the tokens; each is `tp` processes, which share the heads.
    `pools` are further ones, by name: rings of other sizes, which have all else in common with these.

    A step computes at most `chunk_tokens` new tokens and `step_budget` work units: one is what the matrix products of a
    token cost, attention counts by what it costs beside them; 0 is the work of `chunk_tokens` tokens with nothing
    before them. Nor should it take longer than `step_seconds`, by what the ring measured of itself when it started:
    about so long a short prompt may have to wait for a step of others; 0 sets no such limit. Long prompts are cut
    accordingly, into chunks of at least `min_chunk_tokens`. `fuse` lets a step hold tokens of several turns,
    `interleave` lets other turns in between the chunks of a long one. `ageing_seconds` of waiting make up for one step
    of priority. A ring whose queue holds `max_queue_work` work units refuses more.
    """

    rings: int = 1
    cp: int = 2
    tp: int = 1
    chunk_tokens: int = 4096
    step_budget: float = 0.0
    step_seconds: float = 0.15
    min_chunk_tokens: int = 256
    fuse: bool = True
    interleave: bool = True
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
            fuse=self.fuse,
            interleave=self.interleave,
            ageing_seconds=self.ageing_seconds,
            max_queue_work=self.max_queue_work,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Decode rings: `rings` of `cp` ranks of `tp` processes, and those of `pools`; each ring decodes up to `max_batch`
    turns.

    `variant` is how a ring decodes its batch: every rank all of it (`gather`), each rank a part (`pass_q`), or
    whichever is predicted to be faster (`auto`). `preemption`: a turn begins with KV room for `headroom_tokens` of its
    answer and grows; where no room is left the youngest turn gives way and is resumed later. Without, room for the
    whole answer is set aside at once. `continuous`: turns join the batch at every step; without, when it is empty.

    A ring computes up to `max_direct_tokens` new tokens of a turn whose other KV it keeps itself (0: none), where that
    is predicted to be sooner than by a prefill ring and to hold up its batch no longer than `max_direct_seconds`.
    """

    rings: int = 1
    cp: int = 2
    tp: int = 1
    max_batch: int = 32
    max_waiting: int = 256
    threads_per_rank: int = 1
    pools: PoolsByName = field(default_factory=dict)
    variant: str = "auto"
    continuous: bool = True
    preemption: bool = True
    headroom_tokens: int = 128
    max_direct_tokens: int = 128
    max_direct_seconds: float = 0.15


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """KV of every rank: `tokens_per_rank` tokens in blocks of `block_tokens`, of its own heads where `tp` is not 1.

    At most `kept_fraction` of it is kept between turns. `checksums` guard KV on its way between rings.

    Kernels that follow block tables do so where `block_tokens` is a multiple of their page (256 on GPUs); elsewhere
    runs of adjacent blocks are attended one by one.
    """

    block_tokens: int = 16
    tokens_per_rank: int = 65536
    kept_fraction: float = 1.0
    checksums: bool = True

    @property
    def num_blocks(self) -> int:
        return self.tokens_per_rank // self.block_tokens
