"""Registrations and statuses on the wire."""

from __future__ import annotations

from cp_core.cost.model import RingRates
from orchestration.protocol.turns import RingRegistration
from orchestration.protocol.views import (
    Correction,
    DrainView,
    MoveReason,
    MoveTotals,
    RankKvUsage,
    RingStatus,
    ServerView,
)
from ringserve.v1 import inference_pb2, router_pb2
from workers.protocol.prefill_steps import Algorithm


def registration_to(ring: RingRegistration) -> router_pb2.RegisterRingRequest:
    return router_pb2.RegisterRingRequest(
        role=ring.role,
        name=ring.name,
        endpoint=ring.endpoint,
        incarnation=ring.incarnation,
        num_ranks=ring.num_ranks,
        tp=ring.tp,
        capacity_tokens=ring.capacity_tokens,
        chunk_tokens=ring.chunk_tokens,
        step_budget=ring.step_budget,
        min_chunk_tokens=ring.min_chunk_tokens,
        waiting_work=ring.waiting_work,
        work_rate=ring.work_rate,
        free_tokens=ring.free_tokens,
        spare_tokens=ring.spare_tokens,
        max_batch=ring.max_batch,
        max_direct_tokens=ring.max_direct_tokens,
        max_direct_seconds=ring.max_direct_seconds,
        draining=ring.is_draining,
        leaving=ring.is_leaving,
        rates=inference_pb2.RingRates(
            gemm_flops=ring.rates.gemm_flops,
            attention_flops=ring.rates.attention_flops,
            link_bytes_per_second=ring.rates.link_bytes_per_second,
            link_latency_seconds=ring.rates.link_latency_seconds,
            overlap=ring.rates.overlap,
        ),
    )


def registration_from(message: router_pb2.RegisterRingRequest) -> RingRegistration:
    return RingRegistration(
        role=message.role,
        name=message.name,
        endpoint=message.endpoint,
        incarnation=message.incarnation,
        num_ranks=message.num_ranks,
        tp=message.tp,
        capacity_tokens=message.capacity_tokens,
        chunk_tokens=message.chunk_tokens,
        step_budget=message.step_budget,
        min_chunk_tokens=message.min_chunk_tokens,
        waiting_work=message.waiting_work,
        work_rate=message.work_rate,
        free_tokens=message.free_tokens if message.HasField("free_tokens") else None,
        spare_tokens=message.spare_tokens,
        max_batch=message.max_batch,
        max_direct_tokens=message.max_direct_tokens,
        max_direct_seconds=message.max_direct_seconds,
        is_draining=message.draining,
        is_leaving=message.leaving,
        rates=RingRates(
            gemm_flops=message.rates.gemm_flops,
            attention_flops=message.rates.attention_flops,
            link_bytes_per_second=message.rates.link_bytes_per_second,
            link_latency_seconds=message.rates.link_latency_seconds,
            overlap=message.rates.overlap,
        ),
    )


def status_to(status: RingStatus) -> inference_pb2.RingInfo:
    return inference_pb2.RingInfo(
        role=status.role,
        name=status.name,
        endpoint=status.endpoint,
        incarnation=status.incarnation,
        state=status.state,
        num_ranks=status.num_ranks,
        tp=status.tp,
        attention_backend=status.attention_backend,
        ring_transport=status.ring_transport,
        num_requests_running=status.num_requests_running,
        num_requests_waiting=status.num_requests_waiting,
        waiting_work=status.waiting_work,
        max_waiting_work=status.max_waiting_work,
        rebuilds=status.rebuilds,
        rank_pids=status.rank_pids,
        metrics_endpoint=status.metrics_endpoint,
        num_preemptions=status.num_preemptions,
        decode_variant=status.decode_variant,
        rates=None if status.rates is None else rates_to(status.rates),
        capacity_tokens=status.capacity_tokens,
        chunk_tokens=status.chunk_tokens,
        corrections=[
            inference_pb2.Correction(
                algorithm=each.algorithm, min_work=each.min_work, factor=each.factor, num_turns=each.num_turns
            )
            for each in status.corrections
        ],
        draining=status.is_draining,
        restarting=status.is_restarting,
        nodes=status.nodes,
        kv_usage=[
            inference_pb2.RankKvUsage(
                total_blocks=rank.total_blocks,
                free_blocks=rank.free_blocks,
                active_blocks=rank.active_blocks,
                kept_blocks=rank.kept_blocks,
            )
            for rank in status.kv_usage
        ],
    )


def status_from(message: inference_pb2.RingInfo) -> RingStatus:
    return RingStatus(
        role=message.role,
        name=message.name,
        endpoint=message.endpoint,
        incarnation=message.incarnation,
        state=message.state,
        num_ranks=message.num_ranks,
        tp=message.tp,
        attention_backend=message.attention_backend,
        ring_transport=message.ring_transport,
        num_requests_running=message.num_requests_running,
        num_requests_waiting=message.num_requests_waiting,
        waiting_work=message.waiting_work,
        max_waiting_work=message.max_waiting_work,
        rebuilds=message.rebuilds,
        rank_pids=tuple(message.rank_pids),
        metrics_endpoint=message.metrics_endpoint,
        num_preemptions=message.num_preemptions,
        decode_variant=message.decode_variant,
        rates=rates_from(message.rates) if message.HasField("rates") else None,
        capacity_tokens=message.capacity_tokens,
        chunk_tokens=message.chunk_tokens,
        corrections=tuple(
            Correction(
                algorithm=Algorithm(each.algorithm),
                min_work=each.min_work,
                factor=each.factor,
                num_turns=each.num_turns,
            )
            for each in message.corrections
        ),
        is_draining=message.draining,
        is_restarting=message.restarting,
        nodes=tuple(message.nodes),
        kv_usage=tuple(
            RankKvUsage(
                total_blocks=rank.total_blocks,
                free_blocks=rank.free_blocks,
                active_blocks=rank.active_blocks,
                kept_blocks=rank.kept_blocks,
            )
            for rank in message.kv_usage
        ),
    )


def server_to(view: ServerView) -> inference_pb2.GetServerInfoResponse:
    return inference_pb2.GetServerInfoResponse(
        selector=view.selector,
        rings=[status_to(ring) for ring in view.rings],
        conversations=view.conversations,
        running_turns=view.running_turns,
        router_metrics_endpoint=view.metrics_endpoint,
        turns_waiting_for_rings=view.turns_waiting_for_rings,
        drains=[
            inference_pb2.RingDrain(
                role=drain.role,
                ring=drain.ring,
                has_left=drain.has_left,
                running_turns=drain.running_turns,
                moved=drain.num_moved,
                left=drain.num_left,
                no_room=drain.num_no_room,
                failed=drain.num_failed,
                moved_bytes=drain.moved_bytes,
            )
            for drain in view.drains
        ],
        kv_moves=[
            inference_pb2.KvMoves(
                role=each.role,
                reason=each.reason,
                moved=each.num_moved,
                failed=each.num_failed,
                payload_bytes=each.payload_bytes,
                seconds=each.seconds,
            )
            for each in view.moves
        ],
    )


def server_from(message: inference_pb2.GetServerInfoResponse) -> ServerView:
    return ServerView(
        selector=message.selector,
        rings=tuple(status_from(ring) for ring in message.rings),
        conversations=message.conversations,
        running_turns=message.running_turns,
        metrics_endpoint=message.router_metrics_endpoint,
        turns_waiting_for_rings=message.turns_waiting_for_rings,
        drains=tuple(
            DrainView(
                role=drain.role,
                ring=drain.ring,
                has_left=drain.has_left,
                running_turns=drain.running_turns,
                num_moved=drain.moved,
                num_left=drain.left,
                num_no_room=drain.no_room,
                num_failed=drain.failed,
                moved_bytes=drain.moved_bytes,
            )
            for drain in message.drains
        ),
        moves=tuple(
            MoveTotals(
                role=each.role,
                reason=MoveReason(each.reason),
                num_moved=each.moved,
                num_failed=each.failed,
                payload_bytes=each.payload_bytes,
                seconds=each.seconds,
            )
            for each in message.kv_moves
        ),
    )


def rates_to(rates: RingRates) -> inference_pb2.RingRates:
    return inference_pb2.RingRates(
        gemm_flops=rates.gemm_flops,
        attention_flops=rates.attention_flops,
        link_bytes_per_second=rates.link_bytes_per_second,
        link_latency_seconds=rates.link_latency_seconds,
        overlap=rates.overlap,
    )


def rates_from(message: inference_pb2.RingRates) -> RingRates:
    return RingRates(
        gemm_flops=message.gemm_flops,
        attention_flops=message.attention_flops,
        link_bytes_per_second=message.link_bytes_per_second,
        link_latency_seconds=message.link_latency_seconds,
        overlap=message.overlap,
    )
