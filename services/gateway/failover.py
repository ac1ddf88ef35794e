"""Failover at the gateway: a turn's events up to its last token, even if rings are lost on the way."""

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
"""Failovers in a row without a new token, then the turn fails: its own prompt may crash the rings."""
ROUTER_SECONDS = 30.0
"""How long to retry while the router may be restarting, in seconds."""
ROUTER_PAUSE_SECONDS = 0.2
"""Seconds between two calls to an unreachable router."""


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
    """Begun turn with its decode leader's two verbs. If a ring is lost, the turn begins again, unseen by the reader.

    `leader_at` finds a decode leader. `interval` returns the minimum seconds between two token messages. `noted` is
    called with each lost ring's role and whether the turn continued. Once `is_stopping`, no turn begins again.

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
