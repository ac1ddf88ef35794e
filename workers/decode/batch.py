"""Decode batch of a ring: its sequences, and which rank stores each sequence's next token in which slot.

Every rank derives the same batch from the same headers, so a step exchanges nothing but the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_core.layout.shards import append_owner
from cp_core.layout.step_plans import DecodePlan
from workers.kv.cache import SlotRun, runs
from workers.protocol.decode_commands import AdmitSequence, ComputePrompt, GrowSequence
from workers.sampling.sampler import RowSampler


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Changes at a step boundary, in this order: sequences leave, sequences join, block tables grow.

    `prompt` is computed before the batch's next step.
    """

    removed: tuple[str, ...] = ()
    admitted: tuple[AdmitSequence, ...] = ()
    grown: tuple[GrowSequence, ...] = ()
    prompt: ComputePrompt | None = None

    def __bool__(self) -> bool:
        return bool(self.removed or self.admitted or self.grown or self.prompt)


@dataclass(slots=True)
class BatchRow:
    """Running sequence. `token_id` at `position` is its newest token; the next step computes that token's KV.

    `runs` are the slots of this rank's shard in stored order. `sampler` draws tokens; the leading loop ends sequences.
    """

    sequence_id: str
    token_id: int
    position: int
    held: list[int]
    blocks: list[int]
    runs: list[SlotRun]
    sampler: RowSampler

    @property
    def next_position(self) -> int:
        """Position of the token that the next step samples."""
        return self.position + 1


@dataclass(frozen=True, slots=True)
class Appended:
    """Placement of the newest tokens: the rows whose KV this rank stores, their slots, and every row's owner."""

    rows: list[int]
    slots: list[int]
    owners: list[int]


class BatchState:
    """Running rows in order of admission, as one rank sees them."""

    def __init__(self, rank: int, num_ranks: int, block_tokens: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self.block_tokens = block_tokens
        self.rows: list[BatchRow] = []

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, token_ids: Sequence[int], change: BatchChange) -> None:
        """Append the tokens sampled from the last step, in the order of its rows, then apply `change`."""
        if token_ids:
            for row, token_id in zip(self.rows, token_ids, strict=True):
                row.token_id = token_id
                row.position += 1
                row.sampler.push(token_id)
        if change.removed:
            self.rows = [row for row in self.rows if row.sequence_id not in change.removed]
        for admission in change.admitted:
            blocks, held = list(admission.blocks[self._rank]), list(admission.held)
            assert sum(held) == admission.position, "tokens before the newest one must all be stored"
            where = list(runs(blocks, held[self._rank], self.block_tokens))
            self.rows.append(
                BatchRow(
                    admission.sequence_id,
                    admission.token_id,
                    admission.position,
                    held,
                    blocks,
                    where,
                    RowSampler(admission.sampling, admission.history),
                )
            )
        for growth in change.grown:
            row = next(row for row in self.rows if row.sequence_id == growth.sequence_id)
            row.blocks += growth.blocks[self._rank]

    def append(self) -> Appended:
        """Give every row's newest token to the rank that stores the fewest tokens of the sequence."""
        appended = Appended([], [], [])
        for number, row in enumerate(self.rows):
            owner = append_owner(row.held)
            appended.owners.append(owner)
            if owner == self._rank:
                appended.rows.append(number)
                appended.slots.append(self._take_slot(row))
            row.held[owner] += 1
        return appended

    def plan(self, appended: Appended) -> DecodePlan:
        """Plan the step whose tokens were just appended: the rank that computes each row, and every rank's tokens.

        A row is computed by the rank that stores its new token: the KV is made where it stays. Appending circulates
        over the ranks, and so does computing (arXiv 2411.01783, 3.6).
        """
        return DecodePlan(self._num_ranks, tuple(appended.owners), tuple(tuple(row.held) for row in self.rows))

    def _take_slot(self, row: BatchRow) -> int:
        block, offset = divmod(row.held[self._rank], self.block_tokens)
        assert block < len(row.blocks), f"{row.sequence_id!r} has outgrown its {len(row.blocks)} blocks"
        slot = row.blocks[block] * self.block_tokens + offset
        if row.runs and row.runs[-1].stop == slot:
            row.runs[-1] = SlotRun(row.runs[-1].start, slot + 1)
        else:
            row.runs.append(SlotRun(slot, slot + 1))
        return slot
