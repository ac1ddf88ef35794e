"""RouterService: the door of the router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc

from orchestration.protocol.ports import RouterPort
from ringserve.v1 import inference_pb2, router_pb2, router_pb2_grpc
from services.rpc.errors import answer
from services.rpc.wire import conversations as wire_conversations
from services.rpc.wire import plans
from services.rpc.wire import rings as wire_rings
from services.rpc.wire import turns as wire
from services.telemetry.metrics.router import RouterMetrics

Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Each method is one verb of the router. `metrics_endpoint` is told to whoever asks for the whole service."""

    def __init__(self, router: RouterPort, metrics: RouterMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self.metrics_endpoint = ""

    async def BeginTurn(self, request: router_pb2.BeginTurnRequest, context: Context) -> router_pb2.BeginTurnResponse:
        turn = await answer(context, self._metrics.planned(self._router.begin_turn(wire.turn_request_from(request))))
        return router_pb2.BeginTurnResponse(
            turn_id=turn.turn_id,
            decode_endpoint=turn.decode_endpoint,
            prompt_tokens=turn.prompt_tokens,
            plan=plans.plan_to(turn.plan),
        )

    async def EndTurn(self, request: router_pb2.EndTurnRequest, context: Context) -> router_pb2.EndTurnResponse:
        keep = await answer(context, self._router.end_turn(wire.outcome_from(request)))
        return router_pb2.EndTurnResponse(keep_tokens=keep)

    async def ResumeTurn(
        self, request: router_pb2.ResumeTurnRequest, context: Context
    ) -> router_pb2.ResumeTurnResponse:
        await answer(context, self._router.resume_turn(wire.resume_from(request)))
        return router_pb2.ResumeTurnResponse()

    async def AbortTurns(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        aborted, unknown = await answer(context, self._router.abort_requests(list(request.request_ids)))
        return inference_pb2.AbortResponse(aborted=aborted, unknown=unknown)

    async def GetConversation(
        self, request: inference_pb2.GetConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        view = await answer(context, self._router.get_conversation(request.conversation_id))
        return wire_conversations.conversation_to(view)

    async def ListConversations(
        self, request: inference_pb2.ListConversationsRequest, context: Context
    ) -> inference_pb2.ListConversationsResponse:
        listing = self._router.list_conversations(request.prefix, request.page_token, request.page_size)
        return wire_conversations.list_to(await answer(context, listing))

    async def ForkConversation(
        self, request: inference_pb2.ForkConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        at_token = request.at_token if request.HasField("at_token") else None
        view = await answer(context, self._router.fork_conversation(request.source_id, request.new_id, at_token))
        return wire_conversations.conversation_to(view)

    async def DeleteConversation(
        self, request: inference_pb2.DeleteConversationRequest, context: Context
    ) -> inference_pb2.DeleteConversationResponse:
        await answer(context, self._router.delete_conversation(request.conversation_id))
        return inference_pb2.DeleteConversationResponse()

    async def RegisterRing(
        self, request: router_pb2.RegisterRingRequest, context: Context
    ) -> router_pb2.RegisterRingResponse:
        turns = await answer(context, self._router.register_ring(wire_rings.registration_from(request)))
        return router_pb2.RegisterRingResponse(running_turns=turns)

    async def DrainRing(self, request: router_pb2.DrainRingRequest, context: Context) -> router_pb2.DrainRingResponse:
        await answer(context, self._router.drain_ring(request.ring, request.seconds, force=request.force))
        return router_pb2.DrainRingResponse()

    async def RestartRing(
        self, request: router_pb2.RestartRingRequest, context: Context
    ) -> router_pb2.RestartRingResponse:
        restart = self._router.restart_ring(request.ring, request.seconds, leaving_node=request.leaving_node)
        await answer(context, restart)
        return router_pb2.RestartRingResponse()

    async def UndrainRing(
        self, request: router_pb2.UndrainRingRequest, context: Context
    ) -> router_pb2.UndrainRingResponse:
        await answer(context, self._router.undrain_ring(request.ring))
        return router_pb2.UndrainRingResponse()

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        view = await answer(context, self._router.get_server_info())
        return wire_rings.server_to(replace(view, metrics_endpoint=self.metrics_endpoint))
