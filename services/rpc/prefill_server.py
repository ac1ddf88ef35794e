"""PrefillService: the door of a prefill ring's leader."""

from __future__ import annotations

from typing import Any

import grpc

from orchestration.protocol.ports import PrefillPort
from ringserve.v1 import rings_pb2, rings_pb2_grpc
from services.rpc.errors import answer, error_named
from services.rpc.wire import conversations as wire_conversations
from services.rpc.wire import kv as wire_kv
from services.rpc.wire import rings as wire_rings
from services.rpc.wire import turns as wire

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(rings_pb2_grpc.PrefillServiceServicer):
    """Each method is one verb of the leader."""

    def __init__(self, leader: PrefillPort) -> None:
        self._leader = leader

    async def Reserve(self, request: rings_pb2.ReserveRequest, context: Context) -> rings_pb2.ReserveResponse:
        return wire.reservation_to(await answer(context, self._leader.reserve(wire.reserve_from(request))))

    async def Prefill(self, request: rings_pb2.PrefillRequest, context: Context) -> rings_pb2.PrefillResponse:
        return wire.prefill_done_to(await answer(context, self._leader.prefill(wire.prefill_turn_from(request))))

    async def SendKv(self, request: rings_pb2.SendKvRequest, context: Context) -> rings_pb2.SendKvResponse:
        return wire_kv.sent_to(await answer(context, self._leader.send_kv(wire_kv.send_kv_from(request))))

    async def TakeKv(self, request: rings_pb2.TakeKvRequest, context: Context) -> rings_pb2.TakeKvResponse:
        return wire_kv.taken_to(await answer(context, self._leader.take_kv(wire_kv.take_kv_from(request))))

    async def AbortTurn(self, request: rings_pb2.AbortTurnRequest, context: Context) -> rings_pb2.AbortTurnResponse:
        error = error_named(request.error, request.message)
        await answer(context, self._leader.abort_turn(request.turn_id, error))
        return rings_pb2.AbortTurnResponse()

    async def Settle(self, request: rings_pb2.SettleRequest, context: Context) -> rings_pb2.SettleResponse:
        await answer(context, self._leader.settle(request.sequence_id, request.turn_id, request.keep_tokens))
        return rings_pb2.SettleResponse()

    async def ForkKv(self, request: rings_pb2.ForkKvRequest, context: Context) -> rings_pb2.ForkKvResponse:
        return wire_conversations.forked_to(
            await answer(context, self._leader.fork_kv(wire_conversations.fork_from(request)))
        )

    async def GetKept(self, request: rings_pb2.GetKeptRequest, context: Context) -> rings_pb2.GetKeptResponse:
        return wire_conversations.kept_to(await answer(context, self._leader.get_kept(list(request.sequence_ids))))

    async def Drain(self, request: rings_pb2.DrainRequest, context: Context) -> rings_pb2.DrainResponse:
        await answer(context, self._leader.undrain() if request.undo else self._leader.drain(request.seconds))
        return rings_pb2.DrainResponse()

    async def GetStatus(self, request: rings_pb2.GetStatusRequest, context: Context) -> rings_pb2.RingStatus:
        status = await answer(context, self._leader.get_status())
        return rings_pb2.RingStatus(info=wire_rings.status_to(status))
