"""Which sequences hold which KV blocks on the ranks of one ring.

A sequence is *active* while a turn has it pinned and *kept* afterwards. Kept ones are a cache: the least recently used
goes first when room is needed. Whoever reserves (the group leader) is the only one who frees, and only after the ranks
have let go of the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cp_core.errors import Busy, CapacityExceeded
from cp_core.layout import ShardMap
from orchestration.block_allocator import BlockAllocator
from orchestration.turn import RankKvUsage


@dataclass(slots=True)
class SequenceKv:
    """KV of one sequence on this ring. `blocks[r]` may have room beyond `shards.held[r]` while pinned."""

    sequence_id: str
    shards: ShardMap
    blocks: list[list[int]]
    pinned_by: str | None = None

    def table(self, rank: int) -> tuple[int, ...]:
        return tuple(self.blocks[rank])


class KvPool:
    """Blocks and sequences of one ring incarnation."""

    def __init__(self, num_ranks: int, num_blocks: int, block_tokens: int) -> None:
        self.num_ranks = num_ranks
        self.block_tokens = block_tokens
        self.num_evictions = 0
        self._ranks = [BlockAllocator(num_blocks) for _ in range(num_ranks)]
        self._sequences: OrderedDict[str, SequenceKv] = OrderedDict()

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole ring can hold."""
        return sum(rank.num_blocks for rank in self._ranks) * self.block_tokens

    def get(self, sequence_id: str) -> SequenceKv | None:
        return self._sequences.get(sequence_id)

    def pin(self, sequence_id: str, turn_id: str, match_tokens: int) -> SequenceKv:
        """Take a sequence for a turn, cut to its first `match_tokens` tokens; a new one starts empty.

        Raises Busy while another turn has it pinned: that turn may have ended already and be about to settle.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            sequence = SequenceKv(sequence_id, ShardMap.empty(self.num_ranks), [[] for _ in range(self.num_ranks)])
            self._sequences[sequence_id] = sequence
        if sequence.pinned_by not in (None, turn_id):
            raise Busy(
                f"conversation_id: {sequence_id!r} is busy until turn {sequence.pinned_by!r} has settled; "
                f"retry in a moment"
            )
        sequence.pinned_by = turn_id
        self._sequences.move_to_end(sequence_id)
        self._cut(sequence, match_tokens)
        return sequence

    def make_room(self, sequence: SequenceKv, held: Sequence[int]) -> None:
        """Give a pinned sequence blocks for `held[r]` tokens on each rank r, evicting kept sequences if need be.

        Raises CapacityExceeded with the numbers, having changed nothing, when even that is not enough.
        """
        needs = [self._blocks_for(tokens) - len(have) for tokens, have in zip(held, sequence.blocks, strict=True)]
        evictable = [other for other in self._sequences.values() if other.pinned_by is None]
        for rank, need in enumerate(needs):
            room = self._ranks[rank].num_free + sum(len(other.blocks[rank]) for other in evictable)
            if need > room:
                raise CapacityExceeded(
                    f"kv cache: {need} blocks of {self.block_tokens} tokens are needed on rank {rank} and {room} of "
                    f"{self._ranks[rank].num_blocks} can be freed; retry when running turns have ended"
                )
        for other in evictable:  # oldest first
            if all(need <= rank.num_free for need, rank in zip(needs, self._ranks, strict=True)):
                break
            self._drop(other)
            self.num_evictions += 1
        for allocator, table, need in zip(self._ranks, sequence.blocks, needs, strict=True):
            if need > 0:
                table += allocator.allocate(need, after=table[-1] if table else None)

    def settle(self, sequence_id: str, turn_id: str, keep_tokens: int) -> None:
        """End a turn's pin; keep the first `keep_tokens` tokens and free the other blocks. Idempotent."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.pinned_by not in (None, turn_id):
            return
        if sequence.pinned_by is not None:
            sequence.pinned_by = None
            self._sequences.move_to_end(sequence_id)  # a long turn was in use until now
        self._cut(sequence, keep_tokens)
        if not sequence.shards.num_tokens:
            self._drop(sequence)

    def _cut(self, sequence: SequenceKv, num_tokens: int) -> None:
        sequence.shards = sequence.shards.truncate(num_tokens)
        for rank, held in enumerate(sequence.shards.held):
            keep = self._blocks_for(held)
            self._ranks[rank].free(sequence.blocks[rank][keep:])
            del sequence.blocks[rank][keep:]

    def _drop(self, sequence: SequenceKv) -> None:
        for allocator, table in zip(self._ranks, sequence.blocks, strict=True):
            allocator.free(table)
        del self._sequences[sequence.sequence_id]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def usage(self) -> tuple[RankKvUsage, ...]:
        """Free, active and kept blocks of every rank."""
        return tuple(self._usage_of(rank, allocator) for rank, allocator in enumerate(self._ranks))

    def _usage_of(self, rank: int, allocator: BlockAllocator) -> RankKvUsage:
        active = sum(len(item.blocks[rank]) for item in self._sequences.values() if item.pinned_by is not None)
        total, free = allocator.num_blocks, allocator.num_free
        kept = total - free - active
        return RankKvUsage(total_blocks=total, free_blocks=free, active_blocks=active, kept_blocks=kept)

    def check_integrity(self) -> None:
        """Every block is free or in exactly one table, and every table has room for what its rank holds."""
        for rank, allocator in enumerate(self._ranks):
            allocator.check_integrity(block for item in self._sequences.values() for block in item.blocks[rank])
        for item in self._sequences.values():
            for table, held in zip(item.blocks, item.shards.held, strict=True):
                assert len(table) >= self._blocks_for(held), f"{item.sequence_id} lacks room for its own tokens"
