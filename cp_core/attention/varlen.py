"""Attention of several sequences in one call, for backends that take sequences of any lengths side by side.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

import torch

from cp_core.attention.partial import AttentionBackend, KeyShard, Partial, RowPartial, attend_pair, merge
from cp_core.layout.step_plans import KvRun, Rows, Shard, seen_keys


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

        All numbers are 1 or more. `causal` needs as many keys as queries.
        """
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
    """Return, for each sequence, `attend_pair` of its queries and its keys; [] for sequences without keys here.

    A backend that takes several sequences in a call attends the cached keys of all in one, those of the rank's own new
    tokens in one, and those of another rank's in two: its tokens are two ranges of positions. A cache in pieces is
    copied to one, which costs less than a call for each of them.
    """
    if not attends_many(backend):
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
    cached = _attend_together(
        backend,
        {
            index: (q_of_sequence[index], _joined(each.cached))
            for index, each in keys.items()
            if seen[index] and each.shard.cached
        },
        causal=False,
        scale=scale,
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
            new_parts = _attend_together(backend, calls, causal=causal, scale=scale)
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


def _joined(runs: Sequence[KvRun]) -> KvRun:
    """Return runs as one, a copy if they are several."""
    filled = [run for run in runs if run.k.shape[0]]
    if len(filled) == 1:
        return filled[0]
    return KvRun(torch.cat([run.k for run in filled]), torch.cat([run.v for run in filled]))


def _attend_together(
    backend: VarlenAttention, calls: dict[int, tuple[torch.Tensor, KvRun]], *, causal: bool, scale: float
) -> dict[int, Partial]:
    """Attend queries over keys of several sequences, in one call, and return each sequence's part."""
    if not calls:
        return {}
    queries, runs = [q for q, _ in calls.values()], [run for _, run in calls.values()]
    if len(calls) == 1:
        part = backend.partial_attention(queries[0], runs[0].k, runs[0].v, causal=causal, scale=scale)
        return dict.fromkeys(calls, part)
    lengths = [q.shape[0] for q in queries]
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
    return {index: Partial(out, lse) for index, out, lse in zip(calls, outs, lses, strict=True)}
