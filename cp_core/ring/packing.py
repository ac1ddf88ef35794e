"""Messages of the ring algorithms: several tensors side by side in one contiguous buffer, so that each hop is one send.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_core.attention.interface import Partial
from cp_core.attention.pair import KeyShard, RowPartial, Rows
from cp_core.layout.prefill_plan import KvRun, Shard


def pack_keys(shards: Sequence[KeyShard], like: torch.Tensor) -> torch.Tensor:
    """[2, S, K, D]: the k, then the v, of all sequences' cached, low and high tokens. `like` is any k[.., K, D]."""
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


def unpack_keys(packed: torch.Tensor, shards: Sequence[Shard]) -> list[KeyShard]:
    """Views of each sequence's keys in a packed[2, S, K, D] that holds the given shards."""
    keys = []
    at = 0
    for shard in shards:
        new, stop = at + shard.cached, at + shard.stored
        keys.append(
            KeyShard(
                shard, [KvRun(packed[0, at:new], packed[1, at:new])], KvRun(packed[0, new:stop], packed[1, new:stop])
            )
        )
        at = stop
    return keys


class PartialBuffer:
    """One flat fp32 buffer for the partials of T rows: out[T, H, D], then lse[T, H], as views."""

    def __init__(self, num_rows: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        num_out = num_rows * num_heads * head_dim
        self.flat = torch.empty(num_out + num_rows * num_heads, dtype=torch.float32, device=device)
        self.out = self.flat[:num_out].view(num_rows, num_heads, head_dim)
        self.lse = self.flat[num_out:].view(num_rows, num_heads)

    def fill(self, partials: Sequence[Partial]) -> None:
        """Copy partials of all rows, in order."""
        at = 0
        for partial in partials:
            stop = at + partial.lse.shape[0]
            self.out[at:stop] = partial.out
            self.lse[at:stop] = partial.lse
            at = stop
        assert at == self.lse.shape[0], f"{at} rows for a message of {self.lse.shape[0]}"

    def read(self, ranges: Sequence[Rows]) -> list[RowPartial]:
        """Views of the consecutive ranges of rows that were filled in."""
        parts = []
        at = 0
        for rows in ranges:
            stop = at + len(rows)
            parts.append(RowPartial(rows, Partial(self.out[at:stop], self.lse[at:stop])))
            at = stop
        return parts
