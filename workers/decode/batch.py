"""Decode batch of a ring, as one rank holds it.

Every rank derives the same batch from the same headers: its sequences, and which rank stores each sequence's next token
in which slot. The decode loop and its steps change it, on the loop's thread. A draft model has a batch of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ringserve.cp_core.layout.shards import TokenRange, assign_owners
from ringserve.cp_core.layout.step_plans import DecodePlan
from ringserve.workers.decode.messages import BatchChange
from ringserve.workers.kv.cache import SlotRun, runs
from ringserve.workers.sampling.grammar import Grammars
from ringserve.workers.sampling.sampler import RowSampler


@dataclass(slots=True)
class BatchRow:
    """Running sequence. `token_id` at `position` is its newest token; the next step computes that token's KV.

    The step also computes `drafts`, guesses of the tokens that follow it, and stores all on the rank `owner`.

    `held` counts the stored tokens of every rank, `room` the slots in every rank's table. `owner` is the rank that
    stores the newest token; it is set when a step starts. `blocks` and `runs` are this rank's: its block table, and the
    slots of its shard in stored order. `recent` is None if the model has no windows; else it lists, ascending, the
    positions of the newest tokens on this rank, at least all that the widest window can still reach. `sampler` draws
    tokens; the first rank's decode loop decides when the sequence ends.
    """

    sequence_id: str
    token_id: int
    position: int
    held: list[int]
    room: list[int]
    blocks: list[int]
    runs: list[SlotRun]
    sampler: RowSampler
    owner: int = 0
    drafts: list[int] = field(default_factory=list)
    recent: list[int] | None = None

    def num_from_window(self, position: int, window: int) -> int:
        """Return how many of `recent` lie in the window that ends at `position`, or after it.

        Example: with positions 2, 5 and 8 here and a window of 4, two for position 8, but three for position 5.
        """
        assert self.recent is not None, "the admission named no positions: it had no `tail`"
        return len(self.recent) - bisect_right(self.recent, position - window)

    @property
    def next_position(self) -> int:
        """Position of the token that the next step samples."""
        return self.position + 1


@dataclass(frozen=True, slots=True)
class StepToken:
    """Token that a step computes: the newest of a row (`number` 0), or its draft of that number."""

    row: BatchRow
    number: int

    @property
    def token_id(self) -> int:
        return self.row.drafts[self.number - 1] if self.number else self.row.token_id

    @property
    def position(self) -> int:
        return self.row.position + self.number

    @property
    def next_position(self) -> int:
        """Position of the token that is sampled from this one's logits."""
        return self.position + 1

    @property
    def num_after(self) -> int:
        """Number of the row's drafts after this token; it does not see them."""
        return len(self.row.drafts) - self.number

    @property
    def sampler(self) -> RowSampler:
        return self.row.sampler


@dataclass(frozen=True, slots=True)
class Appended:
    """Tokens of the step that this rank stores, and their slots."""

    tokens: list[int]
    slots: list[int]


class BatchState:
    """Running rows in order of admission, with this rank's blocks and slots. Every rank holds one."""

    def __init__(self, rank: int, num_ranks: int, block_tokens: int, grammars: Grammars | None = None) -> None:
        """Begin without rows; a rank that samples has `grammars`."""
        self._rank = rank
        self._grammars = grammars
        self._num_ranks = num_ranks
        self.block_tokens = block_tokens
        self.rows: list[BatchRow] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> list[StepToken]:
        """Step tokens: of each row in turn the newest token and the drafts after it."""
        return [StepToken(row, number) for row in self.rows for number in range(1 + len(row.drafts))]

    def draft(self, drafts: Sequence[Sequence[int]]) -> None:
        """Let the next step compute drafts of each row."""
        for row, tokens in zip(self.rows, drafts, strict=True):
            row.drafts = list(tokens)

    def settle(self, accepted: Sequence[int]) -> None:
        """Append the first `accepted[i]` drafts of row i to its text, and drop the KV of its other drafts."""
        for row, count in zip(self.rows, accepted, strict=True):
            num_wrong = len(row.drafts) - count
            row.held[row.owner] -= num_wrong
            if row.owner == self._rank:
                _take_back(row.runs, num_wrong)
                if row.recent is not None:
                    del row.recent[len(row.recent) - num_wrong :]
            for token_id in row.drafts[:count]:
                row.position += 1
                row.token_id = token_id
                row.sampler.push(token_id)
            row.drafts = []

    def advance(self, token_ids: Sequence[int], change: BatchChange, accepted: Sequence[int] = ()) -> None:
        """Append the tokens sampled from the last step, in the order of its rows, then apply `change`.

        `accepted` counts each row's accepted drafts; it is empty if the step had none or `settle` was called already.
        """
        if accepted:
            self.settle(accepted)
        if token_ids:
            self.advance_untold()
            self.tell(token_ids)
        if change.removed:
            self.rows = [row for row in self.rows if row.sequence_id not in change.removed]
        for admission in change.admitted:
            blocks, held = list(admission.blocks[self._rank]), list(admission.held)
            assert sum(held) == admission.position, "tokens before the newest one must all be stored"
            row = BatchRow(
                sequence_id=admission.sequence_id,
                token_id=admission.token_id,
                position=admission.position,
                held=held,
                room=[self.block_tokens * len(table) for table in admission.blocks],
                blocks=blocks,
                runs=list(runs(blocks, held[self._rank], self.block_tokens)),
                sampler=RowSampler(admission.sampling, admission.history, self._grammars),
                recent=None if admission.tail is None else _positions(admission.tail.ranks[self._rank]),
            )
            self.rows.append(row)
        for growth in change.grown:
            row = next(row for row in self.rows if row.sequence_id == growth.sequence_id)
            row.blocks += growth.blocks[self._rank]
            row.room = [
                slots + self.block_tokens * len(blocks) for slots, blocks in zip(row.room, growth.blocks, strict=True)
            ]

    def forget(self, window: int) -> None:
        """Forget positions that no window of at most `window` tokens can reach any more."""
        for row in self.rows:
            if row.recent is not None:
                del row.recent[: bisect_right(row.recent, row.position - window)]

    def advance_untold(self) -> None:
        """Move every row on by one token; `tell` must bring the ids before any other change of the batch."""
        for row in self.rows:
            row.position += 1

    def tell(self, token_ids: Sequence[int]) -> None:
        """Take the ids, in the order of the rows, of the tokens by which `advance_untold` moved the rows on."""
        for row, token_id in zip(self.rows, token_ids, strict=True):
            row.token_id = token_id
            row.sampler.push(token_id)

    def append(self) -> Appended:
        """Assign every row's new tokens to a rank by `assign_owners`, and take slots for those that this rank stores.

        One rank stores all new tokens of a row, so only that rank must work out which of them a draft sees, and it can
        sample them in order. Drafts without a slot are dropped.
        """
        appended = Appended([], [])
        owners = assign_owners([row.held for row in self.rows], [row.room for row in self.rows])
        number = 0
        for row, owner in zip(self.rows, owners, strict=True):
            row.owner = owner
            del row.drafts[row.room[owner] - row.held[owner] - 1 :]
            for place in range(1 + len(row.drafts)):
                if owner == self._rank:
                    if row.recent is not None:
                        row.recent.append(row.position + place)
                    appended.tokens.append(number)
                    appended.slots.append(self._take_slot(row))
                row.held[owner] += 1
                number += 1
        return appended

    def plan(self) -> DecodePlan:
        """Plan the step whose tokens were just appended: each token's rank, and the keys that it sees on every rank.

        The rank that stores a row's new tokens computes them, so their KV never travels. Owners rotate over the ranks,
        and the work rotates with them (arXiv 2411.01783, 3.6). In each step the rows lie evenly over the ranks.
        """
        tokens = self.tokens
        return DecodePlan(self._num_ranks, tuple(token.row.owner for token in tokens), tuple(map(_seen, tokens)))

    def _take_slot(self, row: BatchRow) -> int:
        """Return the slot of this rank's next token of the row, and add it to the row's runs."""
        block, offset = divmod(row.held[self._rank], self.block_tokens)
        slot = row.blocks[block] * self.block_tokens + offset
        if row.runs and row.runs[-1].stop == slot:
            row.runs[-1] = SlotRun(row.runs[-1].start, slot + 1)
        else:
            row.runs.append(SlotRun(slot, slot + 1))
        return slot


def _positions(ranges: Iterable[TokenRange]) -> list[int]:
    return [position for each in ranges for position in range(each.start, each.stop)]


def _seen(token: StepToken) -> tuple[int, ...]:
    """Return how many tokens of its row a step token sees on each rank, itself included."""
    held = token.row.held
    if not token.num_after:
        return tuple(held)
    return tuple(count - token.num_after * (rank == token.row.owner) for rank, count in enumerate(held))


def _take_back(runs: list[SlotRun], num_slots: int) -> None:
    """Drop the newest slots of a shard. The tokens that come next take them again."""
    while num_slots:
        last = runs.pop()
        if len(last) > num_slots:
            runs.append(SlotRun(last.start, last.stop - num_slots))
        num_slots -= min(num_slots, len(last))
