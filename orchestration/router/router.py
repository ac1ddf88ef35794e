"""Router: begins and ends turns on the rings that suit them, and knows every ring and conversation.

The router is on no token's path. A gateway begins a turn (`begin_turn`), a decode leader ends it (`end_turn`). A turn
passes through `admission`, `lifecycle` (reservations, plan and prefill) and `registry` (its end); one that loses a
ring, through `recovery` as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringserve.cp_core.cost.sparse import SparseLosses
from ringserve.cp_core.errors import Busy, CapacityExceeded, TurnCancelled, Unavailable
from ringserve.orchestration.conversations.mover import ConversationMover, MoveCounts
from ringserve.orchestration.conversations.operations import ConversationOperations
from ringserve.orchestration.conversations.prefixes import PromptPrefixes
from ringserve.orchestration.conversations.rebalancing import DrainRebalancing, FullRebalancing
from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.placement.placer import RingPlacer, SparseChooser
from ringserve.orchestration.placement.planner import Planner
from ringserve.orchestration.placement.registry import (
    LEASE_TICKS,
    RegisteredRing,
    RingRegistry,
    status_of,
    status_without,
)
from ringserve.orchestration.placement.scaling import ScalingSettings
from ringserve.orchestration.protocol.inventory import UNKNOWN_EPOCH, KnownEpoch, Registered, RingInventory
from ringserve.orchestration.protocol.journal import JournalPort, NoJournal
from ringserve.orchestration.protocol.plans import Bound
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.rings import AWAY, LOST, LOST_SECONDS, RingEvent, RingStanding, RingState
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    KvQuota,
    ResumeTurn,
    RingRegistration,
    TurnOutcome,
    TurnRequest,
)
from ringserve.orchestration.protocol.views import EventKind, roles_fault
from ringserve.orchestration.router.admission import PromptWaits, TurnAdmission, as_not_begun
from ringserve.orchestration.router.drains import Drains, RingReturns, Scaling
from ringserve.orchestration.router.lifecycle import TurnLifecycle
from ringserve.orchestration.router.recovery import TurnRecovery
from ringserve.orchestration.router.registry import TurnRegistry
from ringserve.orchestration.tasks import TaskSet
from ringserve.views import ConversationInfo, ConversationPage, KvMoves, ServerInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Router settings. Times in seconds; `conversation_ttl` 0: conversations are never forgotten because of their age.

    `max_waiting_turns` bounds the turns that wait for one conversation, and the turns that wait for rings to return. A
    ring that has left and is to return gets `return_seconds` for it. A ring that has not announced itself for
    `ring_lease` counts as lost (0: never). `retain_prompts`: KV of requests without a conversation is retained, and
    every new prompt shares the KV of the longest prefix that rings retain. Tenants share prompts only within a group of
    `share_prompts`. After a restart turns wait a while for the inventories of `num_rings` rings (0: for one of each
    role). With measured `sparse_losses` turns may attend a selection of the keys; a turn that names no bound on its
    loss or time to first token gets `bound`. For each role in `least_rings`, only as many rings serve as `scaling`
    finds necessary, but at least `least_rings[role]`.
    """

    max_conversations: int = 10_000
    conversation_ttl: float = 0.0
    max_waiting_turns: int = 64
    return_seconds: float = 150.0
    ring_lease: float = LOST_SECONDS
    control_timeout: float = 20.0
    transfer_timeout: float = 60.0
    retain_prompts: bool = True
    share_prompts: tuple[tuple[str, ...], ...] = ()
    max_positions: int
    num_rings: int = 0
    sparse_losses: SparseLosses | None = None
    bound: Bound | None = None
    least_rings: Mapping[str, int] = field(default_factory=dict)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)


class Router:
    """The router, as its callers see it. `peers` reaches the leaders, `clock` tells seconds.

    With a `journal` it goes on with the turns and conversations of the router before it.
    """

    def __init__(
        self,
        settings: RouterSettings,
        planner: Planner,
        peers: Peers,
        clock: Callable[[], float] = time.monotonic,
        journal: JournalPort | None = None,
    ) -> None:
        self._journal = journal = journal or NoJournal()
        self._planner = planner
        self._peers = peers
        self._tasks = TaskSet("the router")
        self._lease = settings.ring_lease
        self._leases: asyncio.Task[None] | None = None
        self._least_rings = settings.least_rings
        self._scaled: asyncio.Task[None] | None = None
        self._rings = rings = RingRegistry(clock)
        self._conversations = store = ConversationStore(
            settings.max_conversations,
            max_waiting=settings.max_waiting_turns,
            ttl_seconds=settings.conversation_ttl,
            clock=clock,
            journal=journal,
        )
        self._turns = turns = TurnRegistry(peers, rings, store, self._tasks, settings.control_timeout, journal)
        rings.on_lost = turns.lose
        self._operations = ConversationOperations(store, peers, rings, turns, self._tasks)
        self.prefixes = (
            PromptPrefixes(store, rings, self._operations.num_shareable, communities=settings.share_prompts)
            if settings.retain_prompts
            else None
        )
        self._returns = RingReturns(rings, seconds=settings.return_seconds, max_waiting=settings.max_waiting_turns)
        self._drains = Drains(peers, rings, self._returns)
        self._scaling = Scaling(rings, self._drains, self._returns, settings.scaling, settings.least_rings)
        self._moves = MoveCounts()
        self.placer = RingPlacer(rings, planner)
        self._prompt_waits = PromptWaits(self.prefixes, self.placer, planner, clock) if self.prefixes else None
        self._admission = TurnAdmission(
            store,
            self._operations,
            self._returns,
            self.placer,
            turns,
            self._tasks,
            self.prefixes,
            self._prompt_waits,
            SparseChooser(rings, self.placer, planner, settings.sparse_losses, settings.bound),
            max_positions=settings.max_positions,
        )
        self._lifecycle = TurnLifecycle(
            peers, planner, self.placer, turns, self._moves, self._tasks, self.prefixes, settings.control_timeout
        )
        self._recovery = TurnRecovery(
            journal,
            store,
            rings,
            turns,
            self._lifecycle,
            self._admission,
            self.placer,
            self._returns,
            peers,
            self._tasks,
            settings.num_rings,
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

    def restore(self) -> None:
        """Begin to continue the turns of the router's predecessor. Call it on the event loop, before any other verb."""
        self._recovery.restore()

    # --- turns -------------------------------------------------------------------------------------------------------

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        """Plan a turn and start it; it may have to wait for its conversation, or for a ring to return.

        A turn that has begun before and lost a ring goes on; see `TurnRecovery.begin_again`. Raises InvalidRequest,
        NotFound, ConversationLost, Busy, CapacityExceeded, DeadlineExceeded, NotBegun.
        """
        try:
            return await self._begin(request)
        except (CapacityExceeded, Unavailable) as error:
            self._rings.events.note(EventKind.REFUSAL, "", f"a turn was refused: {error}")
            raise

    async def _begin(self, request: TurnRequest) -> BegunTurn:
        if request.resume is not None:
            begun = await self._begin_again(request)
            if begun is not None:
                went_on = "a turn that lost a ring or its gateway went on"
                self._rings.events.note(EventKind.FAILOVER, begun.plan.decode_ring, went_on)
                return begun
        if self._is_known(request.request_id):
            raise Busy(f"request_id: {request.request_id!r} is running already; choose another")
        if self._recovery.is_early:
            await self._recovery.until_rings_told()
        turn = await self._admission.admit(replace(request, resume=None))
        remembered_tokens = turn.admitted.conversation.num_tokens
        with as_not_begun():
            await self._lifecycle.start(turn)
        return turn.as_begun(remembered_tokens=remembered_tokens)

    async def _begin_again(self, request: TurnRequest) -> BegunTurn | None:
        """Go on with a turn that has begun before; None if nobody knows that it has, so that the caller begins it."""
        await self._recovery.until_request_settled(request.request_id)
        if self._recovery.is_early:
            await self._recovery.until_rings_told()
        if self._is_waiting(request.request_id):
            raise Unavailable(
                f"request {request.request_id!r} waits already for another gateway, which may be gone; retry"
            )
        return await self._recovery.begin_again(request)

    @property
    def _waits(self) -> tuple[ConversationStore | RingReturns | PromptWaits, ...]:
        """Registries of requests that wait for something before they are turns."""
        return self._conversations, self._returns, *((self._prompt_waits,) if self._prompt_waits else ())

    def _is_waiting(self, request_id: str) -> bool:
        return any(wait.is_waiting(request_id) for wait in self._waits)

    def _is_known(self, request_id: str) -> bool:
        """Return whether a turn of that request runs or waits."""
        awaited = (each.record.request.request_id for each in self._recovery.pending.values())
        return self._is_waiting(request_id) or self._turns.of_request(request_id) is not None or request_id in awaited

    async def resume_turn(self, request: ResumeTurn) -> None:
        """Have the KV of a preempted turn, of its prompt and decoded tokens, made again. Idempotent.

        Answers when the KV has been handed over. KV that the prefill ring retains is not computed again. Raises
        NotFound for a turn that has ended, else the rings' errors; then the turn may be resumed later.
        """
        if request.turn_id in self._recovery.pending:
            await self._recovery.until_settled(request.turn_id)
        await self._lifecycle.resume(request)

    async def end_turn(self, outcome: TurnOutcome) -> int:
        """End a turn. Return how many tokens its decode ring should retain. Idempotent."""
        if outcome.turn_id in self._recovery.pending:
            await self._recovery.until_settled(outcome.turn_id)
        if outcome.ok and outcome.turn_id in self._recovery.given_up:
            await self._recovery.note_late_end(outcome.turn_id)
        return await self._turns.end(outcome)

    async def abort_requests(self, request_ids: Sequence[str], reader: str = "") -> tuple[list[str], list[str]]:
        """End running and waiting turns by request id. Return (aborted, unknown).

        With a `reader`, end only running turns that no later reader has taken over. So a gateway whose client is gone
        does not end a turn that goes on at another gateway.
        """
        await self._recovery.until_all_settled()
        error = TurnCancelled("the request was aborted")
        waits = () if reader else self._waits
        aborted = {name for name in request_ids if any(wait.end_wait(name, error) for wait in waits)}
        running = {name: self._turns.of_request(name) for name in request_ids}
        if reader:
            running = {name: turn for name, turn in running.items() if turn and turn.request.reader in ("", reader)}
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
        """Conversations in the store that clients have named."""
        return len(self._conversations) - self.num_unnamed

    @property
    def num_unnamed(self) -> int:
        """Histories of requests without a conversation, whose KV may be shared."""
        return self._conversations.num_unnamed

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """How many prompt tokens were looked up among earlier prompts, and for how many KV was found."""
        return (0, 0) if self.prefixes is None else (self.prefixes.queried, self.prefixes.hit)

    @property
    def moves(self) -> tuple[KvMoves, ...]:
        """Retained KV that was moved between rings."""
        return self._moves.totals()

    async def get_conversation(self, conversation_id: str) -> ConversationInfo:
        """Show a conversation. Raises NotFound."""
        return await self._operations.get(conversation_id)

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationPage:
        """Return a page of the conversations whose id begins with `prefix`. Raises InvalidRequest."""
        return await self._operations.list(prefix, after, limit)

    async def fork_conversation(
        self, source_id: str, new_id: str, at_token: int | None, kv_quota: KvQuota | None = None
    ) -> ConversationInfo:
        """Fork a conversation; see `ConversationOperations.fork`."""
        return await self._operations.fork(source_id, new_id, at_token, kv_quota)

    async def delete_conversation(self, conversation_id: str) -> None:
        """Forget a conversation and release its KV. Raises NotFound, Busy."""
        await self._operations.delete(conversation_id)

    def expire_conversations(self) -> None:
        """Forget the conversations whose time to live is over; their KV is released in the background."""
        self._operations.expire()

    # --- rings -------------------------------------------------------------------------------------------------------

    async def register_ring(self, ring: RingRegistration, known: KnownEpoch = UNKNOWN_EPOCH) -> Registered:
        """Enter a leader's announcement, and its ring's inventory if it has one.

        A leader that names another epoch gets this router's: it must announce its ring again, with its inventory.
        """
        if known.epoch != self._journal.epoch:
            return Registered(running_turns=0, epoch=self._journal.epoch)
        return Registered(running_turns=self._register(ring, known.inventory), epoch=known.epoch)

    def _register(self, ring: RingRegistration, inventory: RingInventory | None) -> int:
        if self._leases is None and self._lease:
            self._leases = self._tasks.spawn(self._watch_leases())
        if self._scaled is None and self._least_rings:
            self._scaled = self._tasks.spawn(self._scaling.run())
        if self._rings.register(ring):
            doing = "is being rebuilt" if ring.is_rebuilding else ring.doing
            log.info("%s ring %s %s with %s", ring.role, ring.name, doing, ring.size)
            self._returns.note(ring)
        known = self._rings.named(ring.role, ring.name)
        if known is not None and inventory is not None:
            self._recovery.note(known, inventory)
        if known is None:
            self._drain_rebalancing.ring_left(ring.name)
            return 0
        if known.registration.is_draining:
            return known.num_turns + self._drain_rebalancing.continue_drain(known)
        self._drain_rebalancing.forget_drain(ring.name)
        self._full_rebalancing.note(known)
        return known.num_turns

    async def _watch_leases(self) -> None:
        """Look at intervals for rings that have not announced themselves in time, and ask for new leaders for them."""
        while True:
            await asyncio.sleep(self._lease / LEASE_TICKS)
            self.tick()

    def tick(self) -> None:
        """Count a tick of every ring's lease; a lease has LEASE_TICKS."""
        for ring in self._rings.tick():
            log.warning("%s ring %s has not announced itself for %.1f s and is lost", ring.role, ring.name, self._lease)
            self._returns.note_silence(ring.name, self._lease)

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
        """Wait for the next ring event and return it.

        Whoever starts rings calls this, and starts a ring or replaces a leader by it.
        """
        return await self._returns.next_event()

    @property
    def rings(self) -> Sequence[RegisteredRing]:
        """Every ring that has announced itself."""
        return self._rings.all()

    def standing_of_ring(self, name: str) -> RingStanding:
        """Return a ring's standing, registered or not. A ring that has left and is to return counts as starting."""
        state = self._rings.state_of(name)
        is_returning = state is RingStanding.AWAY and self._returns.is_expected(name)
        return RingStanding.STARTING if is_returning else state

    @property
    def num_waiting_for_rings(self) -> int:
        """Turns that wait for a ring to return."""
        return self._returns.num_waiting

    async def find_fault(self) -> str:
        """Return why no turns should be sent to the service, by the rings' announcements alone; see `roles_fault`."""
        rings = [ring.registration for ring in self._rings.all()]
        states = {ring.name: RingState.READY if ring.is_ready else LOST for ring in self._rings.all()}
        shown = [status_without(ring, states[ring.name], is_draining=ring.is_draining) for ring in rings]
        shown += [status_without(ring, AWAY) for ring in self._returns.away()]
        expected = self._returns.is_expected
        return roles_fault(replace(status, restarting=expected(status.name)) for status in shown)

    async def get_server_info(self) -> ServerInfo:
        """Show every ring, and how busy the service is."""
        # Both are read before the rings are asked, so that a ring that leaves or returns meanwhile is shown exactly
        # once.
        rings, away, returns = self._rings.all(), self._returns.away(), self._returns
        statuses = await asyncio.gather(*(status_of(ring, self._peers) for ring in rings))
        shown_in = self._planner.corrections.shown_in
        shown = [shown_in(status, ring.registration) for status, ring in zip(statuses, rings, strict=True)]
        shown += [status_without(ring, AWAY) for ring in away]
        return ServerInfo(
            selector=self._planner.selector,
            rings=tuple(replace(status, restarting=returns.is_expected(status.name)) for status in shown),
            conversations=self.num_conversations,
            running_turns=len(self._turns),
            turns_waiting_for_rings=returns.num_waiting,
            drains=self._drain_rebalancing.views(),
            kv_moves=self._moves.totals(),
            events=self._rings.events.latest(),
        )

    async def close(self) -> None:
        """End background work, and let another router have the journal."""
        await self._tasks.close()
        await asyncio.to_thread(self._journal.close)
