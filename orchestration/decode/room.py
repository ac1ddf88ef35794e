"""Decisions about KV blocks on a decode ring: turns grow ahead of need; without free blocks the youngest is preempted.

A turn's tables begin with room for its prompt and a headroom, and get another headroom when half of it is used. If
no block is free, the pool first evicts retained conversations. Then turns go through the states STARVED, PREEMPTED and
RESUMING (`DecodeTurnState`).

No turn waits for ever. A turn is preempted only for an older one, so the oldest in the batch never is, and ends after
at most max_tokens steps. New turns are refused while a turn is held up, and preempted turns come back in order of
arrival. So the number of turns falls until the oldest of all has the blocks that it needs. Alone it fits, because the
router refuses turns that do not.

Pure and synchronous: the engine carries out these decisions.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Protocol

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.cp_core.layout.shards import level_counts
from ringserve.orchestration.decode.turn import DecodeTurn, DecodeTurnState
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv

URGENT_TOKENS = 4
"""Free slots at or below which a turn takes a younger turn's blocks; above, turns that end may free some in time."""

OWNER_DRIFT = 2
"""Tokens by which a rank may have more than a level share of an answer, so that rows find owners on all ranks."""


class RoomActions(Protocol):
    """Effects of the room's decisions. None of them waits."""

    def grow(self, turn: DecodeTurn, blocks: list[list[int]]) -> None:
        """Tell the ranks of blocks that were appended to the tables."""

    def rejoin(self, turn: DecodeTurn) -> None:
        """Put a starved turn, which has new blocks, back into the batch."""

    def preempt(self, turn: DecodeTurn) -> None:
        """Take the turn out of the batch, then call `DecodeRoom.preempted`."""

    def resume(self, turn: DecodeTurn) -> None:
        """Have the KV of a turn with new, empty blocks made again, then call `enter` or `release`."""


class DecodeRoom:
    """Blocks of one ring incarnation and the turns that want them. `headroom` is in tokens of the whole ring."""

    def __init__(self, pool: KvPool, headroom: int, actions: RoomActions) -> None:
        self.num_preemptions = 0
        self._pool = pool
        self._headroom = max(headroom, 1)
        self._actions = actions
        self._active: list[DecodeTurn] = []  # in the batch, waiting for a place in it, or starved; by arrival
        self._preempted: list[DecodeTurn] = []  # by arrival
        self._resuming: set[str] = set()  # ids of turns from RESUMING to SEALED
        self._leaving: set[str] = set()  # ids of turns whose blocks are about to be free

    @property
    def num_held_up(self) -> int:
        """Turns that have begun and wait for blocks or for their KV to be made again."""
        starved = sum(turn.state is DecodeTurnState.STARVED for turn in self._active)
        return len(self._preempted) + len(self._resuming) + starved

    def reserve(self, sequence: SequenceKv, filled: tuple[int, ...], max_tokens: int) -> int:
        """Reserve blocks for a new turn whose prompt fills `filled[r]` slots of rank r; return its room in tokens.

        Raises CapacityExceeded, having changed nothing.
        """
        if self.num_held_up:
            raise CapacityExceeded(
                f"kv cache: {self.num_held_up} running turns wait for free blocks; retry when others have ended"
            )
        answer = min(self._headroom, max_tokens)
        room = sum(filled) + answer
        self._pool.make_room(sequence, self._slots_for(filled, answer))
        return room

    def enter(self, turn: DecodeTurn) -> None:
        """Add a turn whose KV is whole; it may be preempted from now on. It joins the batch after this."""
        self._resuming.discard(turn.turn_id)
        insort(self._active, turn, key=lambda other: other.arrival)
        self.balance()

    def note_token(self, turn: DecodeTurn) -> None:
        """Give the turn, which has one token more, new blocks if it needs them."""
        if self._wants(turn):
            self.balance()

    def starve(self, turn: DecodeTurn) -> None:
        """Record that the turn left the batch because its tables are full."""
        turn.to(DecodeTurnState.STARVED)
        self.balance()

    def preempted(self, turn: DecodeTurn) -> None:
        """Take back the blocks of a turn that has left the batch by `RoomActions.preempt`. No rank uses them now."""
        if turn in self._active:  # it may have ended instead
            self._leaving.discard(turn.turn_id)
            self._active.remove(turn)
            self.num_preemptions += 1
            turn.to(DecodeTurnState.PREEMPTED)
            self.release(turn)

    def release(self, turn: DecodeTurn) -> None:
        """Free the blocks of a preempted turn, which waits for new ones at its place in the order of arrival."""
        self._resuming.discard(turn.turn_id)
        self._pool.pin(turn.request.kv_id, turn.turn_id, 0)
        turn.owners.clear()
        turn.room = 0
        insort(self._preempted, turn, key=lambda other: other.arrival)
        self.balance()

    def end(self, turn: DecodeTurn) -> None:
        """Drop the wishes of a turn that is ending. `freed` follows when its blocks are free."""
        for turns in (self._active, self._preempted):
            if turn in turns:
                turns.remove(turn)
        self._resuming.discard(turn.turn_id)
        self._leaving.add(turn.turn_id)

    def freed(self, turn: DecodeTurn) -> None:
        """Hand out the blocks of an ended turn, which are free now."""
        self._leaving.discard(turn.turn_id)
        self.balance()

    def balance(self) -> None:
        """Hand out free blocks: the oldest turn first, turns that decode before turns that were preempted."""
        for turn in list(self._active):
            if turn.turn_id in self._leaving:
                continue
            if self._wants(turn) and not self._extend(turn) and _free_slots(turn) <= URGENT_TOKENS:
                self._preempt_for(turn)
                return
            if turn.state is DecodeTurnState.STARVED and _free_slots(turn) > 0:
                turn.to(DecodeTurnState.ADMITTED)
                self._actions.rejoin(turn)
        while self._preempted and self._reserve_again(self._preempted[0]):
            turn = self._preempted.pop(0)
            turn.to(DecodeTurnState.RESUMING)
            self._resuming.add(turn.turn_id)
            self._actions.resume(turn)

    def _wants(self, turn: DecodeTurn) -> bool:
        return turn.room < turn.final_tokens and _free_slots(turn) <= self._headroom // 2

    def _extend(self, turn: DecodeTurn) -> bool:
        """Add a headroom to the turn's tables, or a block on each rank if that is all there is."""
        for step in (self._headroom, self._pool.block_tokens * self._pool.num_ranks):
            room = min(turn.kv_tokens + step, turn.final_tokens)
            if room <= turn.room:
                continue
            before = [len(table) for table in turn.sequence.blocks]
            try:
                self._pool.make_room(turn.sequence, self._slots_for(turn.held, room - turn.kv_tokens))
            except CapacityExceeded:
                continue
            turn.room = room
            blocks = [table[known:] for table, known in zip(turn.sequence.blocks, before, strict=True)]
            if any(blocks):
                self._actions.grow(turn, blocks)
            return True
        return False

    def _preempt_for(self, turn: DecodeTurn) -> None:
        """Preempt the youngest turn that is younger than `turn`, unless one is leaving already."""
        if not self._leaving and self._active[-1] is not turn:
            self._leaving.add(self._active[-1].turn_id)
            self._actions.preempt(self._active[-1])

    def _reserve_again(self, turn: DecodeTurn) -> bool:
        room = min(turn.kv_tokens + self._headroom, turn.final_tokens)
        try:
            self._pool.make_room(turn.sequence, self._slots_for(turn.held, room))
        except CapacityExceeded:
            return False
        turn.room = room
        return True

    def _slots_for(self, held: Sequence[int], num_tokens: int) -> list[int]:
        """Return the slots that each rank needs for its `held` tokens and its share of `num_tokens` decoded ones.

        The share has `OWNER_DRIFT` tokens more than a level one, as far as a rank has blocks.
        """
        most = self._pool.capacity_tokens // self._pool.num_ranks
        return [
            max(own + more, min(own + more + OWNER_DRIFT, own + num_tokens, most))
            for own, more in zip(held, level_counts(held, num_tokens), strict=True)
        ]


def _free_slots(turn: DecodeTurn) -> int:
    """Return the slots that the turn's tables have beyond its KV."""
    return turn.room - turn.kv_tokens
