"""Who gets KV blocks on a decode ring: turns grow ahead of need, and when nothing is left the youngest gives way.

A turn's tables begin with room for its prompt and a headroom, and get another headroom when half of it is used. Where
no block is left, kept conversations go first (the pool's business); then

RUNNING ──tables full──> PAUSED ──room──> RUNNING                its KV stays where it is
RUNNING, PAUSED ──an older turn lacks room──> PREEMPTED ──room──> RESUMING ──sealed──> RUNNING       its KV is dropped

Why nobody waits for ever: a turn gives way only to an older one, so the oldest in the batch never does and is done
after at most max_tokens steps. New turns are refused while one is held up, and the preempted come back in order of
arrival. So the number of turns falls until the oldest of all has what it needs; alone it fits, because the router
refuses what does not.

Pure and synchronous: what is decided here the leader carries out.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

from cp_core.errors import CapacityExceeded
from cp_core.layout.shards import level_counts
from orchestration.decode.turn import DecodeTurn
from orchestration.ring.kv_pool import KvPool, SequenceKv

URGENT_TOKENS = 4
"""With so few slots left a turn takes those of younger ones; before, turns that end may make room for it."""


class RoomActions(Protocol):
    """What the leader does for a turn. None of them waits."""

    def grow(self, turn: DecodeTurn, blocks: list[list[int]]) -> None:
        """Tell the ranks of blocks that were appended to the tables."""

    def rejoin(self, turn: DecodeTurn) -> None:
        """A paused turn has room: let it decode."""

    def preempt(self, turn: DecodeTurn) -> None:
        """Take the turn out of the batch, then call `DecodeRoom.given_way`."""

    def resume(self, turn: DecodeTurn) -> None:
        """The turn holds empty blocks for all of its tokens: have its KV made again, then call `enter` or `give_up`."""


class DecodeRoom:
    """The blocks of one ring incarnation and the turns that want them. `headroom` is in tokens of the whole ring."""

    def __init__(self, pool: KvPool, headroom: int, *, can_preempt: bool, actions: RoomActions) -> None:
        self.num_preemptions = 0
        self._pool = pool
        self._headroom = max(headroom, 1)
        self._can_preempt = can_preempt
        self._actions = actions
        self._active: list[DecodeTurn] = []  # in the batch, waiting for a place in it, or paused; by arrival
        self._preempted: list[DecodeTurn] = []  # by arrival
        self._resuming: set[str] = set()
        self._leaving: set[str] = set()  # blocks that are about to be free

    @property
    def num_held_up(self) -> int:
        """Turns that have begun and cannot go on for want of blocks."""
        return len(self._preempted) + len(self._resuming) + sum(turn.is_paused for turn in self._active)

    def reserve(self, sequence: SequenceKv, filled: tuple[int, ...], max_tokens: int) -> int:
        """Blocks for a new turn whose prompt will fill the ranks so. Returns how many tokens have room.

        Raises CapacityExceeded, having changed nothing.
        """
        if self.num_held_up:
            raise CapacityExceeded(
                f"kv cache: {self.num_held_up} running turns wait for free blocks; retry when others have ended"
            )
        answer = min(self._headroom, max_tokens) if self._can_preempt else max_tokens
        room = sum(filled) + answer
        self._pool.make_room(sequence, _levelled(filled, answer))
        return room

    def enter(self, turn: DecodeTurn) -> None:
        """The turn's KV is whole; from now on it may be told to give way. It joins the batch after this."""
        self._resuming.discard(turn.turn_id)
        insort(self._active, turn, key=lambda other: other.arrival)
        self.balance()

    def note_token(self, turn: DecodeTurn) -> None:
        """The turn has a token more."""
        if self._wants(turn):
            self.balance()

    def pause(self, turn: DecodeTurn) -> None:
        """The turn left the batch because its tables are full."""
        turn.is_paused = True
        self.balance()

    def given_way(self, turn: DecodeTurn) -> None:
        """A turn that was told to has left the batch; nobody touches its blocks any more."""
        if turn in self._active:  # it may have ended instead
            self._leaving.discard(turn.turn_id)
            self._active.remove(turn)
            self.num_preemptions += 1
            self.give_up(turn)

    def give_up(self, turn: DecodeTurn) -> None:
        """The turn's blocks are free for others, and it waits, at its place in the order, for new ones."""
        self._resuming.discard(turn.turn_id)
        turn.is_paused = False
        self._pool.pin(turn.request.kv_id, turn.turn_id, 0)
        turn.room = 0
        insort(self._preempted, turn, key=lambda other: other.arrival)
        self.balance()

    def end(self, turn: DecodeTurn) -> None:
        """The turn is ending: it wants nothing more. `freed` follows when its blocks are free."""
        for turns in (self._active, self._preempted):
            if turn in turns:
                turns.remove(turn)
        self._resuming.discard(turn.turn_id)
        self._leaving.add(turn.turn_id)

    def freed(self, turn: DecodeTurn) -> None:
        """An ended turn's blocks are free."""
        self._leaving.discard(turn.turn_id)
        self.balance()

    def balance(self) -> None:
        """Hand out what is free: the oldest first, those that decode before those that were preempted."""
        for turn in list(self._active):
            if turn.turn_id in self._leaving:
                continue
            if self._wants(turn) and not self._extend(turn) and _left(turn) <= URGENT_TOKENS:
                self._make_way_for(turn)
                return
            if turn.is_paused and _left(turn) > 0:
                turn.is_paused = False
                self._actions.rejoin(turn)
        while self._preempted and self._reserve_again(self._preempted[0]):
            turn = self._preempted.pop(0)
            self._resuming.add(turn.turn_id)
            self._actions.resume(turn)

    def _wants(self, turn: DecodeTurn) -> bool:
        return turn.room < turn.final_tokens and _left(turn) <= self._headroom // 2

    def _extend(self, turn: DecodeTurn) -> bool:
        """A headroom more, or where that is not to be had, a block on each rank."""
        for step in (self._headroom, self._pool.block_tokens * self._pool.num_ranks):
            room = min(turn.kv_tokens + step, turn.final_tokens)
            if room <= turn.room:
                continue
            before = [len(table) for table in turn.sequence.blocks]
            try:
                self._pool.make_room(turn.sequence, turn.held_with(room))
            except CapacityExceeded:
                continue
            turn.room = room
            blocks = [table[known:] for table, known in zip(turn.sequence.blocks, before, strict=True)]
            if any(blocks):
                self._actions.grow(turn, blocks)
            return True
        return False

    def _make_way_for(self, turn: DecodeTurn) -> None:
        """The youngest turn that is younger gives way, one at a time. With none, turns on their way here make room."""
        if not self._leaving and self._active[-1] is not turn:
            self._leaving.add(self._active[-1].turn_id)
            self._actions.preempt(self._active[-1])

    def _reserve_again(self, turn: DecodeTurn) -> bool:
        room = min(turn.kv_tokens + self._headroom, turn.final_tokens)
        try:
            self._pool.make_room(turn.sequence, turn.held_with(room))
        except CapacityExceeded:
            return False
        turn.room = room
        return True


def _levelled(held: tuple[int, ...], num_tokens: int) -> list[int]:
    return [own + more for own, more in zip(held, level_counts(held, num_tokens), strict=True)]


def _left(turn: DecodeTurn) -> int:
    """Slots that the turn's tables have beyond its KV."""
    return turn.room - turn.kv_tokens
