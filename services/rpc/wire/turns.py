"""Turns, reservations, plans and events on the wire."""

from __future__ import annotations

from orchestration.protocol.turns import (
    Admit,
    EndingEvent,
    FinishedEvent,
    KvQuota,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    PromptMode,
    Reservation,
    Reserve,
    ResumeTurn,
    RetainingRing,
    ScoredEvent,
    TokensEvent,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from ringserve.v1 import inference_pb2, rings_pb2, router_pb2
from services.rpc.wire.layouts import shards_from, shards_to, token_array
from services.rpc.wire.plans import chunks_from, chunks_to
from services.rpc.wire.sampling import (
    all_logprobs_from,
    all_logprobs_to,
    logprobs_from,
    logprobs_to,
    sampling_from,
    sampling_to,
)
from workers.protocol.decode_commands import FinishReason
from workers.protocol.prefill_steps import Algorithm

PROMPT_MODES = {
    PromptMode.AUTO: inference_pb2.PROMPT_MODE_UNSPECIFIED,
    PromptMode.APPEND: inference_pb2.PROMPT_MODE_APPEND,
    PromptMode.WHOLE_HISTORY: inference_pb2.PROMPT_MODE_WHOLE_HISTORY,
}


def prompt_mode_from(value: int) -> PromptMode | None:
    """None for a number that the contract does not define."""
    return next((mode for mode, number in PROMPT_MODES.items() if number == value), None)


def turn_request_to(request: TurnRequest) -> router_pb2.BeginTurnRequest:
    return router_pb2.BeginTurnRequest(
        request_id=request.request_id,
        conversation_id=request.conversation_id,
        prompt_mode=PROMPT_MODES[request.prompt_mode],
        token_ids=request.token_ids.tolist(),
        sampling=sampling_to(request.sampling),
        deadline_seconds=request.deadline_seconds,
        conversation_ttl_seconds=request.conversation_ttl_seconds,
        wait=request.wait,
        priority=request.priority,
        algorithm=request.algorithm or "",
        trace_parent=request.trace_parent,
        kv_quota=quota_to(request.kv_quota),
    )


def quota_to(quota: KvQuota | None) -> router_pb2.KvQuota | None:
    return None if quota is None else router_pb2.KvQuota(tenant=quota.tenant, max_tokens=quota.max_tokens)


def quota_from(message: router_pb2.KvQuota) -> KvQuota:
    return KvQuota(tenant=message.tenant, max_tokens=message.max_tokens)


def turn_request_from(message: router_pb2.BeginTurnRequest) -> TurnRequest:
    return TurnRequest(
        request_id=message.request_id,
        conversation_id=message.conversation_id,
        prompt_mode=prompt_mode_from(message.prompt_mode) or PromptMode.AUTO,
        token_ids=token_array(message.token_ids),
        sampling=sampling_from(message.sampling),
        deadline_seconds=message.deadline_seconds,
        conversation_ttl_seconds=(
            message.conversation_ttl_seconds if message.HasField("conversation_ttl_seconds") else None
        ),
        wait=message.wait,
        priority=message.priority,
        algorithm=Algorithm(message.algorithm) if message.algorithm else None,
        trace_parent=message.trace_parent,
        kv_quota=quota_from(message.kv_quota) if message.HasField("kv_quota") else None,
    )


def reserve_to(request: Reserve) -> rings_pb2.ReserveRequest:
    return rings_pb2.ReserveRequest(
        turn_id=request.turn_id,
        attempt=request.attempt,
        kv_id=request.kv_id,
        match_tokens=request.match_tokens,
        num_tokens=request.num_tokens,
        deadline_seconds=request.deadline_seconds,
        source_incarnation=request.source_incarnation,
        sampling=sampling_to(request.sampling),
        penalized_ids=request.penalized_ids,
        priority=request.priority,
        request_id=request.request_id,
        direct=request.is_direct,
        trace_parent=request.trace_parent,
    )


def reserve_from(message: rings_pb2.ReserveRequest) -> Reserve:
    return Reserve(
        turn_id=message.turn_id,
        attempt=message.attempt,
        kv_id=message.kv_id,
        match_tokens=message.match_tokens,
        num_tokens=message.num_tokens,
        deadline_seconds=message.deadline_seconds,
        source_incarnation=message.source_incarnation,
        sampling=sampling_from(message.sampling),
        penalized_ids=tuple(message.penalized_ids),
        priority=message.priority,
        request_id=message.request_id,
        is_direct=message.direct,
        trace_parent=message.trace_parent,
    )


def reservation_to(reservation: Reservation) -> rings_pb2.ReserveResponse:
    return rings_pb2.ReserveResponse(
        incarnation=reservation.incarnation,
        retained_tokens=reservation.retained_tokens,
        shards=shards_to(reservation.shards),
        kv_endpoints=reservation.kv_endpoints,
        tp=reservation.tp,
    )


def reservation_from(message: rings_pb2.ReserveResponse) -> Reservation:
    return Reservation(
        incarnation=message.incarnation,
        retained_tokens=message.retained_tokens,
        shards=shards_from(message.shards),
        kv_endpoints=tuple(message.kv_endpoints),
        tp=message.tp,
    )


def prefill_turn_to(turn: PrefillTurn) -> rings_pb2.PrefillRequest:
    return rings_pb2.PrefillRequest(
        turn_id=turn.turn_id,
        attempt=turn.attempt,
        kv_id=turn.kv_id,
        token_ids=turn.token_ids.tolist(),
        cached_tokens=turn.cached_tokens,
        chunks=chunks_to(turn.chunks),
        sampling=sampling_to(turn.sampling),
        deadline_seconds=turn.deadline_seconds,
        decode_endpoint=turn.decode_endpoint,
        destination=reservation_to(turn.destination),
        pulled_from=None if turn.pulled_from is None else retaining_ring_to(turn.pulled_from),
    )


def retaining_ring_to(keeping: RetainingRing) -> rings_pb2.KvSource:
    return rings_pb2.KvSource(
        role=keeping.role, ring=keeping.ring, endpoint=keeping.endpoint, incarnation=keeping.incarnation
    )


def retaining_ring_from(message: rings_pb2.KvSource) -> RetainingRing:
    return RetainingRing(
        role=message.role, ring=message.ring, endpoint=message.endpoint, incarnation=message.incarnation
    )


def prefill_turn_from(message: rings_pb2.PrefillRequest) -> PrefillTurn:
    return PrefillTurn(
        turn_id=message.turn_id,
        attempt=message.attempt,
        kv_id=message.kv_id,
        token_ids=token_array(message.token_ids),
        cached_tokens=message.cached_tokens,
        chunks=chunks_from(message.chunks),
        sampling=sampling_from(message.sampling),
        deadline_seconds=message.deadline_seconds,
        decode_endpoint=message.decode_endpoint,
        destination=reservation_from(message.destination),
        pulled_from=retaining_ring_from(message.pulled_from) if message.HasField("pulled_from") else None,
    )


def report_to(report: PrefillReport) -> rings_pb2.PrefillReport:
    return rings_pb2.PrefillReport(
        prefill_seconds=report.prefill_seconds,
        queue_seconds=report.queue_seconds,
        pulled_bytes=report.pulled_bytes,
        pull_seconds=report.pull_seconds,
        chunks=chunks_to(report.chunks),
        lost_tokens=report.lost_tokens,
    )


def report_from(message: rings_pb2.PrefillReport) -> PrefillReport:
    return PrefillReport(
        prefill_seconds=message.prefill_seconds,
        queue_seconds=message.queue_seconds,
        pulled_bytes=message.pulled_bytes,
        pull_seconds=message.pull_seconds,
        chunks=chunks_from(message.chunks),
        lost_tokens=message.lost_tokens,
    )


def prefill_done_to(done: PrefillDone) -> rings_pb2.PrefillResponse:
    return rings_pb2.PrefillResponse(report=report_to(done.report), shards=shards_to(done.shards))


def prefill_done_from(message: rings_pb2.PrefillResponse) -> PrefillDone:
    return PrefillDone(report=report_from(message.report), shards=shards_from(message.shards))


def admit_to(admit: Admit) -> rings_pb2.AdmitRequest:
    return rings_pb2.AdmitRequest(
        turn_id=admit.turn_id,
        attempt=admit.attempt,
        first_token=admit.first_token,
        report=report_to(admit.report),
        logprobs=None if admit.logprobs is None else logprobs_to(admit.logprobs),
        prompt_logprobs=all_logprobs_to(admit.prompt_logprobs),
    )


def admit_from(message: rings_pb2.AdmitRequest) -> Admit:
    return Admit(
        turn_id=message.turn_id,
        attempt=message.attempt,
        first_token=message.first_token,
        report=report_from(message.report),
        logprobs=logprobs_from(message.logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=all_logprobs_from(message.prompt_logprobs),
    )


def event_to(event: TurnEvent) -> rings_pb2.TurnEvent:
    if isinstance(event, PrefillReport):
        return rings_pb2.TurnEvent(prefilled=report_to(event))
    if isinstance(event, TokensEvent):
        tokens = rings_pb2.Tokens(token_ids=event.token_ids, logprobs=all_logprobs_to(event.logprobs))
        return rings_pb2.TurnEvent(tokens=tokens)
    if isinstance(event, ScoredEvent):
        return rings_pb2.TurnEvent(scored=rings_pb2.PromptScored(logprobs=all_logprobs_to(event.logprobs)))
    if isinstance(event, EndingEvent):
        return rings_pb2.TurnEvent(ending=rings_pb2.Ending(finish_reason=event.finish_reason))
    return rings_pb2.TurnEvent(
        finished=rings_pb2.Finished(
            finish_reason=event.finish_reason,
            migrated_bytes=event.migrated_bytes,
            migration_seconds=event.migration_seconds,
            handoff_seconds=event.handoff_seconds,
        )
    )


def event_from(message: rings_pb2.TurnEvent) -> TurnEvent:
    kind = message.WhichOneof("event")
    if kind == "prefilled":
        return report_from(message.prefilled)
    if kind == "tokens":
        tokens = message.tokens
        return TokensEvent(token_ids=tuple(tokens.token_ids), logprobs=all_logprobs_from(tokens.logprobs))
    if kind == "scored":
        return ScoredEvent(logprobs=all_logprobs_from(message.scored.logprobs))
    if kind == "ending":
        return EndingEvent(finish_reason=FinishReason(message.ending.finish_reason))
    finished = message.finished
    return FinishedEvent(
        finish_reason=FinishReason(finished.finish_reason),
        migrated_bytes=finished.migrated_bytes,
        migration_seconds=finished.migration_seconds,
        handoff_seconds=finished.handoff_seconds,
    )


def resume_to(request: ResumeTurn) -> router_pb2.ResumeTurnRequest:
    return router_pb2.ResumeTurnRequest(
        turn_id=request.turn_id,
        attempt=request.attempt,
        token_ids=request.token_ids,
        deadline_seconds=request.deadline_seconds,
    )


def resume_from(message: router_pb2.ResumeTurnRequest) -> ResumeTurn:
    return ResumeTurn(
        turn_id=message.turn_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        deadline_seconds=message.deadline_seconds,
    )


def outcome_to(outcome: TurnOutcome) -> router_pb2.EndTurnRequest:
    return router_pb2.EndTurnRequest(
        turn_id=outcome.turn_id,
        ok=outcome.ok,
        token_ids=outcome.token_ids,
        kv_tokens=outcome.kv_tokens,
        shards=shards_to(outcome.shards),
    )


def outcome_from(message: router_pb2.EndTurnRequest) -> TurnOutcome:
    return TurnOutcome(
        turn_id=message.turn_id,
        ok=message.ok,
        token_ids=tuple(message.token_ids),
        kv_tokens=message.kv_tokens,
        shards=shards_from(message.shards),
    )
