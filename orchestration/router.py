"""The router: per turn it matches the prompt, reserves room on both rings, chooses the algorithm, and keeps the books.

It is on no token's path. A turn is begun by a gateway (`begin_turn`) and ended by the decode leader (`end_turn`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import numpy as np

from cp_core.errors import Busy, InvalidRequest, RingserveError, TurnCancelled, Unavailable
from orchestration.conversations import Conversation, ConversationStore, Placement
from orchestration.groups import Group, GroupRegistry
from orchestration.planner import Planner
from orchestration.ports import DecodePort, Peers, PrefillPort
from orchestration.prompts import common_prefix, resolve_prompt
from orchestration.turn import (
    BegunTurn,
    ConversationView,
    GroupRegistration,
    GroupStatus,
    Plan,
    PrefillDone,
    PrefillTurn,
    PromptMode,
    Reservation,
    Reserve,
    ServerView,
    TurnOutcome,
    TurnRequest,
)
from workers.steps import TokenIds

log = logging.getLogger(__name__)

MAX_REMEMBERED_ENDS = 4096
"""Ended turns whose answer is kept, so that telling an end twice is harmless."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Times in seconds."""

    max_conversations: int = 10_000
    control_timeout: float = 20.0
    max_positions: int


@dataclass(slots=True)
class _Turn:
    """A turn between `begin_turn` and `end_turn`."""

    turn_id: str
    request: TurnRequest
    conversation: Conversation
    prompt: TokenIds
    mode: PromptMode
    prefill: Group
    decode: Group
    kept_on_prefill: Reservation | None = None
    kept_on_decode: Reservation | None = None
    prefilling: asyncio.Task[PrefillDone] | None = None
    ending: asyncio.Task[int] | None = None

    @property
    def is_kept(self) -> bool:
        return bool(self.request.conversation_id)

    @property
    def sequence_id(self) -> str:
        return self.request.conversation_id or self.turn_id


class Router:
    """Knows every ring, conversation and running turn. `peers` reaches the leaders."""

    def __init__(self, settings: RouterSettings, planner: Planner, peers: Peers) -> None:
        self._settings = settings
        self._planner = planner
        self._peers = peers
        self._groups = GroupRegistry()
        self._conversations = ConversationStore(settings.max_conversations)
        self._turns: dict[str, _Turn] = {}
        self._turn_of_request: dict[str, str] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- beginning ---------------------------------------------------------------------------------------------------

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        """Plan a turn and set it going. Raises InvalidRequest, NotFound, Busy, CapacityExceeded, Unavailable."""
        if request.request_id in self._turn_of_request:
            raise Busy(f"request_id: {request.request_id!r} is running already; choose another")
        conversation = self._open(request)
        try:
            turn = self._admit(request, conversation)
        except BaseException:
            self._conversations.close(conversation)
            raise
        try:
            await self._reserve(turn)
            plan = self._plan(turn)
        except BaseException as error:
            # Also when the gateway hangs up while we wait: what was reserved must not stay.
            reason = error if isinstance(error, RingserveError) else TurnCancelled("the turn was cancelled")
            self._spawn(self._give_up(turn, reason))
            raise
        turn.prefilling = asyncio.create_task(self._prefill(turn, plan))
        turn.prefilling.add_done_callback(lambda task: self._prefilled(turn, task))
        return BegunTurn(
            turn_id=turn.turn_id,
            decode_endpoint=turn.decode.registration.endpoint,
            prompt_tokens=len(turn.prompt),
            plan=plan,
        )

    def _open(self, request: TurnRequest) -> Conversation:
        if not request.conversation_id:
            return Conversation("", running_request=request.request_id)
        conversation, dropped = self._conversations.open(request.conversation_id, request.request_id)
        for old in dropped:
            self._spawn(self._free(old))
        return conversation

    def _admit(self, request: TurnRequest, conversation: Conversation) -> _Turn:
        prompt, mode = resolve_prompt(conversation.tokens, request.token_ids, request.prompt_mode)
        prefill = self._groups.choose("prefill", conversation.prefill)
        decode = self._groups.choose("decode", conversation.decode)
        self._check_length(len(prompt), request.sampling.max_tokens, prefill, decode)
        turn = _Turn(f"turn-{uuid.uuid4().hex[:16]}", request, conversation, prompt, mode, prefill, decode)
        self._turns[turn.turn_id] = turn
        self._turn_of_request[request.request_id] = turn.turn_id
        prefill.num_turns += 1
        decode.num_turns += 1
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

    async def _reserve(self, turn: _Turn) -> None:
        history = turn.conversation.tokens
        match = 0 if history is None else common_prefix(history, turn.prompt)
        # The last prompt token is always computed: its logits give the first new one.
        match = min(match, len(turn.prompt) - 1)
        request = Reserve(
            turn_id=turn.turn_id,
            attempt=1,
            sequence_id=turn.sequence_id,
            match_tokens=match,
            num_tokens=len(turn.prompt),
            deadline_seconds=turn.request.deadline_seconds,
            source_incarnation=turn.prefill.registration.incarnation,
            sampling=turn.request.sampling,
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
        turn.kept_on_prefill, turn.kept_on_decode = answers  # type: ignore[assignment]
        if turn.kept_on_prefill.incarnation != request.source_incarnation:  # type: ignore[union-attr]
            raise Unavailable(f"ring {turn.prefill.name} was rebuilt just now; retry")

    def _plan(self, turn: _Turn) -> Plan:
        assert turn.kept_on_prefill and turn.kept_on_decode, "both rings have answered"
        return self._planner.plan(
            num_tokens=len(turn.prompt),
            kept_on_prefill=turn.kept_on_prefill.kept_tokens,
            kept_on_decode=turn.kept_on_decode.kept_tokens,
            prefill=turn.prefill.registration,
            decode=turn.decode.registration,
            mode=turn.mode,
        )

    async def _prefill(self, turn: _Turn, plan: Plan) -> PrefillDone:
        assert turn.kept_on_decode, "the decode ring has answered"
        request = PrefillTurn(
            turn_id=turn.turn_id,
            attempt=1,
            sequence_id=turn.sequence_id,
            token_ids=turn.prompt,
            cached_tokens=plan.cached_tokens,
            algorithm=plan.algorithm,
            sampling=turn.request.sampling,
            deadline_seconds=turn.request.deadline_seconds,
            decode_endpoint=turn.decode.registration.endpoint,
            destination=turn.kept_on_decode,
        )
        return await self._prefill_port(turn).prefill(request)

    def _prefilled(self, turn: _Turn, task: asyncio.Task[PrefillDone]) -> None:
        """A failed prefill ends the turn where its client waits: on the decode ring's stream."""
        error = None if task.cancelled() else task.exception()
        if error is None or turn.ending is not None:
            return
        if not isinstance(error, RingserveError):
            log.error("the prefill of turn %s failed", turn.turn_id, exc_info=error)
            error = Unavailable("the prefill failed for an internal reason; retry")
        if isinstance(error, Unavailable):
            turn.prefill.is_ready = False
        self._spawn(self._abort_on_decode(turn, error))

    async def _abort_on_decode(self, turn: _Turn, error: RingserveError) -> None:
        try:
            await self._decode_port(turn).abort_turn(turn.turn_id, error)
        except RingserveError as failure:
            log.warning("decode ring %s could not be told to end %s: %s", turn.decode.name, turn.turn_id, failure)
            await self.end_turn(TurnOutcome(turn_id=turn.turn_id, ok=False))

    # --- ending ------------------------------------------------------------------------------------------------------

    async def end_turn(self, outcome: TurnOutcome) -> int:
        """Enter what a turn came to. Returns how many tokens its decode ring should keep. Idempotent."""
        turn = self._turns.get(outcome.turn_id)
        if turn is None:
            return self._ended.get(outcome.turn_id, 0)
        if turn.ending is None:
            turn.ending = asyncio.create_task(self._end(turn, outcome))
        return await asyncio.shield(turn.ending)

    async def _end(self, turn: _Turn, outcome: TurnOutcome) -> int:
        try:
            if outcome.ok:
                keep = await self._finish(turn, outcome)
            else:
                keep = await self._roll_back(turn)
        finally:
            self._close(turn)
        self._ended[turn.turn_id] = keep
        while len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        return keep

    async def _finish(self, turn: _Turn, outcome: TurnOutcome) -> int:
        conversation = turn.conversation
        assert turn.prefilling and turn.kept_on_prefill and turn.kept_on_decode, "a finished turn was prefilled"
        done: PrefillDone | None = None
        try:
            async with asyncio.timeout(self._settings.control_timeout):
                done = await asyncio.shield(turn.prefilling)
        except (RingserveError, TimeoutError) as error:
            log.warning("prefill ring %s lost the KV of %s: %s", turn.prefill.name, turn.sequence_id, error)
        keep_on_prefill = len(turn.prompt) if done and turn.is_kept else 0
        await self._settle_prefill(turn, keep_on_prefill)
        if not turn.is_kept:
            return 0
        await self._leave_other_rings(turn)
        conversation.tokens = np.concatenate([turn.prompt, np.asarray(outcome.token_ids, dtype=np.int64)])
        conversation.num_turns += 1
        conversation.epoch += 1
        conversation.prefill = (
            Placement(group=turn.prefill.name, incarnation=turn.kept_on_prefill.incarnation, shards=done.shards)
            if done
            else None
        )
        conversation.decode = Placement(
            group=turn.decode.name, incarnation=turn.kept_on_decode.incarnation, shards=outcome.shards
        )
        return outcome.kv_tokens

    async def _roll_back(self, turn: _Turn) -> int:
        """The conversation is as before the turn; of its KV, what agreed with the turn's prompt is still there."""
        before, conversation = turn.kept_on_prefill, turn.conversation
        kept_on_prefill = before.kept_tokens if before and turn.is_kept else 0
        await self._settle_prefill(turn, kept_on_prefill)
        kept_on_decode = turn.kept_on_decode.kept_tokens if turn.kept_on_decode and turn.is_kept else 0
        conversation.epoch += 1
        conversation.prefill = conversation.prefill and conversation.prefill.cut(kept_on_prefill)
        conversation.decode = conversation.decode and conversation.decode.cut(kept_on_decode)
        return kept_on_decode

    async def _settle_prefill(self, turn: _Turn, keep_tokens: int) -> None:
        port = self._prefill_port(turn)
        try:
            if turn.prefilling is not None and not turn.prefilling.done():
                await port.abort_turn(turn.turn_id, TurnCancelled("the turn ended"))
            await port.settle(turn.sequence_id, turn.turn_id, keep_tokens)
        except RingserveError as error:
            log.warning("prefill ring %s could not settle %s: %s", turn.prefill.name, turn.turn_id, error)
        if turn.prefilling is not None:
            turn.prefilling.cancel()
            await asyncio.gather(turn.prefilling, return_exceptions=True)

    async def _give_up(self, turn: _Turn, reason: RingserveError) -> None:
        """The turn failed before a client could wait on it."""
        try:
            await self._decode_port(turn).abort_turn(turn.turn_id, reason)
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", turn.decode.name, turn.turn_id, error)
        await self.end_turn(TurnOutcome(turn_id=turn.turn_id, ok=False))

    def _close(self, turn: _Turn) -> None:
        self._turns.pop(turn.turn_id, None)
        self._turn_of_request.pop(turn.request.request_id, None)
        turn.prefill.num_turns -= 1
        turn.decode.num_turns -= 1
        self._conversations.close(turn.conversation)

    async def _leave_other_rings(self, turn: _Turn) -> None:
        """The conversation has moved; its KV on the rings it came from is of no more use."""
        old, new = turn.conversation, (turn.prefill.name, turn.decode.name)
        moved_prefill = old.prefill if old.prefill and old.prefill.group != new[0] else None
        moved_decode = old.decode if old.decode and old.decode.group != new[1] else None
        left = Conversation(old.conversation_id, prefill=moved_prefill, decode=moved_decode)
        await self._free(left)

    async def _free(self, conversation: Conversation) -> None:
        """Free a conversation's KV wherever it lies."""
        for role, placement in (("prefill", conversation.prefill), ("decode", conversation.decode)):
            for group in self._groups.of_role(role):
                if placement is not None and group.name == placement.group:
                    endpoint = group.registration.endpoint
                    port = self._peers.prefill(endpoint) if role == "prefill" else self._peers.decode(endpoint)
                    try:
                        await port.settle(conversation.conversation_id, "", 0)
                    except RingserveError as error:
                        log.warning("ring %s could not free %s: %s", group.name, conversation.conversation_id, error)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """End running turns by request id. Returns (aborted, unknown)."""
        known = [name for name in request_ids if name in self._turn_of_request]
        turns = [self._turns[self._turn_of_request[name]] for name in known]
        error = TurnCancelled("the request was aborted")
        await asyncio.gather(*(self._abort_on_decode(turn, error) for turn in turns))
        return known, [name for name in request_ids if name not in known]

    async def get_conversation(self, conversation_id: str) -> ConversationView:
        return self._conversations.get(conversation_id).view()

    async def delete_conversation(self, conversation_id: str) -> None:
        """Forget a conversation and free its KV. Raises NotFound, Busy."""
        await self._free(self._conversations.remove(conversation_id))

    async def register_group(self, group: GroupRegistration) -> None:
        if self._groups.register(group):
            log.info("%s ring %s serves with %d ranks", group.role, group.name, group.num_ranks)

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
                attention_backend="",
                num_requests_running=0,
                num_requests_waiting=0,
                kv_usage=(),
                rebuilds=0,
                rank_pids=(),
            )

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _prefill_port(self, turn: _Turn) -> PrefillPort:
        return self._peers.prefill(turn.prefill.registration.endpoint)

    def _decode_port(self, turn: _Turn) -> DecodePort:
        return self._peers.decode(turn.decode.registration.endpoint)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

