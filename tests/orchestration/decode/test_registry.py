"""A turn on a decode ring ends once, is reported once, and frees its blocks only when no rank writes to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ringserve.cp_core.errors import Busy, DeadlineExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from ringserve.orchestration import tasks
from ringserve.orchestration.decode import registry
from ringserve.orchestration.decode.engine import DecodeEngine
from ringserve.orchestration.decode.registry import DecodeTurns
from ringserve.orchestration.decode.turn import Attempt, DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.protocol.turns import FinishedEvent, SentKv, TokensEvent, TurnEvent, TurnOutcome
from ringserve.orchestration.ring.life import Ring
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.protocol.steps import DecodeEvent, FinishReason
from ringserve.workers.protocol.transfers import TransferKey
from tests.orchestration.decode.decode_turns import PROMPT_TOKENS, decode_turn
from tests.orchestration.fake_ranks import FakeRanks
from tests.waiting import WAIT_SECONDS, eventually, pass_time


class Router:
    """Router that notes the ends of turns and retains all of their KV. The next calls raise `errors`."""

    def __init__(self) -> None:
        self.heard: list[TurnOutcome] = []
        self.errors: list[RingserveError] = []
        self.is_here = asyncio.Event()
        self.is_here.set()

    async def end_turn(self, outcome: TurnOutcome) -> int:
        await self.is_here.wait()
        self.heard.append(outcome)
        if self.errors:
            raise self.errors.pop(0)
        return outcome.kv_tokens


class DecodeRing:
    """Ring of fake ranks with its engine and its registry of turns."""

    def __init__(self, attach_timeout: float) -> None:
        self.ranks, self.router = FakeRanks(), Router()
        settings = RingSettings(
            role="decode",
            name="ring",
            num_ranks=2,
            attach_timeout=attach_timeout,
            watch_interval=3600.0,
            ranks=RankSettings(
                model_path="model",
                num_blocks=64,
                block_tokens=4,
            ),
        )
        self.tasks: set[asyncio.Task[None]] = set()
        self.settled: list[DecodeTurn] = []
        self.ring = Ring(settings, self.ranks, on_ready=self._on_ready, on_lost=self._on_lost)

        def end_soon(turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
            self.turns.end_soon(turn, how)

        self.engine = DecodeEngine(self.ring, self.router, self.spawn, end_soon, end_soon)  # type: ignore[arg-type]
        self.turns = DecodeTurns(self.ring, self.engine, self.router, self.spawn, self.settled.append)  # type: ignore[arg-type]

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def _on_ready(self) -> None:
        self.engine.start()

    async def _on_lost(self, error: RingserveError) -> None:
        self.engine.stop(error)
        self.turns.end_all(error)

    def turn(self, name: str = "turn", deadline_seconds: float = 60.0) -> DecodeTurn:
        """Register a turn that runs on this ring."""
        turn = decode_turn(name)
        request = replace(turn.request, deadline_seconds=deadline_seconds)
        reservation = replace(turn.reservation, incarnation=self.ring.incarnation)
        key = replace(turn.attempt.key, destination=self.ring.incarnation)
        turn.attempt = Attempt(request, key, reservation)
        self.turns.add(turn)
        return turn

    async def decoding(self, name: str = "turn") -> DecodeTurn:
        turn = self.turn(name)
        await self.engine.enter(turn)
        return turn

    def post(self, token_id: int | None, reason: FinishReason | None = None, name: str = "turn") -> None:
        owner = None if token_id is None else 0
        event = DecodeEvent(sequence_id=name, token_id=token_id, finish_reason=reason, kv_tokens=1, owner=owner)
        self.ranks.latest[0].post(event)


@asynccontextmanager
async def ring(*, attach_timeout: float = 30.0) -> AsyncIterator[DecodeRing]:
    made = DecodeRing(attach_timeout)
    await made.ring.start()
    try:
        yield made
    finally:
        made.engine.stop(Unavailable("the test is over"))
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        await made.ring.close()


async def over(turn: DecodeTurn) -> TurnEvent | RingserveError:
    """Return the last event of the turn's stream."""
    await eventually(lambda: turn.tasks.ending is not None and turn.tasks.ending.done(), WAIT_SECONDS)
    assert turn.end is not None
    return turn.end


async def test_the_first_to_end_a_turn_decides_how_and_the_router_hears_it_once() -> None:
    async with ring() as made:
        turn = made.turn()
        made.turns.end_soon(turn, FinishReason.LENGTH)
        await made.turns.end("turn", TurnCancelled("too late"))
        await made.turns.end("turn", TurnCancelled("and later"))
        last = await over(turn)
        assert isinstance(last, FinishedEvent)
        assert last.finish_reason is FinishReason.LENGTH
        assert [(told.ok, told.kv_tokens) for told in made.router.heard] == [(True, PROMPT_TOKENS)]
        assert turn.state is DecodeTurnState.DONE
        assert turn.pool.num_retained("turn") == PROMPT_TOKENS
        assert len(made.turns) == 0
        assert made.settled == [turn]


async def test_a_turn_that_fails_waits_for_no_ring_that_stands_still_and_was_to_have_its_kv() -> None:
    async with ring() as made:
        turn, key = made.turn(), TransferKey("pull", 1, made.ring.incarnation, "another")
        given_up: list[TransferKey] = []
        sending: asyncio.Future[SentKv] = asyncio.get_running_loop().create_future()

        async def abandon(key: TransferKey, timeout: float) -> None:
            given_up.append(key)
            sending.cancel()

        async def send() -> SentKv:
            return await sending

        task = asyncio.create_task(send())
        turn.tasks.sends[task] = key
        for rank in made.ranks.latest:
            rank.abandon_send = abandon  # type: ignore[method-assign]
        await made.turns.end("turn", Unavailable("the prefill ring is lost"))
        assert await over(turn) is turn.error
        assert given_up == [key, key], "every rank"
        assert task.cancelled()


async def test_a_send_outlives_the_answer_of_its_turn() -> None:
    async with ring() as made:
        turn = made.turn()
        sending: asyncio.Future[SentKv] = asyncio.get_running_loop().create_future()

        async def send() -> SentKv:
            return await sending

        turn.tasks.sends[asyncio.create_task(send())] = turn.attempt.key
        made.turns.end_soon(turn, FinishReason.LENGTH)
        await eventually(lambda: bool(made.router.heard))
        assert turn.end is None
        sending.set_result(SentKv(payload_bytes=1, seconds=1.0))
        assert isinstance(await over(turn), FinishedEvent)


async def test_the_end_of_a_turn_that_fails_is_reported_too_and_once() -> None:
    async with ring() as made:
        turns = [made.turn("one"), await made.decoding("two")]
        await made.turns.end("one", TurnCancelled("aborted"))
        ending = asyncio.create_task(made.turns.end("two", TurnCancelled("aborted")))
        await eventually(lambda: made.ranks.latest[0].removed == ["two"])
        made.post(None, FinishReason.ABORT, "two")
        await ending
        made.turns.end_all(TurnCancelled("again"))
        assert made.settled == turns
        assert [(told.turn_id, told.ok) for told in made.router.heard] == [("one", False), ("two", False)]


async def test_a_token_goes_to_the_stream_and_the_last_one_ends_the_turn() -> None:
    async with ring() as made:
        turn = await made.decoding()
        made.post(51)
        made.post(52, FinishReason.STOP)
        last = await over(turn)
        assert isinstance(last, FinishedEvent)
        assert made.router.heard[0].token_ids == (50, 51, 52)
        assert made.engine.num_running == 0


async def test_an_end_that_the_router_does_not_hear_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    async with ring() as made:
        made.router.errors = [Unavailable("no router")] * 3
        turn = made.turn()
        made.turns.end_soon(turn, FinishReason.STOP)
        assert isinstance(await over(turn), FinishedEvent)
        assert [told.ok for told in made.router.heard] == [True] * 4
        assert len(set(made.router.heard)) == 1
        assert turn.pool.num_retained("turn") == PROMPT_TOKENS


@pytest.mark.parametrize("retained", [0, PROMPT_TOKENS])
async def test_a_stream_ends_though_the_router_is_away_and_the_end_is_told_later(
    monkeypatch: pytest.MonkeyPatch, retained: int
) -> None:
    monkeypatch.setattr(registry, "TELL_SECONDS", 0.01)
    async with ring() as made:
        made.router.is_here.clear()
        turn = made.turn()
        if retained:
            turn.attempt = replace(turn.attempt, request=replace(turn.request, turn_id="turn-of-it"))
            turn.sequence.pinned_by = "turn-of-it"
            made.turns.add(turn)
        made.turns.end_soon(turn, FinishReason.STOP)
        assert isinstance(await over(turn), FinishedEvent)
        assert made.router.heard == []
        assert turn.pool.num_retained("turn") == retained
        assert turn.pool.usage()[0].active_blocks == 0
        made.router.is_here.set()
        await eventually(lambda: [told.ok for told in made.router.heard] == [True])


async def test_a_turn_whose_lease_is_over_is_told_no_more() -> None:
    async with ring() as made:
        made.router.errors = [Unavailable("no router")] * 2
        turn = made.turn(deadline_seconds=-registry.LEASE_SECONDS)
        made.turns.end_soon(turn, FinishReason.STOP)
        assert isinstance(await over(turn), FinishedEvent)
        assert len(made.router.heard) == 1
        assert turn.pool.num_retained("turn") == 0


async def test_a_turn_that_fails_leaves_the_batch_before_its_blocks_are_settled() -> None:
    async with ring() as made:
        turn = await made.decoding()
        ending = asyncio.create_task(made.turns.end("turn", TurnCancelled("gone")))
        await eventually(lambda: made.ranks.latest[0].removed == ["turn"])
        assert turn.pool.usage()[0].active_blocks > 0
        assert made.router.heard == []
        made.post(None, FinishReason.ABORT)
        await ending
        assert turn.state is DecodeTurnState.ABORTED
        assert turn.pool.usage()[0].active_blocks == 0
        assert [told.ok for told in made.router.heard] == [False]


@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_decode_loop_that_does_not_let_go_in_time_loses_its_ring(is_finished: bool) -> None:
    async with ring() as made:
        turn, incarnation = await made.decoding(), made.ring.incarnation
        if is_finished:
            turn.finish(1)
        made.turns.end_soon(turn, FinishReason.STOP if is_finished else TurnCancelled("gone"))
        await eventually(lambda: made.ranks.latest[0].removed == ["turn"])
        pass_time(made.ring.settings.control_timeout)
        last = await over(turn)
        if is_finished:
            assert isinstance(last, Unavailable)
            assert "did not release turn turn within" in str(last)
        else:
            assert isinstance(last, TurnCancelled)
        await eventually(lambda: made.ring.rebuilds == 1)
        assert made.ring.incarnation != incarnation


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_a_refused_turn_is_there_until_its_ranks_have_let_go(is_aborted: bool) -> None:
    async with ring() as made:
        turn, gate = made.turn(), made.ranks.latest[0].gate
        gate.clear()
        if is_aborted:
            made.turns.end_soon(turn, TurnCancelled("gone"))
        refusal = asyncio.create_task(made.turns.refuse(turn))
        await eventually(lambda: turn.is_ending)
        waits = [refusal, *(asyncio.create_task(wait) for wait in _waits_for_the_end(made))]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        assert turn.pool.usage()[0].active_blocks > 0
        gate.set()
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*waits)
        assert turn.state is DecodeTurnState.ABORTED
        assert [usage.total_blocks - usage.free_blocks for usage in turn.pool.usage()] == [0, 0]
        assert [told.ok for told in made.router.heard] == [False] * is_aborted
        assert len(made.turns) == 0


def _waits_for_the_end(made: DecodeRing) -> list[Coroutine[None, None, None]]:
    return [made.turns.end("turn", TurnCancelled("gone")), made.turns.until_settled("turn")]


async def test_a_lost_ring_ends_every_turn_without_asking_its_ranks() -> None:
    async with ring() as made:
        turns = [await made.decoding(), made.turn("waiting")]
        first = made.ranks.latest[0]
        made.ring.report_lost(Unavailable("a rank died"), made.ring.incarnation)
        assert [type(await over(turn)) for turn in turns] == [Unavailable, Unavailable]
        assert first.removed == []
        await eventually(lambda: made.ring.rebuilds == 1)
        made.engine.require_started()


async def test_a_stopped_engine_takes_no_turns() -> None:
    async with ring() as made:
        made.engine.stop(Unavailable("over"))
        made.engine.stop(Unavailable("over"))
        with pytest.raises(Unavailable, match="ring ring is shutting down"):
            made.engine.require_started()


async def test_one_stream_reads_a_turn_and_may_come_after_its_end() -> None:
    async with ring() as made:
        turn = made.turn()
        await made.turns.end("turn", TurnCancelled("gone"))
        assert made.turns.under_way("turn") is None
        for _ in range(2):
            reader = made.turns.read("turn", 0)
            assert reader.turn is turn
            assert isinstance(await reader.next(), TokensEvent)
            with pytest.raises(TurnCancelled, match="gone"):
                await reader.next()
        with pytest.raises(NotFound, match="unknown is not known"):
            made.turns.read("unknown", 0)
        first = made.turns.read(made.turn("other").turn_id, 0)
        made.turns.read("other", 0)
        with pytest.raises(Busy, match="read by another stream"):
            await first.next()


async def test_a_turn_that_no_stream_reads_is_forgotten() -> None:
    async with ring(attach_timeout=0.01) as made:
        turn = made.turn()
        made.turns.watch(turn)
        last = await over(turn)
        assert isinstance(last, TurnCancelled)
        assert "no client read the turn's tokens" in str(last)
        await eventually(lambda: not made.turns._ended)
        with pytest.raises(NotFound):
            made.turns.read("turn", 0)


async def test_a_turn_that_is_read_ends_at_its_deadline() -> None:
    async with ring(attach_timeout=0.001) as made:
        turn = made.turn(deadline_seconds=0.05)
        made.turns.watch(turn)
        made.turns.read("turn", 0)
        assert isinstance(await over(turn), DeadlineExceeded)


async def test_tokens_that_come_within_the_pause_of_a_reader_are_told_together() -> None:
    async with ring() as made:
        turn = made.turn()
        reader = made.turns.read("turn", 0, interval=0.02)
        await reader.next()
        turn.add_token(7, None)
        reading = asyncio.create_task(reader.next())
        await asyncio.sleep(0)
        turn.add_token(8, None)
        event = await reading
        assert isinstance(event, TokensEvent)
        assert event.token_ids == (7, 8)


async def test_the_last_tokens_of_a_turn_wait_for_no_pause() -> None:
    async with ring() as made:
        turn = made.turn()
        reader = made.turns.read("turn", 0, interval=3600.0)
        await reader.next()
        turn.add_token(7, None)
        await made.turns.end("turn", TurnCancelled("gone"))
        async with asyncio.timeout(WAIT_SECONDS):
            assert isinstance(await reader.next(), TokensEvent)
            with pytest.raises(TurnCancelled):
                await reader.next()
