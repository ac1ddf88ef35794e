"""gRPC services between ringserve processes: a ring leader's RingService and the router's RouterService.

All state of rings and turns stays with the leader or the router that they call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.inventory import KnownEpoch, RingInventory
from ringserve.orchestration.protocol.ports import DecodePort, PrefillPort, RouterPort
from ringserve.orchestration.protocol.rings import HEARTBEAT_SECONDS
from ringserve.orchestration.protocol.turns import (
    Admit,
    BegunTurn,
    ForkKv,
    KvQuota,
    PrefillTurn,
    Reserve,
    ResumeTurn,
    RingRegistration,
    SendKv,
    TakeKv,
    TurnOutcome,
    TurnRequest,
)
from ringserve.services.rpc.errors import abort_on_error, answer, make_error
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.turn_streams import ADMITTED, TurnsWriter
from ringserve.services.rpc.wire.contract import from_message, to_message
from ringserve.services.telemetry.metrics.router import RouterMetrics
from ringserve.v1 import inference_pb2, rings_pb2, rings_pb2_grpc, router_pb2, router_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
A = TypeVar("A")
M = TypeVar("M", bound=Message)


async def _serve(
    context: Context, verb: Callable[[A], Awaitable[object]], kind: type[A], request: Message, response: type[M]
) -> M:
    """Call a verb with the request as a dataclass, and return its result as the response; None becomes an empty one."""

    async def call() -> M:
        result = await verb(from_message(kind, request))
        return response() if result is None else to_message(response, result)

    return await answer(context, call())


class PrefillServicer(rings_pb2_grpc.RingServiceServicer):
    """Endpoint of a prefill leader: each method is one verb of `PrefillPort`. It refuses the decode-only verbs."""

    def __init__(self, leader: PrefillPort) -> None:
        self._leader = leader

    def register(self, server: GrpcServer) -> None:
        """Add the service to a server that has not started."""
        server.add("ringserve.v1.RingService", lambda to: rings_pb2_grpc.add_RingServiceServicer_to_server(self, to))

    def end_idle(self) -> None:
        """End the streams of gateways that read no turn, before the server stops: they would use up its grace."""

    async def Reserve(self, request: rings_pb2.ReserveRequest, context: Context) -> rings_pb2.ReserveResponse:
        return await _serve(context, self._leader.reserve, Reserve, request, rings_pb2.ReserveResponse)

    async def Prefill(self, request: rings_pb2.PrefillRequest, context: Context) -> rings_pb2.PrefillResponse:
        return await _serve(context, self._leader.prefill, PrefillTurn, request, rings_pb2.PrefillResponse)

    async def SendKv(self, request: rings_pb2.SendKvRequest, context: Context) -> rings_pb2.SendKvResponse:
        return await _serve(context, self._leader.send_kv, SendKv, request, rings_pb2.SendKvResponse)

    async def TakeKv(self, request: rings_pb2.TakeKvRequest, context: Context) -> rings_pb2.TakeKvResponse:
        return await _serve(context, self._leader.take_kv, TakeKv, request, rings_pb2.TakeKvResponse)

    async def AbortTurn(self, request: rings_pb2.AbortTurnRequest, context: Context) -> rings_pb2.AbortTurnResponse:
        error = make_error(request.error, request.message)
        await answer(context, self._leader.abort_turn(request.turn_id, error))
        return rings_pb2.AbortTurnResponse()

    async def Settle(self, request: rings_pb2.SettleRequest, context: Context) -> rings_pb2.SettleResponse:
        await answer(context, self._leader.settle(request.kv_id, request.turn_id, request.retain_tokens))
        return rings_pb2.SettleResponse()

    async def ForkKv(self, request: rings_pb2.ForkKvRequest, context: Context) -> rings_pb2.ForkKvResponse:
        return await _serve(context, self._leader.fork_kv, ForkKv, request, rings_pb2.ForkKvResponse)

    async def GetRetained(
        self, request: rings_pb2.GetRetainedRequest, context: Context
    ) -> rings_pb2.GetRetainedResponse:
        kept = await answer(context, self._leader.get_retained(list(request.kv_ids)))
        return to_message(rings_pb2.GetRetainedResponse, kept)

    async def Drain(self, request: rings_pb2.DrainRequest, context: Context) -> rings_pb2.DrainResponse:
        await answer(context, self._leader.undrain() if request.undo else self._leader.drain(request.seconds))
        return rings_pb2.DrainResponse()

    async def GetStatus(self, request: rings_pb2.GetStatusRequest, context: Context) -> inference_pb2.RingInfo:
        return to_message(inference_pb2.RingInfo, await answer(context, self._leader.get_status()))

    async def Admit(self, request: rings_pb2.AdmitRequest, context: Context) -> rings_pb2.AdmitResponse:
        return await answer(context, _refuse())

    async def StreamTurns(
        self, asked: AsyncIterator[rings_pb2.TurnReading], context: Context
    ) -> AsyncIterator[rings_pb2.TurnsEvents]:
        yield await answer(context, _refuse())

    async def FinishTurn(self, request: rings_pb2.FinishTurnRequest, context: Context) -> rings_pb2.FinishTurnResponse:
        return await answer(context, _refuse())


async def _refuse() -> NoReturn:
    raise InvalidRequest("this is the leader of a prefill ring, which admits, streams and finishes no turns")


class DecodeServicer(PrefillServicer):
    """Endpoint of a decode leader: each method is one verb of `DecodePort`."""

    _leader: DecodePort

    def __init__(self, leader: DecodePort, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        """Send a heartbeat in every stream each `heartbeat` seconds."""
        super().__init__(leader)
        self._heartbeat = heartbeat
        self._writers: set[TurnsWriter] = set()

    def end_idle(self) -> None:
        for writer in self._writers:
            writer.end_idle()

    async def Admit(self, request: rings_pb2.AdmitRequest, context: Context) -> rings_pb2.AdmitResponse:
        return await _serve(context, self._leader.admit, Admit, request, rings_pb2.AdmitResponse)

    async def StreamTurns(
        self, asked: AsyncIterator[rings_pb2.TurnReading], context: Context
    ) -> AsyncIterator[rings_pb2.TurnsEvents]:
        writer = TurnsWriter(self._leader, self._heartbeat)
        self._writers.add(writer)
        # A caller that hangs up cancels this coroutine: `aclosing` tells the leader at once, not at garbage collection.
        try:
            async with abort_on_error(context), aclosing(writer.messages(asked)) as messages:
                await context.send_initial_metadata(ADMITTED)
                async for message in messages:
                    yield message
        finally:
            self._writers.discard(writer)

    async def FinishTurn(self, request: rings_pb2.FinishTurnRequest, context: Context) -> rings_pb2.FinishTurnResponse:
        await answer(context, self._leader.finish_turn(request.turn_id, request.num_tokens))
        return rings_pb2.FinishTurnResponse()


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Router endpoint: each method is one verb of `RouterPort`.

    `metrics_endpoint` (HOST:PORT, or empty) is part of the answer to GetServerInfo.
    """

    def __init__(self, router: RouterPort, metrics: RouterMetrics) -> None:
        self._router = router
        self._metrics = metrics
        self._inventory_lock = asyncio.Lock()
        self.metrics_endpoint = ""

    def register(self, server: GrpcServer) -> None:
        """Add the service to a server that has not started."""
        server.add(
            "ringserve.v1.RouterService", lambda to: router_pb2_grpc.add_RouterServiceServicer_to_server(self, to)
        )

    async def BeginTurn(self, request: router_pb2.BeginTurnRequest, context: Context) -> router_pb2.BeginTurnResponse:
        def begin(turn: TurnRequest) -> Awaitable[BegunTurn]:
            return self._metrics.planned(self._router.begin_turn(turn))

        return await _serve(context, begin, TurnRequest, request, router_pb2.BeginTurnResponse)

    async def EndTurn(self, request: router_pb2.EndTurnRequest, context: Context) -> router_pb2.EndTurnResponse:
        async def end() -> int:
            return await self._router.end_turn(from_message(TurnOutcome, request))

        return router_pb2.EndTurnResponse(retain_tokens=await answer(context, end()))

    async def ResumeTurn(
        self, request: router_pb2.ResumeTurnRequest, context: Context
    ) -> router_pb2.ResumeTurnResponse:
        return await _serve(context, self._router.resume_turn, ResumeTurn, request, router_pb2.ResumeTurnResponse)

    async def AbortTurns(self, request: router_pb2.AbortTurnsRequest, context: Context) -> inference_pb2.AbortResponse:
        aborts = self._router.abort_requests(list(request.request_ids), request.reader)
        aborted, unknown = await answer(context, aborts)
        return inference_pb2.AbortResponse(aborted=aborted, unknown=unknown)

    async def GetConversation(
        self, request: inference_pb2.GetConversationRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        view = await answer(context, self._router.get_conversation(request.conversation_id))
        return to_message(inference_pb2.GetConversationResponse, view)

    async def ListConversations(
        self, request: inference_pb2.ListConversationsRequest, context: Context
    ) -> inference_pb2.ListConversationsResponse:
        listing = self._router.list_conversations(request.prefix, request.page_token, request.page_size)
        return to_message(inference_pb2.ListConversationsResponse, await answer(context, listing))

    async def ForkConversation(
        self, request: router_pb2.BeginForkRequest, context: Context
    ) -> inference_pb2.GetConversationResponse:
        at_token = request.at_token if request.HasField("at_token") else None
        quota = from_message(KvQuota, request.kv_quota) if request.HasField("kv_quota") else None
        fork = self._router.fork_conversation(request.source_id, request.new_id, at_token, quota)
        view = await answer(context, fork)
        return to_message(inference_pb2.GetConversationResponse, view)

    async def DeleteConversation(
        self, request: inference_pb2.DeleteConversationRequest, context: Context
    ) -> inference_pb2.DeleteConversationResponse:
        await answer(context, self._router.delete_conversation(request.conversation_id))
        return inference_pb2.DeleteConversationResponse()

    async def RegisterRing(
        self, request: router_pb2.RegisterRingRequest, context: Context
    ) -> router_pb2.RegisterRingResponse:
        if not request.HasField("inventory"):
            return await self._register(request, None, context)
        # One inventory at a time: many rings' inventories take seconds, and heartbeats must get through in between.
        async with self._inventory_lock:
            await asyncio.sleep(0)
            return await self._register(request, from_message(RingInventory, request.inventory), context)

    async def _register(
        self, request: router_pb2.RegisterRingRequest, inventory: RingInventory | None, context: Context
    ) -> router_pb2.RegisterRingResponse:
        known = KnownEpoch(epoch=request.epoch, inventory=inventory)
        registering = self._router.register_ring(from_message(RingRegistration, request), known)
        return to_message(router_pb2.RegisterRingResponse, await answer(context, registering))

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

    async def FindFault(self, request: router_pb2.FindFaultRequest, context: Context) -> router_pb2.FindFaultResponse:
        return router_pb2.FindFaultResponse(fault=await answer(context, self._router.find_fault()))

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        view = await answer(context, self._router.get_server_info())
        return to_message(
            inference_pb2.GetServerInfoResponse, replace(view, router_metrics_endpoint=self.metrics_endpoint)
        )
