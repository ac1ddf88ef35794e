"""Free KV blocks of one rank, as intervals, so that sequences get runs of adjacent blocks.

A table that cannot grow in place goes on at the start of a free *extent*, a fixed range of blocks. The other blocks of
the extent stay free and count as free. But as long as there are free extents, no other table enters this one, so the
table grows in place to its end. Without a free extent any free block serves.

`KvPool` uses one allocator for each rank of its ring. The allocator knows block numbers alone, no KV. A block may have
several holders; it is free again when the last of them releases it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable


class BlockAllocator:
    """Allocator of block numbers 0..num_blocks-1. It prefers long runs: attention reads adjacent blocks as one view.

    Extent i are the blocks [i * extent_blocks, (i + 1) * extent_blocks).
    """

    def __init__(self, num_blocks: int, extent_blocks: int = 1) -> None:
        assert extent_blocks >= 1, f"an extent of {extent_blocks} blocks"
        self.num_blocks = num_blocks
        self._extent_blocks = extent_blocks
        self._free: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []
        self.num_free = num_blocks
        self._extra_holders: dict[int, int] = {}  # number beyond the first; blocks with several alone

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks: from the run that follows block `after`, else from free extents, else from any run.

        The first run that is long enough is taken. If none is, the blocks come from several runs. More than
        `num_free` is a bug: AssertionError.
        """
        assert count <= self.num_free, f"asked for {count} blocks of {self.num_free} free"
        taken: list[int] = []
        if after is not None:
            index = bisect_left(self._free, (after + 1, 0))
            if index < len(self._free) and self._free[index][0] == after + 1:
                taken += self._take(index, after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take(*self._place_for(missing), missing)
        return taken

    def _place_for(self, count: int) -> tuple[int, int]:
        """Return a free run, by its index, and the block in it at which `count` blocks are taken.

        The first run that has them from the start of a free extent on, else the first of that length, else the longest.
        """
        extent = self._extent_blocks
        for index, (start, stop) in enumerate(self._free):
            aligned = -(-start // extent) * extent
            if stop - aligned >= max(count, extent):
                return index, aligned
        lengths = [stop - start for start, stop in self._free]
        fitting = (index for index, length in enumerate(lengths) if length >= count)
        index = next(fitting, lengths.index(max(lengths)))
        return index, self._free[index][0]

    def _take(self, index: int, first: int, count: int) -> list[int]:
        """Take `count` blocks of a free run from block `first` on, or all from there on of a shorter one."""
        start, stop = self._free[index]
        end = min(stop, first + count)
        self._free[index : index + 1] = [(low, high) for low, high in ((start, first), (end, stop)) if low < high]
        self.num_free -= end - first
        return list(range(first, end))

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, which are held already."""
        for block in blocks:
            self._extra_holders[block] = self._extra_holders.get(block, 0) + 1

    def num_holders(self, block: int) -> int:
        """Return the number of holders of a block that is not free."""
        return 1 + self._extra_holders.get(block, 0)

    @property
    def num_shared(self) -> int:
        """Blocks that holders would need beyond those here if they shared none."""
        return sum(self._extra_holders.values())

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each of these blocks. Freeing a free or unknown block is a bug: AssertionError."""
        for block in blocks:
            more = self._extra_holders.pop(block, 0)
            if not more:
                self._make_free(block)
            elif more > 1:
                self._extra_holders[block] = more - 1

    def _make_free(self, block: int) -> None:
        """Enter a block into the free runs, joined with the runs before and after it."""
        assert 0 <= block < self.num_blocks, f"block {block} does not exist"
        index = bisect_left(self._free, (block, 0))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        assert not (before and before[1] > block), f"block {block} is free already"
        assert not (after and after[0] == block), f"block {block} is free already"
        start, stop = block, block + 1
        if before and before[1] == block:
            start = before[0]
            self._free.remove(before)
        if after and after[0] == stop:
            stop = after[1]
            self._free.remove(after)
        insort(self._free, (start, stop))
        self.num_free += 1

    def check_integrity(self, used: Iterable[int]) -> None:
        """Assert that each block is either free, or in `used` exactly once for each of its holders."""
        holders = Counter(used)
        all_blocks = sorted([*holders, *(block for start, stop in self._free for block in range(start, stop))])
        assert all_blocks == list(range(self.num_blocks)), "a block is lost or held twice"
        assert all(count == self.num_holders(block) for block, count in holders.items()), (
            "a holder holds a block twice, or is not counted"
        )
        assert self._extra_holders.keys() <= holders.keys(), "a free block has holders"
        assert self.num_free == sum(stop - start for start, stop in self._free), "free count is off"
