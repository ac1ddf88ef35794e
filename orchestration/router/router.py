"""Router: begins and ends turns on the rings that suit them, and knows every ring and conversation.

The router is on no token's path. A gateway begins a turn (`begin_turn`), a decode leader ends it (`end_turn`). A turn
passes through `begin` (admission and reservations), `attempts` (plan and prefill) and `registry` (its end).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cp_core.errors import Busy, TurnCancelled
from orchestration.conversations.mover import ConversationMover, MoveCounts
from orchestration.conversations.operations import ConversationOperations
from orchestration.conversations.rebalancing import DrainRebalancing, FullRebalancing
from orchestration.conversations.store import ConversationStore
from orchestration.placement.placer import RingPlacer
from orchestration.placement.planner import Planner
from orchestration.placement.registry import RegisteredRing, RingRegistry, status_of, status_without
from orchestration.protocol.ports import Peers
from orchestration.protocol.rings import AWAY, RingEvent
from orchestration.protocol.turns import BegunTurn, ResumeTurn, RingRegistration, TurnOutcome, TurnRequest
from orchestration.protocol.views import ConversationList, ConversationView, MoveTotals, ServerView
from orchestration.router.attempts import TurnAttempts
from orchestration.router.begin import TurnAdmission, TurnReservations, refused_whole
from orchestration.router.drains import Drains, RingReturns
from orchestration.router.registry import TurnRegistry
from orchestration.tasks import TaskSet

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Settings of the router. Times in seconds; `conversation_ttl` 0: conversations are never forgotten for their age.

    `max_waiting_turns` bounds the turns that wait for one conversation, and those that wait for rings to return. A ring
    has `return_seconds` for that.
    """

    max_conversations: int = 10_000
    conversation_ttl: float = 0.0
    max_waiting_turns: int = 64
    return_seconds: float = 150.0
    control_timeout: float = 20.0
    transfer_timeout: float = 60.0
    max_positions: int


class Router:
    """Surface of the router. `peers` reaches the leaders, `clock` tells seconds, `placer` chooses rings."""

    def __init__(
        self, settings: RouterSettings, planner: Planner, peers: Peers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planner = planner
        self._peers = peers
        self._tasks = TaskSet("the router")
        self._rings = rings = RingRegistry(clock)
        self._conversations = store = ConversationStore(
            settings.max_conversations,
            max_waiting=settings.max_waiting_turns,
            ttl_seconds=settings.conversation_ttl,
            clock=clock,
        )
        self._turns = turns = TurnRegistry(peers, rings, store, self._tasks, settings.control_timeout)
        self._operations = ConversationOperations(store, peers, rings, turns, self._tasks)
        self._returns = RingReturns(rings, seconds=settings.return_seconds, max_waiting=settings.max_waiting_turns)
        self._drains = Drains(peers, rings, self._returns)
        self._moves = MoveCounts()
        self.placer = RingPlacer(rings, planner)
        self._admission = TurnAdmission(
            store, self._operations, self._returns, self.placer, turns, self._tasks, settings.max_positions
        )
        reservations = TurnReservations(peers, self.placer, turns, self._tasks)
        self._attempts = TurnAttempts(
            peers, planner, reservations, turns, self._moves, self._tasks, settings.control_timeout
        )
        mover = ConversationMover(
            store,
            peers,
            self._moves,
            control_timeout=settings.control_timeout,
            transfer_timeout=settings.transfer_timeout,
        )
        self._drain_rebalancing = DrainRebalancing(
            store, rings, mover, self._moves, self._tasks, self._returns.is_waiting
        )
        self._full_rebalancing = FullRebalancing(store, rings, planner, mover, self._moves, self._tasks)

    # --- turns -------------------------------------------------------------------------------------------------------

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        """Plan a turn and start it; it may have to wait for its conversation, or for a ring to return.

        Raises InvalidRequest, NotFound, Busy, CapacityExceeded, DeadlineExceeded, NotBegun.
        """
        if self._is_known(request.request_id):
            raise Busy(f"request_id: {request.request_id!r} is running already; choose another")
        turn = await self._admission.admit(request)
        with refused_whole():
            plan = await self._attempts.start(turn)
        return BegunTurn(
            turn_id=turn.turn_id,
            decode_endpoint=turn.decode.registration.endpoint,
            prompt_tokens=len(turn.prompt),
            plan=plan,
        )

    def _is_known(self, request_id: str) -> bool:
        """Return whether a turn of that request runs or waits."""
        waits = self._conversations.is_waiting(request_id) or self._returns.is_waiting(request_id)
        return waits or self._turns.of_request(request_id) is not None

    async def resume_turn(self, request: ResumeTurn) -> None:
        """Make the KV of a turn again, of its prompt and of its decoded tokens. Idempotent.

        Answers when the KV has been handed over. KV that the prefill ring retains is not computed again. Raises
        NotFound for a turn that has ended, else the rings' errors; then the turn may be resumed later.
        """
        await self._attempts.resume(request)

    async def end_turn(self, outcome: TurnOutcome) -> int:
        """End a turn. Return how many tokens its decode ring should retain. Idempotent."""
        return await self._turns.end(outcome)

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """End running and waiting turns by request id. Return (aborted, unknown)."""
        error = TurnCancelled("the request was aborted")
        waits = (self._conversations, self._returns)
        aborted = {name for name in request_ids if any(wait.end_wait(name, error) for wait in waits)}
        running = {name: self._turns.of_request(name) for name in request_ids}
        await asyncio.gather(*(self._turns.abort(turn, error) for turn in running.values() if turn is not None))
        aborted |= {name for name, turn in running.items() if turn is not None}
        names = list(dict.fromkeys(request_ids))
        return [name for name in names if name in aborted], [name for name in names if name not in aborted]

    @property
    def num_running(self) -> int:
        """Turns that have begun and not ended."""
        return len(self._turns)

    # --- conversations -----------------------------------------------------------------------------------------------

    @property
    def num_conversations(self) -> int:
        """Conversations in the store."""
        return len(self._conversations)

    @property
    def moves(self) -> tuple[MoveTotals, ...]:
        """Retained KV that was moved between rings."""
        return self._moves.totals()

    async def get_conversation(self, conversation_id: str) -> ConversationView:
        """Show a conversation. Raises NotFound."""
        return await self._operations.get(conversation_id)

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationList:
        """Return a page of the conversations whose id begins with `prefix`. Raises InvalidRequest."""
        return await self._operations.list(prefix, after, limit)

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationView:
        """Fork a conversation; see `ConversationOperations.fork`. Raises NotFound, InvalidRequest, Busy."""
        return await self._operations.fork(source_id, new_id, at_token)

    async def delete_conversation(self, conversation_id: str) -> None:
        """Forget a conversation and release its KV. Raises NotFound, Busy."""
        await self._operations.delete(conversation_id)

    def expire_conversations(self) -> None:
        """Forget the conversations whose time to live is over; their KV is released in the background."""
        self._operations.expire()

    # --- rings -------------------------------------------------------------------------------------------------------

    async def register_ring(self, ring: RingRegistration) -> int:
        """Enter a leader's announcement. Return how many turns are on its ring, or come, and conversations to move."""
        if self._rings.register(ring):
            log.info("%s ring %s %s with %d ranks", ring.role, ring.name, ring.doing, ring.num_ranks)
            self._returns.note(ring)
        known = self._rings.named(ring.role, ring.name)
        if known is None:
            self._drain_rebalancing.left(ring.name)
            return 0
        if known.registration.is_draining:
            return known.num_turns + self._drain_rebalancing.go_on(known)
        self._drain_rebalancing.serves(ring.name)
        self._full_rebalancing.note(known)
        return known.num_turns

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        """Drain a ring; see `Drains.drain`. Raises NotFound, InvalidRequest, Busy, Unavailable."""
        await self._drains.drain(name, seconds, force=force)

    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        """Restart a ring; see `Drains.restart`. Raises NotFound, InvalidRequest, Unavailable."""
        await self._drains.restart(name, seconds, leaving_node=leaving_node)

    async def undrain_ring(self, name: str) -> None:
        """Let a ring serve again; see `Drains.undrain`. Raises NotFound, Unavailable."""
        await self._drains.undrain(name)

    async def next_return(self) -> RingEvent:
        """Return the next ring that has left and is wanted again."""
        return await self._returns.next_wanted()

    @property
    def rings(self) -> Sequence[RegisteredRing]:
        """Every ring that has announced itself."""
        return self._rings.all()

    @property
    def rings_away(self) -> Sequence[RingRegistration]:
        """Rings that have left and are to return, as they were."""
        return self._returns.away()

    @property
    def num_waiting_for_rings(self) -> int:
        """Turns that wait for a ring to return."""
        return self._returns.num_waiting

    async def get_server_info(self) -> ServerView:
        """Show every ring, and how busy the service is."""
        # Read before the rings are asked: a ring that leaves or returns meanwhile is shown once all the same.
        rings, away, returns = self._rings.all(), self._returns.away(), self._returns
        statuses = await asyncio.gather(*(status_of(ring, self._peers) for ring in rings))
        shown_in = self._planner.corrections.shown_in
        shown = [shown_in(status, ring.registration) for status, ring in zip(statuses, rings, strict=True)]
        shown += [status_without(ring, AWAY) for ring in away]
        return ServerView(
            selector=self._planner.selector,
            rings=tuple(replace(status, is_restarting=returns.is_expected(status.name)) for status in shown),
            conversations=len(self._conversations),
            running_turns=len(self._turns),
            turns_waiting_for_rings=returns.num_waiting,
            drains=self._drain_rebalancing.views(),
            moves=self._moves.totals(),
        )

    async def close(self) -> None:
        """End background work."""
        await self._tasks.close()
