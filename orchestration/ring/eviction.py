"""Choice of the retained KV that makes room: ends of the least recently used sequences.

The beginning of a sequence stays as long as its end is enough: later prompts are likelier to share it, and it is of no
use to them without what precedes it. A block that several sequences hold is free when the last of them lets it go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.orchestration.ring.block_allocator import BlockAllocator

if TYPE_CHECKING:
    from ringserve.orchestration.ring.kv_pool import SequenceKv

MAX_PARTS = 8
"""Most parts in which a sequence is evicted."""
PARTS = ("end", "whole")
"""Parts of a sequence that evictions take."""


def tails_to_evict(
    oldest_first: Iterable[SequenceKv],
    ranks: Sequence[BlockAllocator],
    needs: Sequence[int],
    block_tokens: int,
    part_tokens: int,
) -> list[tuple[SequenceKv, int]]:
    """Return sequences to be evicted until `needs[r]` blocks are free on rank r, each with the tokens that stay.

    They are evicted in parts of at least `part_tokens` tokens. Raises CapacityExceeded where all are not enough.
    """
    room = [rank.num_free for rank in ranks]
    released: Counter[tuple[int, int]] = Counter()  # holders of (rank, block) that are to be evicted
    tails: list[tuple[SequenceKv, int]] = []
    # Only sequences that are evicted are looked at, each once: a full cache evicts at each growth.
    rest = iter(oldest_first)
    while any(need > blocks for need, blocks in zip(needs, room, strict=True)):
        other = next(rest, None)
        if other is None:
            rank = next(rank for rank, need in enumerate(needs) if need > room[rank])
            raise CapacityExceeded(
                f"kv cache: {needs[rank]} blocks of {block_tokens} tokens are needed on rank {rank} and "
                f"{room[rank]} of {ranks[rank].num_blocks} can be freed; retry when running turns have ended"
            )
        total = keep = other.shards.num_tokens
        parts = max(1, min(MAX_PARTS, total // part_tokens))
        ends = [len(table) for table in other.blocks]
        for part in reversed(range(parts)):
            keep = total * part // parts
            for rank, held in enumerate(other.shards.truncate(keep).held):
                first = -(-held // block_tokens)
                for block in other.blocks[rank][first : ends[rank]]:
                    released[rank, block] += 1
                    room[rank] += released[rank, block] == ranks[rank].num_holders(block)
                ends[rank] = min(ends[rank], first)
            if all(need <= blocks for need, blocks in zip(needs, room, strict=True)):
                break
        tails.append((other, keep))
    return tails
