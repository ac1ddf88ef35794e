"""Decode batch of a ring, as one rank holds it.

Every rank derives the same batch from the same headers: its sequences, and which rank stores each sequence's next token
in which slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.cp_core.layout.shards import assign_owners
from ringserve.cp_core.layout.step_plans import DecodePlan
from ringserve.workers.decode.messages import BatchChange
from ringserve.workers.kv.cache import SlotRun, runs
from ringserve.workers.sampling.grammar import Grammars
from ringserve.workers.sampling.sampler import RowSampler


@dataclass(slots=True)
class BatchRow:
    """Running sequence. `token_id` at `position` is its newest token; the next step computes that token's KV.

    `held` counts the stored tokens of every rank, `room` the slots in every rank's table. `owner` is the rank that
    stores the newest token, from the step's start on. `blocks` and `runs` are this rank's: its block table, and the
    slots of its shard in stored order. `sampler` draws tokens; the leading loop decides when the sequence ends.
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

    @property
    def next_position(self) -> int:
        """Position of the token that the next step samples."""
        return self.position + 1


@dataclass(frozen=True, slots=True)
class Appended:
    """Rows whose newest token this rank stores, and the slots of those tokens."""

    rows: list[int]
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

    def advance(self, token_ids: Sequence[int], change: BatchChange) -> None:
        """Append the tokens sampled from the last step, in the order of its rows, then apply `change`."""
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
            )
            self.rows.append(row)
        for growth in change.grown:
            row = next(row for row in self.rows if row.sequence_id == growth.sequence_id)
            row.blocks += growth.blocks[self._rank]
            row.room = [
                slots + self.block_tokens * len(blocks) for slots, blocks in zip(row.room, growth.blocks, strict=True)
            ]

    def advance_untold(self) -> None:
        """Append tokens that the device alone has; `tell` brings them before any other change of the batch."""
        for row in self.rows:
            row.position += 1

    def tell(self, token_ids: Sequence[int]) -> None:
        """Take the tokens, in the order of the rows, to whose positions the batch has advanced already."""
        for row, token_id in zip(self.rows, token_ids, strict=True):
            row.token_id = token_id
            row.sampler.push(token_id)

    def append(self) -> Appended:
        """Assign every row's newest token to a rank by `assign_owners`, and take the slots of this rank's."""
        appended = Appended([], [])
        owners = assign_owners([row.held for row in self.rows], [row.room for row in self.rows])
        for number, (row, owner) in enumerate(zip(self.rows, owners, strict=True)):
            row.owner = owner
            if owner == self._rank:
                appended.rows.append(number)
                appended.slots.append(self._take_slot(row))
            row.held[owner] += 1
        return appended

    def plan(self) -> DecodePlan:
        """Plan the step whose tokens were just appended: the rank that computes each row, and every rank's tokens.

        The rank that stores a row's new token computes the row, so its KV never travels. Owners rotate over the ranks,
        and the work rotates with them (arXiv 2411.01783, 3.6). In each step the rows lie evenly over the ranks.
        """
        owners = tuple(row.owner for row in self.rows)
        return DecodePlan(self._num_ranks, owners, tuple(tuple(row.held) for row in self.rows))

    def _take_slot(self, row: BatchRow) -> int:
        """Return the slot of this rank's next token of the row, and add it to the row's runs."""
        block, offset = divmod(row.held[self._rank], self.block_tokens)
        slot = row.blocks[block] * self.block_tokens + offset
        if row.runs and row.runs[-1].stop == slot:
            row.runs[-1] = SlotRun(row.runs[-1].start, slot + 1)
        else:
            row.runs.append(SlotRun(slot, slot + 1))
        return slot
