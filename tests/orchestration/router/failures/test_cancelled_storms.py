"""Storms of requests that end at any moment and in any way leave no KV, turn, task or file behind."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from ringserve.cp_core.errors import DeadlineExceeded, NotFound, TurnCancelled
from ringserve.orchestration.protocol.turns import TokensEvent, TurnRequest
from tests.orchestration.service import Service
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.models import Oracle, random_tokens

NUM_REQUESTS = 60
NUM_ROUNDS = 3
AT_ONCE = 30
MAX_TOKENS = 12
LENGTHS = (5, 33, 120, 400)
NUM_CONVERSATIONS = 20
CONNECTION_FILES = 2
"""Files of the one connection from a rank to a rank of the other ring: both its ends are in this process."""


class Storm:
    """One round of requests. A client without a hurry reads its whole answer and must get the right one."""

    def __init__(self, service: Service, expected: Mapping[int, list[int]], seed: int) -> None:
        self._service = service
        self._expected = expected
        self._chance = random.Random(seed)
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.ends: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()

    async def run(self) -> None:
        ways = (self._whole, self._hurried, self._aborted, self._hung_up, self._expired, self._in_line)
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_REQUESTS):
                group.create_task(self._one(ways[number % len(ways)], number))

    async def _one(self, way, number: int) -> None:  # type: ignore[no-untyped-def]
        async with self._gate:
            length = self._chance.choice(LENGTHS)
            self.ends[await way(length, number)] += 1

    def _request(
        self, length: int, name: str = "", *, deadline: float = WAIT_SECONDS, wait: bool = False
    ) -> TurnRequest:
        return self._service.request(
            random_tokens(length, length), max_tokens=MAX_TOKENS, conversation=name, deadline=deadline, wait=wait
        )

    async def _whole(self, length: int, number: int) -> str:
        answer = await self._service.answer(self._request(length, f"c{number}" if number % 4 == 0 else ""))
        assert answer.token_ids == self._expected[length]
        return "answered"

    async def _hurried(self, length: int, number: int) -> str:
        """Cancel the client after a while, wherever its turn is by then."""
        turn = asyncio.create_task(self._service.answer(self._request(length, f"c{number}" if number % 2 else "")))
        await asyncio.wait([turn], timeout=self._chance.uniform(0, 0.4))
        return await self._cancel(turn)

    async def _aborted(self, length: int, number: int) -> str:
        request = self._request(length)
        turn = asyncio.create_task(self._service.answer(request))
        await asyncio.wait([turn], timeout=self._chance.uniform(0, 0.4))
        self._note_stage(request)
        aborted, _ = await self._service.router.abort_requests([request.request_id])
        if not aborted:
            return await self._cancel(turn)  # it had not begun, or had ended
        try:
            await turn
        except TurnCancelled:
            return "aborted"
        return "answered"  # it ended in that very moment

    async def _hung_up(self, length: int, number: int) -> str:
        """Hang up after so many tokens: after none, while the turn migrates, while it decodes."""
        request, seen = self._request(length), 0
        tokens = self._chance.choice((0, 0, 1, 1, 4))
        begun = await self._service.router.begin_turn(request)
        async with aclosing(self._service.peers.decode(begun.decode_endpoint).stream_turn(begun.turn_id)) as events:
            while seen < tokens:
                event = await anext(events)
                seen += len(event.token_ids) if isinstance(event, TokensEvent) else 0
            self._note_stage(request)
        return "hung up"

    async def _expired(self, length: int, number: int) -> str:
        try:
            await self._service.answer(self._request(length, deadline=self._chance.uniform(0.005, 0.5)))
        except DeadlineExceeded:
            return "expired"
        return "answered"

    async def _in_line(self, length: int, number: int) -> str:
        """Run turns of few conversations behind each other, some of which do not wait to the end."""
        name = f"line-{self._chance.randrange(NUM_CONVERSATIONS)}"
        request = self._request(length, name, wait=True)
        turn = asyncio.create_task(self._service.answer(request))
        await asyncio.wait([turn], timeout=self._chance.choice((0.05, 0.3, WAIT_SECONDS)))
        return await self._cancel(turn)

    async def _cancel(self, turn: asyncio.Task) -> str:  # type: ignore[type-arg]
        if turn.done():
            await turn
            return "answered"
        turn.cancel()
        try:
            await turn
        except asyncio.CancelledError:
            return "cancelled"
        return "answered"

    def _note_stage(self, request: TurnRequest) -> None:
        turn = self._service.router._turns.of_request(request.request_id)
        on_decode = self._service.decode._turns.get(turn.turn_id) if turn else None
        self.stages[on_decode.state.name if on_decode else "NOT BEGUN OR ENDED"] += 1


async def forget_conversations(service: Service) -> None:
    for item in (await service.router.list_conversations("", "", 1000)).conversations:
        try:
            await service.router.delete_conversation(item.conversation_id)
        except NotFound:  # its first turn was cancelled, and has ended since
            continue


def holds_nothing(service: Service, free: list[int]) -> bool:
    """Return whether no turn runs, no block is taken and no transfer is open on any rank."""
    ranks = [*service.prefill_ranks.made, *service.decode_ranks.made]
    return (
        service.router.num_running == 0
        and all(rank.worker.parts.sender.num_open == rank.worker.parts.receiver.num_open == 0 for rank in ranks)
        and service.free_blocks() == free
    )


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_storm_of_requests_that_end_at_random_stages_leaves_nothing_behind_three_times(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    expected = {length: oracle.greedy(random_tokens(length, length), MAX_TOKENS) for length in LENGTHS}
    stages: Counter[str] = Counter()
    async with Service(model_paths["llama_gqa"], 2, 3, chunk_tokens=64) as service:
        free = service.free_blocks()
        tasks, files = len(asyncio.all_tasks()), num_files() + CONNECTION_FILES * 2 * 2 * 3
        for number in range(NUM_ROUNDS):
            storm = Storm(service, expected, seed=number)
            await storm.run()
            await _at_rest(service, free)
            stages += storm.stages
            assert sum(storm.ends.values()) == NUM_REQUESTS
            assert min(storm.ends[end] for end in ("answered", "cancelled", "aborted", "hung up")) > 0, storm.ends
            probe = await service.answer(service.request(random_tokens(33, 33), max_tokens=MAX_TOKENS))
            assert probe.token_ids == expected[33]
            await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
            await eventually(lambda most=files: num_files() <= most)  # type: ignore[misc]
            if number == 1:
                files = num_files()  # by now every connection there will be has been made
            service.check_integrity()
    # Queued or prefilling; migrating; decoding.
    assert {"RESERVED", "STREAMING", "ADMITTED"} <= stages.keys(), stages


async def _at_rest(service: Service, free: list[int]) -> None:
    """Wait until everything is free. No timeout may free it: those of the service are as long as this wait's limit."""
    await eventually(lambda: service.router.num_running == 0)
    await forget_conversations(service)
    await eventually(lambda: holds_nothing(service, free))
    statuses = [await leader.get_status() for leader in (service.prefill, service.decode)]
    assert all(status.num_requests_running == status.num_requests_waiting == 0 for status in statuses)
