"""The decode batch, kept alike on every rank of a ring: who is in it, which rank stores whose next token, and where.

Every rank derives this from the same headers, so the step path carries nothing but the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cp_core.layout.decode_plan import DecodePlan
from cp_core.layout.shards import append_owner
from workers.kv.cache import SlotRun, runs
from workers.protocol.decode_commands import AdmitSequence, ComputePrompt
from workers.sampling.parameters import NO_HISTORY, Sampling, TokenHistory
from workers.sampling.processors import RowSampler

GREEDY = Sampling()
ONE_TOKEN = TokenHistory(num_generated=1)


@dataclass(frozen=True, slots=True)
class Admission:
    """What every rank must know of a sequence that joins. Fields as in AdmitSequence; any rank may have to sample."""

    sequence_id: str
    token_id: int
    position: int
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: Sampling = GREEDY
    history: TokenHistory = ONE_TOKEN

    @classmethod
    def of(cls, command: AdmitSequence) -> Admission:
        return cls(
            command.sequence_id,
            command.token_id,
            command.position,
            command.held,
            command.blocks,
            command.sampling,
            replace(command.history, num_generated=command.num_generated),
        )


@dataclass(frozen=True, slots=True)
class Growth:
    """More blocks for a sequence: `blocks[r]` follow rank r's table."""

    sequence_id: str
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to compute after those that the ring holds. Fields as in ComputePrompt."""

    sequence_id: str
    token_ids: tuple[int, ...]
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: Sampling = GREEDY
    history: TokenHistory = NO_HISTORY

    @classmethod
    def of(cls, command: ComputePrompt) -> Prompt:
        return cls(
            command.sequence_id, command.token_ids, command.held, command.blocks, command.sampling, command.history
        )


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Who leaves, who joins and whose tables grow at a step border, in this order; and a prompt that is computed
    before the batch's next step.
    """

    removed: tuple[str, ...] = ()
    admitted: tuple[Admission, ...] = ()
    grown: tuple[Growth, ...] = ()
    prompt: Prompt | None = None

    def __bool__(self) -> bool:
        return bool(self.removed or self.admitted or self.grown or self.prompt)


@dataclass(slots=True)
class BatchRow:
    """A running sequence. `token_id` at `position` is its newest token, whose KV the next step computes.

    `runs` are the slots of this rank's shard in stored order. `sampler` says how tokens are drawn, not when to stop.
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
        """Where the token stands that the next step samples."""
        return self.position + 1


@dataclass(frozen=True, slots=True)
class Appended:
    """Which rows of the batch this rank stores the new KV of, and in which slots; and who does so for every row."""

    rows: list[int]
    slots: list[int]
    owners: list[int]


class DecodeBatch:
    """Rows in order of admission."""

    def __init__(self, rank: int, num_ranks: int, block_tokens: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self.block_tokens = block_tokens
        self.rows: list[BatchRow] = []

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, token_ids: Sequence[int], change: BatchChange) -> None:
        """Take the tokens sampled from the last step, in the order of its rows, then let rows leave, join and grow."""
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
        """Give every row's newest token to the rank that holds least of the sequence."""
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
        """Who computes and who holds what in the step whose tokens were just appended.

        A row is computed by the rank that stores its token: its KV is made where it stays, and as appending goes
        round the ranks, so does computing (arXiv 2411.01783, 3.6).
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
