"""Transfers of kept KV on the wire."""

from __future__ import annotations

from cp_core.layout.shards import TokenRange
from orchestration.protocol.kv import SendKv, SentKv, TakeKv, TakenKv
from ringserve.v1 import inference_pb2, rings_pb2
from services.rpc.wire.layouts import shards_from, shards_to


def send_kv_to(request: SendKv) -> rings_pb2.SendKvRequest:
    return rings_pb2.SendKvRequest(
        transfer_id=request.transfer_id,
        attempt=request.attempt,
        kv_id=request.kv_id,
        turn_id=request.turn_id,
        source_incarnation=request.source_incarnation,
        destination_incarnation=request.destination_incarnation,
        tokens=inference_pb2.Range(start=request.tokens.start, stop=request.tokens.stop),
        shards=shards_to(request.shards),
        kv_endpoints=request.kv_endpoints,
        tp=request.tp,
        deadline_seconds=request.deadline_seconds,
    )


def send_kv_from(message: rings_pb2.SendKvRequest) -> SendKv:
    return SendKv(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        kv_id=message.kv_id,
        turn_id=message.turn_id,
        source_incarnation=message.source_incarnation,
        destination_incarnation=message.destination_incarnation,
        tokens=TokenRange(message.tokens.start, message.tokens.stop),
        shards=shards_from(message.shards),
        kv_endpoints=tuple(message.kv_endpoints),
        tp=message.tp,
        deadline_seconds=message.deadline_seconds,
    )


def sent_to(sent: SentKv) -> rings_pb2.SendKvResponse:
    return rings_pb2.SendKvResponse(payload_bytes=sent.payload_bytes, seconds=sent.seconds)


def sent_from(message: rings_pb2.SendKvResponse) -> SentKv:
    return SentKv(payload_bytes=message.payload_bytes, seconds=message.seconds)


def take_kv_to(request: TakeKv) -> rings_pb2.TakeKvRequest:
    return rings_pb2.TakeKvRequest(
        transfer_id=request.transfer_id,
        attempt=request.attempt,
        kv_id=request.kv_id,
        num_tokens=request.num_tokens,
        source_role=request.source_role,
        source_endpoint=request.source_endpoint,
        source_incarnation=request.source_incarnation,
        deadline_seconds=request.deadline_seconds,
    )


def take_kv_from(message: rings_pb2.TakeKvRequest) -> TakeKv:
    return TakeKv(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        kv_id=message.kv_id,
        num_tokens=message.num_tokens,
        source_role=message.source_role,
        source_endpoint=message.source_endpoint,
        source_incarnation=message.source_incarnation,
        deadline_seconds=message.deadline_seconds,
    )


def taken_to(taken: TakenKv) -> rings_pb2.TakeKvResponse:
    return rings_pb2.TakeKvResponse(
        incarnation=taken.incarnation,
        shards=shards_to(taken.shards),
        payload_bytes=taken.payload_bytes,
        seconds=taken.seconds,
    )


def taken_from(message: rings_pb2.TakeKvResponse) -> TakenKv:
    return TakenKv(
        incarnation=message.incarnation,
        shards=shards_from(message.shards),
        payload_bytes=message.payload_bytes,
        seconds=message.seconds,
    )
