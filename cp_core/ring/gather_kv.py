"""Gather-KV prefill: every rank gets all other ranks' KV at once (TSP, KV-Runahead's baseline, arXiv 2405.05329).

Every rank keeps its queries, as in pass-KV, and the result has the same bits as pass-KV's on the same layout. Message
latency is paid once per layer instead of N - 1 times, but messages hide only behind the attention over the rank's own
keys. It suits few new tokens on fast links. RingPrefill calls it for each layer; it keeps nothing between calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringserve.cp_core.attention.partial import AttentionBackend, KeyShard, attend_pairs
from ringserve.cp_core.layout.step_plans import PrefillPlan
from ringserve.cp_core.ring.pass_kv import SequenceParts, merge_all_held, pack_keys, unpack_keys
from ringserve.cp_core.transport.interface import RingTransport


def gather_kv(
    q_of_sequence: Sequence[torch.Tensor],
    keys_of_sequence: Sequence[KeyShard],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
) -> list[SequenceParts]:
    """Return this rank's partial results, by the rank whose keys they attended: result[source][sequence].

    KV goes only to ranks whose queries see it. q_of_sequence[i][T, H, D] and keys_of_sequence[i] are this rank's
    queries and keys. Raises Unavailable if a peer is lost.
    """
    rank, size = transport.rank, transport.size
    queries = plan.of_rank(rank)
    like = keys_of_sequence[0].new.k
    packed: dict[tuple[int, ...], torch.Tensor] = {}
    sends, receives, coming = [], [], []
    for peer in range(size):
        wanted = plan.seen[peer][rank]
        if wanted not in packed:
            packed[wanted] = pack_keys([keys_of_sequence[index] for index in wanted], like)
        sends.append(packed[wanted])
        coming.append(plan.seen[rank][peer])
        stored = sum(plan.of_rank(peer)[index].stored for index in coming[peer])
        receives.append(like.new_empty(2, stored, *like.shape[1:]))
    work = transport.all_to_all(sends, receives)
    own = dict(enumerate(keys_of_sequence))
    # The packed copy needs fewer attention calls than a cache in several runs.
    most = max(packed, key=len)
    if any(len(own[index].cached) > 1 for index in most):
        own |= unpack_keys(packed[most], queries, most)
    parts: list[SequenceParts] = [[] for _ in range(size)]
    for source in [rank, *(peer for peer in range(size) if peer != rank)]:
        if source == rank:
            keys = own
        else:
            work.wait()
            keys = unpack_keys(receives[source], plan.of_rank(source), coming[source])
        parts[source] = attend_pairs(backend, q_of_sequence, queries, keys, scale)
        merge_all_held(parts, q_of_sequence)
    if size == 1:
        work.wait()
    return parts
