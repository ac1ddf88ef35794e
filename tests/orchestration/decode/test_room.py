"""Blocks of a decode ring: turns of any number and length all end, and the oldest is never preempted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.cp_core.layout.shards import ShardMap, assign_owners, spread
from ringserve.orchestration.decode.engine import DecodeRoom
from ringserve.orchestration.decode.turn import Attempt, DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.turns import Reservation, Reserve
from ringserve.orchestration.ring.kv_pool import KvPool
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import SamplingParameters

BLOCK_TOKENS = 4
MAX_STEPS = 4000


class Simulation:
    """Decode ring of counters: every running turn gets a token a step, or is starved. Ranks see the same tables.

    New blocks reach a running turn a step late, as in service.
    """

    def __init__(self, num_ranks: int, num_blocks: int, headroom: int) -> None:
        self.pool = KvPool(num_ranks, num_blocks, BLOCK_TOKENS)
        self.room = DecodeRoom(self.pool, headroom, self)
        self.turns: list[DecodeTurn] = []
        self.running: dict[str, list[int]] = {}  # slots in the tables that the ring knows, by rank
        self.held: dict[str, list[int]] = {}
        self.resuming: list[DecodeTurn] = []
        self.leaving: list[DecodeTurn] = []
        self.preempted: list[str] = []
        self.late: list[tuple[DecodeTurn, list[list[int]]]] = []

    # --- actions of the room

    def grow(self, turn: DecodeTurn, blocks: list[list[int]]) -> None:
        self.late.append((turn, blocks))

    def rejoin(self, turn: DecodeTurn) -> None:
        self._join(turn)

    def preempt(self, turn: DecodeTurn) -> None:
        active = [other for other in self.turns if other.turn_id in self.held]
        assert turn is not min(active, key=lambda other: other.arrival), "the oldest is never preempted"
        self.leaving.append(turn)

    def resume(self, turn: DecodeTurn) -> None:
        self.resuming.append(turn)

    # --- events of the ring

    def begin(self, number: int, prompt: int, max_tokens: int) -> bool:
        name = f"turn-{number}"
        sequence = self.pool.pin(name, name, 0)
        ranks = self.pool.num_ranks
        coming = spread(0, prompt, (0,) * ranks)
        try:
            room = self.room.reserve(sequence, coming.held, max_tokens)
        except CapacityExceeded:
            self.pool.settle(name, name, 0)
            return False
        sequence.shards = coming
        request = Reserve(
            turn_id=name,
            attempt=1,
            kv_id=name,
            match_tokens=0,
            num_tokens=prompt,
            deadline_seconds=60.0,
            source_incarnation="prefill",
            sampling=SamplingParameters(max_tokens=max_tokens),
        )
        reservation = Reservation(
            incarnation="decode", retained_tokens=0, shards=ShardMap.empty(ranks), kv_endpoints=("kv:0",) * ranks
        )
        key = TransferKey(name, 1, "prefill", "decode")
        turn = DecodeTurn(
            Attempt(request, key, reservation), self.pool, sequence, arrival=number, prompt_tokens=prompt, room=room
        )
        turn.state = DecodeTurnState.ADMITTED
        turn.answer.tokens.append(1)
        self.turns.append(turn)
        if max_tokens == 1:
            self._finish(turn)
        else:
            self._enter(turn)
        return True

    def _enter(self, turn: DecodeTurn) -> None:
        self.held[turn.turn_id] = []
        self._join(turn)
        self.room.enter(turn)

    def _join(self, turn: DecodeTurn) -> None:
        admission = turn.admission()
        self.held[turn.turn_id] = list(admission.held)
        self.running[turn.turn_id] = [BLOCK_TOKENS * len(table) for table in admission.blocks]

    def _finish(self, turn: DecodeTurn) -> None:
        self.running.pop(turn.turn_id, None)
        self.held.pop(turn.turn_id, None)
        self.room.end(turn)
        self.turns.remove(turn)
        self.pool.settle(turn.turn_id, turn.turn_id, 0)
        self.room.freed(turn)

    def step(self) -> None:
        late, self.late = self.late, []
        batch = list(self.running)
        rows = [name for name in batch if sum(self.held[name]) < sum(self.running[name])]
        owned = assign_owners([self.held[name] for name in rows], [self.running[name] for name in rows])
        owners = dict(zip(rows, owned, strict=True))
        for turn in list(self.turns):
            name = turn.turn_id
            if name not in batch or name not in self.running:
                continue
            if name not in owners:
                del self.running[name]
                self.room.starve(turn)
                continue
            self.held[name][owners[name]] += 1
            turn.owners.append(owners[name])
            turn.answer.tokens.append(1)
            if len(turn.answer.tokens) == turn.request.sampling.max_tokens:
                self._finish(turn)
            else:
                self.room.note_token(turn)
        for turn, blocks in late:
            if turn.turn_id in self.running:
                known = self.running[turn.turn_id]
                whole = [BLOCK_TOKENS * len(table) for table in turn.sequence.blocks]
                more = [own + BLOCK_TOKENS * len(new) for own, new in zip(known, blocks, strict=True)]
                self.running[turn.turn_id] = [min(pair) for pair in zip(more, whole, strict=True)]
        leaving, self.leaving = self.leaving, []
        for turn in leaving:
            if turn in self.turns:
                self.running.pop(turn.turn_id, None)
                self.held.pop(turn.turn_id)
                self.preempted.append(turn.turn_id)
            self.room.preempted(turn)
        resuming, self.resuming = self.resuming, []
        for turn in resuming:
            turn.sequence.shards = spread(0, turn.kv_tokens, (0,) * self.pool.num_ranks)
            for state in (DecodeTurnState.RESERVED, DecodeTurnState.SEALED, DecodeTurnState.ADMITTED):
                turn.to(state)
            self._enter(turn)
        self.pool.check_integrity()


@settings(max_examples=150, deadline=None)
@given(
    num_ranks=st.integers(1, 3),
    num_blocks=st.integers(4, 14),
    headroom=st.integers(1, 24),
    data=st.data(),
)
def test_every_turn_is_done_in_the_end_and_all_blocks_are_free(
    num_ranks: int, num_blocks: int, headroom: int, data: st.DataObject
) -> None:
    capacity = num_ranks * num_blocks * BLOCK_TOKENS
    lengths = st.integers(1, capacity - 1).flatmap(
        lambda prompt: st.tuples(st.just(prompt), st.integers(1, capacity - prompt))
    )
    waiting = list(enumerate(data.draw(st.lists(lengths, min_size=1, max_size=8))))
    ring = Simulation(num_ranks, num_blocks, headroom)
    steps = 0
    while waiting or ring.turns:
        if waiting and ring.begin(waiting[0][0], *waiting[0][1]):
            waiting.pop(0)
        ring.step()
        steps += 1
        assert steps < MAX_STEPS, f"{len(ring.turns)} turns get nowhere"
    assert ring.room.num_preemptions == len(ring.preempted)
    assert ring.room.num_held_up == 0
    assert all(rank.free_blocks == num_blocks for rank in ring.pool.usage())


def test_the_youngest_is_preempted_and_no_new_turn_comes_before_it_is_back() -> None:
    ring = Simulation(1, 8, 4)
    assert ring.begin(0, 8, 16)
    assert ring.begin(1, 8, 10)
    while not ring.preempted:
        ring.step()
    assert ring.preempted == ["turn-1"]
    assert not ring.begin(2, 1, 1)
    with pytest.raises(CapacityExceeded, match="1 running turns wait for free blocks"):
        ring.room.reserve(ring.pool.pin("x", "x", 0), (1,), 1)
    ring.pool.settle("x", "x", 0)
    while len(ring.turns) > 1 or ring.turns[0].turn_id not in ring.held:
        ring.step()
    assert ring.begin(2, 1, 1)


def test_an_answer_within_the_headroom_has_its_whole_room_from_the_start() -> None:
    ring = Simulation(2, 8, 40)
    assert ring.begin(0, 5, 40)
    # 23 and 22 tokens, and two that the other rank may not get.
    assert list(map(len, ring.turns[0].sequence.blocks)) == [7, 6]
    assert not ring.begin(1, 5, 40)
    while ring.turns:
        ring.step()
    assert not ring.preempted
