"""Free KV blocks of one rank, as intervals, so that sequences get runs of adjacent blocks.

A block may have several holders; it is free again when the last of them releases it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable


class BlockAllocator:
    """Allocator of block numbers 0..num_blocks-1. It prefers long runs: attention reads adjacent blocks as one view."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []
        self.num_free = num_blocks
        self._more_holders: dict[int, int] = {}  # beyond the first, of blocks that have several

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks: from the run that follows block `after`, else from the first run that holds all of them.

        Where no run holds all, the blocks come from several runs. More than `num_free` is a bug: AssertionError.
        """
        assert count <= self.num_free, f"asked for {count} blocks of {self.num_free} free"
        taken: list[int] = []
        if after is not None:
            place = bisect_left(self._free, (after + 1, 0))
            if place < len(self._free) and self._free[place][0] == after + 1:
                taken += self._take(place, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take(self._place_for(missing), missing)
        return taken

    def _place_for(self, count: int) -> int:
        """Return the index of the first free run that holds `count` blocks, else of the longest."""
        lengths = [stop - start for start, stop in self._free]
        fitting = (place for place, length in enumerate(lengths) if length >= count)
        return next(fitting, lengths.index(max(lengths)))

    def _take(self, place: int, count: int) -> list[int]:
        start, stop = self._free[place]
        end = min(stop, start + count)
        self._free[place : place + 1] = [(end, stop)] if end < stop else []
        self.num_free -= end - start
        return list(range(start, end))

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, which are held already."""
        for block in blocks:
            self._more_holders[block] = self._more_holders.get(block, 0) + 1

    def num_holders(self, block: int) -> int:
        """Return the number of holders of a block that is not free."""
        return 1 + self._more_holders.get(block, 0)

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each of these blocks. Freeing a free or unknown block is a bug: AssertionError."""
        for block in blocks:
            more = self._more_holders.pop(block, 0)
            if not more:
                self._return(block)
            elif more > 1:
                self._more_holders[block] = more - 1

    def _return(self, block: int) -> None:
        assert 0 <= block < self.num_blocks, f"block {block} does not exist"
        place = bisect_left(self._free, (block, 0))
        before = self._free[place - 1] if place else None
        behind = self._free[place] if place < len(self._free) else None
        assert not (before and before[1] > block), f"block {block} is free already"
        assert not (behind and behind[0] == block), f"block {block} is free already"
        start, stop = block, block + 1
        if before and before[1] == block:
            start = before[0]
            self._free.remove(before)
        if behind and behind[0] == stop:
            stop = behind[1]
            self._free.remove(behind)
        insort(self._free, (start, stop))
        self.num_free += 1

    def check_integrity(self, used: Iterable[int]) -> None:
        """Assert that each block is free or in `used`, there exactly once for each of its holders."""
        holders = Counter(used)
        every = sorted([*holders, *(block for start, stop in self._free for block in range(start, stop))])
        assert every == list(range(self.num_blocks)), "a block is lost or held twice"
        assert all(count == self.num_holders(block) for block, count in holders.items()), (
            "a holder holds a block twice, or is not counted"
        )
        assert self._more_holders.keys() <= holders.keys(), "a free block has holders"
        assert self.num_free == sum(stop - start for start, stop in self._free), "free count is off"
