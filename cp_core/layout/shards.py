"""Layout of one sequence's tokens over the ranks of a ring. Pure Python: leaders and the router load it without torch.

Positions are absolute token positions in the sequence. Every rank *stores* tokens in arrival order, and tokens always
arrive by ascending position: new tokens follow all cached tokens, a decoded token follows all others. A rank's shard is
therefore an ascending list of ranges, truncating a sequence truncates each rank's stored order, and "stored index j of
rank r" names one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ringserve.cp_core.errors import ReshardError

UNEVEN = 1.125
"""A step's sequences are laid whole on one rank each, which needs no messages, if the fullest rank then has at most
this many times the mean work."""


@dataclass(frozen=True, slots=True, order=True)
class TokenRange:
    """Positions [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"range [{self.start}, {self.stop}) is no range"

    def __len__(self) -> int:
        return self.stop - self.start

    def intersect(self, other: TokenRange) -> TokenRange:
        """Return the common part. It is empty (start == stop) if there is none."""
        start = max(self.start, other.start)
        return TokenRange(start, max(start, min(self.stop, other.stop)))


def even_share(total: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return one rank's [start, stop) of `total` rows, columns or heads. Shares differ by at most one.

    Example: `even_share(5, 1, 2)` is (2, 5).
    """
    return total * rank // num_ranks, total * (rank + 1) // num_ranks


def coalesce(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Join neighbours and drop empty ranges. The ranges must already ascend."""
    joined: list[TokenRange] = []
    for item in ranges:
        if not len(item):
            continue
        if joined and joined[-1].stop == item.start:
            joined[-1] = TokenRange(joined[-1].start, item.stop)
        else:
            joined.append(item)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class StoredRanges:
    """Ranges of one rank in stored order. Neighbours are joined, and none is empty.

    Decoded tokens rotate over the ranks, so most ranges repeat the length and distance of the range before. `runs` has
    four numbers for each series of such ranges: first start, length, distance between starts, count. Equal ranges have
    equal runs. Example: positions 4, 6 and 8 are the run (4, 1, 2, 3).
    """

    runs: tuple[int, ...] = ()
    num_tokens: int = 0

    @classmethod
    def of(cls, ranges: Iterable[TokenRange]) -> StoredRanges:
        if isinstance(ranges, StoredRanges):
            return ranges
        runs = _Runs()
        for item in ranges:
            runs.add(item.start, item.stop)
        return runs.stored()

    def __iter__(self) -> Iterator[TokenRange]:
        for start, length, distance, number in self._series():
            for begin in range(start, start + number * distance, distance):
                yield TokenRange(begin, begin + length)

    def __len__(self) -> int:
        return sum(self.runs[3::4])

    def _series(self) -> Iterator[tuple[int, int, int, int]]:
        numbers = iter(self.runs)
        return zip(numbers, numbers, numbers, numbers, strict=True)

    def within(self, start: int, stop: int) -> StoredRanges:
        """Return the positions in [start, stop)."""
        runs = _Runs()
        for first, length, distance, number in self._series():
            below = max(0, (start - first - length) // distance + 1)  # ranges that end at or before `start`
            until = min(number, -(-(stop - first) // distance))  # ranges that begin before `stop`
            for index in (below, until - 1) if until - below > 1 else range(below, until):
                begin = first + index * distance
                runs.add(max(begin, start), min(begin + length, stop))
                if index == below and until - below > 2:
                    runs.add_series(begin + distance, length, distance, until - below - 2)
        return runs.stored()

    def extend(self, later: StoredRanges) -> StoredRanges:
        """Append later ranges."""
        if not later.runs:
            return self
        runs = _Runs(self)
        for series in later._series():
            runs.add_series(*series)
        return runs.stored()


class _Runs:
    """Builder of stored ranges, range by range or by series."""

    def __init__(self, before: StoredRanges = StoredRanges()) -> None:
        self._runs = list(before.runs)
        self._num_tokens = before.num_tokens

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        runs = self._runs
        self._num_tokens += stop - start
        if runs:
            first, each, distance, number = runs[-4:]
            latest = first + (number - 1) * distance
            if start == latest + each:  # joined, these two differ in length from the series, so the last one leaves it
                self._drop_latest()
                start = latest
        if runs:
            first, each, distance, number = runs[-4:]
            if stop - start == each and number == 1 and start > first:
                runs[-2:] = start - first, 2
                return
            if stop - start == each and start == first + number * distance:
                runs[-1] += 1
                return
        runs += (start, stop - start, stop - start, 1)

    def _drop_latest(self) -> None:
        runs = self._runs
        if runs[-1] == 1:
            del runs[-4:]
        else:
            runs[-1] -= 1
            if runs[-1] == 1:
                runs[-2] = runs[-3]

    def add_series(self, start: int, length: int, distance: int, number: int) -> None:
        while number:
            if self._runs and number > 1:
                first, each, between, before = self._runs[-4:]
                if before > 1 and (each, between) == (length, distance) and start == first + before * between:
                    self._runs[-1] += number
                    self._num_tokens += number * length
                    return
            self.add(start, start + length)
            start, number = start + distance, number - 1

    def stored(self) -> StoredRanges:
        return StoredRanges(tuple(self._runs), self._num_tokens)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Positions of one sequence on each rank, in stored order: `ranks[r]` holds the ranges of rank r."""

    ranks: tuple[StoredRanges, ...]

    @classmethod
    def of(cls, ranks: Iterable[Iterable[TokenRange]]) -> ShardMap:
        """Return the map of each rank's ranges."""
        return cls(tuple(map(StoredRanges.of, ranks)))

    @classmethod
    def empty(cls, num_ranks: int) -> ShardMap:
        return cls((StoredRanges(),) * num_ranks)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens on each rank."""
        return tuple(ranges.num_tokens for ranges in self.ranks)

    @property
    def num_tokens(self) -> int:
        return sum(self.held)

    def truncate(self, num_tokens: int) -> ShardMap:
        """Return the positions below `num_tokens`: on every rank a prefix of its stored order."""
        return self.within(TokenRange(0, num_tokens))

    def within(self, tokens: TokenRange) -> ShardMap:
        """Return the positions in `tokens`."""
        return ShardMap(tuple(ranges.within(tokens.start, tokens.stop) for ranges in self.ranks))

    def newest(self, num_tokens: int) -> ShardMap | None:
        """Return the positions of the newest tokens of a sequence; None for 0 tokens. See `ModelInfo.tail_tokens`."""
        stop = self.num_tokens
        return self.within(TokenRange(max(0, stop - num_tokens), stop)) if num_tokens else None

    def extend(self, later: ShardMap) -> ShardMap:
        """Append each rank's later ranges to its stored order."""
        assert later.num_ranks == self.num_ranks, "maps of rings of different size"
        return ShardMap(tuple(old.extend(new) for old, new in zip(self.ranks, later.ranks, strict=True)))

    def check(self, covered: TokenRange) -> None:
        """Prove that every position of `covered` lies on exactly one rank, and that no rank holds another position.

        Raises ReshardError with the first position that is missing, doubled, out of order or outside.
        """
        for rank, ranges in enumerate(self.ranks):
            for before, after in pairwise(ranges):
                if after.start < before.stop:
                    raise ReshardError(f"rank {rank} stores position {after.start} after position {before.stop - 1}")
        where = f"[{covered.start}, {covered.stop})"
        position = covered.start
        for item in sorted(item for ranges in self.ranks for item in ranges if len(item)):
            if item.start != position:
                fault = f"missing in {where}" if item.start > position else f"held twice, or lies outside {where}"
                raise ReshardError(f"position {min(item.start, position)} is {fault}")
            position = item.stop
        if position != covered.stop:
            raise ReshardError(f"position {min(position, covered.stop)} is missing or outside {where}")


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Layout of a step's new tokens [start, start + num_tokens): rank r computes and stores `ranges[r]`.

    A rank's ranges ascend, none is empty, and no two touch. Together, the ranks hold each new token once. The
    constructors below guarantee this.
    """

    start: int
    num_tokens: int
    ranges: tuple[tuple[TokenRange, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranges)

    @property
    def tokens(self) -> TokenRange:
        return TokenRange(self.start, self.start + self.num_tokens)

    def tokens_on(self, rank: int) -> int:
        return sum(map(len, self.ranges[rank]))

    def owner_of(self, position: int) -> tuple[int, int]:
        """Return (rank, index among the rank's local new tokens) of a new token."""
        for rank, ranges in enumerate(self.ranges):
            before = 0
            for item in ranges:
                if item.start <= position < item.stop:
                    return rank, before + position - item.start
                before += len(item)
        raise AssertionError(f"position {position} is not among the new tokens {self.tokens}")

    def shard_map(self) -> ShardMap:
        return ShardMap.of(self.ranges)


def chunked_layout(start: int, num_tokens: int, slots: Sequence[int]) -> PrefillLayout:
    """Lay out new tokens in 2N chunks (arXiv 2411.01783, 3.5.1): rank r gets chunks slots[r] and 2N-1-slots[r].

    Chunk sizes differ by at most one, and the first chunks are the longer ones. `slots` is a permutation of 0..N-1.
    Example: 8 tokens on slots (0, 1) give rank 0 positions 0-1 and 6-7, and rank 1 positions 2-5.
    """
    num_chunks = 2 * len(slots)
    size, remainder = divmod(num_tokens, num_chunks)
    bounds = [start + index * size + min(index, remainder) for index in range(num_chunks + 1)]
    chunks = [TokenRange(begin, end) for begin, end in pairwise(bounds)]
    return PrefillLayout(start, num_tokens, tuple(coalesce((chunks[slot], chunks[~slot])) for slot in slots))


def balanced_layout(start: int, num_tokens: int, held: Sequence[int], load: Sequence[int] = ()) -> PrefillLayout:
    """Lay out `num_tokens` new tokens in 2N chunks from position `start`; rank r already holds `held[r]` tokens.

    The fullest slots go to the emptiest ranks. With fixed slots, rank 0 would get the remainder of every turn, and all
    tokens of a conversation of very short turns. Ties go to the rank with the least `load`: the number of tokens that
    it computes for other sequences in the same step (default: 0 each).
    """
    num_ranks = len(held)
    identity = chunked_layout(start, num_tokens, range(num_ranks))
    fullest_slots = sorted(range(num_ranks), key=lambda slot: -identity.tokens_on(slot))
    load = load or (0,) * num_ranks
    emptiest_ranks = sorted(range(num_ranks), key=lambda rank: (held[rank], load[rank]))
    slot_of = dict(zip(emptiest_ranks, fullest_slots, strict=True))
    return PrefillLayout(start, num_tokens, tuple(identity.ranges[slot_of[rank]] for rank in range(num_ranks)))


def whole_layout(start: int, num_tokens: int, rank: int, num_ranks: int) -> PrefillLayout:
    """Lay all new tokens on one rank, so that its queries see them without a message."""
    whole = coalesce([TokenRange(start, start + num_tokens)])
    return PrefillLayout(start, num_tokens, tuple(whole if each == rank else () for each in range(num_ranks)))


def cut_layout(start: int, cuts: Sequence[int], order: Sequence[int]) -> PrefillLayout:
    """Give each rank one range of the new tokens: [start + cuts[i], start + cuts[i + 1]) to rank `order[i]`.

    The N + 1 cuts ascend from 0 to the number of new tokens. Ranges may be empty.
    """
    place_of = {rank: place for place, rank in enumerate(order)}
    assert len(place_of) == len(order) == len(cuts) - 1 and cuts[0] == 0, f"cuts {cuts} of a chain of ranks {order}"
    ranges = (TokenRange(start + cuts[place_of[rank]], start + cuts[place_of[rank] + 1]) for rank in range(len(order)))
    return PrefillLayout(start, cuts[-1], tuple(coalesce([each]) for each in ranges))


def segment_layout(start: int, counts: Sequence[int], num_segments: int) -> PrefillLayout:
    """Lay new tokens in consecutive segments over all ranks: each has an even share of rank r's `counts[r]` tokens."""
    ranges: list[list[TokenRange]] = [[] for _ in counts]
    stop = start
    for segment in range(num_segments):
        for rank, count in enumerate(counts):
            first, last = even_share(count, segment, num_segments)
            ranges[rank].append(TokenRange(stop, stop + last - first))
            stop += last - first
    return PrefillLayout(start, stop - start, tuple(map(coalesce, ranges)))


def stored_on_chain(start: int, cuts: Sequence[int], counts: Sequence[int], order: Sequence[int]) -> ShardMap:
    """Return the new tokens that each rank of a chain stores.

    The rank at chain position i receives all tokens below cuts[i + 1], so it stores [s_i, s_(i+1)), where s_(i+1) is
    the lesser of cuts[i + 1] and the sum of the counts up to position i. If no cut is below this sum, rank r stores
    `counts[r]` tokens. Else later ranks store more than their counts, and need the room.
    """
    ranges: dict[int, TokenRange] = {}
    first = level = 0
    for rank, cut in zip(order, cuts[1:], strict=True):
        level += counts[rank]
        stop = max(first, min(cut, level))
        ranges[rank] = TokenRange(start + first, start + stop)
        first = stop
    return ShardMap.of([ranges[rank]] for rank in range(len(order)))


def ranks_of_whole(lengths: Sequence[int], num_ranks: int) -> list[int] | None:
    """Assign each sequence of a step to one rank, the longest first, to the rank with the least work.

    Return None if the fullest rank would have more than `UNEVEN` times its even share.
    """
    load, ranks = [0] * num_ranks, [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        ranks[index] = load.index(min(load))
        load[ranks[index]] += lengths[index]
    return ranks if max(load) * num_ranks <= UNEVEN * sum(lengths) else None


def assign_owners(held: Sequence[Sequence[int]], room: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank that stores the next decoded token of each row, for B rows over N ranks.

    Rank r stores `held[row][r]` tokens of a row and has slots for `room[row][r]`. Each row needs a free slot on some
    rank. A rank gets at most ceil(B / N) rows, unless further rows have no free slot elsewhere. Each row takes its
    emptiest remaining rank, and the rows with the most uneven shards choose first: shards that start even stay within a
    few tokens of each other, whichever rows join and leave.
    """
    num_rows, num_ranks = len(held), len(held[0]) if held else 1
    limit = -(-num_rows // num_ranks)
    load = [0] * num_ranks
    owners = [0] * num_rows
    for row in sorted(range(num_rows), key=lambda row: min(held[row]) - max(held[row])):
        counts, slots = held[row], room[row]
        free = [rank for rank in range(num_ranks) if counts[rank] < slots[rank]]
        assert free, "a row of the batch has no free slot"
        owner = min(free, key=lambda rank: (load[rank] >= limit, counts[rank], load[rank]))
        owners[row] = owner
        load[owner] += 1
    return owners


def level_counts(held: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return how many of `num_tokens` each rank gets if every token goes to the emptiest rank (ties: the lowest).

    Example: `level_counts((3, 0), 5)` is (1, 4).
    """
    counts = [0] * len(held)
    order = sorted(range(len(held)), key=lambda rank: (held[rank], rank))
    left = num_tokens
    for filled, following in zip(range(1, len(order) + 1), [*order[1:], None], strict=True):
        level = held[order[filled - 1]]
        step = left if following is None else min(left, (held[following] - level) * filled)
        share, extra = divmod(step, filled)
        for place, rank in enumerate(sorted(order[:filled])):
            counts[rank] += share + (place < extra)
        left -= step
        if not left:
            break
    return tuple(counts)


def spread(start: int, num_tokens: int, held: Sequence[int]) -> ShardMap:
    """Lay positions [start, start + num_tokens) over ranks, one contiguous range each, to level their token counts."""
    counts = level_counts(held, num_tokens)
    bounds = accumulate(counts, initial=start)
    return ShardMap.of([TokenRange(begin, end)] for begin, end in pairwise(bounds))


def appended(start: int, owners: Iterable[int], num_ranks: int) -> ShardMap:
    """Lay decoded tokens from position `start` over ranks: `owners[i]` stores position start + i."""
    ranks = [_Runs() for _ in range(num_ranks)]
    for position, owner in enumerate(owners, start):
        ranks[owner].add(position, position + 1)
    return ShardMap(tuple(runs.stored() for runs in ranks))
