"""Turns at the gateway: tokens become text, times are as the client sees them, and running turns can be ended.

The servicer runs turns by it, for both endpoints; nothing outlives its turn. Several answers to one prompt are a turn
each, and their streams are merged into one. If rings or the router are lost on the way, a turn is begun again with the
tokens that the client has (`LastingTurn`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace

from ringserve.cp_core.errors import (
    LOSSES,
    DeadlineExceeded,
    NotBegun,
    NotFound,
    RingserveError,
    Stopping,
    Unavailable,
    Unreachable,
)
from ringserve.mapping import enum_number
from ringserve.orchestration.protocol.ports import DecodePort
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndingEvent,
    FinishedEvent,
    LostTurn,
    PrefillReport,
    ScoredEvent,
    TokensEvent,
    TurnEvent,
    TurnRequest,
)
from ringserve.orchestration.tasks import fan_in
from ringserve.services.gateway.text import AnswerText
from ringserve.services.rpc.wire.contract import all_logprobs_to, note_chunks, note_lost, to_message
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters

log = logging.getLogger(__name__)

Begin = Callable[[TurnRequest], Awaitable[BegunTurn]]
"""The router's `begin_turn`."""

MAX_FAILOVERS = 2
"""Failovers in a row without a new token. At the next loss the turn fails: its own prompt may crash the rings."""
ROUTER_SECONDS = 30.0
"""How long to retry while the router may be restarting, in seconds."""
ROUTER_PAUSE_SECONDS = 0.2
"""Seconds between two calls to an unreachable router."""
Responses = AsyncGenerator[inference_pb2.GenerateResponse, None]
UNGUARDED = nullcontext()
MESSAGE_SECONDS = 100e-6
"""Gateway time planned for one token message from a ring to a client. A third of it is reserve (decision 0037)."""
LEAST_INTERVAL_SECONDS = 0.01  # a shorter interval changes nothing: a ring's step takes longer
DEADLINE_GRACE_SECONDS = 2.0
"""Seconds the rings have to end a turn after its deadline; then the gateway ends it."""
STOPPING = "the gateway is stopping; retry at another"


async def begin_with_retries(begin: Begin, request: TurnRequest) -> BegunTurn:
    """Have the router begin or resume a turn. Retry an unreachable router for up to ROUTER_SECONDS.

    The router may have begun the turn before it was lost, so retries mark the turn as possibly running. Raises NotBegun
    and other refusals at once.
    """
    clock = time.monotonic
    deadline = clock() + request.deadline_seconds
    give_up_at = min(clock() + ROUTER_SECONDS, deadline)
    while True:
        try:
            return await begin(request)
        except NotBegun:
            raise
        except Unavailable as error:
            if clock() + ROUTER_PAUSE_SECONDS > give_up_at:
                raise
            log.info(
                "request %s could not begin, retrying in %g s: %s", request.request_id, ROUTER_PAUSE_SECONDS, error
            )
        await asyncio.sleep(ROUTER_PAUSE_SECONDS)
        left = max(deadline - clock(), 0.001)
        request = replace(request, resume=request.resume or LostTurn(), deadline_seconds=left)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedOver:
    """Event: a turn lost a ring at `lost_at` (`time.monotonic`) and continues as `begun`."""

    begun: BegunTurn
    cause: str
    lost_at: float


class LastingTurn:
    """Begun turn, with the two verbs of its decode leader that a reader needs: `events` and `finish`.

    If a ring is lost, the turn begins again, and its events go on. `leader_at` finds a leader. `interval` returns the
    minimum seconds between two token messages. `noted` is called with each lost ring's role and whether the turn
    continued. Once `is_stopping`, no turn begins again.

    If `request.resume` is set, an earlier gateway was lost, and the events begin with the tokens that the client has.
    Their log-probabilities are not known here: if the request asks for them, the ring sends all tokens again. A ring
    that lacks the log-probabilities counts as lost, and another ring computes the answer from its beginning.
    """

    def __init__(
        self,
        request: TurnRequest,
        begun: BegunTurn,
        begin: Begin,
        leader_at: Callable[[str], DecodePort],
        *,
        interval: Callable[[], float] = lambda: 0.0,
        noted: Callable[[str, bool], None] = lambda role, went_on: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._request, self._begun = set_max_tokens(request, begun), begun
        self._begin = begin
        self._leader_at = leader_at
        self._interval = interval
        self._noted = noted
        self._is_stopping = is_stopping
        self._deadline = time.monotonic() + request.deadline_seconds
        self._tokens = list(request.resume.token_ids) if request.resume else []
        self._num_finished: int | None = None
        self._num_losses = 0  # since the latest token
        self._is_cut = False  # the stream broke, and no token has come since

    async def events(self) -> AsyncGenerator[TurnEvent | FailedOver, None]:
        """Yield the turn's events. Raises the error that ended it for good."""
        if self._tokens:
            yield TokensEvent(token_ids=tuple(self._tokens))
        while (begun := self._begun).ended is None or (is_scored(self._request) and begun.decode_endpoint):
            # True also if no scores of the prompt are due: only a resumed turn needs them, before its first token.
            has_scores = self._request.resume is None or bool(self._tokens) or begun.prompt_tokens == 1
            try:
                leader = self._leader_at(begun.decode_endpoint)
                async with aclosing(leader.stream_turn(begun.turn_id, len(self._tokens), self._interval())) as events:
                    if self._num_finished is not None:
                        await self._send_finish()
                    async for event in events:
                        has_scores = has_scores or isinstance(event, ScoredEvent)
                        if isinstance(event, TokensEvent):
                            if not self._is_scored(event, has_scores):
                                raise NotFound(f"the ring of turn {begun.turn_id} lacks the first log-probabilities")
                            self._tokens.extend(event.token_ids)
                            self._num_losses, self._is_cut = 0, False
                        yield event
                        if isinstance(event, FinishedEvent):
                            return
                raise Unavailable(f"the tokens of turn {begun.turn_id} ended before the turn did")
            except LOSSES as error:
                if begun.ended is not None:
                    log.info("the end of turn %s has no log-probabilities: %s", begun.turn_id, error)
                    break
                if self._is_stopping():
                    raise
                if isinstance(error, Unreachable) and not self._is_cut:
                    # The leader may be alive, and keeps the turn for a while.
                    log.warning("turn %s: the token stream broke, reopening it: %s", begun.turn_id, error)
                    self._is_cut = True
                    continue
                yield await self._fail_over(error)
        assert begun.ended is not None
        rest = begun.ended.token_ids[len(self._tokens) :]
        if rest and self._num_finished is None:
            self._tokens.extend(rest)
            yield TokensEvent(token_ids=rest)
        reason = find_finish_reason(self._request.sampling, begun.ended.token_ids)
        yield FinishedEvent(finish_reason=reason, migrated_bytes=0, migration_seconds=0.0, handoff_seconds=0.0)

    def _is_scored(self, event: TokensEvent, has_scores: bool) -> bool:
        """Return whether a resumed turn has the log-probabilities that its request asks for."""
        if self._request.resume is None:
            return True
        sampling = self._request.sampling
        is_complete = sampling.logprobs is None or len(event.logprobs) == len(event.token_ids)
        return is_complete and (sampling.prompt_logprobs is None or has_scores)

    async def finish(self, num_tokens: int) -> None:
        """Finish the turn after its first `num_tokens` tokens. The last event still comes from `events`."""
        if self._num_finished is None:
            self._num_finished = num_tokens
            await self._send_finish()

    async def _send_finish(self) -> None:
        begun, num_tokens = self._begun, self._num_finished
        if begun.ended is not None or num_tokens is None:
            return
        try:
            await self._leader_at(begun.decode_endpoint).finish_turn(begun.turn_id, num_tokens)
        except LOSSES as error:
            log.info("turn %s could not be finished, its stream will report why: %s", begun.turn_id, error)

    async def _fail_over(self, error: RingserveError) -> FailedOver:
        lost_at = time.monotonic()
        self._num_losses += 1
        try:
            if self._num_losses > MAX_FAILOVERS:
                raise Unavailable(
                    f"the turn lost a ring {self._num_losses} times after {len(self._tokens)} tokens and is not tried "
                    f"again: {error}"
                )
            begun = self._begun = await self._begin_again()
            self._request = set_max_tokens(self._request, begun)
        except BaseException:
            self._noted("", False)
            raise
        log.warning(
            "request %s lost a %s ring after %d tokens and continues as turn %s: %s",
            self._request.request_id,
            begun.lost_role,
            len(self._tokens),
            begun.turn_id,
            error,
        )
        self._noted(begun.lost_role, True)
        return FailedOver(begun=begun, cause=str(error), lost_at=lost_at)

    async def _begin_again(self) -> BegunTurn:
        """Have the router begin the turn again. Raises RingserveError if it refuses or stays unreachable."""
        return await begin_with_retries(self._begin, self._resumption())

    def _resumption(self) -> TurnRequest:
        tokens, begun = tuple(self._tokens[: self._num_finished]), self._begun
        sampling = self._request.sampling
        is_whole = self._num_finished is not None or (not sampling.ends_by_text and _is_whole(sampling, tokens))
        lost = LostTurn(
            turn_id=begun.turn_id, token_ids=tokens, prompt_tokens=begun.prompt_tokens, is_complete=is_whole
        )
        left = max(self._deadline - time.monotonic(), 0.001)
        return replace(self._request, deadline_seconds=left, resume=lost)


def set_max_tokens(request: TurnRequest, begun: BegunTurn) -> TurnRequest:
    """Return the request with the answer length that the router decided, if it decided one."""
    if not begun.max_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, max_tokens=begun.max_tokens), is_open_ended=False)


def is_scored(request: TurnRequest) -> bool:
    """Return whether a request asks for log-probabilities."""
    return request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None


def ask_for_all_tokens(request: TurnRequest, lost: LostTurn) -> TurnRequest:
    """Return a resumed request that asks for all tokens again if it needs their log-probabilities."""
    return replace(request, resume=replace(lost, token_ids=()) if is_scored(request) else lost)


def _is_whole(sampling: SamplingParameters, tokens: tuple[int, ...]) -> bool:
    return bool(tokens) and (len(tokens) >= sampling.max_tokens or tokens[-1] in sampling.stop_token_ids)


def find_finish_reason(sampling: SamplingParameters, tokens: tuple[int, ...]) -> FinishReason:
    """Return why an answer ended, judged by its tokens."""
    is_stopped = tokens[-1] in sampling.stop_token_ids or len(tokens) < sampling.max_tokens
    return FinishReason.STOP if is_stopped else FinishReason.LENGTH


class TurnStream:
    """Responses of one begun turn, made from its decode leader's events."""

    def __init__(
        self,
        request: TurnRequest,
        begun: BegunTurn,
        text: AnswerText,
        started: float,
        index: int = 0,
        shown: Callable[[str], str] = str,
        num_received: int | None = None,
        note_tokens: Callable[[int, float | None], None] = lambda num_tokens, gap: None,
    ) -> None:
        """Start with a begun turn. `started` is the request's arrival (`time.monotonic`).

        `shown` turns a router id into the client's own id. `num_received` tokens reached the client before its gateway
        was lost, and are not sent again; None if the request is not resumed. `note_tokens` is called with each
        response's number of tokens and the seconds since the previous tokens, None for the first.
        """
        self._shown = shown
        self._request = request
        self._begun = begun
        self._text = text
        self._started = started
        self._index = index
        self._logprobs: list[inference_pb2.TokenLogprobs] = []
        self._prompt_logprobs: list[inference_pb2.TokenLogprobs] = []
        self._tokens: list[int] = []
        self._first_at = 0.0
        self._last_at = 0.0
        self._sent_at = 0.0
        self._note_tokens = note_tokens
        self._plan = to_message(inference_pb2.Plan, begun.plan)
        self._lost_at = 0.0  # time of a loss without a token since, else 0
        self._num_received = num_received or 0
        if num_received is not None:
            self._plan.failovers.add(
                role=inference_pb2.ROLE_GATEWAY,
                cause="the stream to the client broke",
                after_tokens=num_received,
                prefill_ring=begun.plan.prefill_ring,
                decode_ring=begun.plan.decode_ring,
            )

    @property
    def ttft_seconds(self) -> float:
        return self._first_at - self._started if self._tokens else 0.0

    @property
    def ttit_seconds(self) -> float:
        """TTIT: mean over the tokens after the first; 0 with fewer than two."""
        return (self._last_at - self._first_at) / (len(self._tokens) - 1) if len(self._tokens) > 1 else 0.0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def _start(self) -> inference_pb2.GenerateResponse:
        """Return the response that opens the stream, with the plan as decided."""
        return inference_pb2.GenerateResponse(
            start=inference_pb2.GenerateStart(
                request_id=self._shown(self._request.request_id),
                conversation_id=self._shown(self._request.conversation_id),
                prompt_tokens=self._begun.prompt_tokens,
                cached_tokens=self._begun.plan.cached_tokens,
                plan=self._plan,
                remembered_tokens=self._begun.remembered_tokens,
                seed=self._request.sampling.seed,
            )
        )

    async def responses(
        self,
        turn: LastingTurn,
        waiting: AbstractContextManager[None] = UNGUARDED,
        completed: Callable[[inference_pb2.GenerateComplete], None] = lambda complete: None,
    ) -> Responses:
        """Yield the start, the chunks and the completion. Raises the error that ended a failed turn.

        `waiting` is entered around every wait for rings; `completed` is called before the last response.
        """
        yield self._start()
        is_complete = False
        async with aclosing(turn.events()) as events:
            while True:
                with waiting:
                    event = await anext(events, None)
                if event is None:
                    break
                if isinstance(event, PrefillReport):
                    self._note_prefill(event)
                elif isinstance(event, ScoredEvent):
                    self._prompt_logprobs = all_logprobs_to(event.logprobs)
                elif isinstance(event, FailedOver):
                    self._note_failover(event)
                elif isinstance(event, TokensEvent):
                    if is_complete:
                        continue  # the ring decoded more before it learned that the answer was complete
                    chunk = self._chunk(event)
                    if chunk.chunk.token_ids:
                        yield chunk
                    is_complete = self._text.matched is not None
                    if is_complete:
                        with waiting:
                            await turn.finish(len(self._tokens))
                elif isinstance(event, EndingEvent):
                    with waiting:
                        await turn.finish(len(self._tokens))
                else:
                    last = self._complete(event)
                    completed(last.complete)
                    yield last
                    return
        raise Unavailable(f"the tokens of turn {self._begun.turn_id} ended before the turn did")

    def _note_failover(self, event: FailedOver) -> None:
        """Add a failover to the plan. If the turn had no token yet, the new plan replaces the old one."""
        self._end_failover(event.lost_at)  # ends an earlier failover that brought no token
        self._lost_at, plan = event.lost_at, event.begun.plan
        if not self._tokens:
            before = list(self._plan.failovers)
            self._plan = to_message(inference_pb2.Plan, plan)
            self._plan.failovers.extend(before)
        self._plan.failovers.add(
            role=enum_number(inference_pb2.Role, event.begun.lost_role),
            cause=event.cause,
            after_tokens=len(self._tokens),
            prefill_ring=plan.prefill_ring,
            decode_ring=plan.decode_ring,
            new_tokens=plan.new_tokens,
            cached_tokens=plan.cached_tokens,
        )

    def _end_failover(self, now: float) -> None:
        if self._lost_at:
            self._plan.failovers[-1].lost_seconds = now - self._lost_at
            self._lost_at = 0.0

    def _note_prefill(self, report: PrefillReport) -> None:
        if self._tokens:
            return  # the report is about an attempt after a loss
        self._plan.prefill_seconds = report.prefill_seconds
        self._plan.queue_seconds = report.queue_seconds
        self._plan.pulled_bytes = report.pulled_bytes
        self._plan.pull_seconds = report.pull_seconds
        note_lost(self._plan, report.lost_tokens)
        if report.chunks:
            note_chunks(self._plan, report.chunks)

    def _chunk(self, event: TokensEvent) -> inference_pb2.GenerateResponse:
        """Add tokens to the answer, and return a chunk with the tokens that the client lacks."""
        self._last_at = time.monotonic()
        self._end_failover(self._last_at)
        if not self._tokens:
            self._first_at = self._last_at
        num_known = max(0, self._num_received - len(self._tokens))
        count, text = self._text.push_all(event.token_ids, num_known)
        token_ids = event.token_ids[:count]
        logprobs = all_logprobs_to(event.logprobs[:count])
        self._tokens.extend(token_ids)
        self._logprobs.extend(logprobs)
        if num_new := len(token_ids[num_known:]):
            self._note_tokens(num_new, self._last_at - self._sent_at if self._sent_at else None)
            self._sent_at = self._last_at
        return inference_pb2.GenerateResponse(
            chunk=inference_pb2.GenerateStreamChunk(
                token_ids=token_ids[num_known:],
                text=text,
                prompt_tokens=self._begun.prompt_tokens,
                completion_tokens=len(self._tokens),
                cached_tokens=self._plan.cached_tokens,
                index=self._index,
                logprobs=logprobs[num_known:],
            )
        )

    def _complete(self, event: FinishedEvent) -> inference_pb2.GenerateResponse:
        self._text.finish()
        if self._lost_at:
            self._end_failover(time.monotonic())
        plan = self._plan
        plan.migrated_bytes = event.migrated_bytes
        plan.migration_seconds = event.migration_seconds
        plan.handoff_seconds = event.handoff_seconds
        matched = self._text.matched
        reason = event.finish_reason if matched is None else FinishReason.STOP
        is_stopped = reason is FinishReason.STOP and matched is None
        return inference_pb2.GenerateResponse(
            complete=inference_pb2.GenerateComplete(
                output_ids=self._tokens,
                text=self._text.text,
                finish_reason=enum_number(inference_pb2.FinishReason, reason),
                matched_stop=self._tokens[-1] if is_stopped else None,
                matched_stop_str=matched,
                usage=inference_pb2.Usage(
                    prompt_tokens=self._begun.prompt_tokens,
                    cached_tokens=self._plan.cached_tokens,
                    completion_tokens=len(self._tokens),
                    accepted_draft_tokens=min(event.accepted_drafts, len(self._tokens)),
                ),
                plan=plan,
                ttft_seconds=self.ttft_seconds,
                ttit_seconds=self.ttit_seconds,
                seed=self._request.sampling.seed,
                index=self._index,
                output_logprobs=self._logprobs,
                prompt_logprobs=self._prompt_logprobs,
            )
        )


class CallsUnderWay:
    """Counter of running calls, as a context. The event `none` is set while no call runs."""

    def __init__(self) -> None:
        self.none = asyncio.Event()
        self.none.set()
        self._count = 0

    def __enter__(self) -> None:
        self._count += 1
        self.none.clear()

    def __exit__(self, *error: object) -> None:
        self._count -= 1
        if not self._count:
            self.none.set()


class TurnUnderWay:
    """Running turn, and the context around each of its waits.

    The context raises Stopping at once when the gateway stops or has stopped, and DeadlineExceeded if the rings have
    not ended the turn within its deadline of `seconds` plus DEADLINE_GRACE_SECONDS.
    """

    def __init__(self, request_id: str, stopping: asyncio.Event, seconds: float) -> None:
        self.request_id = request_id
        self._waits: asyncio.Task[object] | None = None
        self._error: RingserveError | None = Stopping(STOPPING) if stopping.is_set() else None
        late = DeadlineExceeded(f"the turn did not end within its deadline of {seconds:.1f} s")
        self._timer = asyncio.get_running_loop().call_later(seconds + DEADLINE_GRACE_SECONDS, self.stop, late)

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        self._waits = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._waits = self._waits, None
        # Pass on a cancellation by another task, even if `stop` has cancelled the wait too.
        if kind is asyncio.CancelledError and self._error is not None and task is not None and not task.uncancel():
            raise self._error from None

    def stop(self, error: RingserveError) -> None:
        """End the turn with `error`: cancel its current wait."""
        self._error = error
        if self._waits is not None:
            self._waits.cancel()

    def close(self) -> None:
        """Stop watching the deadline."""
        self._timer.cancel()


class TurnsUnderWay:
    """Registry of running turns. The event `stopping` is set once they are being ended."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._turns: set[TurnUnderWay] = set()

    def add(self, request_id: str, seconds: float) -> TurnUnderWay:
        turn = TurnUnderWay(request_id, self.stopping, seconds)
        self._turns.add(turn)
        return turn

    def discard(self, turn: TurnUnderWay) -> None:
        turn.close()
        self._turns.discard(turn)

    @property
    def request_ids(self) -> set[str]:
        return {turn.request_id for turn in self._turns}

    def interval(self) -> float:
        """Return the least seconds between two messages of a turn, so that the gateway can serve all running turns."""
        seconds = len(self._turns) * MESSAGE_SECONDS
        return seconds if seconds >= LEAST_INTERVAL_SECONDS else 0.0

    def stop(self) -> None:
        """End every turn: at once if it waits, else when the client has taken its latest response."""
        self.stopping.set()
        for turn in self._turns:
            turn.stop(Stopping(STOPPING))


def split_answers(request: TurnRequest, num_completions: int) -> list[TurnRequest]:
    """Return one turn request per answer. The first is the request itself; the others share its prompt's KV."""
    others = [
        replace(
            request,
            request_id=f"{request.request_id}/{index}",
            follows=request.request_id,
            sampling=replace(request.sampling, seed=derive_seed(request.sampling.seed, index), prompt_logprobs=None),
        )
        for index in range(1, num_completions)
    ]
    return [request, *others]


def derive_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of answer `index`. Answer 0 has the request's own seed."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


async def merge_answers(turns: Sequence[AbstractAsyncContextManager[Responses]]) -> Responses:
    """Yield responses as they arrive: the first turn's `start`, then all turns' responses except other starts.

    The other turns begin after the first start, and share its prompt's KV. `fan_in` describes failures.
    """
    async with aclosing(fan_in(turns, leads=lambda response: response.HasField("start"))) as arriving:
        async for place, response in arriving:
            if place == 0 or not response.HasField("start"):
                yield response
