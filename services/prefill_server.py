"""PrefillService: the door of a prefill ring's leader."""

from __future__ import annotations

from typing import Any

import grpc

from orchestration.ports import PrefillPort
from ringserve.v1 import groups_pb2, groups_pb2_grpc
from services.status import answer, error_named
from services.wire import conversations as wire_conversations
from services.wire import groups as wire_groups
from services.wire import kv as wire_kv
from services.wire import turns as wire

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(groups_pb2_grpc.PrefillServiceServicer):
    """Each method is one verb of the leader."""

    def __init__(self, leader: PrefillPort) -> None:
        self._leader = leader

    async def Reserve(self, request: groups_pb2.ReserveRequest, context: Context) -> groups_pb2.ReserveResponse:
        return wire.reservation_to(await answer(context, self._leader.reserve(wire.reserve_from(request))))

    async def Prefill(self, request: groups_pb2.PrefillRequest, context: Context) -> groups_pb2.PrefillResponse:
        return wire.prefill_done_to(await answer(context, self._leader.prefill(wire.prefill_turn_from(request))))

    async def SendKv(self, request: groups_pb2.SendKvRequest, context: Context) -> groups_pb2.SendKvResponse:
        return wire_kv.sent_to(await answer(context, self._leader.send_kv(wire_kv.send_kv_from(request))))

    async def TakeKv(self, request: groups_pb2.TakeKvRequest, context: Context) -> groups_pb2.TakeKvResponse:
        return wire_kv.taken_to(await answer(context, self._leader.take_kv(wire_kv.take_kv_from(request))))

    async def AbortTurn(self, request: groups_pb2.AbortTurnRequest, context: Context) -> groups_pb2.AbortTurnResponse:
        error = error_named(request.error, request.message)
        await answer(context, self._leader.abort_turn(request.turn_id, error))
        return groups_pb2.AbortTurnResponse()

    async def Settle(self, request: groups_pb2.SettleRequest, context: Context) -> groups_pb2.SettleResponse:
        await answer(context, self._leader.settle(request.sequence_id, request.turn_id, request.keep_tokens))
        return groups_pb2.SettleResponse()

    async def ForkKv(self, request: groups_pb2.ForkKvRequest, context: Context) -> groups_pb2.ForkKvResponse:
        return wire_conversations.forked_to(
            await answer(context, self._leader.fork_kv(wire_conversations.fork_from(request)))
        )

    async def GetKept(self, request: groups_pb2.GetKeptRequest, context: Context) -> groups_pb2.GetKeptResponse:
        return wire_conversations.kept_to(await answer(context, self._leader.get_kept(list(request.sequence_ids))))

    async def Drain(self, request: groups_pb2.DrainRequest, context: Context) -> groups_pb2.DrainResponse:
        await answer(context, self._leader.undrain() if request.undo else self._leader.drain(request.seconds))
        return groups_pb2.DrainResponse()

    async def GetStatus(self, request: groups_pb2.GetStatusRequest, context: Context) -> groups_pb2.GroupStatus:
        status = await answer(context, self._leader.get_status())
        return groups_pb2.GroupStatus(info=wire_groups.status_to(status))
