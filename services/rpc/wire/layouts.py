"""Token ids and shard maps on the wire."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cp_core.layout.shards import ShardMap, TokenRange
from ringserve.v1 import inference_pb2
from workers.protocol.prefill_steps import TokenIds


def token_array(token_ids: Iterable[int]) -> TokenIds:
    return np.fromiter(token_ids, dtype=np.int64)


def shards_to(shards: ShardMap) -> list[inference_pb2.RankShard]:
    return [
        inference_pb2.RankShard(
            num_tokens=held, ranges=[inference_pb2.Range(start=item.start, stop=item.stop) for item in ranges]
        )
        for ranges, held in zip(shards.ranks, shards.held, strict=True)
    ]


def shards_from(shards: Iterable[inference_pb2.RankShard]) -> ShardMap:
    return ShardMap(tuple(tuple(TokenRange(item.start, item.stop) for item in shard.ranges) for shard in shards))
