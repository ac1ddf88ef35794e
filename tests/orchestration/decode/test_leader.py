"""A decode leader over fake ranks: reservations whose callers are lost leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from ringserve.cp_core.errors import TransferError, TurnCancelled, Unavailable
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.protocol.inventory import KnownEpoch, Registered
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.protocol.turns import Reserve, RingRegistration, TurnOutcome
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.protocol.transfers import KvExpect
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.fake_ranks import FakeRanks
from tests.orchestration.service import DirectPeers
from tests.waiting import eventually


@dataclass
class Router:
    """Router that notes what leaders tell it."""

    heard: list[TurnOutcome] = field(default_factory=list)

    async def end_turn(self, outcome: TurnOutcome) -> int:
        self.heard.append(outcome)
        return 0

    async def register_ring(self, registration: RingRegistration, known: KnownEpoch) -> Registered:
        return Registered(running_turns=0)


@asynccontextmanager
async def leading(attach_timeout: float = 3600.0) -> AsyncIterator[tuple[DecodeLeader, FakeRanks, Router]]:
    ranks, router = FakeRanks(), Router()
    settings = RingSettings(
        role="decode",
        name="decode-0",
        num_ranks=3,
        attach_timeout=attach_timeout,
        watch_interval=3600.0,
        announce_interval=3600.0,
        ranks=RankSettings(model_path="model", num_blocks=64, block_tokens=4),
    )
    leader = DecodeLeader(settings, ranks, DirectPeers(), router, router.register_ring)  # type: ignore[arg-type]
    await leader.start("here:1")
    try:
        yield leader, ranks, router
    finally:
        await leader.close()


def reserve(turn_id: str = "turn") -> Reserve:
    return Reserve(
        turn_id=turn_id,
        attempt=1,
        kv_id=turn_id,
        match_tokens=0,
        num_tokens=10,
        deadline_seconds=3600.0,
        source_incarnation="prefill",
        sampling=SamplingParameters(max_tokens=8),
    )


def blocks_in_use(leader: DecodeLeader) -> int:
    return sum(rank.total_blocks - rank.free_blocks for rank in leader.ring.pool.usage())


async def test_a_reservation_whose_caller_is_cancelled_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading() as (leader, ranks, router):
        asked = asyncio.Event()

        async def never_answers(expect: KvExpect, timeout: float) -> None:
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(ranks.latest[1], "expect_kv", never_answers)
        call = asyncio.create_task(leader.reserve(reserve()))
        await asked.wait()
        assert blocks_in_use(leader) > 0
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert blocks_in_use(leader) == 0
        assert leader.num_turns == 0
        assert router.heard == [], "the router began no turn here"
        leader.ring.pool.check_integrity()


async def test_a_later_attempt_of_a_turn_that_has_ended_reserves_nothing() -> None:
    """The router may ask while a preempted turn ends here: no stream and no router would end it a second time."""
    async with leading() as (leader, _, _):
        await leader.reserve(reserve())
        await leader.abort_turn("turn", TurnCancelled("the client left"))
        assert blocks_in_use(leader) == 0
        before = leader.num_turns
        with pytest.raises(TurnCancelled, match="turn turn has ended on decode ring decode-0"):
            await leader.reserve(replace(reserve(), attempt=2))
        assert blocks_in_use(leader) == 0
        assert leader.num_turns == before, "the ended one, which no stream has read"


@pytest.mark.parametrize("is_refused", [False, True], ids=["expected by all ranks", "refused by one rank"])
async def test_a_reservation_that_is_aborted_meanwhile_fails_with_the_cause_of_its_end(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end drops the transfer that the ranks are about to expect: one of them may refuse it before it is heard."""
    async with leading() as (leader, ranks, _):
        asked, answer = asyncio.Event(), asyncio.Event()

        async def answers_late(expect: KvExpect, timeout: float) -> None:
            asked.set()
            await answer.wait()
            if is_refused:
                raise TransferError("transfer 'turn' attempt 1 was dropped: a new attempt is needed")

        monkeypatch.setattr(ranks.latest[1], "expect_kv", answers_late)
        call = asyncio.create_task(leader.reserve(reserve()))
        await asked.wait()
        await leader.abort_turn("turn", TurnCancelled("the client left"))
        answer.set()
        with pytest.raises(TurnCancelled, match="the client left"):
            await call
        assert blocks_in_use(leader) == 0
        leader.ring.pool.check_integrity()


async def test_a_reservation_that_fails_for_an_unknown_reason_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading() as (leader, ranks, _):

        async def breaks(expect: KvExpect, timeout: float) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(ranks.latest[2], "expect_kv", breaks)
        with pytest.raises(RuntimeError, match="a bug"):
            await leader.reserve(reserve())
        assert blocks_in_use(leader) == 0
        assert leader.num_turns == 0


async def test_a_reservation_that_no_stream_claims_ends_though_its_ranks_do_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leading(attach_timeout=0.01) as (leader, ranks, _):

        async def never_answers(expect: KvExpect, timeout: float) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(ranks.latest[0], "expect_kv", never_answers)
        call = asyncio.create_task(leader.reserve(reserve()))
        await eventually(lambda: leader.num_turns == 1)
        await eventually(lambda: blocks_in_use(leader) == 0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_finished_reservation_outlives_its_caller() -> None:
    async with leading() as (leader, _, _):
        reservation = await leader.reserve(reserve())
        assert reservation == await leader.reserve(reserve()), "idempotent"
        assert blocks_in_use(leader) > 0
        await leader.abort_turn("turn", Unavailable("over"))
        assert blocks_in_use(leader) == 0
