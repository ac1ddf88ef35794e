"""Control-plane ports over gRPC: how router, leaders and gateways call each other. `GrpcPeers` owns the channels."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import grpc
from google.protobuf.message import Message

from ringserve import __version__
from ringserve.channels import CHANNEL_OPTIONS, keepalive
from ringserve.cp_core.errors import NotFound, RingserveError, Unreachable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.orchestration.protocol.inventory import UNKNOWN_EPOCH, KnownEpoch, Registered
from ringserve.orchestration.protocol.rings import LOST_SECONDS
from ringserve.orchestration.protocol.turns import (
    Admit,
    BegunTurn,
    ForkedKv,
    ForkKv,
    KvQuota,
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    ResumeTurn,
    RetainedKv,
    RingRegistration,
    SendKv,
    SentKv,
    TakeKv,
    TakenKv,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from ringserve.orchestration.tasks import until_reached
from ringserve.services.auth.tls import SECRET_VARIABLE, peer_channel
from ringserve.services.rpc.errors import error_from
from ringserve.services.rpc.server import EPOCH_KEY, SECRET_KEY, VERSION_KEY
from ringserve.services.rpc.turn_streams import SILENT_TICKS, TurnsStream
from ringserve.services.rpc.wire.contract import from_message, to_message
from ringserve.v1 import inference_pb2, rings_pb2, rings_pb2_grpc, router_pb2, router_pb2_grpc
from ringserve.views import ConversationInfo, ConversationPage, RingInfo, ServerInfo

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

CONTROL_SECONDS = 30.0
"""Deadline of a call that should take milliseconds, on a machine whose cores may all be busy."""

ABORT_SECONDS = 330.0
"""Abort deadline: a ring finishes the prefill step under way first."""
FAULT_SECONDS = 4.0
"""Deadline of a gateway's readiness call."""


class _Peer:
    """Process at the other end of a channel. Errors quote `name`; calls carry `metadata`."""

    def __init__(self, name: str, metadata: Metadata = ()) -> None:
        self._name = name
        self._metadata = metadata

    async def _reach(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self._name) from None

    async def _ask(
        self, method: Callable[..., Awaitable[Any]], request: Message, kind: type[T], timeout: float = CONTROL_SECONDS
    ) -> T:
        """Call a method and return its answer as a dataclass of this kind."""
        return from_message(kind, await self._tell(method, request, timeout))

    async def _tell(self, method: Callable[..., Awaitable[T]], request: Message, timeout: float = CONTROL_SECONDS) -> T:
        """Call a method and return its answer."""
        return await self._reach(method(request, timeout=timeout, metadata=self._metadata))


class GrpcPrefillRing(_Peer):
    """`PrefillPort` over a channel."""

    role = "prefill"
    settle_seconds = ABORT_SECONDS
    """Deadline of `settle`: a prefill ring finishes the step under way before it unpins a sequence."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        super().__init__(f"the {self.role} leader at {endpoint}", metadata)
        self._stub = rings_pb2_grpc.RingServiceStub(channel)

    async def reserve(self, request: Reserve) -> Reservation:
        return await self._ask(self._stub.Reserve, to_message(rings_pb2.ReserveRequest, request), Reservation)

    async def prefill(self, turn: PrefillTurn) -> PrefillDone:
        # The decode leader enforces the turn's deadline. This call waits longer, so that a ring that computes up to the
        # deadline can still answer.
        timeout = turn.deadline_seconds + CONTROL_SECONDS
        return await self._ask(self._stub.Prefill, to_message(rings_pb2.PrefillRequest, turn), PrefillDone, timeout)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        request = rings_pb2.AbortTurnRequest(turn_id=turn_id, message=str(error), error=type(error).__name__)
        await self._tell(self._stub.AbortTurn, request, ABORT_SECONDS)

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        request = rings_pb2.SettleRequest(kv_id=kv_id, turn_id=turn_id, retain_tokens=retain_tokens)
        await self._tell(self._stub.Settle, request, self.settle_seconds)

    async def send_kv(self, request: SendKv) -> SentKv:
        timeout = request.deadline_seconds + CONTROL_SECONDS
        return await self._ask(self._stub.SendKv, to_message(rings_pb2.SendKvRequest, request), SentKv, timeout)

    async def take_kv(self, request: TakeKv) -> TakenKv:
        # The called leader in turn calls `send_kv` at the source ring, with that call's timeout, and then reports the
        # outcome.
        timeout = request.deadline_seconds + 2 * CONTROL_SECONDS
        return await self._ask(self._stub.TakeKv, to_message(rings_pb2.TakeKvRequest, request), TakenKv, timeout)

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        return await self._ask(self._stub.ForkKv, to_message(rings_pb2.ForkKvRequest, request), ForkedKv)

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        return await self._ask(self._stub.GetRetained, rings_pb2.GetRetainedRequest(kv_ids=kv_ids), RetainedKv)

    async def drain(self, seconds: float) -> None:
        await self._tell(self._stub.Drain, rings_pb2.DrainRequest(seconds=seconds))

    async def undrain(self) -> None:
        await self._tell(self._stub.Drain, rings_pb2.DrainRequest(undo=True))

    async def get_status(self) -> RingInfo:
        return await self._ask(self._stub.GetStatus, rings_pb2.GetStatusRequest(), RingInfo)


class GrpcDecodeRing(GrpcPrefillRing):
    """`DecodePort` over a channel."""

    role = "decode"
    settle_seconds = CONTROL_SECONDS

    def __init__(self, endpoint: str, channel: grpc.aio.Channel, turns: TurnsStream, metadata: Metadata) -> None:
        super().__init__(endpoint, channel, metadata)
        self._turns = turns

    async def admit(self, admit: Admit) -> None:
        request = to_message(rings_pb2.AdmitRequest, admit)
        await self._tell(self._stub.Admit, request)

    def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        """Yield a turn's events, which share one stream with the leader's other turns.

        Closing the iterator leaves the turn. Also raises Unavailable if neither events nor heartbeats arrive, and
        Unreachable if the connection breaks although they arrived until then.
        """
        return self._turns.read(turn_id, after, interval)

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        request = rings_pb2.FinishTurnRequest(turn_id=turn_id, num_tokens=num_tokens)
        await self._tell(self._stub.FinishTurn, request)


class GrpcRouter(_Peer):
    """`RouterPort` over a channel.

    Queries, aborts, forks and deletions are safe to repeat. They are retried for `patience` seconds while the router is
    unreachable, since it may be restarting.
    """

    def __init__(self, endpoint: str, channel: grpc.aio.Channel, patience: float, metadata: Metadata) -> None:
        super().__init__(f"the router at {endpoint}", metadata)
        self._stub = router_pb2_grpc.RouterServiceStub(channel)
        self._patience = patience

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        until = asyncio.get_running_loop().time() + self._patience
        return await until_reached(call, f"{self._name} could not be reached", until, Unreachable)

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        # A request may wait for its conversation or a ring; the router itself answers once the deadline has passed.
        timeout = request.deadline_seconds + CONTROL_SECONDS
        return await self._ask(
            self._stub.BeginTurn, to_message(router_pb2.BeginTurnRequest, request), BegunTurn, timeout
        )

    async def resume_turn(self, request: ResumeTurn) -> None:
        message = to_message(router_pb2.ResumeTurnRequest, request)
        await self._tell(self._stub.ResumeTurn, message, request.deadline_seconds)

    async def end_turn(self, outcome: TurnOutcome) -> int:
        message = to_message(router_pb2.EndTurnRequest, outcome)
        answer: router_pb2.EndTurnResponse = await self._tell(self._stub.EndTurn, message, ABORT_SECONDS)
        return answer.retain_tokens

    async def abort_requests(self, request_ids: Sequence[str], reader: str = "") -> tuple[list[str], list[str]]:
        request = router_pb2.AbortTurnsRequest(request_ids=request_ids, reader=reader)
        answer = await self._repeat(lambda: self._tell(self._stub.AbortTurns, request, ABORT_SECONDS))
        return list(answer.aborted), list(answer.unknown)

    async def get_conversation(self, conversation_id: str) -> ConversationInfo:
        request = inference_pb2.GetConversationRequest(conversation_id=conversation_id)
        return await self._repeat(lambda: self._ask(self._stub.GetConversation, request, ConversationInfo))

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationPage:
        request = inference_pb2.ListConversationsRequest(prefix=prefix, page_token=after, page_size=limit)
        return await self._repeat(lambda: self._ask(self._stub.ListConversations, request, ConversationPage))

    async def fork_conversation(
        self, source_id: str, new_id: str, at_token: int | None, kv_quota: KvQuota | None = None
    ) -> ConversationInfo:
        quota = None if kv_quota is None else to_message(router_pb2.KvQuota, kv_quota)
        request = router_pb2.BeginForkRequest(source_id=source_id, new_id=new_id, at_token=at_token, kv_quota=quota)
        return await self._repeat(lambda: self._ask(self._stub.ForkConversation, request, ConversationInfo))

    async def delete_conversation(self, conversation_id: str) -> None:
        request, num_calls = inference_pb2.DeleteConversationRequest(conversation_id=conversation_id), 0

        async def delete() -> None:
            nonlocal num_calls
            num_calls += 1
            try:
                await self._tell(self._stub.DeleteConversation, request)
            except NotFound:
                if num_calls == 1:  # else an earlier attempt deleted it
                    raise

        await self._repeat(delete)

    async def register_ring(self, ring: RingRegistration, known: KnownEpoch = UNKNOWN_EPOCH) -> Registered:
        request = to_message(router_pb2.RegisterRingRequest, ring)
        request.epoch = known.epoch
        if known.inventory is not None:
            request.inventory.CopyFrom(to_message(router_pb2.RingInventory, known.inventory))
        return await self._ask(self._stub.RegisterRing, request, Registered)

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        request = router_pb2.DrainRingRequest(ring=name, seconds=seconds, force=force)
        await self._tell(self._stub.DrainRing, request)

    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        request = router_pb2.RestartRingRequest(ring=name, seconds=seconds, leaving_node=leaving_node)
        await self._tell(self._stub.RestartRing, request)

    async def undrain_ring(self, name: str) -> None:
        request = router_pb2.UndrainRingRequest(ring=name)
        await self._tell(self._stub.UndrainRing, request)

    async def find_fault(self) -> str:
        request = router_pb2.FindFaultRequest()
        answer: router_pb2.FindFaultResponse = await self._tell(self._stub.FindFault, request, FAULT_SECONDS)
        return answer.fault

    async def get_server_info(self) -> ServerInfo:
        return await self._ask(self._stub.GetServerInfo, inference_pb2.GetServerInfoRequest(), ServerInfo)


def make_peer_metadata(secret: str | None = None) -> Metadata:
    """Return the metadata of calls within a cluster: release and secret, by default the environment's secret."""
    secret = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
    return ((VERSION_KEY, __version__), *([(SECRET_KEY, secret)] if secret else []))


class GrpcPeers:
    """`Peers` over gRPC: one channel per endpoint, opened on first use; `close` closes all.

    `epoch` is the calling router's epoch; 0 for other callers and for a router without memory. Calls carry `secret`, by
    default the environment's. If a peer's machine is silent for `lost_seconds`, calls to the peer fail. If the machine
    answers and only the process is silent, just the streams from it fail.
    """

    def __init__(
        self,
        tls: PeerTls | None = None,
        lost_seconds: float = LOST_SECONDS,
        router_patience: float = 0.0,
        secret: str | None = None,
    ) -> None:
        """Raise ConfigError for unusable TLS files. `router_patience` is the `patience` of `GrpcRouter`."""
        self.epoch = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns: dict[str, TurnsStream] = {}
        self._lost_seconds = lost_seconds
        self._router_patience = router_patience
        self._metadata = make_peer_metadata(secret)
        self._credentials, options = peer_channel(tls)
        alive = keepalive(lost_seconds / SILENT_TICKS, lost_seconds, is_always_on=True)
        self._options = (*CHANNEL_OPTIONS, *alive, *options)

    @overload
    def leader(self, role: Literal["decode"], endpoint: str) -> GrpcDecodeRing: ...
    @overload
    def leader(self, role: str, endpoint: str) -> GrpcPrefillRing: ...
    def leader(self, role: str, endpoint: str) -> GrpcPrefillRing:
        epoch = ((EPOCH_KEY, str(self.epoch)),) if self.epoch else ()
        metadata, channel = (*self._metadata, *epoch), self._channel(endpoint)
        if role == "prefill":
            return GrpcPrefillRing(endpoint, channel, metadata)
        if endpoint not in self._turns:
            stub, name = rings_pb2_grpc.RingServiceStub(channel), f"the decode leader at {endpoint}"
            self._turns[endpoint] = TurnsStream(stub, metadata, name, self._lost_seconds)
        return GrpcDecodeRing(endpoint, channel, self._turns[endpoint], metadata)

    def router(self, endpoint: str) -> GrpcRouter:
        return GrpcRouter(endpoint, self._channel(endpoint), self._router_patience, self._metadata)

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = self._open(endpoint)
        return self._channels[endpoint]

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=self._options)
        return grpc.aio.secure_channel(endpoint, self._credentials, options=self._options)

    async def close(self) -> None:
        for turns in self._turns.values():
            await turns.close()
        self._turns.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
