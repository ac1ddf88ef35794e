"""Prefill attention of one step on one rank, for any number of sequences, with or without cached tokens.

It is exact unless a sequence is sparse. A prefill step of a model makes one `RingPrefill`. Only a chain has messages in
flight between layers.

Shapes: T new tokens of this rank over all sequences, S stored tokens, H query heads, K key/value heads, D head
dimension, N ranks. On a rank, a sequence's new tokens lie together, by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ringserve.cp_core.attention.partial import (
    AttentionBackend,
    KeyShard,
    attend_alone,
    attends_whole,
    merge_rows,
    newest_tokens,
)
from ringserve.cp_core.cost.model import CHAIN, GATHER_KV, PASS_KV, PASS_Q, PREFILL_ALGORITHMS, SP_NTP
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, Shard, split_new
from ringserve.cp_core.ring.chain import Chain
from ringserve.cp_core.ring.gather_kv import gather_kv
from ringserve.cp_core.ring.pass_kv import SequenceParts, pass_kv
from ringserve.cp_core.ring.pass_q import pass_q
from ringserve.cp_core.ring.sp_ntp import sp_ntp
from ringserve.cp_core.ring.sparse_keys import KeyChooser
from ringserve.cp_core.transport.interface import RingTransport

CachedOf = Callable[[int], Sequence[Sequence[KvRun]]]
"""Function that takes a layer and returns this rank's runs of cached tokens, by sequence."""


class RingPrefill:
    """Prefill attention of one step on one rank: call `attend` for each layer, in order, then `finish`.

    All ranks pass the same plan and algorithm. All ranks synchronise before every `period`-th layer (0: never); only a
    chain needs to know it. `windows` has each layer's window (0: none), `sinks` each layer's sinks[H] or None. Either
    may be empty if no layer has one.
    """

    def __init__(
        self,
        plan: PrefillPlan,
        transport: RingTransport,
        backend: AttentionBackend,
        algorithm: str,
        num_layers: int = 1,
        period: int = 0,
        windows: Sequence[int] = (),
        sinks: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """Raise ConfigError if `algorithm` is unknown, InvalidRequest if a chain's layout is wrong."""
        if algorithm not in PREFILL_ALGORITHMS:
            raise ConfigError(f"algorithm is {algorithm!r}; allowed are {', '.join(PREFILL_ALGORITHMS)}")
        self._plan = plan
        self._windows = windows or (0,) * num_layers
        self._sinks = sinks or (None,) * num_layers
        self._plans = {window: replace(plan, window=window) for window in {0, *self._windows}}
        self._transport = transport
        self._backend = backend
        self._algorithm = algorithm
        is_chain = algorithm == CHAIN and plan.sequences
        self._chain = Chain(plan, transport, backend, num_layers, period) if is_chain else None
        assert is_chain or all(each.stored is None for each in plan.sequences), (
            f"{algorithm} stores new tokens on the ranks that compute them; only a chain can store them on others"
        )
        is_sparse = any(each.is_sparse for each in plan.sequences)
        assert algorithm == PASS_KV or not is_sparse, f"{algorithm} sends all keys, but a sequence is sparse"
        self._chooser = KeyChooser(plan, transport, num_layers) if is_sparse else None
        # Without other ranks, all algorithms compute the same. Chains and sp_ntp still take their own path: a chain
        # keeps the layer's new KV for `stored`.
        self._is_alone = transport.size == 1 and algorithm not in (CHAIN, SP_NTP) and not is_sparse

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cached_of: CachedOf, scale: float
    ) -> torch.Tensor:
        """Attend q[T, H, D] over the cached and new keys of all ranks. Return out[T, H, D] in q's dtype.

        k and v[T, K, D] belong to the new tokens. `cached_of(layer)[i]` has this rank's cached runs of sequence i,
        which are attended in place. A rank without tokens must call it too. Raises Unavailable if a peer is lost.
        """
        window, sink_h = self._windows[layer], self._sinks[layer]
        plan, transport, backend = self._plans[window], self._transport, self._backend
        shards, num_new, cached = plan.of_rank(transport.rank), plan.new_on(transport.rank), cached_of(layer)
        assert len(cached) == len(plan.sequences), f"{len(cached)} cached sequences for {len(plan.sequences)} planned"
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            assert tensor.shape[0] == num_new, f"{name} has {tensor.shape[0]} tokens, the plan says {num_new}"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not plan.sequences:
            return out

        q_of_sequence = split_new(q, shards)
        keys_of_sequence = [
            KeyShard(shard, newest_tokens(runs, shard.cached) if window else runs, KvRun(k_new, v_new))
            for shard, runs, k_new, v_new in zip(
                shards, cached, split_new(k, shards), split_new(v, shards), strict=True
            )
        ]
        if self._is_alone and attends_whole(backend) and sink_h is None:
            of_sequence = zip(q_of_sequence, shards, keys_of_sequence, split_new(out, shards), strict=True)
            for q_thd, shard, keys, out_thd in of_sequence:
                attend_alone(backend, q_thd, shard, keys, scale, out_thd)
            return out
        parts: list[SequenceParts]
        if self._algorithm == SP_NTP:
            sp_ntp(q_of_sequence, keys_of_sequence, plan, transport, backend, scale, split_new(out, shards), sink_h)
            return out
        if self._chain is not None:
            parts = self._chain.attend(layer, q_of_sequence, keys_of_sequence, cached_of, scale, plan)
        elif self._chooser is not None and not window and self._chooser.is_sparse(layer):
            thinned = self._chooser.thin(q_of_sequence, keys_of_sequence, scale)
            parts = pass_kv(q_of_sequence, keys_of_sequence, plan, transport, backend, scale, thinned)
        elif self._algorithm == PASS_Q:
            parts = pass_q(q.contiguous(), keys_of_sequence, plan, transport, backend, scale)
        else:
            attend = gather_kv if self._algorithm == GATHER_KV else pass_kv
            parts = attend(q_of_sequence, keys_of_sequence, plan, transport, backend, scale)
        for index, out_rows in enumerate(split_new(out, shards)):
            merge_rows([part for source in parts for part in source[index]], out_rows, sink_h)
        return out

    def is_lone(self, layer: int) -> bool:
        """Return whether a layer has no window and no sinks, and this rank has all keys of every sequence."""
        return self._is_alone and not self._windows[layer] and self._sinks[layer] is None

    def shards(self, layer: int) -> tuple[Shard, ...]:
        """Return this rank's shards in a layer, one per sequence."""
        return self._plans[self._windows[layer]].of_rank(self._transport.rank)

    def stored(self, index: int) -> KvRun:
        """Return KV of a sequence's new tokens that this rank stores, in the layer attended last. Only for chains."""
        assert self._chain is not None, f"{self._algorithm} keeps no new KV; only a chain does"
        return self._chain.stored(index)

    def finish(self) -> None:
        """Wait until all sends are done. Call it after the last layer. Raises Unavailable if a peer is lost."""
        if self._chain is not None:
            self._chain.finish()


def ring_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cached: Sequence[Sequence[KvRun]],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    algorithm: str,
    window: int = 0,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend a single layer: q[T, H, D] over k, v[T, K, D] and `cached`. Return out[T, H, D].

    On the same layout, all algorithms except sp_ntp give the same bits if each sequence has at most one cached run per
    rank. Otherwise they differ by at most 4e-7 of max |v|. KV that no other rank's queries see is not sent. Raises like
    `RingPrefill`.
    """
    ring = RingPrefill(plan, transport, backend, algorithm, windows=(window,), sinks=(sink,))
    out = ring.attend(0, q, k, v, lambda _: cached, scale)
    ring.finish()
    return out
