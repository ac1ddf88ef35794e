"""The gateway: the public `ringserve.v1.Inference`. Stateless, and no part of Ray: whoever reaches Ray can run code."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc

from cp_core.errors import InvalidRequest, RingserveError, Unavailable
from orchestration.ports import Peers, RouterPort
from orchestration.turn import ConversationView, Plan, TurnRequest
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from services.completions import Responses, merged, turns_of
from services.metrics.gateway import GatewayMetrics
from services.requests import RequestReader, identifier
from services.sampling_params import num_completions, stop_rule
from services.status import answer, answer_stream, code_of
from services.text import IncrementalText, TextCodec
from services.text_stops import AnswerText, StopRule
from services.turn_stream import TurnStream
from services.wire import conversations as wire_conversations
from services.wire import groups as wire_groups
from workers.steps import ModelInfo

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

DEFAULT_PAGE = 100
"""Conversations on a page of a list."""

UNSETTLED = ("cancelled", "unavailable")
"""Outcomes after which the router may still take the turn for running: it is told, once more than needed perhaps."""


def package_version() -> str:
    try:
        return version("ringserve")
    except PackageNotFoundError:
        return "unknown"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The public methods. Tokens come straight from the decode leader of each turn."""

    def __init__(
        self,
        model: ModelInfo,
        model_path: str,
        codec: TextCodec,
        reader: RequestReader,
        router: RouterPort,
        peers: Peers,
        metrics: GatewayMetrics,
    ) -> None:
        self._model = model
        self._model_path = model_path
        self._codec = codec
        self._reader = reader
        self._router = router
        self._peers = peers
        self._metrics = metrics
        self._started = time.monotonic()
        self._aborts: set[asyncio.Task[None]] = set()
        self._running: set[str] = set()
        self._is_stopping = False

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async for response in answer_stream(context, self._generate(request, context.time_remaining())):
            yield response

    async def _generate(self, request: inference_pb2.GenerateRequest, seconds_left: float | None) -> Responses:
        started = time.monotonic()
        try:
            turn_request = await asyncio.to_thread(self._reader.read, request, seconds_left)
        except RingserveError as error:
            self._metrics.began()
            self._metrics.ended(code_of(error).name.lower(), time.monotonic() - started)
            raise
        rule, count = stop_rule(request.sampling_params), num_completions(request.sampling_params)
        turns = [self._turn(each, rule, started, index) for index, each in enumerate(turns_of(turn_request, count))]
        async with aclosing(merged(turns) if count > 1 else turns[0]) as responses:
            async for response in responses:
                yield response

    async def _turn(self, turn_request: TurnRequest, rule: StopRule, started: float, index: int) -> Responses:
        """The responses of one answer."""
        outcome, request_id = "cancelled", turn_request.request_id
        self._metrics.began()
        try:
            self._running.add(request_id)
            begun = await self._router.begin_turn(turn_request)
            self._note_plan(request_id, begun.prompt_tokens, begun.plan)
            text = AnswerText(IncrementalText(self._codec), rule)
            stream = TurnStream(turn_request, begun, text, started, index)
            yield stream.start()
            async for response in stream.responses(self._peers.decode(begun.decode_endpoint)):
                if response.HasField("complete"):
                    outcome = response.complete.finish_reason
                    self._metrics.completed(response.complete)
                yield response
        except RingserveError as error:
            outcome = code_of(error).name.lower()
            if self._is_stopping:
                raise Unavailable("the gateway is stopping; retry at another") from error
            raise
        finally:
            self._running.discard(request_id)
            self._metrics.ended(outcome, time.monotonic() - started)
            if outcome in UNSETTLED:
                self._abort_soon(request_id)

    def _note_plan(self, request_id: str, prompt_tokens: int, plan: Plan) -> None:
        cached = {source.source: len(source.tokens) for source in plan.cached_sources}
        self._metrics.planned(plan.algorithm, prompt_tokens, cached)
        log.info(
            "request %s: %s, T=%d P=%d on %s -> %s: %s",
            request_id,
            plan.algorithm,
            plan.new_tokens,
            plan.cached_tokens,
            plan.prefill_ring,
            plan.decode_ring,
            plan.reason,
        )

    def _abort_soon(self, request_id: str) -> None:
        """The client hung up, perhaps before its stream had reached the decode ring; or that ring's leader died."""
        task = asyncio.create_task(self._abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        try:
            await self._router.abort_requests([request_id])
        except RingserveError as error:
            log.warning("request %s could not be aborted: %s", request_id, error)

    async def end_turns(self, grace: float) -> None:
        """The gateway stops: turns have `grace` seconds to end by themselves, then they are ended everywhere."""
        await asyncio.sleep(grace)
        self._is_stopping = True
        for request_id in list(self._running):
            await self._abort(request_id)

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        aborted, unknown = await answer(context, self._router.abort_requests(list(request.request_ids)))
        return inference_pb2.AbortResponse(aborted=aborted, unknown=unknown)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        model = self._model
        return inference_pb2.GetModelInfoResponse(
            model_path=self._model_path,
            model_type=model.model_type,
            dtype=model.dtype,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            max_context_length=model.max_positions,
            eos_token_ids=model.eos_token_ids,
            kv_bytes_per_token=model.kv_bytes_per_token,
            num_parameters=model.num_parameters,
            intermediate_size=model.intermediate_size,
        )

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        info = wire_groups.server_to(await answer(context, self._router.get_server_info()))
        info.version = package_version()
        info.uptime_seconds = time.monotonic() - self._started
        return info

    async def GetConversation(
        self, request: inference_pb2.GetConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        view = await answer(context, self._named(request.conversation_id, self._router.get_conversation))
        return wire_conversations.conversation_to(view)

    async def ListConversations(
        self, request: inference_pb2.ListConversationsRequest, context: Context
    ) -> inference_pb2.ListConversationsResponse:
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE
        listing = self._router.list_conversations(request.prefix, request.page_token, size)
        return wire_conversations.list_to(await answer(context, listing))

    async def ForkConversation(
        self, request: inference_pb2.ForkConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        return wire_conversations.conversation_to(await answer(context, self._fork(request)))

    async def _fork(self, request: inference_pb2.ForkConversationRequest) -> ConversationView:
        for field, value in (("source_id", request.source_id), ("new_id", request.new_id)):
            if not identifier(field, value):
                raise InvalidRequest(f"{field}: '' is not allowed; name a conversation")
        at_token = request.at_token if request.HasField("at_token") else None
        return await self._router.fork_conversation(request.source_id, request.new_id, at_token)

    async def DeleteConversation(
        self, request: inference_pb2.DeleteConversationRequest, context: Context
    ) -> inference_pb2.DeleteConversationResponse:
        await answer(context, self._named(request.conversation_id, self._router.delete_conversation))
        return inference_pb2.DeleteConversationResponse()

    async def _named(self, conversation_id: str, call: Any) -> Any:
        if not conversation_id:
            raise InvalidRequest("conversation_id: '' is not allowed; name a conversation")
        return await call(conversation_id)
