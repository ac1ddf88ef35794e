"""Plan of one decode step: the rank that computes each sequence, and the ranks that hold its KV. No torch.

B sequences (rows) with one new token each, N ranks. Every rank derives the same plan, so lengths are exact and no batch
ids are sent with the queries (arXiv 2411.01783, algorithm 4, sends them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Owner of each row and its tokens by rank.

    `owners[i]` computes row i and stores its new token; `held[i][r]` tokens of it, with the new one, lie on rank r.
    """

    num_ranks: int
    owners: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        assert len(self.owners) == len(self.held), f"{len(self.owners)} owners of {len(self.held)} sequences"
        assert all(len(held) == self.num_ranks for held in self.held), "one count a rank"
        assert all(0 <= owner < self.num_ranks for owner in self.owners), "owners are ranks of the ring"

    def __len__(self) -> int:
        return len(self.owners)

    def rows_of(self, rank: int) -> list[int]:
        """Return the rows that a rank computes, ascending."""
        return [row for row, owner in enumerate(self.owners) if owner == rank]

    def held_by(self, rank: int, rows: Sequence[int]) -> list[int]:
        """Return the rows among `rows` of which the rank holds any token: it has a part of no others."""
        return [row for row in rows if self.held[row][rank]]

    def sent_on(self, source: int, hop: int) -> list[int]:
        """Return the rows of `source` whose queries reach rank source + hop: it, or one behind it, holds their keys."""
        later = [(source + step) % self.num_ranks for step in range(max(hop, 1), self.num_ranks)]
        return [row for row in self.rows_of(source) if hop == 0 or any(self.held[row][rank] for rank in later)]


@dataclass(frozen=True, slots=True)
class Visit:
    """Queries of `source` at one rank: `rows` of the batch, in the order of the message.

    `answered` and `onward` are places in the message: of queries that this rank attends, and that it sends on.
    """

    source: int
    rows: tuple[int, ...]
    answered: tuple[int, ...]
    onward: tuple[int, ...]


class PassQRoute:
    """Work of one rank in every layer of a pass-Q step, derived once a step.

    `visits[j]` is hop j of N; the first is the rank's own queries. `returns[p]` are the places, among the rank's own
    rows, of those that rank p answers.
    """

    def __init__(self, plan: DecodePlan, rank: int) -> None:
        size = plan.num_ranks
        self.rank = rank
        self.batch = len(plan)
        self.own = plan.rows_of(rank)
        self.visits = [_visit(plan, rank, (rank - hop) % size, hop) for hop in range(size)]
        place = {row: index for index, row in enumerate(self.own)}
        self.returns = [[place[row] for row in plan.held_by(peer, self.own)] for peer in range(size)]


def _visit(plan: DecodePlan, rank: int, source: int, hop: int) -> Visit:
    rows = plan.sent_on(source, hop)
    onward = set(plan.sent_on(source, hop + 1))
    answered = set(plan.held_by(rank, rows))
    return Visit(
        source,
        tuple(rows),
        tuple(place for place, row in enumerate(rows) if row in answered),
        tuple(place for place, row in enumerate(rows) if row in onward),
    )
