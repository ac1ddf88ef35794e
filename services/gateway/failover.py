"""Failover at the gateway: the events of a turn, whatever rings it takes until its last token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from ringserve.cp_core.errors import LOSSES, NotBegun, NotFound, RingserveError, Unavailable, Unreachable
from ringserve.orchestration.protocol.ports import DecodePort
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    FinishedEvent,
    LostTurn,
    ScoredEvent,
    TokensEvent,
    TurnEvent,
    TurnRequest,
)
from ringserve.workers.protocol.decode_commands import FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters

log = logging.getLogger(__name__)

Begin = Callable[[TurnRequest], Awaitable[BegunTurn]]
"""The router's `begin_turn`."""

MAX_FAILOVERS = 2
"""Failovers of a turn that gets no token further: its own prompt may be what ends the rings."""
ROUTER_SECONDS = 30.0
"""Seconds for the router to be reached, which restarts meanwhile perhaps."""
ROUTER_PAUSE_SECONDS = 0.2
"""Seconds between two calls of a router that cannot be reached."""


async def begun_in_time(begin: Begin, request: TurnRequest) -> BegunTurn:
    """Have the router begin a turn, or let it go on. A router that cannot be reached is asked again for a while.

    It may have begun the turn before it was lost, so the next one is asked for a turn that may run. Raises NotBegun and
    other refusals at once.
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
            log.info("request %s is not begun yet: %s", request.request_id, error)
        await asyncio.sleep(ROUTER_PAUSE_SECONDS)
        left = max(deadline - clock(), 0.001)
        request = replace(request, resume=request.resume or LostTurn(), deadline_seconds=left)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedOver:
    """Event of a turn that goes on as `begun` after a loss, which was at `lost_at` of `time.monotonic`."""

    begun: BegunTurn
    cause: str
    lost_at: float


class LastingTurn:
    """Begun turn with the two verbs of its decode leader. Where a ring is lost it begins again, unseen by the reader.

    `leader_at` finds a decode leader. `interval` tells the least seconds between two of its messages with tokens.
    `noted` is called with the role of each lost ring, and whether the turn went on. Once `is_stopping` nothing is begun
    again.

    Where `request.resume` says that an earlier gateway was lost, the events begin with the tokens that the client has.
    Log-probabilities of these are not known here: where they are asked for, the ring is to tell all tokens again. A
    ring that lacks them counts as lost, and another computes the answer from its beginning.
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
        self._request, self._begun = bounded(request, begun), begun
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
            has_scores = self._request.resume is None or bool(self._tokens) or begun.prompt_tokens == 1
            try:
                leader = self._leader_at(begun.decode_endpoint)
                async with aclosing(leader.stream_turn(begun.turn_id, len(self._tokens), self._interval())) as events:
                    if self._num_finished is not None:
                        await self._tell_finished()
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
                    # The leader may live, and keeps the turn for a while.
                    log.warning("the stream of turn %s broke and is opened again: %s", begun.turn_id, error)
                    self._is_cut = True
                    continue
                yield await self._fail_over(error)
        assert begun.ended is not None
        rest = begun.ended.token_ids[len(self._tokens) :]
        if rest and self._num_finished is None:
            self._tokens.extend(rest)
            yield TokensEvent(token_ids=rest)
        reason = end_of(self._request.sampling, begun.ended.token_ids)
        yield FinishedEvent(finish_reason=reason, migrated_bytes=0, migration_seconds=0.0, handoff_seconds=0.0)

    def _is_scored(self, event: TokensEvent, has_scores: bool) -> bool:
        """Return whether a resumed turn has the log-probabilities that its client asked for."""
        if self._request.resume is None:
            return True
        sampling = self._request.sampling
        is_complete = sampling.logprobs is None or len(event.logprobs) == len(event.token_ids)
        return is_complete and (sampling.prompt_logprobs is None or has_scores)

    async def finish(self, num_tokens: int) -> None:
        """End the turn well after its first `num_tokens` tokens; the events bring the end."""
        if self._num_finished is None:
            self._num_finished = num_tokens
            await self._tell_finished()

    async def _tell_finished(self) -> None:
        begun, num_tokens = self._begun, self._num_finished
        if begun.ended is not None or num_tokens is None:
            return
        try:
            await self._leader_at(begun.decode_endpoint).finish_turn(begun.turn_id, num_tokens)
        except LOSSES as error:
            log.info("turn %s could not be finished, its events tell more: %s", begun.turn_id, error)

    async def _fail_over(self, error: RingserveError) -> FailedOver:
        lost_at = time.monotonic()
        self._num_losses += 1
        try:
            if self._num_losses > MAX_FAILOVERS:
                raise Unavailable(
                    f"the turn lost a ring {self._num_losses} times after {len(self._tokens)} tokens and is not tried "
                    f"again: {error}"
                )
            begun = self._begun = await self._begun_again()
            self._request = bounded(self._request, begun)
        except BaseException:
            self._noted("", False)
            raise
        log.warning(
            "request %s lost a %s ring after %d tokens and goes on as turn %s: %s",
            self._request.request_id,
            begun.lost_role,
            len(self._tokens),
            begun.turn_id,
            error,
        )
        self._noted(begun.lost_role, True)
        return FailedOver(begun=begun, cause=str(error), lost_at=lost_at)

    async def _begun_again(self) -> BegunTurn:
        """Have the router begin the turn again, where the router can be reached soon. Raises RingserveError."""
        return await begun_in_time(self._begin, self._resumption())

    def _resumption(self) -> TurnRequest:
        tokens, begun = tuple(self._tokens[: self._num_finished]), self._begun
        sampling = self._request.sampling
        is_whole = self._num_finished is not None or (not sampling.ends_by_text and _is_whole(sampling, tokens))
        lost = LostTurn(
            turn_id=begun.turn_id, token_ids=tokens, prompt_tokens=begun.prompt_tokens, is_complete=is_whole
        )
        left = max(self._deadline - time.monotonic(), 0.001)
        return replace(self._request, deadline_seconds=left, resume=lost)


def bounded(request: TurnRequest, begun: BegunTurn) -> TurnRequest:
    """Return the request of a begun turn with the length of its answer, where the router decided that."""
    if not begun.max_tokens:
        return request
    return replace(request, sampling=replace(request.sampling, max_tokens=begun.max_tokens), is_open_ended=False)


def is_scored(request: TurnRequest) -> bool:
    """Return whether a request asks for log-probabilities."""
    return request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None


def replayed(request: TurnRequest, lost: LostTurn) -> TurnRequest:
    """Return a resumed request whose turn tells its tokens again as far as they lack log-probabilities here."""
    return replace(request, resume=replace(lost, token_ids=()) if is_scored(request) else lost)


def _is_whole(sampling: SamplingParameters, tokens: tuple[int, ...]) -> bool:
    return bool(tokens) and (len(tokens) >= sampling.max_tokens or tokens[-1] in sampling.stop_token_ids)


def end_of(sampling: SamplingParameters, tokens: tuple[int, ...]) -> FinishReason:
    """Return why an answer ended, as far as its tokens tell."""
    is_stopped = tokens[-1] in sampling.stop_token_ids or len(tokens) < sampling.max_tokens
    return FinishReason.STOP if is_stopped else FinishReason.LENGTH
