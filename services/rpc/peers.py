"""The control plane's ports over gRPC: how router, leaders and gateway reach each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

import grpc

from cp_core.errors import RingserveError
from cp_core.transport.peer_tls import PeerTls
from orchestration.protocol.kv import ForkedKv, ForkKv, RetainedKv, SendKv, SentKv, TakeKv, TakenKv
from orchestration.protocol.turns import (
    Admit,
    BegunTurn,
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    ResumeTurn,
    RingRegistration,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from orchestration.protocol.views import ConversationList, ConversationView, RingStatus, ServerView
from ringserve.v1 import inference_pb2, rings_pb2, rings_pb2_grpc, router_pb2, router_pb2_grpc
from services.auth.tls import peer_channel
from services.rpc.errors import error_from
from services.rpc.server import OPTIONS
from services.rpc.wire import conversations as wire_conversations
from services.rpc.wire import kv as wire_kv
from services.rpc.wire import plans
from services.rpc.wire import rings as wire_rings
from services.rpc.wire import turns as wire

T = TypeVar("T")

CONTROL_SECONDS = 30.0
"""Deadline of a call that should take milliseconds, on a machine whose cores may all be computing."""
ABORT_SECONDS = 330.0
"""Deadline of an abort: a prefill step under way is let finish first."""


async def _reach(peer: str, call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_from(failure, peer) from None


class GrpcRing:
    """`RingPort` over a channel."""

    def __init__(self, role: str, endpoint: str, channel: grpc.aio.Channel) -> None:
        self._peer = f"the {role} leader at {endpoint}"
        self._stub = rings_pb2_grpc.RingServiceStub(channel)
        # A prefill ring finishes the step under way before it unpins a sequence.
        self._settle_seconds = ABORT_SECONDS if role == "prefill" else CONTROL_SECONDS

    async def reserve(self, request: Reserve) -> Reservation:
        call = self._stub.Reserve(wire.reserve_to(request), timeout=CONTROL_SECONDS)
        return wire.reservation_from(await _reach(self._peer, call))

    async def prefill(self, turn: PrefillTurn) -> PrefillDone:
        # The decode leader keeps the turn's deadline: a ring that works up to it still answers.
        call = self._stub.Prefill(wire.prefill_turn_to(turn), timeout=turn.deadline_seconds + CONTROL_SECONDS)
        return wire.prefill_done_from(await _reach(self._peer, call))

    async def admit(self, admit: Admit) -> None:
        await _reach(self._peer, self._stub.Admit(wire.admit_to(admit), timeout=CONTROL_SECONDS))

    async def stream_turn(self, turn_id: str) -> AsyncGenerator[TurnEvent, None]:
        """Leaving the iterator cancels the call, and with it the turn."""
        call = self._stub.StreamTurn(rings_pb2.StreamTurnRequest(turn_id=turn_id))
        try:
            async for event in call:
                yield wire.event_from(event)
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self._peer) from None
        finally:
            call.cancel()

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        request = rings_pb2.FinishTurnRequest(turn_id=turn_id, num_tokens=num_tokens)
        await _reach(self._peer, self._stub.FinishTurn(request, timeout=CONTROL_SECONDS))

    async def send_kv(self, request: SendKv) -> SentKv:
        timeout = request.deadline_seconds + CONTROL_SECONDS
        return wire_kv.sent_from(
            await _reach(self._peer, self._stub.SendKv(wire_kv.send_kv_to(request), timeout=timeout))
        )

    async def take_kv(self, request: TakeKv) -> TakenKv:
        # The leader gives the source ring as long as `send_kv` does, and then reports the outcome.
        timeout = request.deadline_seconds + 2 * CONTROL_SECONDS
        return wire_kv.taken_from(
            await _reach(self._peer, self._stub.TakeKv(wire_kv.take_kv_to(request), timeout=timeout))
        )

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        await _reach(self._peer, self._stub.AbortTurn(_abort_request(turn_id, error), timeout=ABORT_SECONDS))

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        request = rings_pb2.SettleRequest(kv_id=kv_id, turn_id=turn_id, retain_tokens=retain_tokens)
        await _reach(self._peer, self._stub.Settle(request, timeout=self._settle_seconds))

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        call = self._stub.ForkKv(wire_conversations.fork_to(request), timeout=CONTROL_SECONDS)
        return wire_conversations.forked_from(await _reach(self._peer, call))

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        call = self._stub.GetRetained(rings_pb2.GetRetainedRequest(kv_ids=kv_ids), timeout=CONTROL_SECONDS)
        return wire_conversations.retained_from(await _reach(self._peer, call))

    async def drain(self, seconds: float) -> None:
        await _reach(self._peer, self._stub.Drain(rings_pb2.DrainRequest(seconds=seconds), timeout=CONTROL_SECONDS))

    async def undrain(self) -> None:
        await _reach(self._peer, self._stub.Drain(rings_pb2.DrainRequest(undo=True), timeout=CONTROL_SECONDS))

    async def get_status(self) -> RingStatus:
        call = self._stub.GetStatus(rings_pb2.GetStatusRequest(), timeout=CONTROL_SECONDS)
        return wire_rings.status_from((await _reach(self._peer, call)).info)


class GrpcRouter:
    """`RouterPort` over a channel."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        self._peer = f"the router at {endpoint}"
        self._stub = router_pb2_grpc.RouterServiceStub(channel)

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        # One that waits, for its conversation or for a ring, is told by the router when its deadline has passed.
        timeout = request.deadline_seconds + CONTROL_SECONDS
        call = self._stub.BeginTurn(wire.turn_request_to(request), timeout=timeout)
        answer = await _reach(self._peer, call)
        return BegunTurn(
            turn_id=answer.turn_id,
            decode_endpoint=answer.decode_endpoint,
            prompt_tokens=answer.prompt_tokens,
            plan=plans.plan_from(answer.plan),
        )

    async def resume_turn(self, request: ResumeTurn) -> None:
        await _reach(self._peer, self._stub.ResumeTurn(wire.resume_to(request), timeout=request.deadline_seconds))

    async def end_turn(self, outcome: TurnOutcome) -> int:
        call = self._stub.EndTurn(wire.outcome_to(outcome), timeout=ABORT_SECONDS)
        return (await _reach(self._peer, call)).retain_tokens

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        request = inference_pb2.AbortRequest(request_ids=request_ids)
        answer = await _reach(self._peer, self._stub.AbortTurns(request, timeout=ABORT_SECONDS))
        return list(answer.aborted), list(answer.unknown)

    async def get_conversation(self, conversation_id: str) -> ConversationView:
        request = inference_pb2.GetConversationRequest(conversation_id=conversation_id)
        answer = await _reach(self._peer, self._stub.GetConversation(request, timeout=CONTROL_SECONDS))
        return wire_conversations.conversation_from(answer)

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationList:
        request = inference_pb2.ListConversationsRequest(prefix=prefix, page_token=after, page_size=limit)
        call = self._stub.ListConversations(request, timeout=CONTROL_SECONDS)
        return wire_conversations.list_from(await _reach(self._peer, call))

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationView:
        request = inference_pb2.ForkConversationRequest(source_id=source_id, new_id=new_id, at_token=at_token)
        answer = await _reach(self._peer, self._stub.ForkConversation(request, timeout=CONTROL_SECONDS))
        return wire_conversations.conversation_from(answer)

    async def delete_conversation(self, conversation_id: str) -> None:
        request = inference_pb2.DeleteConversationRequest(conversation_id=conversation_id)
        await _reach(self._peer, self._stub.DeleteConversation(request, timeout=CONTROL_SECONDS))

    async def register_ring(self, ring: RingRegistration) -> int:
        call = self._stub.RegisterRing(wire_rings.registration_to(ring), timeout=CONTROL_SECONDS)
        return (await _reach(self._peer, call)).running_turns

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        request = router_pb2.DrainRingRequest(ring=name, seconds=seconds, force=force)
        await _reach(self._peer, self._stub.DrainRing(request, timeout=CONTROL_SECONDS))

    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        request = router_pb2.RestartRingRequest(ring=name, seconds=seconds, leaving_node=leaving_node)
        await _reach(self._peer, self._stub.RestartRing(request, timeout=CONTROL_SECONDS))

    async def undrain_ring(self, name: str) -> None:
        request = router_pb2.UndrainRingRequest(ring=name)
        await _reach(self._peer, self._stub.UndrainRing(request, timeout=CONTROL_SECONDS))

    async def get_server_info(self) -> ServerView:
        call = self._stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=CONTROL_SECONDS)
        return wire_rings.server_from(await _reach(self._peer, call))


def _abort_request(turn_id: str, error: RingserveError) -> rings_pb2.AbortTurnRequest:
    return rings_pb2.AbortTurnRequest(turn_id=turn_id, message=str(error), error=type(error).__name__)


class GrpcPeers:
    """`Peers`: one channel an endpoint, made on first use and closed together."""

    def __init__(self, tls: PeerTls | None = None) -> None:
        """Raises ConfigError for TLS files that cannot be used."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._credentials, options = peer_channel(tls)
        self._options = (*OPTIONS, *options)

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = self._open(endpoint)
        return self._channels[endpoint]

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=self._options)
        return grpc.aio.secure_channel(endpoint, self._credentials, options=self._options)

    def leader(self, role: str, endpoint: str) -> GrpcRing:
        return GrpcRing(role, endpoint, self._channel(endpoint))

    def router(self, endpoint: str) -> GrpcRouter:
        return GrpcRouter(endpoint, self._channel(endpoint))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
