"""Beginning of a router's turns: from a client's request to reservations on the rings that serve it.

The router admits a request (`TurnAdmission`): it waits for its conversation, its prompt is read, and its rings are
chosen. `TurnAttempts` then reserves on these rings (`TurnReservations`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from cp_core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from orchestration.conversations.operations import ConversationOperations
from orchestration.conversations.quotas import KvQuotas
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.placement.kv_locations import Choice, WantedTurn
from orchestration.placement.placer import RingPlacer
from orchestration.placement.planner import RetainedPrefix
from orchestration.placement.registry import RegisteredRing
from orchestration.protocol.ports import Peers
from orchestration.protocol.turns import PromptMode, Reserve, TurnPlan, TurnRequest
from orchestration.router.drains import RingReturns
from orchestration.router.registry import TurnRegistry
from orchestration.router.turn import RunningTurn, new_turn_id
from orchestration.tasks import TaskSet
from workers.protocol.prefill_steps import Algorithm, TokenIds

log = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Refusals by rings that a turn survives; the next one is the client's error."""
ASK_SECONDS = 2.0
"""Seconds for the answer of a ring that a conversation leaves, on how much of its KV the ring retains."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities of one prompt, those of top tokens included: they cross the control plane in one message."""
SHINGLE = 8
"""Consecutive tokens that must agree for a passage to count as repeated."""


class TurnAdmission:
    """Admission of requests: waits for what a turn needs, checks it against limits and quotas, and chooses its rings.

    `max_positions` is the longest sequence that the model takes.
    """

    def __init__(
        self,
        conversations: ConversationStore,
        operations: ConversationOperations,
        returns: RingReturns,
        placer: RingPlacer,
        turns: TurnRegistry,
        tasks: TaskSet,
        max_positions: int,
    ) -> None:
        self._conversations = conversations
        self._operations = operations
        self._returns = returns
        self._placer = placer
        self._turns = turns
        self._tasks = tasks
        self._quotas = KvQuotas(conversations, turns)
        self._max_positions = max_positions

    async def admit(self, request: TurnRequest) -> RunningTurn:
        """Make a turn of a request; it may have to wait for its conversation, or for a ring to return.

        Raises InvalidRequest, NotFound, Busy, CapacityExceeded, DeadlineExceeded, NotBegun.
        """
        if self._conversations.next_expiry is not None:
            self._operations.expire()
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        waits = request.wait or self._conversations.is_moving(request.conversation_id)
        conversation = await self._open(request, waits=waits)
        try:
            if await self._returns.until_served(request.request_id, deadline) or waits:
                left = deadline - asyncio.get_running_loop().time()
                request = replace(request, deadline_seconds=max(left, 0.001))
            with refused_whole():
                return self._admit(request, conversation)
        except BaseException:
            self._conversations.close(conversation)
            raise

    async def _open(self, request: TurnRequest, *, waits: bool) -> Conversation:
        """Open the request's conversation. Awaits nothing unless `waits`: then until the conversation is idle."""
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
            self._tasks.spawn(self._turns.free(old))
        if conversation.ttl_seconds:
            self._operations.watch_ages()
        return conversation

    def _admit(self, request: TurnRequest, conversation: Conversation) -> RunningTurn:
        """Read the prompt, choose rings, check length and quota, and add the turn to the registry. Awaits nothing."""
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
        choice = self._placer.choose(wanted)
        self._check_length(wanted, choice)
        if request.kv_quota is not None:
            for old in self._quotas.admit(request.kv_quota, conversation, wanted.num_tokens, wanted.answer_tokens):
                log.info("conversation %s loses its KV to its tenant's quota", old.conversation_id)
                self._tasks.spawn(self._turns.free(old))
        load_share = self._placer.place(wanted, choice)
        turn = RunningTurn(new_turn_id(), request, conversation, prompt, mode, wanted, choice, load_share)
        self._turns.add(turn)
        return turn

    def _check_length(self, wanted: WantedTurn, choice: Choice) -> None:
        prefill, decode = choice.prefill, choice.decode
        limits = {
            "the model's positions": self._max_positions,
            f"the KV room of ring {prefill.name}": prefill.registration.capacity_tokens,
            f"the KV room of ring {decode.name}": decode.registration.capacity_tokens,
        }
        name, limit = min(limits.items(), key=lambda item: item[1])
        prompt, answer = wanted.num_tokens, wanted.answer_tokens
        if prompt + answer > limit:
            raise InvalidRequest(
                f"input: {prompt} prompt tokens and max_tokens {answer} make {prompt + answer}, "
                f"and {name} allow at most {limit}"
            )


class TurnReservations:
    """Reservations of turns on rings. A turn that a ring refuses moves to the next best rings."""

    def __init__(self, peers: Peers, placer: RingPlacer, turns: TurnRegistry, tasks: TaskSet) -> None:
        self._peers = peers
        self._placer = placer
        self._turns = turns
        self._tasks = tasks

    async def reserve_somewhere(self, turn: RunningTurn) -> None:
        """Reserve on the chosen rings or, where they have no room, on the next best ones."""
        while True:
            try:
                return await self.reserve(turn)
            except (CapacityExceeded, Unavailable) as refusal:
                await self._try_elsewhere(turn, refusal)

    async def reserve(self, turn: RunningTurn) -> None:
        """Reserve on the turn's rings. Ask rings that its conversation leaves how much of its KV they retain.

        Rings that refused are added to `turn.refused`. Raises CapacityExceeded, Unavailable.
        """
        request = _reserve_request(turn)
        # A turn whose prompt its decode ring computes pulls no KV. A later attempt uses its own rings alone.
        asks_left = turn.attempt == 1 and turn.prefill is not None
        left = self._left_rings(turn) if asks_left else []
        asking = asyncio.create_task(self._ask_left(turn, left)) if left else None
        try:
            calls = (
                self._peers.leader(ring.role, ring.registration.endpoint).reserve(
                    replace(request, match_tokens=turn.match_to_reserve(ring))
                )
                for ring in turn.rings
            )
            answers = await asyncio.gather(*calls, return_exceptions=True)
            turn.left = [] if asking is None else await asking
        finally:
            if asking is not None:
                asking.cancel()
        for ring, answer in zip(turn.rings, answers, strict=True):
            if isinstance(answer, Unavailable):
                ring.is_ready = False
            # A decode ring that cannot compute the prompt may have room for KV that comes from a prefill ring.
            if isinstance(answer, Unavailable) or (isinstance(answer, CapacityExceeded) and not request.is_direct):
                turn.refused.append(ring)
        *on_prefill, turn.on_decode = (None if isinstance(each, BaseException) else each for each in answers)
        turn.on_prefill = on_prefill[0] if on_prefill else None
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        names = " and ".join(ring.name for ring in turn.rings)
        log.info(
            "turn %s of request %s is reserved on %s",
            turn.turn_id,
            request.request_id,
            names,
            extra=request.log_fields,
        )
        prefill = turn.prefill
        if prefill and turn.on_prefill and turn.on_prefill.incarnation != request.source_incarnation:
            turn.refused.append(prefill)
            raise Unavailable(f"ring {prefill.name} was rebuilt just now; retry")

    async def _try_elsewhere(self, turn: RunningTurn, refusal: RingserveError) -> None:
        """Move a refused turn to the next best rings, and release its reservations on the previous ones.

        A turn whose decode ring could not compute the prompt uses a prefill ring now. Raises `refusal` where no other
        ring is left, after MAX_REFUSALS, where the turn is to end, or where it asked for its decode ring.
        """
        if len(turn.refused) > MAX_REFUSALS or turn.stop_error is not None or turn.is_over:
            raise refusal
        if turn.choice.is_direct:
            if turn.wanted.asks_for_direct:
                raise refusal
            turn.wanted = replace(turn.wanted, refused_direct=turn.decode.name)
        wanted = turn.wanted
        try:
            choice = self._placer.choose(wanted, turn.refused)
        except Unavailable:
            raise refusal from None
        need = wanted.num_tokens + wanted.answer_tokens
        if any(need > ring.registration.capacity_tokens for ring in (choice.prefill, choice.decode)):
            raise refusal
        log.info("turn %s goes to rings %s and %s: %s", turn.turn_id, choice.prefill.name, choice.decode.name, refusal)
        before_prefill, before_decode, retained = turn.prefill, turn.decode, turn.retained_on_prefill
        had_prefill, had_decode = turn.on_prefill is not None, turn.on_decode is not None
        kv_id = turn.kv_id  # the turn's own id where it has no conversation: `move` changes it
        turn_id = self._turns.move(turn, choice, self._placer.place(wanted, choice))
        # Reserved blocks must be free before the turn reserves again. Rings that did not reserve are told, and nothing
        # waits for them. `shield`: a client that hangs up does not cancel the release.
        leaving = [(self._tasks.spawn(self._leave_decode(turn_id, before_decode)), had_decode)]
        if before_prefill is not None:
            work = self.leave_prefill(kv_id, turn_id, before_prefill, retained)
            leaving.append((self._tasks.spawn(work), had_prefill))
        await asyncio.shield(asyncio.gather(*(task for task, had in leaving if had)))

    async def leave_prefill(self, kv_id: str, turn_id: str, ring: RegisteredRing, retain: int) -> None:
        """Release a turn's reservation on a prefill ring, as far as the ring can be told."""
        try:
            await self._peers.leader("prefill", ring.registration.endpoint).settle(kv_id, turn_id, retain)
        except RingserveError as error:
            log.info("prefill ring %s could not be told to drop %s: %s", ring.name, turn_id, error)

    async def _leave_decode(self, turn_id: str, ring: RegisteredRing) -> None:
        try:
            moved = TurnCancelled("the turn went to another ring")
            await self._peers.leader("decode", ring.registration.endpoint).abort_turn(turn_id, moved)
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", ring.name, turn_id, error)

    def take_prefill_ring(self, turn: RunningTurn) -> None:
        """Choose a prefill ring to resume a turn whose prompt the decode ring had computed. Raises Unavailable."""
        self._turns.take_prefill_ring(turn, self._placer.choose_prefill(turn.wanted, turn.decode))

    def _left_rings(self, turn: RunningTurn) -> list[RegisteredRing]:
        """Return the rings that the conversation leaves and that may retain its KV."""
        return [ring for ring in self._placer.own_rings(turn.wanted) if ring not in (turn.prefill, turn.decode)]

    async def _ask_left(self, turn: RunningTurn, rings: Sequence[RegisteredRing]) -> list[RetainedPrefix]:
        """Ask `rings` how much of the conversation they retain. A ring silent for ASK_SECONDS counts as empty."""
        answers = await asyncio.gather(*(self._ask_one(turn, ring) for ring in rings))
        return [prefix for prefix in answers if prefix is not None]

    async def _ask_one(self, turn: RunningTurn, ring: RegisteredRing) -> RetainedPrefix | None:
        registration = ring.registration
        try:
            async with asyncio.timeout(ASK_SECONDS):
                retained = await self._peers.leader(ring.role, registration.endpoint).get_retained([turn.kv_id])
        except (RingserveError, TimeoutError) as error:
            log.info("ring %s cannot say what it retains of %s: %s", ring.name, turn.kv_id, error)
            return None
        num_tokens = min(turn.wanted.retained_on(ring), *retained.num_tokens)
        return RetainedPrefix(registration, num_tokens) if retained.incarnation == registration.incarnation else None


def explain(turn: RunningTurn, plan: TurnPlan) -> TurnPlan:
    """Return the plan with the reason for its rings, and the predicted seconds of the alternatives."""
    refused = "".join(f"; ring {ring.name} had no room or was gone" for ring in turn.refused)
    direct, others = turn.choice.direct, plan.alternatives
    if direct is not None and not turn.choice.is_direct:
        others = (*others, (Algorithm.DECODE_RING, direct.prefill_seconds))
    return replace(
        plan,
        reason=plan.reason + refused + turn.choice.reason,
        alternatives=others,
        ring_alternatives=turn.choice.alternatives,
    )


@contextmanager
def refused_whole() -> Iterator[None]:
    """Raise NotBegun for Unavailable: the turn got no plan, its conversation is unchanged, and it may be repeated."""
    try:
        yield
    except Unavailable as error:
        raise NotBegun(str(error)) from error


def _reserve_request(turn: RunningTurn) -> Reserve:
    sampling, prefill = turn.request.sampling, turn.prefill
    return Reserve(
        turn_id=turn.turn_id,
        attempt=turn.attempt,
        kv_id=turn.kv_id,
        match_tokens=0,
        num_tokens=len(turn.token_ids),
        deadline_seconds=turn.request.deadline_seconds,
        source_incarnation=prefill.registration.incarnation if prefill else "",
        is_direct=prefill is None,
        sampling=sampling,
        penalized_ids=tuple(np.unique(turn.prompt).tolist()) if sampling.looks_at_prompt else (),
        priority=turn.request.priority,
        request_id=turn.request.request_id,
        trace_parent=turn.request.trace_parent,
    )


def _match(conversation: Conversation, prompt: TokenIds, request: TurnRequest) -> int:
    """Return how many leading tokens of the prompt are the conversation's, and so need no computing where KV is."""
    history = conversation.tokens
    # Cached tokens have no logits, so a request for the prompt's log-probabilities has the whole prompt computed.
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


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Return how many leading tokens of both agree."""
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _shingles(tokens: TokenIds) -> set[bytes]:
    """Return the distinct passages of SHINGLE consecutive tokens."""
    window = np.lib.stride_tricks.sliding_window_view(tokens, SHINGLE)
    return {row.tobytes() for row in window}


def repeats_history(history: TokenIds, prompt: TokenIds) -> bool:
    """Return whether a prompt of unstated mode repeats the whole history, unchanged or edited.

    Unchanged: the prompt begins with the whole history. Cut back and continued: at least half of the prompt and a
    quarter of the history agree from the start. Changed in the middle: at least half of the history's passages of
    SHINGLE tokens occur in the prompt.
    """
    shared = common_prefix(history, prompt)
    if shared == len(history):
        return True
    if 2 * shared >= len(prompt) and 4 * shared >= len(history):
        return True
    if min(len(history), len(prompt)) < SHINGLE or 2 * len(prompt) < len(history):
        return False
    passages = _shingles(history)
    return 2 * len(passages & _shingles(prompt)) >= len(passages)


def resolve_prompt(history: TokenIds | None, prompt: TokenIds, mode: PromptMode) -> tuple[TokenIds, PromptMode]:
    """Return the whole prompt of a turn, and the mode in which it was read. `history` is None for a new conversation.

    Raises InvalidRequest for an empty prompt, NotFound where there is nothing to append to.
    """
    if len(prompt) == 0:
        raise InvalidRequest("input: the prompt has 0 tokens, at least 1 is needed")
    if history is None:
        if mode is PromptMode.APPEND:
            raise NotFound("conversation_id: no such conversation, so there is nothing to append to")
        return prompt, PromptMode.NEW
    if mode is PromptMode.AUTO:
        mode = PromptMode.WHOLE_HISTORY if repeats_history(history, prompt) else PromptMode.APPEND
    if mode is PromptMode.APPEND:
        return np.concatenate([history, prompt]), mode
    return prompt, PromptMode.WHOLE_HISTORY
