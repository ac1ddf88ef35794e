"""Pools: the rings of one role that have one size. A role has a first pool and may have further ones, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cp_core.errors import ConfigError

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
