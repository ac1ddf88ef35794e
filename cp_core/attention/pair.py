"""Attention of one rank's queries over one rank's keys of one sequence, without any mask.

Chunks of a sequence are in order of position, and all cached tokens precede them. So with the queries in slot s and
the keys in slot u of a ring with N slots (chunks s, 2N-1-s and u, 2N-1-u):

    keys            low queries (chunk s)     high queries (chunk 2N-1-s)
    cached          all                       all
    u < s: low      all                       all
    u < s: high     none                      none
    u > s: low      none                      all
    u > s: high     none                      all
    u = s: both     causal over [low, high] as one square, since low precedes high

So every pair takes one call over the cached keys and one over the new ones, on a suffix of the queries [low, high].

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_core.attention.interface import AttentionBackend
from cp_core.attention.partial import Accumulator, Partial, merge
from cp_core.layout.step_plans import KvRun, Shard


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows [start, stop) of a sequence's new tokens on a rank."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RowPartial:
    """Partial attention of the query rows `rows`."""

    rows: Rows
    partial: Partial


@dataclass(frozen=True, slots=True)
class KeyShard:
    """Keys and values of `shard`: runs of cached tokens, and the new tokens, low then high, as one run."""

    shard: Shard
    cached: Sequence[KvRun]
    new: KvRun

    def __post_init__(self) -> None:
        held = sum(run.k.shape[0] for run in self.cached)
        assert held == self.shard.cached, f"the runs hold {held} cached tokens, the plan says {self.shard.cached}"
        held = self.new.k.shape[0]
        assert held == self.shard.new, f"the run holds {held} new tokens, the plan says {self.shard.new}"


def seen_rows(queries: Shard, keys: Shard) -> tuple[Rows, ...]:
    """Return the query rows that see any key of `keys`, as the ranges that `attend_pair` answers. None is empty."""
    low, high, both = Rows(0, queries.low), Rows(queries.low, queries.new), Rows(0, queries.new)
    new_rows, num_new = _rows_and_new_keys(queries, keys)
    ranges: tuple[Rows, ...]
    if not num_new:
        ranges = (both,) if keys.cached else ()
    elif new_rows == both:
        ranges = (both,)
    else:
        ranges = (low, high) if keys.cached else (high,)
    return tuple(rows for rows in ranges if len(rows))


def attend_pair(
    backend: AttentionBackend, q_thd: torch.Tensor, queries: Shard, keys: KeyShard, scale: float
) -> list[RowPartial]:
    """Return one RowPartial for each range of `seen_rows(queries, keys.shard)`, in that order.

    q_thd[T, H, D] holds the low, then the high queries. Cached and new keys are attended in separate calls even where
    they lie side by side, as they do in pass-KV: so it has the bits of pass-Q.
    """
    ranges = seen_rows(queries, keys.shard)
    if not ranges:
        return []
    cached = Accumulator()
    for run in keys.cached:
        if run.k.shape[0]:
            cached.add(backend.partial_attention(q_thd, run.k, run.v, causal=False, scale=scale))
    new: Partial | None = None
    new_rows, num_new = _rows_and_new_keys(queries, keys.shard)
    if num_new and len(new_rows):
        new = backend.partial_attention(
            q_thd[new_rows.start : new_rows.stop],
            keys.new.k[:num_new],
            keys.new.v[:num_new],
            causal=keys.shard.slot == queries.slot,
            scale=scale,
        )
    answers = []
    for rows in ranges:
        parts = [cached.result().rows(rows.start, rows.stop)] if keys.shard.cached else []
        if new is not None and rows.start >= new_rows.start:
            parts.append(new)
        answers.append(RowPartial(rows, merge(parts)))
    return answers


def _rows_and_new_keys(queries: Shard, keys: Shard) -> tuple[Rows, int]:
    """Return the query rows that see new keys, and the number of leading keys they see (causally in the same slot)."""
    if keys.slot == queries.slot:
        return Rows(0, queries.new), keys.new
    if keys.slot < queries.slot:
        return Rows(0, queries.new), keys.low
    return Rows(queries.low, queries.new), keys.new


def merge_rows(parts: Sequence[RowPartial], queries: Shard, out_thd: torch.Tensor) -> None:
    """Merge the parts of one sequence, given in source-rank order, into out_thd[T, H, D] (cast to its dtype)."""
    low, high = Rows(0, queries.low), Rows(queries.low, queries.new)
    both = Rows(0, queries.new)
    segments = (both,) if all(part.rows == both for part in parts) else (low, high)
    for rows in (rows for rows in segments if len(rows)):
        covering = [
            part.partial.rows(rows.start - part.rows.start, rows.stop - part.rows.start)
            for part in parts
            if part.rows.start <= rows.start and rows.stop <= part.rows.stop
        ]
        out_thd[rows.start : rows.stop] = merge(covering).out
