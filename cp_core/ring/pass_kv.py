"""Ring pass-KV prefill of sequences of any length in one step (arXiv 2411.01783, algorithm 2).

Every rank keeps its queries. The sequences' packed KV travels round the ring, N - 1 hops, and each sequence's KV stops
at the last rank whose queries see it. RingPrefill calls `pass_kv` for each layer; other ring algorithms use the
helpers. Nothing is kept between calls.

Shapes: T query tokens, S stored tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringserve.cp_core.attention.partial import AttentionBackend, KeyShard, RowPartial, attend_pairs, merge_held
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, Shard
from ringserve.cp_core.transport.interface import RingTransport

SequenceParts = list[list[RowPartial]]


def pass_kv(
    q_of_sequence: Sequence[torch.Tensor],
    keys_of_sequence: Sequence[KeyShard],
    plan: PrefillPlan,
    transport: RingTransport,
    backend: AttentionBackend,
    scale: float,
    thinned: Sequence[KeyShard] = (),
) -> list[SequenceParts]:
    """Return this rank's partial results, by the rank whose keys they attended: result[source][sequence].

    KV is sent on while it is attended. q_of_sequence[i][T, H, D] and keys_of_sequence[i] are this rank's queries and
    keys. If `thinned` is given, other ranks get these keys instead of all keys; `plan.thinned` says how many. Raises
    Unavailable if a peer is lost.
    """
    rank, size = transport.rank, transport.size
    queries = plan.of_rank(rank)
    parts: list[SequenceParts] = [[] for _ in range(size)]
    keys = dict(enumerate(keys_of_sequence))
    if size > 1:
        sent = plan.kv_at(rank, 1)
        message = pack_keys([(thinned or keys)[index] for index in sent], keys_of_sequence[0].new.k)
        # If the cache has several runs, the packed copy is attended instead: it takes fewer attention calls.
        if not thinned and any(len(keys[index].cached) > 1 for index in sent):
            keys |= unpack_keys(message, queries, sent)
    for hop in range(size):
        source, following = (rank - hop) % size, (rank - hop - 1) % size
        is_last = hop == size - 1
        if not is_last:
            onward, coming = plan.kv_at(source, hop + 1), plan.kv_at(following, hop + 1)
            if hop and onward != tuple(keys):
                message = pack_keys([keys[index] for index in onward], message[0])
            arriving = plan.thinned[following] if thinned else plan.of_rank(following)
            received = message.new_empty(2, sum(arriving[index].stored for index in coming), *message.shape[2:])
            work = transport.exchange(message, (rank + 1) % size, received, (rank - 1) % size)
        parts[source] = attend_pairs(backend, q_of_sequence, queries, keys, scale)
        if hop:
            merge_all_held(parts, q_of_sequence)
        if not is_last:
            work.wait()
            message = received
            keys = unpack_keys(message, arriving, coming)
    return parts


def merge_all_held(parts: Sequence[SequenceParts], q_of_sequence: Sequence[torch.Tensor]) -> None:
    """Merge the parts that each sequence has so far, from all sources, if these are too many to hold on a GPU."""
    for index, q_thd in enumerate(q_of_sequence):
        held = [part for source in parts if source for part in source[index]]
        merged = merge_held(held, q_thd)
        if merged is held:
            continue
        for source in parts:
            if source:
                source[index], merged = merged, []


def pack_keys(shards: Sequence[KeyShard], like: torch.Tensor) -> torch.Tensor:
    """Pack the sequences' cached and new tokens into [2, S, K, D]: k, then v. `like` is any k[.., K, D]."""
    num_stored = sum(keys.shard.stored for keys in shards)
    packed = like.new_empty(2, num_stored, *like.shape[1:])
    at = 0
    for keys in shards:
        for run in (*keys.cached, keys.new):
            stop = at + run.k.shape[0]
            packed[0, at:stop] = run.k
            packed[1, at:stop] = run.v
            at = stop
    assert at == num_stored, f"{at} tokens for a message of {num_stored}"
    return packed


def unpack_keys(packed: torch.Tensor, shards: Sequence[Shard], sequences: Sequence[int]) -> dict[int, KeyShard]:
    """Return views of each sequence's keys in packed[2, S, K, D], which holds shards[i] for each i of `sequences`."""
    keys = {}
    at = 0
    for index in sequences:
        shard = shards[index]
        new, stop = at + shard.cached, at + shard.stored
        keys[index] = KeyShard(
            shard, [KvRun(packed[0, at:new], packed[1, at:new])], KvRun(packed[0, new:stop], packed[1, new:stop])
        )
        at = stop
    return keys
