"""The router: per turn it matches the prompt, reserves room on both rings, chooses the algorithm, and keeps the books.

It is on no token's path. A turn is begun by a gateway (`begin_turn`) and ended by the decode leader (`end_turn`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cp_core.errors import Busy, DeadlineExceeded, InvalidRequest, NotFound, RingserveError, TurnCancelled, Unavailable
from orchestration.conversation_desk import ConversationDesk
from orchestration.conversations import Conversation, ConversationStore
from orchestration.drains import Drains
from orchestration.groups import Group, GroupRegistry
from orchestration.planner import Planner
from orchestration.ports import DecodePort, Peers, PrefillPort
from orchestration.prompts import common_prefix, resolve_prompt
from orchestration.ring import RingState
from orchestration.running_turn import RunningTurn
from orchestration.turn import (
    BegunTurn,
    ConversationList,
    ConversationView,
    GroupRegistration,
    GroupStatus,
    Plan,
    PrefillDone,
    PrefillTurn,
    Reserve,
    ResumeTurn,
    ServerView,
    TurnOutcome,
    TurnRequest,
)
from orchestration.turn_ends import TurnEnds
from workers.steps import TokenIds

log = logging.getLogger(__name__)

EXPIRY_INTERVAL = 1.0
"""Seconds: how late a conversation may be forgotten."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log-probabilities of one prompt, the most likely tokens' included: they cross the control plane in one message."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Times in seconds. `conversation_ttl` 0: conversations are not forgotten for their age.

    `max_waiting_turns` bounds those that wait for one conversation.
    """

    max_conversations: int = 10_000
    conversation_ttl: float = 0.0
    max_waiting_turns: int = 64
    control_timeout: float = 20.0
    max_positions: int


class Router:
    """Knows every ring, conversation and running turn. `peers` reaches the leaders, `clock` tells seconds."""

    def __init__(
        self, settings: RouterSettings, planner: Planner, peers: Peers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._peers = peers
        self._groups = GroupRegistry()
        self._conversations = ConversationStore(
            settings.max_conversations,
            max_waiting=settings.max_waiting_turns,
            ttl_seconds=settings.conversation_ttl,
            clock=clock,
        )
        self._turns = TurnEnds(peers, self._groups, self._conversations, settings.control_timeout)
        self._desk = ConversationDesk(self._conversations, peers, self._groups, self._turns)
        self._drains = Drains(peers, self._groups)
        self._expiring: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- beginning ---------------------------------------------------------------------------------------------------

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        """Plan a turn and set it going. Raises InvalidRequest, NotFound, Busy, CapacityExceeded, Unavailable."""
        request_id = request.request_id
        if self._turns.of_request(request_id) is not None or self._conversations.is_waiting(request_id):
            raise Busy(f"request_id: {request_id!r} is running already; choose another")
        self.expire_conversations()
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        conversation = await self._open(request)
        if request.wait:
            left = deadline - asyncio.get_running_loop().time()
            request = replace(request, deadline_seconds=max(left, 0.001))
        try:
            turn = self._admit(request, conversation)
        except BaseException:
            self._conversations.close(conversation)
            raise
        try:
            await self._reserve(turn)
            if turn.stop_error is not None:
                raise turn.stop_error
            plan = self._plan(turn)
        except BaseException as error:
            # Also when the gateway hangs up while we wait: what was reserved must not stay.
            reason = error if isinstance(error, RingserveError) else TurnCancelled("the turn was cancelled")
            self._spawn(self._give_up(turn, reason))
            if turn.stop_error is not None and isinstance(error, RingserveError):
                raise turn.stop_error from None  # whatever else a ring says of a turn that was ended meanwhile
            raise
        turn.prefilling = asyncio.create_task(self._prefill(turn, plan))
        turn.prefilling.add_done_callback(lambda task: self._prefilled(turn, task))
        return BegunTurn(
            turn_id=turn.turn_id,
            decode_endpoint=turn.decode.registration.endpoint,
            prompt_tokens=len(turn.prompt),
            plan=plan,
        )

    async def _open(self, request: TurnRequest) -> Conversation:
        """Awaits nothing unless the request is to wait for its conversation."""
        name, ttl = request.conversation_id, request.conversation_ttl_seconds
        if not name:
            return Conversation("", running_request=request.request_id)
        if request.wait:
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
        prefill = self._groups.choose("prefill", conversation.prefill)
        decode = self._groups.choose("decode", conversation.decode)
        self._check_length(len(prompt), request.sampling.max_tokens, prefill, decode)
        _check_scores(len(prompt), request.sampling.prompt_logprobs)
        turn = RunningTurn(f"turn-{uuid.uuid4().hex[:16]}", request, conversation, prompt, mode, prefill, decode)
        self._turns.add(turn)
        return turn

    def _check_length(self, prompt: int, answer: int, prefill: Group, decode: Group) -> None:
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

    async def _reserve(self, turn: RunningTurn) -> None:
        history = turn.conversation.tokens
        sampling = turn.request.sampling
        # What is cached has no logits any more: a prompt whose log-probabilities are asked for is computed whole.
        is_new = history is None or sampling.prompt_logprobs is not None
        match = 0 if history is None or is_new else common_prefix(history, turn.prompt)
        # The last prompt token is always computed: its logits give the first new one.
        turn.match_tokens = min(match, len(turn.prompt) - 1)
        num_tokens = len(turn.token_ids)
        request = Reserve(
            turn_id=turn.turn_id,
            attempt=turn.attempt,
            sequence_id=turn.sequence_id,
            # Of a later attempt the rings hold nothing but the turn's own tokens.
            match_tokens=turn.match_tokens if turn.attempt == 1 else num_tokens - 1,
            num_tokens=num_tokens,
            deadline_seconds=turn.request.deadline_seconds,
            source_incarnation=turn.prefill.registration.incarnation,
            sampling=sampling,
            penalized_ids=tuple(np.unique(turn.prompt).tolist()) if sampling.looks_at_prompt else (),
            priority=turn.request.priority,
            request_id=turn.request.request_id,
        )
        answers = await asyncio.gather(
            self._prefill_port(turn).reserve(request), self._decode_port(turn).reserve(request), return_exceptions=True
        )
        for group, answer in zip((turn.prefill, turn.decode), answers, strict=True):
            if isinstance(answer, Unavailable):
                group.is_ready = False
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        log.info(
            "turn %s of request %s is reserved on %s and %s",
            turn.turn_id,
            request.request_id,
            turn.prefill.name,
            turn.decode.name,
            extra=request.log_fields,
        )
        turn.on_prefill, turn.on_decode = answers  # type: ignore[assignment]
        if turn.on_prefill.incarnation != request.source_incarnation:  # type: ignore[union-attr]
            raise Unavailable(f"ring {turn.prefill.name} was rebuilt just now; retry")

    def _plan(self, turn: RunningTurn) -> Plan:
        assert turn.on_prefill and turn.on_decode, "both rings have answered"
        return self._planner.plan(
            num_tokens=len(turn.token_ids),
            kept_on_prefill=turn.on_prefill.kept_tokens,
            kept_on_decode=turn.on_decode.kept_tokens,
            prefill=turn.prefill.registration,
            decode=turn.decode.registration,
            mode=turn.mode,
        )

    async def _prefill(self, turn: RunningTurn, plan: Plan) -> PrefillDone:
        assert turn.on_decode, "the decode ring has answered"
        request = PrefillTurn(
            turn_id=turn.turn_id,
            attempt=turn.attempt,
            sequence_id=turn.sequence_id,
            token_ids=turn.token_ids,
            cached_tokens=plan.cached_tokens,
            chunks=plan.chunks,
            sampling=turn.request.sampling,
            deadline_seconds=turn.request.deadline_seconds,
            decode_endpoint=turn.decode.registration.endpoint,
            destination=turn.on_decode,
        )
        return await self._prefill_port(turn).prefill(request)

    def _prefilled(self, turn: RunningTurn, task: asyncio.Task[PrefillDone]) -> None:
        """A failed prefill ends the turn where its client waits: on the decode ring's stream."""
        error = None if task.cancelled() else task.exception()
        if error is None or turn.ending is not None:
            return
        if not isinstance(error, RingserveError):
            log.error("the prefill of turn %s failed", turn.turn_id, exc_info=error)
            error = Unavailable("the prefill failed for an internal reason; retry")
        if isinstance(error, Unavailable):
            self._spawn(self._look_at(turn.prefill))  # or was it the decode ring that could not be reached?
        self._spawn(self._abort_on_decode(turn, error))

    async def _abort_on_decode(self, turn: RunningTurn, error: RingserveError) -> None:
        turn.stop_error = error  # where the ring does not know the turn yet
        try:
            await self._decode_port(turn).abort_turn(turn.turn_id, error)
        except RingserveError as failure:
            log.warning("decode ring %s could not be told to end %s: %s", turn.decode.name, turn.turn_id, failure)
            await self.end_turn(TurnOutcome(turn_id=turn.turn_id, ok=False))

    async def _give_up(self, turn: RunningTurn, reason: RingserveError) -> None:
        """The turn failed before a client could wait on it."""
        try:
            await self._decode_port(turn).abort_turn(turn.turn_id, reason)
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", turn.decode.name, turn.turn_id, error)
        await self.end_turn(TurnOutcome(turn_id=turn.turn_id, ok=False))

    # --- resuming ----------------------------------------------------------------------------------------------------

    async def resume_turn(self, request: ResumeTurn) -> None:
        """From the decode leader: make the KV of a turn again, of its prompt and of what was decoded. Idempotent.

        Answers when it has been handed over. What the prefill ring keeps of it is not computed again. Raises NotFound
        for a turn that has ended, else what kept a ring from it; then the turn may be resumed later.
        """
        turn = self._turns.of_turn(request.turn_id)
        if turn is None or turn.ending is not None:
            raise NotFound(f"turn {request.turn_id} has ended")
        if request.attempt > turn.attempt:
            turn.attempt = request.attempt
            turn.resuming = asyncio.create_task(self._resume(turn, np.asarray(request.token_ids, dtype=np.int64)))
        assert turn.resuming is not None, f"attempt {request.attempt} of turn {request.turn_id} was begun by no resume"
        await asyncio.shield(turn.resuming)
        assert turn.prefilling is not None, "resumed"
        prefilling = turn.prefilling
        await asyncio.wait([prefilling])  # its end, and what ends a cancelled turn, see to it
        if prefilling.cancelled():
            raise NotFound(f"turn {request.turn_id} has ended")
        if (error := prefilling.exception()) is not None:
            raise (
                error if isinstance(error, RingserveError) else Unavailable("the prefill failed for an internal reason")
            )

    async def _resume(self, turn: RunningTurn, decoded: TokenIds) -> None:
        assert turn.prefilling is not None, "a turn that was decoded was prefilled"
        # Of the attempt before: the decode ring had all KV, or gave it up, and its sender may not know yet.
        await asyncio.wait([turn.prefilling], timeout=self._settings.control_timeout)
        if not turn.prefilling.done():
            raise Unavailable(f"prefill ring {turn.prefill.name} still works on turn {turn.turn_id}")
        turn.decoded = decoded
        await self._prefill_port(turn).settle(turn.sequence_id, turn.turn_id, len(turn.token_ids) - 1)
        await self._reserve(turn)
        if turn.ending is not None:
            raise NotFound(f"turn {turn.turn_id} has ended")
        turn.prefilling = asyncio.create_task(self._prefill(turn, self._plan(turn)))

    # --- asking ------------------------------------------------------------------------------------------------------

    async def end_turn(self, outcome: TurnOutcome) -> int:
        """From the decode leader. Returns how many tokens its ring should keep. Idempotent."""
        return await self._turns.end(outcome)

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """End running and waiting turns by request id. Returns (aborted, unknown)."""
        error = TurnCancelled("the request was aborted")
        aborted = {name for name in request_ids if self._conversations.end_wait(name, error)}
        running = {name: self._turns.of_request(name) for name in request_ids}
        await asyncio.gather(*(self._abort_on_decode(turn, error) for turn in running.values() if turn is not None))
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
    def groups(self) -> Sequence[Group]:
        """Every ring that has announced itself."""
        return self._groups.all()

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

    async def register_group(self, group: GroupRegistration) -> int:
        """From a leader. Returns how many turns are, or are about to be, on its ring."""
        if self._groups.register(group):
            log.info("%s ring %s %s with %d ranks", group.role, group.name, group.doing, group.num_ranks)
        known = self._groups.named(group.role, group.name)
        return known.num_turns if known is not None else 0

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        """See `Drains.drain`. Raises NotFound, InvalidRequest, Busy, Unavailable."""
        await self._drains.drain(name, seconds, force=force)

    async def undrain_ring(self, name: str) -> None:
        """See `Drains.undrain`. Raises NotFound, Unavailable."""
        await self._drains.undrain(name)

    async def next_return(self) -> str:
        """The next ring that has left and is wanted again."""
        return await self._drains.next_return()

    async def get_server_info(self) -> ServerView:
        statuses = await asyncio.gather(*(self._status(group) for group in self._groups.all()))
        return ServerView(
            selector=self._planner.selector,
            groups=tuple(statuses),
            conversations=len(self._conversations),
            running_turns=len(self._turns),
        )

    async def _status(self, group: Group) -> GroupStatus:
        registration = group.registration
        peers, endpoint = self._peers, registration.endpoint
        port = peers.prefill(endpoint) if registration.role == "prefill" else peers.decode(endpoint)
        try:
            return await port.get_status()
        except RingserveError:
            return GroupStatus(
                role=registration.role,
                name=registration.name,
                endpoint=endpoint,
                incarnation=registration.incarnation,
                state="lost",
                num_ranks=registration.num_ranks,
                tp=registration.tp,
                attention_backend="",
                ring_transport="",
                num_requests_running=0,
                num_requests_waiting=0,
                kv_usage=(),
                rebuilds=0,
                rank_pids=(),
            )

    async def _look_at(self, group: Group) -> None:
        """Take no more turns to a ring that does not serve; it announces itself when it does again."""
        if (await self._status(group)).state != RingState.READY:
            group.is_ready = False

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _prefill_port(self, turn: RunningTurn) -> PrefillPort:
        return self._peers.prefill(turn.prefill.registration.endpoint)

    def _decode_port(self, turn: RunningTurn) -> DecodePort:
        return self._peers.decode(turn.decode.registration.endpoint)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _check_scores(num_tokens: int, num_top: int | None) -> None:
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"sampling_params.prompt_logprobs: {num_top} for a prompt of {num_tokens} tokens make "
            f"{num_tokens * (num_top + 1)} log-probabilities; allowed are {MAX_PROMPT_LOGPROBS}"
        )
