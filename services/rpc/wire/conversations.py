"""Conversations, and the KV that rings keep of them, on the wire."""

from __future__ import annotations

from orchestration.protocol.kv import ForkedKv, ForkKv, RetainedKv
from orchestration.protocol.views import ConversationList, ConversationSummary, ConversationView, KvLocationView
from ringserve.v1 import inference_pb2, rings_pb2
from services.rpc.wire.layouts import shards_from, shards_to


def conversation_to(view: ConversationView) -> inference_pb2.GetConversationResponse:
    return inference_pb2.GetConversationResponse(
        conversation_id=view.conversation_id,
        num_tokens=view.num_tokens,
        num_turns=view.num_turns,
        running_request_id=view.running_request_id,
        epoch=view.epoch,
        idle_seconds=view.idle_seconds,
        ttl_seconds=view.ttl_seconds,
        num_waiting=view.num_waiting,
        placements=[
            inference_pb2.Placement(
                role=place.role,
                ring=place.ring,
                incarnation=place.incarnation,
                num_tokens=place.num_tokens,
                ranks=shards_to(place.shards),
                epoch=place.epoch,
            )
            for place in view.placements
        ],
    )


def conversation_from(message: inference_pb2.GetConversationResponse) -> ConversationView:
    return ConversationView(
        conversation_id=message.conversation_id,
        num_tokens=message.num_tokens,
        num_turns=message.num_turns,
        running_request_id=message.running_request_id,
        epoch=message.epoch,
        idle_seconds=message.idle_seconds,
        ttl_seconds=message.ttl_seconds,
        num_waiting=message.num_waiting,
        placements=tuple(
            KvLocationView(
                role=place.role,
                ring=place.ring,
                incarnation=place.incarnation,
                num_tokens=place.num_tokens,
                shards=shards_from(place.ranks),
                epoch=place.epoch,
            )
            for place in message.placements
        ),
    )


def list_to(page: ConversationList) -> inference_pb2.ListConversationsResponse:
    return inference_pb2.ListConversationsResponse(
        conversations=[
            inference_pb2.ConversationSummary(
                conversation_id=item.conversation_id,
                num_tokens=item.num_tokens,
                num_turns=item.num_turns,
                running_request_id=item.running_request_id,
                idle_seconds=item.idle_seconds,
                ttl_seconds=item.ttl_seconds,
                num_waiting=item.num_waiting,
                kept_on_prefill=item.kept_on_prefill,
                kept_on_decode=item.kept_on_decode,
            )
            for item in page.conversations
        ],
        next_page_token=page.next_after,
    )


def list_from(message: inference_pb2.ListConversationsResponse) -> ConversationList:
    return ConversationList(
        conversations=tuple(
            ConversationSummary(
                conversation_id=item.conversation_id,
                num_tokens=item.num_tokens,
                num_turns=item.num_turns,
                running_request_id=item.running_request_id,
                idle_seconds=item.idle_seconds,
                ttl_seconds=item.ttl_seconds,
                num_waiting=item.num_waiting,
                kept_on_prefill=item.kept_on_prefill,
                kept_on_decode=item.kept_on_decode,
            )
            for item in message.conversations
        ),
        next_after=message.next_page_token,
    )


def fork_to(request: ForkKv) -> rings_pb2.ForkKvRequest:
    return rings_pb2.ForkKvRequest(source_id=request.source_id, kv_id=request.kv_id, num_tokens=request.num_tokens)


def fork_from(message: rings_pb2.ForkKvRequest) -> ForkKv:
    return ForkKv(source_id=message.source_id, kv_id=message.kv_id, num_tokens=message.num_tokens)


def forked_to(forked: ForkedKv) -> rings_pb2.ForkKvResponse:
    return rings_pb2.ForkKvResponse(incarnation=forked.incarnation, shards=shards_to(forked.shards))


def forked_from(message: rings_pb2.ForkKvResponse) -> ForkedKv:
    return ForkedKv(incarnation=message.incarnation, shards=shards_from(message.shards))


def retained_to(kept: RetainedKv) -> rings_pb2.GetRetainedResponse:
    return rings_pb2.GetRetainedResponse(incarnation=kept.incarnation, num_tokens=kept.num_tokens)


def retained_from(message: rings_pb2.GetRetainedResponse) -> RetainedKv:
    return RetainedKv(incarnation=message.incarnation, num_tokens=tuple(message.num_tokens))
