"""Turns at the gateway: tokens become text, times are as the client sees them, and running turns can be ended.

Several answers to one prompt are a turn each, and their streams are merged into one.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext
from dataclasses import replace

from ringserve.cp_core.errors import DeadlineExceeded, RingserveError, Stopping, Unavailable
from ringserve.mapping import enum_number
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndingEvent,
    FinishedEvent,
    PrefillReport,
    ScoredEvent,
    TokensEvent,
    TurnRequest,
)
from ringserve.orchestration.tasks import fan_in
from ringserve.services.gateway.failover import FailedOver, LastingTurn
from ringserve.services.gateway.text import AnswerText
from ringserve.services.rpc.wire.contract import all_logprobs_to, note_chunks, note_lost, to_message
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.decode_commands import FinishReason

Responses = AsyncGenerator[inference_pb2.GenerateResponse, None]
UNGUARDED = nullcontext()
MESSAGE_SECONDS = 100e-6
"""Gateway time for one token message from a ring to a client, with a third of it as reserve (decision 0037)."""
LEAST_INTERVAL_SECONDS = 0.01  # steps of rings take longer
DEADLINE_GRACE_SECONDS = 2.0
"""Seconds the rings have to end a turn after its deadline; then the gateway ends it."""


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


STOPPING = "the gateway is stopping; retry at another"


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
        """Return the seconds between a turn's messages that leave the gateway time for all turns."""
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
