"""Attention of several sequences in one call, for backends that take sequences of different lengths side by side.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard, TypeVar

import torch

from ringserve.cp_core.attention.partial import (
    Accumulator,
    AttentionBackend,
    KeyShard,
    Partial,
    RowPartial,
    attend_pair,
    join_runs,
    merge,
)
from ringserve.cp_core.layout.step_plans import KvRun, Rows, Shard, seen_keys

Key = TypeVar("Key")
"""Key of one sequence, or of a part of it, in a call for several sequences."""


class VarlenAttention(AttentionBackend, Protocol):
    """Backend that attends several sequences in one call."""

    def attend_many(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float,
    ) -> Partial:
        """Attend the next queries[i] rows of q[T, H, D] over the next keys[i] rows of k and v[S, K, D], for every i.

        All counts are 1 or more. `causal` needs queries[i] == keys[i].
        """
        ...

    def fills(self, queries: Sequence[int], num_heads: int) -> bool:
        """Return whether one call for these queries keeps the device busy without splitting the keys."""
        ...


def attends_many(backend: AttentionBackend) -> TypeGuard[VarlenAttention]:
    """Return whether the backend attends several sequences in one call."""
    return hasattr(backend, "attend_many")


def attend_pairs(
    backend: AttentionBackend,
    q_of_sequence: Sequence[torch.Tensor],
    shards: Sequence[Shard],
    keys: Mapping[int, KeyShard],
    scale: float,
) -> list[list[RowPartial]]:
    """Return `attend_pair` of each sequence's queries and keys, or [] for a sequence without keys here.

    A backend that takes several sequences per call needs one call for all cached keys, one for the rank's own new keys,
    and two for another rank's new keys, which are two position ranges. A cache in several runs is copied to one run,
    which costs less than a call per run.
    """
    if not attends_many(backend) or any(shard.window for shard in shards):
        return [
            attend_pair(backend, q_thd, shard, keys[index], scale) if index in keys else []
            for index, (q_thd, shard) in enumerate(zip(q_of_sequence, shards, strict=True))
        ]
    seen = [
        [each for each in seen_keys(shard, keys[index].shard) if each.count or keys[index].shard.cached]
        if index in keys
        else []
        for index, shard in enumerate(shards)
    ]
    cached = attend_runs(
        backend,
        {
            index: (q_of_sequence[index], each.cached)
            for index, each in keys.items()
            if seen[index] and each.shard.cached
        },
        scale,
    )
    answers: list[list[RowPartial]] = [[] for _ in shards]
    for place in range(max(map(len, seen), default=0)):
        for causal in (True, False):
            calls = {}
            for index, each in keys.items():
                if place >= len(seen[index]) or causal != (each.shard.ranges == shards[index].ranges):
                    continue
                rows, count = seen[index][place].rows, seen[index][place].count
                if count:
                    new = KvRun(each.new.k[:count], each.new.v[:count])
                    calls[index] = q_of_sequence[index][rows.start : rows.stop], new
            new_parts = attend_together(backend, calls, causal=causal, scale=scale)
            for index, part in new_parts.items():
                answers[index].append(RowPartial(seen[index][place].rows, part))
    for index, part in cached.items():
        by_start = {answer.rows.start: answer.partial for answer in answers[index]}
        answers[index] = [
            RowPartial(each.rows, merge([part.rows(each.rows.start, each.rows.stop), *_given(by_start, each.rows)]))
            for each in seen[index]
        ]
    return answers


def _given(parts: dict[int, Partial], rows: Rows) -> list[Partial]:
    return [parts[rows.start]] if rows.start in parts else []


def attend_runs(
    backend: AttentionBackend, calls: Mapping[Key, tuple[torch.Tensor, Sequence[KvRun]]], scale: float
) -> dict[Key, Partial]:
    """Return the part of each call's queries q[T, H, D] over all its runs of keys. Each call has at least one key.

    A backend that takes several sequences per call attends everything in one call. Other backends attend run by run and
    merge the parts.
    """
    if attends_many(backend):
        joined = {key: (q, join_runs(runs)) for key, (q, runs) in calls.items()}
        return attend_together(backend, joined, causal=False, scale=scale)
    parts = {}
    for key, (q, runs) in calls.items():
        merged = Accumulator()
        for run in runs:
            if run.k.shape[0]:
                merged.add(backend.partial_attention(q, run.k, run.v, causal=False, scale=scale))
        parts[key] = merged.result()
    return parts


def attend_together(
    backend: AttentionBackend, calls: Mapping[Key, tuple[torch.Tensor, KvRun]], *, causal: bool, scale: float
) -> dict[Key, Partial]:
    """Return the part of each call's queries q[T, H, D] over its keys. Neither may be empty.

    A backend that takes several sequences attends all of them in one call. If there are few queries and the call is not
    causal, each gets its own call, so that the kernel can split the keys.
    """
    queries, runs = [q for q, _ in calls.values()], [run for _, run in calls.values()]
    lengths = [q.shape[0] for q in queries]
    is_one = len(calls) > 1 and attends_many(backend) and (causal or backend.fills(lengths, queries[0].shape[1]))
    if not is_one:
        return {
            key: backend.partial_attention(q, run.k, run.v, causal=causal, scale=scale)
            for key, (q, run) in calls.items()
        }
    assert attends_many(backend)
    part = backend.attend_many(
        torch.cat(queries),
        torch.cat([run.k for run in runs]),
        torch.cat([run.v for run in runs]),
        lengths,
        [run.k.shape[0] for run in runs],
        causal=causal,
        scale=scale,
    )
    outs, lses = part.out.split(lengths), part.lse.split(lengths)
    return {key: Partial(out, lse) for key, out, lse in zip(calls, outs, lses, strict=True)}
