"""A router that dies and is started again on its journal, while its turns go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringserve.cp_core.errors import Busy, RingserveError
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import BegunTurn, FinishedEvent, TokensEvent, TurnRequest
from ringserve.orchestration.router import recovery
from ringserve.orchestration.router.registry import RunningTurn
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.journal import records
from tests.orchestration.service import QUIET, Service
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

MODEL = "llama_gqa"


class Reader:
    """Gateway that reads a turn's stream."""

    def __init__(self, service: Service, begun: BegunTurn) -> None:
        self.begun = begun
        self.tokens: list[int] = []
        self.is_finished = False
        self.error: RingserveError | None = None
        self._service = service
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stream = self._service.peers.decode(self.begun.decode_endpoint).stream_turn(self.begun.turn_id)
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, TokensEvent):
                        self.tokens += event.token_ids
                    self.is_finished = self.is_finished or isinstance(event, FinishedEvent)
        except RingserveError as error:
            self.error = error


async def begin(service: Service, request: TurnRequest) -> Reader:
    """Begin a turn and read its first token."""
    reader = Reader(service, await service.router.begin_turn(request))
    await eventually(lambda: bool(reader.tokens))
    return reader


async def announce(service: Service) -> None:
    """Let every ring announce itself, as it does at intervals."""
    for leader in service.peers.leaders.values():
        await leader.announce()


@pytest.mark.parametrize(
    ("passed", "left"), [(0.0, 60.0), (20.0, 40.0), (59.0, 1.0), (86_400.0, 60.0), (-86_400.0, 60.0)]
)
def test_a_clock_that_was_set_meanwhile_neither_ends_a_turn_nor_prolongs_it(
    passed: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = records.begun("t", "c", [1])
    monkeypatch.setattr(recovery, "time", SimpleNamespace(time=lambda: record.begun_at + passed))
    assert recovery.seconds_left(record) == left


async def test_a_stream_does_not_notice_the_death_of_the_router(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path) as service:
        prompt = random_tokens(40)
        reader = await begin(service, service.request(prompt, max_tokens=200, conversation="c"))
        await service.crash_router()
        assert not reader.task.done()
        service.start_router()
        await announce(service)
        assert service.router.num_running == 1
        await reader.task
        assert reader.is_finished
        assert reader.tokens == oracles[MODEL].greedy(prompt, 200)
        history = prompt + reader.tokens
        answer = await service.answer(service.request([7, 8], conversation="c", mode=PromptMode.APPEND))
        assert answer.begun.prompt_tokens == len(history) + 2
        assert answer.begun.plan.cached_tokens == len(history) - 1
        assert answer.token_ids == oracles[MODEL].greedy([*history, 7, 8], 5)
        service.check_integrity()


async def test_an_idle_conversation_goes_on_with_the_kv_that_both_rings_retain(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path) as service:
        prompt = random_tokens(40)
        first = await service.answer(service.request(prompt, conversation="c"))
        before = await service.router.get_conversation("c")
        await service.crash_router()
        service.start_router()
        await announce(service)
        after = await service.router.get_conversation("c")
        assert [(place.role, place.ring, place.num_tokens) for place in after.placements] == [
            (place.role, place.ring, place.num_tokens) for place in before.placements
        ]
        history = prompt + first.token_ids
        answer = await service.answer(service.request([7], conversation="c", mode=PromptMode.APPEND))
        assert answer.begun.plan.cached_tokens == len(history) - 1
        assert answer.token_ids == oracles[MODEL].greedy([*history, 7], 5)


async def test_kv_of_a_history_that_was_edited_since_is_not_taken_for_the_conversations(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path, max_direct_tokens=64) as service:
        prompt = random_tokens(40)
        await service.answer(service.request(prompt, conversation="c"))
        # The decode ring computes this turn: the prefill ring's KV beyond the first 20 tokens is of the past.
        edited = [*prompt[:20], *random_tokens(15, seed=9)]
        second = await service.answer(service.request(edited, conversation="c", algorithm=Algorithm.DECODE_RING))
        retained = service.prefill.ring.pool.num_retained("c")
        await service.crash_router()
        service.start_router()
        await announce(service)
        view = await service.router.get_conversation("c")
        on_prefill = next(place for place in view.placements if place.role == "prefill")
        assert on_prefill.num_tokens == 20 < retained
        history = edited + second.token_ids
        answer = await service.answer(service.request([*history, 3], conversation="c", algorithm=None, max_tokens=6))
        assert answer.token_ids == oracles[MODEL].greedy([*history, 3], 6)


async def test_an_answer_that_ends_while_the_router_is_away_is_committed(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path) as service:
        prompt = random_tokens(40)
        reader = await begin(service, service.request(prompt, max_tokens=60, conversation="c"))
        await service.crash_router()
        await eventually(lambda: len(reader.tokens) == 60)
        service.start_router()
        with pytest.raises(Busy):
            await service.router.begin_turn(service.request([1], conversation="c", mode=PromptMode.APPEND))
        await announce(service)
        await reader.task
        assert reader.is_finished
        view = await service.router.get_conversation("c")
        assert view.num_tokens == 100
        assert reader.tokens == oracles[MODEL].greedy(prompt, 60)


async def test_a_turn_that_no_ring_reports_fails_and_leaves_its_conversation_as_it_was(
    model_paths: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_SECONDS", 0.1)
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path, heartbeat=QUIET) as service:
        free = service.free_blocks()
        first = await service.answer(service.request(random_tokens(30), conversation="c"))
        reader = await begin(service, service.request([1, 2], max_tokens=300, conversation="c", mode=PromptMode.APPEND))
        await service.crash_router()
        service.start_router()
        await eventually(lambda: not service.router._recovery.pending)
        view = await service.router.get_conversation("c")
        assert (view.num_tokens, view.running_request_id) == (30 + len(first.token_ids), "")
        await service.router.delete_conversation("c")
        # A ring that tells of it later ends it, since its conversation has changed, and the client learns why.
        await announce(service)
        await reader.task
        assert "the router was started again" in str(reader.error)
        await eventually(lambda: service.free_blocks() == free)


async def test_a_turn_that_is_prefilled_meanwhile_goes_on(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path, chunk_tokens=8) as service:
        prompt = random_tokens(200)
        begun = await service.router.begin_turn(service.request(prompt, max_tokens=8, conversation="c"))
        await eventually(lambda: any(turn.is_begun for turn in service.prefill.turns_here()))
        await service.crash_router()
        reader = Reader(service, begun)
        assert not reader.tokens
        service.start_router()
        await announce(service)
        await reader.task
        assert reader.is_finished, reader.error
        assert reader.tokens == oracles[MODEL].greedy(prompt, 8)
        view = await service.router.get_conversation("c")
        assert sorted(place.role for place in view.placements) == ["decode", "prefill"]


async def test_a_turn_that_was_reserved_and_not_begun_leaves_nothing_behind(
    model_paths: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path) as service:
        free = service.free_blocks()
        turn = service.request(random_tokens(30), max_tokens=8, conversation="c")
        turns, noted = service.router._turns, list[Awaitable[None]]()
        note_begun = turns.note_begun

        def note_without_end(turn: RunningTurn) -> Awaitable[object]:
            noted.append(note_begun(turn))
            return asyncio.get_running_loop().create_future()  # never done: the turn stays reserved

        monkeypatch.setattr(turns, "note_begun", note_without_end)
        beginning = asyncio.create_task(service.router.begin_turn(turn))
        await eventually(lambda: all(leader.num_turns for leader in service.peers.leaders.values()))
        await asyncio.gather(*noted)
        beginning.cancel()
        monkeypatch.setattr(turns, "drop", lambda turn, reason: asyncio.sleep(0))
        await asyncio.gather(beginning, return_exceptions=True)
        await service.crash_router()
        service.start_router()
        await announce(service)
        await eventually(lambda: service.free_blocks() == free)
        assert service.router.num_conversations == 0


async def test_conversations_that_were_deleted_or_forked_are_so_after_a_restart(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path) as service:
        prompt = random_tokens(30)
        await service.answer(service.request(prompt, conversation="c"))
        await service.router.fork_conversation("c", "fork", 25)
        await service.router.delete_conversation("c")
        await service.crash_router()
        service.start_router()
        await announce(service)
        assert service.router.num_conversations == 1
        answer = await service.answer(service.request([4], conversation="fork", mode=PromptMode.APPEND))
        assert answer.begun.plan.cached_tokens == 25
        assert answer.token_ids == oracles[MODEL].greedy([*prompt[:25], 4], 5)


async def test_a_turn_that_comes_before_the_rings_have_announced_themselves_waits_for_them(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], tmp_path: Path
) -> None:
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path) as service:
        prompt = random_tokens(30)
        first = await service.answer(service.request(prompt, conversation="c"))
        await service.crash_router()
        service.start_router()
        history = prompt + first.token_ids
        early = asyncio.create_task(service.answer(service.request([5], conversation="c", mode=PromptMode.APPEND)))
        await asyncio.sleep(0)
        await announce(service)
        answer = await early
        assert answer.begun.plan.cached_tokens == len(history) - 1
        assert answer.token_ids == oracles[MODEL].greedy([*history, 5], 5)
