"""The router: lets turns in, chooses their rings, has them started and ended, and keeps the books.

It is on no token's path. A turn is begun by a gateway (`begin_turn`) and ended by the decode leader (`end_turn`);
what happens on the rings is the business of `turn_starts` and `turn_ends`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cp_core.errors import Busy, DeadlineExceeded, InvalidRequest, NotBegun, TurnCancelled, Unavailable
from orchestration.conversations.desk import ConversationDesk
from orchestration.conversations.drain_moves import DrainMoves
from orchestration.conversations.full_moves import FullMoves
from orchestration.conversations.move_counts import MoveCounts
from orchestration.conversations.mover import ConversationMover
from orchestration.conversations.prompts import common_prefix, resolve_prompt
from orchestration.conversations.quotas import KvQuotas
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.placement.placer import RingPlacer
from orchestration.placement.planner import Planner
from orchestration.placement.registry import RegisteredRing, RingRegistry
from orchestration.placement.ring_status import status_of, status_without
from orchestration.placement.wanted_turn import WantedTurn
from orchestration.protocol.ports import Peers
from orchestration.protocol.rings import AWAY, RingEvent
from orchestration.protocol.turns import BegunTurn, KvQuota, ResumeTurn, RingRegistration, TurnOutcome, TurnRequest
from orchestration.protocol.views import ConversationList, ConversationView, MoveTotals, ServerView
from orchestration.router.drains import Drains
from orchestration.router.placements import TurnPlacements
from orchestration.router.registry import TurnRegistry
from orchestration.router.returns import RingReturns
from orchestration.router.starts import TurnStarts
from orchestration.router.turn import RunningTurn, new_turn_id
from workers.protocol.prefill_steps import TokenIds

log = logging.getLogger(__name__)

EXPIRY_INTERVAL = 1.0
"""Seconds: how late a conversation may be forgotten."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of one prompt, the most likely tokens' included: they cross the control plane in one message."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Times in seconds. `conversation_ttl` 0: conversations are not forgotten for their age.

    `max_waiting_turns` bounds those that wait for one conversation, and those that wait for rings to come back; a ring
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
    """Knows every ring, conversation and running turn. `peers` reaches the leaders, `clock` tells seconds."""

    def __init__(
        self, settings: RouterSettings, planner: Planner, peers: Peers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._peers = peers
        self._rings = RingRegistry(clock)
        self._conversations = ConversationStore(
            settings.max_conversations,
            max_waiting=settings.max_waiting_turns,
            ttl_seconds=settings.conversation_ttl,
            clock=clock,
        )
        self._turns = TurnRegistry(peers, self._rings, self._conversations, settings.control_timeout)
        self._quotas = KvQuotas(self._conversations, self._turns)
        self._moves = MoveCounts()
        self._desk = ConversationDesk(self._conversations, peers, self._rings, self._turns)
        self._placements = TurnPlacements(peers, RingPlacer(self._rings, planner), self._turns)
        self._starts = TurnStarts(
            peers, planner, self._placements, self._turns, self._moves, settings.control_timeout, self._spawn
        )
        self._returns = RingReturns(
            self._rings, seconds=settings.return_seconds, max_waiting=settings.max_waiting_turns
        )
        self._drains = Drains(peers, self._rings, self._returns)
        mover = ConversationMover(
            self._conversations,
            peers,
            self._moves,
            control_timeout=settings.control_timeout,
            transfer_timeout=settings.transfer_timeout,
        )
        books = (self._conversations, self._rings)
        self._drain_moves = DrainMoves(*books, mover, self._moves, self._spawn, self._returns.is_waiting)
        self._full_moves = FullMoves(*books, planner, mover, self._moves, self._spawn)
        self._expiring: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- beginning ---------------------------------------------------------------------------------------------------

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        """Plan a turn and set it going; it may have to wait for its conversation, or for a ring to come back.

        Raises InvalidRequest, NotFound, Busy, CapacityExceeded, DeadlineExceeded, NotBegun.
        """
        request_id = request.request_id
        if self._is_known(request_id):
            raise Busy(f"request_id: {request_id!r} is running already; choose another")
        self.expire_conversations()
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        waits = request.wait or self._conversations.is_moving(request.conversation_id)
        conversation = await self._open(request, waits=waits)
        try:
            if await self._returns.until_served(request_id, deadline) or waits:
                left = deadline - asyncio.get_running_loop().time()
                request = replace(request, deadline_seconds=max(left, 0.001))
            with _refused_whole():
                turn = self._admit(request, conversation)
        except BaseException:
            self._conversations.close(conversation)
            raise
        with _refused_whole():
            plan = await self._starts.start(turn)
        return BegunTurn(
            turn_id=turn.turn_id,
            decode_endpoint=turn.decode.registration.endpoint,
            prompt_tokens=len(turn.prompt),
            plan=plan,
        )

    def _is_known(self, request_id: str) -> bool:
        """Whether a turn of that id runs or waits."""
        waits = self._conversations.is_waiting(request_id) or self._returns.is_waiting(request_id)
        return waits or self._turns.of_request(request_id) is not None

    async def _open(self, request: TurnRequest, *, waits: bool) -> Conversation:
        """Awaits nothing unless the request is to wait for its conversation."""
        name, ttl = request.conversation_id, request.conversation_ttl_seconds
        if not name:
            return Conversation("", running_request=request.request_id)
        if waits:
            try:
                async with asyncio.timeout(request.deadline_seconds):
                    conversation, dropped = await self._conversations.open_in_turn(name, request.request_id, ttl)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the turn waited for conversation {name!r} until its deadline of {request.deadline_seconds:.1f} s"
                ) from None
        else:
            conversation, dropped = self._conversations.open(name, request.request_id, ttl)
        for old in dropped:
            self._spawn(self._turns.free(old))
        if conversation.ttl_seconds:
            self._watch_ages()
        return conversation

    def _admit(self, request: TurnRequest, conversation: Conversation) -> RunningTurn:
        prompt, mode = resolve_prompt(conversation.tokens, request.token_ids, request.prompt_mode)
        _check_scores(len(prompt), request.sampling.prompt_logprobs)
        wanted = WantedTurn(
            num_tokens=len(prompt),
            answer_tokens=request.sampling.max_tokens,
            match_tokens=_match(conversation, prompt, request),
            prefill=conversation.prefill,
            decode=conversation.decode,
            algorithm=request.algorithm,
        )
        choice = self._placements.choose(wanted)
        self._check_length(len(prompt), request.sampling.max_tokens, choice.prefill, choice.decode)
        if request.kv_quota is not None:
            self._enforce_quota(request.kv_quota, conversation, len(prompt), request.sampling.max_tokens)
        placed = self._placements.place(wanted, choice)
        turn = RunningTurn(new_turn_id(), request, conversation, prompt, mode, wanted, choice, placed)
        self._turns.add(turn)
        return turn

    def _enforce_quota(self, quota: KvQuota, conversation: Conversation, prompt: int, answer: int) -> None:
        """See `KvQuotas.admit`."""
        for old in self._quotas.admit(quota, conversation, prompt, answer):
            log.info("conversation %s loses its KV to its tenant's quota", old.conversation_id)
            self._spawn(self._turns.free(old))

    def _check_length(self, prompt: int, answer: int, prefill: RegisteredRing, decode: RegisteredRing) -> None:
        limits = {
            "the model's positions": self._settings.max_positions,
            f"the KV room of ring {prefill.name}": prefill.registration.capacity_tokens,
            f"the KV room of ring {decode.name}": decode.registration.capacity_tokens,
        }
        name, limit = min(limits.items(), key=lambda item: item[1])
        if prompt + answer > limit:
            raise InvalidRequest(
                f"input: {prompt} prompt tokens and max_tokens {answer} make {prompt + answer}, "
                f"and {name} allow at most {limit}"
            )

    # --- from decode leaders -----------------------------------------------------------------------------------------

    async def resume_turn(self, request: ResumeTurn) -> None:
        """Make the KV of a turn again, of its prompt and of what was decoded. Idempotent.

        Answers when it has been handed over. What the prefill ring keeps of it is not computed again. Raises NotFound
        for a turn that has ended, else what kept a ring from it; then the turn may be resumed later.
        """
        await self._starts.resume(request)

    async def end_turn(self, outcome: TurnOutcome) -> int:
        """Enter what a turn came to. Returns how many tokens its ring should keep. Idempotent."""
        return await self._turns.end(outcome)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """End running and waiting turns by request id. Returns (aborted, unknown)."""
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
        """Turns begun and not ended."""
        return len(self._turns)

    @property
    def num_conversations(self) -> int:
        """Conversations remembered."""
        return len(self._conversations)

    @property
    def moves(self) -> tuple[MoveTotals, ...]:
        """Kept KV that went from ring to ring."""
        return self._moves.totals()

    @property
    def rings(self) -> Sequence[RegisteredRing]:
        """Every ring that has announced itself."""
        return self._rings.all()

    async def get_conversation(self, conversation_id: str) -> ConversationView:
        """Raises NotFound."""
        self.expire_conversations()
        return await self._desk.get(conversation_id)

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationList:
        """A page of those whose id begins with `prefix`. Raises InvalidRequest."""
        self.expire_conversations()
        return await self._desk.list(prefix, after, limit)

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationView:
        """See `ConversationDesk.fork`. Raises NotFound, InvalidRequest, Busy."""
        self.expire_conversations()
        return await self._desk.fork(source_id, new_id, at_token)

    async def delete_conversation(self, conversation_id: str) -> None:
        """Forget a conversation and free its KV. Raises NotFound, Busy."""
        self.expire_conversations()
        await self._desk.delete(conversation_id)

    def expire_conversations(self) -> None:
        """Forget those whose time to live is over; their KV is freed in the background."""
        for old in self._conversations.expire():
            log.info("conversation %s has not been used for %.0f s", old.conversation_id, old.ttl_seconds)
            self._spawn(self._turns.free(old))

    def _watch_ages(self) -> None:
        if self._expiring is None or self._expiring.done():
            self._expiring = self._spawn(self._expire_regularly())

    async def _expire_regularly(self) -> None:
        """Until no conversation has an age to reach."""
        while len(self._turns) or self._conversations.next_expiry is not None:
            await asyncio.sleep(EXPIRY_INTERVAL)
            self.expire_conversations()

    async def register_ring(self, ring: RingRegistration) -> int:
        """From a leader. Returns how many turns are, or are about to be, on its ring, and conversations to be moved."""
        if self._rings.register(ring):
            log.info("%s ring %s %s with %d ranks", ring.role, ring.name, ring.doing, ring.num_ranks)
            self._returns.note(ring)
        known = self._rings.named(ring.role, ring.name)
        if known is None:
            self._drain_moves.left(ring.name)
            return 0
        if known.registration.is_draining:
            return known.num_turns + self._drain_moves.go_on(known)
        self._drain_moves.serves(ring.name)
        self._full_moves.note(known)
        return known.num_turns

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        """See `Drains.drain`. Raises NotFound, InvalidRequest, Busy, Unavailable."""
        await self._drains.drain(name, seconds, force=force)

    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        """See `Drains.restart`. Raises NotFound, InvalidRequest, Unavailable."""
        await self._drains.restart(name, seconds, leaving_node=leaving_node)

    async def undrain_ring(self, name: str) -> None:
        """See `Drains.undrain`. Raises NotFound, Unavailable."""
        await self._drains.undrain(name)

    async def next_return(self) -> RingEvent:
        """The next ring that has left and is wanted again."""
        return await self._returns.next_wanted()

    @property
    def rings_away(self) -> Sequence[RingRegistration]:
        """Rings that have left and are to come back, as they were."""
        return self._returns.away()

    @property
    def num_waiting_for_rings(self) -> int:
        """Turns that wait for a ring to come back."""
        return self._returns.num_waiting

    async def get_server_info(self) -> ServerView:
        # At one moment: a ring that leaves or comes back while others are asked is there once all the same.
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
            drains=self._drain_moves.views(),
            moves=self._moves.totals(),
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End background work."""
        await self._placements.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextmanager
def _refused_whole() -> Iterator[None]:
    """A turn that gets no plan leaves its conversation as it was: it may be asked for again."""
    try:
        yield
    except Unavailable as error:
        raise NotBegun(str(error)) from error


def _match(conversation: Conversation, prompt: TokenIds, request: TurnRequest) -> int:
    """How many tokens of the prompt are the conversation's, and need not be computed where their KV is."""
    history = conversation.tokens
    # What is cached has no logits any more: a prompt whose log-probabilities are asked for is computed whole.
    if history is None or request.sampling.prompt_logprobs is not None:
        return 0
    # The last prompt token is always computed: its logits give the first new one.
    return min(common_prefix(history, prompt), len(prompt) - 1)


def _check_scores(num_tokens: int, num_top: int | None) -> None:
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"sampling_params.prompt_logprobs: {num_top} for a prompt of {num_tokens} tokens make "
            f"{num_tokens * (num_top + 1)} log-probabilities; allowed are {MAX_PROMPT_LOGPROBS}"
        )
