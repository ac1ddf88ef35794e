"""Admission of requests at the router: a turn waits for its conversation, its prompt is read, its rings are chosen.

It enters the turn into the registry of turns, and owns only the requests that wait. `TurnLifecycle` then reserves on
these rings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from ringserve.cp_core.errors import (
    ContextTooLong,
    ConversationLost,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFound,
    RingserveError,
    Unavailable,
)
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.conversations.operations import ConversationOperations
from ringserve.orchestration.conversations.prefixes import (
    MIN_SHARED,
    NOTHING_SHARED,
    PromptPrefixes,
    PromptUnderWay,
    SharedKv,
)
from ringserve.orchestration.conversations.quotas import USUAL_ANSWER_TOKENS, KvQuotas
from ringserve.orchestration.conversations.store import Conversation, ConversationStore, common_prefix
from ringserve.orchestration.placement.kv_locations import Choice, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer, SparseChooser
from ringserve.orchestration.placement.planner import Planner, RetainedPrefix
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.orchestration.router.drains import RingReturns
from ringserve.orchestration.router.registry import Admitted, Attempt, RunningTurn, TurnRegistry, new_turn_id
from ringserve.orchestration.tasks import TaskSet
from ringserve.workers.protocol.steps import Algorithm, TokenIds

log = logging.getLogger(__name__)

MAX_PROMPT_LOGPROBS = 1 << 18
"""Limit on log-probabilities per prompt, counting top tokens: they cross the control plane in one message."""


WORTH_WAITING = 1.25
"""Most predicted seconds to the first token for which a turn waits, in multiples of those without waiting."""
PATIENCE = 2.0
"""A turn waits for a prompt at most this many times as long as predicted; then its own is computed."""
LEAST_PATIENCE_SECONDS = 1.0


class PromptWaits:
    """Turns that wait for the prompt of another turn, to share its KV instead of computing the same tokens."""

    def __init__(
        self, prefixes: PromptPrefixes, placer: RingPlacer, planner: Planner, clock: Callable[[], float]
    ) -> None:
        self._prefixes = prefixes
        self._placer = placer
        self._planner = planner
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits."""
        return request_id in self._waiting

    def end_wait(self, request_id: str, error: RingserveError) -> bool:
        """End the wait of a request with `error`. Return False if no request of that id waits."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_exception(error)
        return True

    async def until_shared(self, request: TurnRequest, wanted: Callable[[], WantedTurn], seconds: float) -> bool:
        """Wait while another turn computes a prompt whose KV this turn could share. Return whether it has waited.

        `wanted` returns the KV that it would share now. The wait ends when the other turn's prompt has been computed or
        given up. It lasts at most `seconds` and, unless the request names the other one by `follows`, not much longer
        than predicted. Raises the error of `end_wait`.
        """
        has_waited, until = False, asyncio.get_running_loop().time() + seconds
        while (awaited := self._awaited(request, wanted())) is not None:
            has_waited = True
            patience = max(LEAST_PATIENCE_SECONDS, PATIENCE * (awaited.ready_at - self._clock()))
            now = asyncio.get_running_loop().time()
            if not await self._wait(request, awaited, until if request.follows else min(until, now + patience)):
                break
        return has_waited

    async def _wait(self, request: TurnRequest, awaited: PromptUnderWay, until: float) -> bool:
        """Wait until a prompt has been computed or given up. Return False if neither has happened by `until`."""
        waiting = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        awaited.waiting.append(waiting)
        log.info("request %s waits for the prompt of %s", request.request_id, awaited.request_id)
        try:
            async with asyncio.timeout_at(until):
                await waiting
            return True
        except TimeoutError:
            return False
        finally:
            awaited.waiting.remove(waiting)
            del self._waiting[request.request_id]

    def _awaited(self, request: TurnRequest, wanted: WantedTurn) -> PromptUnderWay | None:
        """Return the prompt under way that is worth waiting for, if any."""
        if request.follows:
            first = self._prefixes.of_request(request.follows)
            return None if first is None or first.is_settled else first
        alone, now = 0.0, self._clock()
        for coming, shared in self._prefixes.coming(request.request_id, request.token_ids):
            if shared - wanted.match_tokens < MIN_SHARED:
                break
            if coming.is_settled:
                continue
            if not alone:
                choice = self._placer.choose(wanted)
                alone = choice.wait_seconds + choice.prefill_seconds
            prefill, decode = coming.choice.prefill.registration, coming.choice.decode.registration
            rest = self._planner.predict_turn(wanted.num_tokens, shared, prefill, RetainedPrefix(decode, shared))
            if max(0.0, coming.ready_at - now) + sum(rest) <= WORTH_WAITING * alone:
                return coming
        return None


class TurnAdmission:
    """Request admission: waits for conversations, rings and prompts to share, checks limits and quotas, chooses rings.

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
        prefixes: PromptPrefixes | None,
        prompt_waits: PromptWaits | None,
        sparse: SparseChooser,
        *,
        max_positions: int,
    ) -> None:
        self._conversations = conversations
        self._operations = operations
        self._returns = returns
        self._placer = placer
        self._turns = turns
        self._tasks = tasks
        self._prefixes = prefixes
        self._prompt_waits = prompt_waits
        self._sparse = sparse
        self._quotas = KvQuotas(conversations, turns)
        self._max_positions = max_positions

    async def admit(self, request: TurnRequest) -> RunningTurn:
        """Make a turn of a request. It may wait for its conversation, a ring to return, or another turn's prompt.

        Raises InvalidRequest, NotFound, ConversationLost, Busy, CapacityExceeded, DeadlineExceeded, NotBegun.
        """
        if self._conversations.next_expiry is not None:
            self._operations.expire()
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        waits = request.wait or self._conversations.is_moving(request.conversation_id)
        if not self._conversations.is_known(request.conversation_id):
            self._check_remembered(request, 0)  # first: a new conversation may take the place of another
        conversation = await self._open(request, waits=waits)
        try:
            waits |= await self._returns.until_served(request.request_id, deadline)
            if await self._until_shared(request, conversation, deadline) or waits:
                left = deadline - asyncio.get_running_loop().time()
                request = replace(request, deadline_seconds=max(left, 0.001))
            with as_not_begun():
                return self._admit(request, conversation)
        except BaseException:
            self._conversations.close(conversation)
            raise

    async def _open(self, request: TurnRequest, *, waits: bool) -> Conversation:
        """Open the request's conversation. With `waits`, wait until it is idle; else wait for nothing."""
        name, ttl = request.conversation_id, request.conversation_ttl_seconds
        if not name and (self._prefixes is None or self._is_alone(request)):
            return Conversation("", running_request=request.request_id)
        if not name and self._prefixes is not None:
            name = self._prefixes.name_for(request.request_id, request.token_ids)
            waits = False  # nobody else uses it
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
            self._operations.start_expiry()
        return conversation

    def _admit(self, request: TurnRequest, conversation: Conversation) -> RunningTurn:
        """Read the prompt, choose rings, check length and quota, and add the turn to the registry. Awaits nothing."""
        self._check_remembered(request, conversation.num_tokens)
        history = None if conversation.is_unnamed else conversation.tokens
        prompt, mode = resolve_prompt(history, request.token_ids, request.prompt_mode, request.num_special)
        _check_scores(len(prompt), request.sampling.prompt_logprobs)
        shared = NOTHING_SHARED
        if self._prefixes is not None and self._may_share(request, conversation):
            shared = self._prefixes.find(request.request_id, prompt)

        def wanted_at(sparsity: Sparsity | None) -> WantedTurn:
            return _wanted(request, conversation, prompt, shared, sparsity)

        sparse = self._sparse.choose(request, wanted_at)
        wanted = wanted_at(sparse.sparsity if sparse else None)
        choice = self._placer.choose(wanted)
        if request.is_open_ended:
            request = self._bounded(request, conversation, len(prompt), choice)
            wanted = replace(wanted, answer_tokens=request.sampling.max_tokens)
        self._check_length(wanted, choice)
        if request.kv_quota is not None:
            for old in self._quotas.admit(request.kv_quota, conversation, wanted.num_tokens, wanted.answer_tokens):
                log.info("conversation %s loses its KV to its tenant's quota", old.conversation_id)
                self._tasks.spawn(self._turns.free(old))
        load_share = self._placer.place(wanted, choice)
        under_way, kv_id = None, conversation.conversation_id
        if self._prefixes is not None and kv_id and not self._is_alone(request):
            ready_at = choice.computing.busy_until
            under_way = self._prefixes.begin(request.request_id, kv_id, prompt, choice, ready_at)
        admitted = Admitted(
            conversation=conversation, prompt=prompt, mode=mode, wanted=wanted, sparse=sparse, under_way=under_way
        )
        turn = RunningTurn(new_turn_id(), request, admitted, Attempt(wanted, choice, load_share))
        self._turns.add(turn)
        return turn

    async def _until_shared(self, request: TurnRequest, conversation: Conversation, deadline: float) -> bool:
        """Wait for the prompt of a running turn if that is worth it. Return whether it has waited."""
        prefixes, prompt = self._prefixes, request.token_ids
        if prefixes is None or self._prompt_waits is None or not self._may_share(request, conversation):
            return False

        def wanted() -> WantedTurn:
            return _wanted(request, conversation, prompt, prefixes.look(request.request_id, prompt))

        left = deadline - asyncio.get_running_loop().time()
        return await self._prompt_waits.until_shared(request, wanted, left)

    def _may_share(self, request: TurnRequest, conversation: Conversation) -> bool:
        """Return whether a turn shares the KV of others: its conversation has no history of its own."""
        scores_prompt = request.sampling.prompt_logprobs is not None
        return not (self._is_alone(request) or scores_prompt or conversation.tokens is not None)

    def _is_alone(self, request: TurnRequest) -> bool:
        """Return whether a turn shares no KV with other histories: on request, or as a bound may make its KV sparse."""
        return request.no_cache or self._sparse.bound_of(request) is not None

    def _check_remembered(self, request: TurnRequest, num_tokens: int) -> None:
        """Check that the request expects a conversation of `num_tokens` tokens (0: a new one)."""
        name = request.conversation_id
        why_gone = "" if num_tokens else f": {self._conversations.why_gone(name)}"
        if request.expected_tokens not in (None, num_tokens):
            raise ConversationLost(
                f"expected_tokens: conversation {name!r} was to remember {request.expected_tokens} tokens, and it has "
                f"{num_tokens}{why_gone}"
            )
        if name and why_gone and request.prompt_mode is PromptMode.APPEND:
            raise NotFound(f"conversation_id: there is no conversation {name!r} to append to{why_gone}")

    def _bounded(
        self, request: TurnRequest, conversation: Conversation, num_tokens: int, choice: Choice
    ) -> TurnRequest:
        """Bound an open-ended answer by the room after a prompt of `num_tokens`.

        Without room the bound is 1 or `min_tokens`; the check of the length, or the quota, then refuses the turn.
        """
        room = self._limit(choice)[1] - num_tokens
        if request.kv_quota is not None:
            room = min(room, self._quotas.room_for_answer(request.kv_quota, conversation, num_tokens))
        sampling = replace(request.sampling, max_tokens=max(1, request.sampling.min_tokens, room))
        return replace(request, sampling=sampling, is_open_ended=False)

    def _limit(self, choice: Choice) -> tuple[str, int]:
        """Return the limit on a sequence on these rings, in words and in tokens."""
        prefill, decode = choice.prefill, choice.decode
        limits = {
            "the model's positions": self._max_positions,
            f"the KV room of ring {prefill.name}": prefill.registration.capacity_tokens,
            f"the KV room of ring {decode.name}": decode.registration.capacity_tokens,
        }
        return min(limits.items(), key=lambda item: item[1])

    def _check_length(self, wanted: WantedTurn, choice: Choice) -> None:
        name, limit = self._limit(choice)
        prompt, answer = wanted.num_tokens, wanted.answer_tokens
        if prompt + answer > limit:
            # Agents shorten their history when they read of a "maximum context length".
            raise ContextTooLong(
                f"input: {prompt} prompt tokens and max_tokens {answer} make {prompt + answer}; this model's maximum "
                f"context length is {limit} tokens ({name})"
            )


@contextmanager
def as_not_begun() -> Iterator[None]:
    """Raise NotBegun for Unavailable: the turn got no plan, its conversation is unchanged, and it may be repeated."""
    try:
        yield
    except Unavailable as error:
        raise NotBegun(str(error)) from error


def _wanted(
    request: TurnRequest,
    conversation: Conversation,
    prompt: TokenIds,
    shared: SharedKv,
    sparsity: Sparsity | None = None,
) -> WantedTurn:
    return WantedTurn(
        num_tokens=len(prompt),
        answer_tokens=USUAL_ANSWER_TOKENS if request.is_open_ended else request.sampling.max_tokens,
        match_tokens=shared.num_tokens or _match(conversation, prompt, request, sparsity),
        prefill=shared.prefill or conversation.prefill,
        decode=shared.decode or conversation.decode,
        algorithm=request.algorithm if sparsity is None else Algorithm.PASS_KV,
        shared=shared.kv_ids,
        cache_key="" if request.no_cache else request.cache_key,
    )


def _match(conversation: Conversation, prompt: TokenIds, request: TurnRequest, sparsity: Sparsity | None) -> int:
    """Return how many leading tokens of the prompt the conversation has: where their KV is, they are not computed."""
    history = conversation.tokens
    # An exact turn uses no approximate KV, and a sparse turn no KV of another sparsity.
    if conversation.sparsity != sparsity:
        return 0
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


def resolve_prompt(
    history: TokenIds | None, prompt: TokenIds, mode: PromptMode, num_special: int = 0
) -> tuple[TokenIds, PromptMode]:
    """Return the whole prompt of a turn, and the mode in which it was read. `history` is None for a new conversation.

    A prompt of mode AUTO follows the history or, if there is none, begins the conversation, whatever its text. Raises
    InvalidRequest for an empty prompt, NotFound if there is nothing to append to.
    """
    if len(prompt) == 0:
        raise InvalidRequest("input: the prompt has 0 tokens, at least 1 is needed")
    if history is None:
        if mode is PromptMode.APPEND:
            raise NotFound("conversation_id: no such conversation, so there is nothing to append to")
        return prompt, PromptMode.NEW
    if mode is PromptMode.WHOLE_HISTORY:
        return prompt, mode
    # A tokenizer's BOS belongs before the conversation's first token, and nowhere else.
    return np.concatenate([history, prompt[num_special:] if len(history) else prompt]), PromptMode.APPEND
