"""Servicer of the public gRPC service `ringserve.v1.Inference`.

The gateway is stateless and stays outside Ray, because any process that reaches Ray can run code there.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from ringserve.cp_core.errors import Forbidden, RingserveError, Stopping, Unauthenticated
from ringserve.mapping import enum_name
from ringserve.orchestration.protocol.plans import TurnPlan
from ringserve.orchestration.protocol.ports import Peers, RouterPort
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.services.auth.authenticator import Authenticator, ScopedRouter, read_grpc_certificate
from ringserve.services.auth.tenants import Tenant
from ringserve.services.gateway.requests import (
    RequestReader,
    check_identifier,
    check_name,
    check_request_ids,
    read_num_completions,
    read_stop_rule,
)
from ringserve.services.gateway.text import CONTEXT_TOKENS, AnswerText, StopRule, TextCodec
from ringserve.services.gateway.turn_stream import (
    STOPPING,
    CallsUnderWay,
    LastingTurn,
    Responses,
    TurnStream,
    TurnsUnderWay,
    ask_for_all_tokens,
    begin_with_retries,
    merge_answers,
    split_answers,
)
from ringserve.services.rpc.errors import abort_on_error, answer, find_status_code
from ringserve.services.rpc.wire.contract import model_info_to, to_message
from ringserve.services.telemetry.logs import TurnRecord
from ringserve.services.telemetry.metrics.gateway import GatewayMetrics
from ringserve.services.telemetry.metrics.registry import package_version
from ringserve.services.telemetry.tracing import SpanTracer, TurnTrace
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.views import ConversationInfo, ServerInfo
from ringserve.workers.protocol.ranks import ModelInfo

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

DEFAULT_PAGE = 100
"""Default number of conversations on a list page."""

ABORT_SECONDS = 3.0
"""Seconds the rings have to release turns that a gateway aborts."""

UNSETTLED = ("cancelled", "unavailable")
"""Outcomes after which the turn may still run at the router, so the gateway aborts it there."""


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Public methods. Each turn's tokens come straight from its decode leader.

    Calls about a client's ids reach the router only through the calling tenant's `ScopedRouter`.
    """

    def __init__(
        self,
        model: ModelInfo,
        model_path: str,
        model_name: str,
        codec: TextCodec,
        reader: RequestReader,
        router: RouterPort,
        peers: Peers,
        metrics: GatewayMetrics,
        authenticator: Authenticator | None = None,
        tracer: SpanTracer | None = None,
    ) -> None:
        self._model = model
        self._model_path = model_path
        self._model_name = model_name
        self._codec = codec
        self._reader = reader
        self._whole_router = router
        self._authenticator = authenticator or Authenticator()
        self._peers = peers
        self._metrics = metrics
        self._tracer = tracer or SpanTracer()
        self._started = time.monotonic()
        self._aborts: set[asyncio.Task[None]] = set()
        self._running = TurnsUnderWay()
        self._calls = CallsUnderWay()

    # gRPC lets a handler write its responses itself, but the stubs' types do not.
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        async with abort_on_error(context):
            tenant, trace_parent = self._caller(context), _metadata(context).get("traceparent", "")
            async with self.generate(request, tenant, context.time_remaining(), trace_parent) as responses:
                async for response in responses:
                    await context.write(response)

    @asynccontextmanager
    async def generate(
        self, request: inference_pb2.GenerateRequest, tenant: Tenant, seconds_left: float | None, trace_parent: str = ""
    ) -> AsyncIterator[Responses]:
        """Serve a request of either endpoint: the context yields the responses, and leaving it ends the turns.

        `trace_parent` is the client's own W3C trace context. Raises RingserveError.
        """
        started, router = time.monotonic(), self.router_for(tenant)
        with ExitStack() as held:
            held.enter_context(self._calls)
            # The client's request id is not checked yet, so a refusal's log line has none.
            with self._count_refusal(started, tenant, TurnRecord("", tenant.name, trace_parent)):
                count = read_num_completions(request.sampling_params)
                held.enter_context(self._authenticator.limits.turns(tenant, count))
                turn_request = await asyncio.to_thread(self._reader.read, request, seconds_left, router)
            rule = read_stop_rule(request.sampling_params)
            turns = [
                self._turn(each, trace_parent, router, rule, started, index)
                for index, each in enumerate(split_answers(turn_request, count))
            ]
            async with turns[0] if count == 1 else aclosing(merge_answers(turns)) as responses:
                yield responses

    @contextmanager
    def _count_refusal(self, started: float, tenant: Tenant, record: TurnRecord) -> Iterator[None]:
        try:
            yield
        except RingserveError as error:
            self._metrics.began(tenant.name)
            outcome, seconds = find_status_code(error).name.lower(), time.monotonic() - started
            self._metrics.ended(outcome, seconds, tenant.name)
            record.end(log, outcome, seconds)
            raise

    @asynccontextmanager
    async def _turn(
        self,
        turn_request: TurnRequest,
        trace_parent: str,
        router: ScopedRouter,
        rule: StopRule,
        started: float,
        index: int,
    ) -> AsyncIterator[Responses]:
        """Begin one answer's turn, yield its responses, and record how it ended."""
        outcome, request_id, tenant = "cancelled", turn_request.request_id, router.tenant.name
        trace = TurnTrace(self._tracer, trace_parent, request_id, tenant, started)
        if trace.parent:
            turn_request = replace(turn_request, trace_parent=trace.parent)
        record = TurnRecord(request_id, tenant, trace.parent or trace_parent)
        stream: TurnStream | None = None
        self._metrics.began(tenant)
        turn = self._running.add(request_id, turn_request.deadline_seconds)
        turn_request = replace(turn_request, reader=uuid.uuid4().hex[:16])
        num_received = None
        if turn_request.resume is not None:
            num_received = len(turn_request.resume.token_ids)
            turn_request = ask_for_all_tokens(turn_request, turn_request.resume)

        def completed(complete: inference_pb2.GenerateComplete) -> None:
            nonlocal outcome
            outcome = enum_name(inference_pb2.FinishReason, complete.finish_reason)
            self._metrics.completed(complete, tenant, trace.trace_id)
            trace.completed(complete)

        try:
            with turn:
                begun = await begin_with_retries(self._whole_router.begin_turn, turn_request)
            self._note_plan(request_id, begun.turn_id, begun.prompt_tokens, begun.plan, tenant)
            trace.planned(begun)
            record.begun(begun.turn_id, begun.prompt_tokens, begun.plan.cached_tokens)
            prompt = turn_request.token_ids[-CONTEXT_TOKENS:].tolist()
            text = AnswerText(rule.make_text(self._codec, turn_request.sampling.stop_token_ids, prompt), rule)
            stream = TurnStream(
                turn_request, begun, text, started, index, router.unscope, num_received, self._metrics.sent_tokens
            )
            if num_received is not None:
                self._metrics.lost_ring("gateway", True)
            lasting = LastingTurn(
                turn_request,
                begun,
                self._whole_router.begin_turn,
                lambda endpoint: self._peers.leader("decode", endpoint),
                interval=self._running.interval,
                noted=self._metrics.lost_ring,
                is_stopping=self._running.stopping.is_set,
            )
            async with aclosing(stream.responses(lasting, turn, completed)) as responses:
                yield responses
        except RingserveError as error:
            outcome = find_status_code(error).name.lower()
            if self._running.stopping.is_set():
                raise Stopping(STOPPING) from error
            raise router.unscope_error(error) from None
        finally:
            self._running.discard(turn)
            self._metrics.ended(outcome, time.monotonic() - started, tenant, trace.trace_id)
            trace.ended(outcome)
            if stream is not None:
                record.answered(stream.num_tokens, stream.ttft_seconds)
            record.end(log, outcome, time.monotonic() - started)
            if outcome in UNSETTLED:
                self._abort_soon(request_id, turn_request.reader)

    def _note_plan(self, request_id: str, turn_id: str, prompt_tokens: int, plan: TurnPlan, tenant: str) -> None:
        cached = {source.source: len(source.tokens) for source in plan.cached_sources}
        self._metrics.planned(plan.algorithm, prompt_tokens, cached, tenant)
        log.info(
            "request %s: %s, T=%d P=%d on %s -> %s: %s",
            request_id,
            plan.algorithm,
            plan.new_tokens,
            plan.cached_tokens,
            plan.prefill_ring,
            plan.decode_ring,
            plan.reason,
            extra={"request_id": request_id, "turn_id": turn_id},
        )

    def _abort_soon(self, request_id: str, reader: str = "") -> asyncio.Task[None]:
        """Abort a turn in the background: the rings do not know that its client is gone.

        If `reader` is given, a turn that another gateway has taken over keeps running.
        """
        task = asyncio.create_task(self._abort(request_id, reader))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    async def _abort(self, request_id: str, reader: str) -> None:
        try:
            await self._whole_router.abort_requests([request_id], reader)
        except RingserveError as error:
            log.warning("request %s could not be aborted: %s", request_id, error)

    async def end_turns(self, grace: float, hurry: asyncio.Event) -> None:
        """Wait until no turn of either endpoint runs, then return. End turns that still run after `grace` seconds.

        `hurry` cuts the wait short. Clients of ended turns get an error at once; the rings have ABORT_SECONDS to
        release the turns.
        """
        ends = [asyncio.create_task(event.wait()) for event in (self._calls.none, hurry)]
        await asyncio.wait(ends, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if not self._calls.none.is_set():
            for request_id in self._running.request_ids:
                self._abort_soon(request_id)
            self._running.stop()
        if self._aborts:
            await asyncio.wait(set(self._aborts), timeout=ABORT_SECONDS)
        for abort in set(self._aborts):  # the router cannot be reached, or knows of the abort and is still at it
            abort.cancel()

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        aborted, unknown = await self._answer(
            context, lambda router: router.abort_requests(check_request_ids(request.request_ids))
        )
        return inference_pb2.AbortResponse(aborted=aborted, unknown=unknown)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        await self._answer(context, _nothing)
        return model_info_to(self._model, self._model_path, self._model_name)

    async def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: Context
    ) -> inference_pb2.CountTokensResponse:
        count = await self._answer(
            context, lambda router: self.read_tokens(router.tenant, lambda reader, codec: reader.count(request))
        )
        return inference_pb2.CountTokensResponse(num_tokens=count, max_context_length=self._model.max_positions)

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer."""
        return self._codec

    async def read_tokens(self, tenant: Tenant, read: Callable[[RequestReader, TextCodec], T]) -> T:
        """Run `read` in a thread and return its result, within the tenant's limits. Raises RingserveError."""
        with self._authenticator.limits.turns(tenant):  # a long text takes as long as a short turn
            return await asyncio.to_thread(read, self._reader, self._codec)

    def router_for(self, tenant: Tenant) -> ScopedRouter:
        """Return the router as a tenant sees it."""
        return ScopedRouter(self._whole_router, tenant)

    async def server_view(self) -> ServerInfo:
        """Return the state of the service as the router sees it. Raises Unavailable."""
        return await self._whole_router.get_server_info()

    def load_view(self) -> dict[str, object]:
        """Return this gateway's uptime and its load of the last ten minutes."""
        return {"uptime_seconds": time.monotonic() - self._started, "load": self._metrics.recent.view()}

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        info = to_message(inference_pb2.GetServerInfoResponse, await self._answer(context, self._read_server_info))
        info.version = package_version()
        info.uptime_seconds = time.monotonic() - self._started
        return info

    async def GetConversation(
        self, request: inference_pb2.GetConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        name = request.conversation_id
        view = await self._answer(context, lambda router: router.get_conversation(check_name("conversation_id", name)))
        return to_message(inference_pb2.GetConversationResponse, view)

    async def ListConversations(
        self, request: inference_pb2.ListConversationsRequest, context: Context
    ) -> inference_pb2.ListConversationsResponse:
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE
        listing = await self._answer(
            context,
            lambda router: router.list_conversations(
                check_identifier("prefix", request.prefix), check_identifier("page_token", request.page_token), size
            ),
        )
        return to_message(inference_pb2.ListConversationsResponse, listing)

    async def ForkConversation(
        self, request: inference_pb2.ForkConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        view = await self._answer(context, lambda router: self._fork(router, request))
        return to_message(inference_pb2.GetConversationResponse, view)

    async def _fork(self, router: ScopedRouter, request: inference_pb2.ForkConversationRequest) -> ConversationInfo:
        at_token = request.at_token if request.HasField("at_token") else None
        source, new = check_name("source_id", request.source_id), check_name("new_id", request.new_id)
        return await self.fork_conversation(router.tenant, source, new, at_token)

    async def fork_conversation(
        self, tenant: Tenant, source_id: str, new_id: str, at_token: int | None
    ) -> ConversationInfo:
        """Begin a conversation with another's tokens, within the tenant's limits. Raises RingserveError."""
        with self._authenticator.limits.turns(tenant):  # it costs the router as much as a turn
            return await self.router_for(tenant).fork_conversation(source_id, new_id, at_token)

    async def DeleteConversation(
        self, request: inference_pb2.DeleteConversationRequest, context: Context
    ) -> inference_pb2.DeleteConversationResponse:
        name = request.conversation_id
        await self._answer(context, lambda router: router.delete_conversation(check_name("conversation_id", name)))
        return inference_pb2.DeleteConversationResponse()

    def _caller(self, context: Context) -> Tenant:
        """Return the calling tenant. Raises Unauthenticated."""
        with self._count_refused_call("grpc"):
            metadata = _metadata(context)
            return self._authenticator.find_tenant(
                metadata.get("authorization"), read_grpc_certificate(context.auth_context())
            )

    def admit(self, metadata: Mapping[str, str]) -> None:
        """Refuse a gRPC call by its metadata alone. Raises Unauthenticated."""
        with self._count_refused_call("grpc"):
            self._authenticator.admit(metadata)

    def note_ignored(self, count: int) -> None:
        """Count fields of an HTTP request that were ignored."""
        self._metrics.ignored_fields(count)

    def note_refused(self, endpoint: str, error: RingserveError) -> None:
        """Count a call refused for its credentials or rights. Other errors are not counted here."""
        if isinstance(error, Unauthenticated | Forbidden):
            self._metrics.refused_call(endpoint, find_status_code(error).name.lower())

    @contextmanager
    def _count_refused_call(self, endpoint: str) -> Iterator[None]:
        try:
            yield
        except RingserveError as error:
            self.note_refused(endpoint, error)
            raise

    async def _answer(self, context: Context, ask: Callable[[ScopedRouter], Awaitable[T]]) -> T:
        """Ask the calling tenant's router. An error becomes its gRPC status."""

        async def asked() -> T:
            return await ask(self.router_for(self._caller(context)))

        return await answer(context, asked())

    async def _read_server_info(self, router: ScopedRouter) -> ServerInfo:
        with self._count_refused_call("grpc"):
            self._authenticator.check_operator(router.tenant)
        return await self._whole_router.get_server_info()


def _metadata(context: Context) -> dict[str, str]:
    return {key: str(value) for key, value in context.invocation_metadata() or ()}


async def _nothing(router: ScopedRouter) -> None:
    """Ask the router nothing: the call only needs a known caller."""
