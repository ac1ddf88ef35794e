"""Turns begin, end, are preempted, aborted, resumed, and lose rings and gateways in any order.

Nothing of them stays with the router, and no turn counts twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringserve.cp_core.errors import NotFound, RingserveError
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import BegunTurn, LostTurn, ResumeTurn, TurnOutcome, TurnRequest
from ringserve.orchestration.router.router import Router, RouterSettings
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.fake_ranks import MODEL
from tests.orchestration.router.fake_rings import SLOW_SECONDS, FakeRing, FakeRings, Mood, shards
from tests.virtual_time import VirtualTimeLoop

DEADLINE_SECONDS = 20.0
LONG_SECONDS = 200.0
"""More than any turn's deadline and lease, and all timeouts of calls to rings."""
CONVERSATIONS = ("", "a", "b")
NUM_RINGS = 2


@dataclass(slots=True)
class Client:
    """Turn of a client, as the model knows it.

    `is_disturbed`: something may end the turn before its success is told. `has_succeeded`: that was told, and
    `is_certain`: the router must have taken it. Each resumption is a call of another `reader`.
    """

    request: TurnRequest
    begin: asyncio.Task[BegunTurn]
    is_disturbed: bool = False
    has_succeeded: bool = False
    is_certain: bool = False
    attempts: int = 1
    reader: int = 0
    answer: tuple[int, ...] = ()
    resumption: asyncio.Task[None] | None = None

    @property
    def begun(self) -> BegunTurn | None:
        """Return the router's answer, if it has answered."""
        failed = not self.begin.done() or self.begin.cancelled() or self.begin.exception() is not None
        return None if failed else self.begin.result()


class Turns(RuleBasedStateMachine):
    """Random schedules of two prefill rings and two decode rings, in virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = VirtualTimeLoop()
        self._clients: list[Client] = []
        self._calls: list[asyncio.Task[Any]] = []
        self._lengths: dict[str, set[int]] = {name: {0} for name in CONVERSATIONS if name}
        self._rings = FakeRings(NUM_RINGS, NUM_RINGS)
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        limits = RouterSettings(max_positions=4096, ring_lease=0.0)
        self._router = Router(limits, Planner(MODEL, PlannerSettings()), self._rings, self._loop.time)
        for ring in self._rings.rings.values():
            ring.on_aborted = self._tell_failure
            await self._router.register_ring(ring.registration)

    def _call(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._calls.append(task)
        return task

    def _tell_failure(self, turn_id: str) -> None:
        self._call(self._router.end_turn(TurnOutcome(turn_id=turn_id, ok=False)))

    def _pass(self, seconds: float) -> None:
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def _decoding(self, *, computed: bool) -> list[tuple[Client, FakeRing, str]]:
        """Return the turns that a decode ring holds, with the ring and the turn's id."""
        found = []
        for client in self._clients:
            if (begun := client.begun) is not None:
                ring = self._rings.rings[begun.decode_endpoint]
                if begun.turn_id in (ring.computed if computed else ring.held):
                    found.append((client, ring, begun.turn_id))
        return found

    def _waiting(self) -> list[Client]:
        return [client for client in self._clients if not client.begin.done()]

    def _disturb(self, clients: list[Client]) -> None:
        for client in clients:
            client.is_disturbed = True

    # --- what clients do ---------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(CONVERSATIONS), new=st.integers(1, 3), wait=st.booleans())
    def begin(self, name: str, new: int, wait: bool) -> None:
        length = max(self._lengths.get(name, {0})) + new
        request = TurnRequest(
            request_id=f"request-{len(self._clients)}",
            conversation_id=name,
            prompt_mode=PromptMode.WHOLE_HISTORY,
            token_ids=np.arange(length, dtype=np.int64) % MODEL.vocab_size,
            sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=8, stop_token_ids=()),
            deadline_seconds=DEADLINE_SECONDS,
            wait=wait,
            reader="reader-0",
        )
        self._clients.append(Client(request, self._call(self._router.begin_turn(request))))

    @precondition(lambda self: self._clients)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self._clients))
        client.is_disturbed = True
        self._call(self._router.abort_requests([client.request.request_id]))

    @precondition(lambda self: self._waiting())
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self._waiting()))
        client.is_disturbed = True
        client.begin.cancel()

    @precondition(lambda self: any(client.begin.done() for client in self._clients))
    @rule(data=st.data(), num_tokens=st.integers(0, 3), has_started=st.booleans())
    def resume_elsewhere(self, data: st.DataObject, num_tokens: int, has_started: bool) -> None:
        """Have another gateway go on, as the client of a lost one asks it to."""
        client = data.draw(st.sampled_from([client for client in self._clients if client.begin.done()]))
        lost = LostTurn(token_ids=(5,) * num_tokens, prompt_tokens=len(client.request.token_ids) if has_started else 0)
        runs = any(each is client for each, _, _ in self._decoding(computed=True))
        before = client.begun if runs and not client.is_disturbed else None
        self._resume(client, lost)
        if before is not None or client.is_certain:
            self._pass(2 * SLOW_SECONDS)  # where the end waits for a slow prefill ring
            begun = client.begun
            assert begun is not None, "a running turn goes on, and an answer is told again"
            assert (begun.ended is not None) == client.is_certain
            assert begun.ended is None or begun.ended.token_ids == client.answer
            assert before is None or begun.turn_id == before.turn_id

    @precondition(lambda self: self._decoding(computed=False))
    @rule(data=st.data(), num_tokens=st.integers(0, 3), is_told=st.booleans())
    def fail_over(self, data: st.DataObject, num_tokens: int, is_told: bool) -> None:
        """Have the turn's own gateway begin it again, after its ring was lost as the ring itself may have told."""
        client, ring, turn_id = data.draw(st.sampled_from(self._decoding(computed=False)))
        client.is_disturbed = True
        if is_told:
            ring.drop(turn_id)
            self._call(self._router.end_turn(TurnOutcome(turn_id=turn_id, ok=False, lost_role="decode")))
        self._resume(
            client,
            LostTurn(turn_id=turn_id, token_ids=(5,) * num_tokens, prompt_tokens=len(client.request.token_ids)),
        )

    def _resume(self, client: Client, lost: LostTurn) -> None:
        client.reader += 1
        again = replace(client.request, resume=lost, reader=f"reader-{client.reader}")
        client.begin = self._call(self._router.begin_turn(again))

    @precondition(lambda self: self._decoding(computed=False))
    @rule(data=st.data())
    def abort_late(self, data: st.DataObject) -> None:
        """Have a gateway abort a turn that another one reads since: it goes on."""
        client, _, _ = data.draw(st.sampled_from(self._decoding(computed=False)))
        if client.reader:
            self._call(self._router.abort_requests([client.request.request_id], f"reader-{client.reader - 1}"))

    # --- what rings do -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self._decoding(computed=True))
    @rule(data=st.data(), num_tokens=st.integers(1, 3), again=st.booleans())
    def end(self, data: st.DataObject, num_tokens: int, again: bool) -> None:
        client, ring, turn_id = data.draw(st.sampled_from(self._decoding(computed=True)))
        ring.drop(turn_id)
        length = len(client.request.token_ids) + num_tokens
        client.has_succeeded, client.is_certain = True, not client.is_disturbed
        client.answer = (5,) * num_tokens
        outcome = TurnOutcome(
            turn_id=turn_id,
            ok=True,
            token_ids=client.answer,
            kv_tokens=length - 1,
            shards=shards(0, length - 1),
        )
        if name := client.request.conversation_id:
            self._lengths[name] = {length} if client.is_certain else self._lengths[name] | {length}
        for _ in range(1 + again):
            self._call(self._router.end_turn(outcome))

    @precondition(lambda self: self._decoding(computed=False))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        client, ring, turn_id = data.draw(st.sampled_from(self._decoding(computed=False)))
        client.is_disturbed = True
        ring.drop(turn_id)
        self._tell_failure(turn_id)

    @precondition(lambda self: self._decoding(computed=True))
    @rule(data=st.data(), num_tokens=st.integers(1, 3))
    def preempt_and_resume(self, data: st.DataObject, num_tokens: int) -> None:
        client, ring, turn_id = data.draw(st.sampled_from(self._decoding(computed=True)))
        if client.resumption is not None and not client.resumption.done():
            return
        ring.computed.discard(turn_id)
        client.attempts += 1
        resume = ResumeTurn(
            turn_id=turn_id,
            attempt=client.attempts,
            token_ids=(5,) * num_tokens,
            deadline_seconds=DEADLINE_SECONDS,
        )
        client.resumption = self._call(self._router.resume_turn(resume))

    @rule(number=st.integers(0, 2 * NUM_RINGS - 1), mood=st.sampled_from(Mood))
    def change_mood(self, number: int, mood: Mood) -> None:
        ring = list(self._rings.rings.values())[number]
        ring.mood = mood
        if mood is Mood.GONE:
            self._disturb(self._clients)

    @rule(number=st.integers(0, 2 * NUM_RINGS - 1))
    def start_again(self, number: int) -> None:
        ring = list(self._rings.rings.values())[number]
        ring.be_born_again()
        self._disturb(self._clients)
        self._call(self._router.register_ring(ring.registration))

    @rule(seconds=st.sampled_from((0.0, 0.1, 0.5, 1.0, 5.0, LONG_SECONDS)))
    def wait(self, seconds: float) -> None:
        if seconds > 1.0:
            self._disturb(self._clients)
        self._pass(seconds)

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def counts_are_those_of_running_turns(self) -> None:
        self._pass(0.0)
        turns = sum(ring.num_turns for ring in self._router.rings)
        assert self._router.num_running <= turns <= 2 * self._router.num_running
        assert all(ring.num_turns >= 0 and ring.num_prefilling >= 0 for ring in self._router.rings)

    @invariant()
    def calls_fail_only_in_sentences(self) -> None:
        for task in self._calls:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, RingserveError), repr(error)

    def teardown(self) -> None:
        try:
            self._loop.run_until_complete(self._quiesce())
        finally:
            self._loop.run_until_complete(self._router.close())
            self._loop.close()

    async def _quiesce(self) -> None:
        """Let every turn come to an end, and look at what is left of them."""
        for ring in self._rings.rings.values():
            ring.mood = Mood.PROMPT
            await self._router.register_ring(ring.registration)
        await asyncio.sleep(LONG_SECONDS)
        self.calls_fail_only_in_sentences()
        assert all(task.done() for task in self._calls)
        assert self._router.num_running == 0
        for known in self._router.rings:
            assert (known.num_turns, known.num_prefilling) == (0, 0), known.name
        for fake in self._rings.rings.values():
            assert fake.was_gone or fake.role == "decode" or not fake.held, (fake.name, fake.held)
        for name, lengths in self._lengths.items():
            ends = [client for client in self._clients if client.request.conversation_id == name]
            try:
                view = await self._router.get_conversation(name)
            except NotFound:
                assert 0 in lengths
                continue
            assert view.running_request_id == ""
            assert view.num_waiting == 0
            assert view.num_tokens in lengths
            least, most = sum(end.is_certain for end in ends), sum(end.has_succeeded for end in ends)
            assert least <= view.num_turns <= most


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
