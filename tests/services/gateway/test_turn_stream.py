"""Responses of one turn: the plan, the tokens as text, and the account at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ringserve.cp_core.errors import RingserveError, TurnCancelled, Unavailable
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.protocol.plans import CachedSource, PlannedChunk, PromptMode, TurnPlan
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndingEvent,
    FinishedEvent,
    PrefillReport,
    ScoredEvent,
    TokensEvent,
    TurnEvent,
    TurnRequest,
)
from ringserve.services.gateway.text import REPLACEMENT, AnswerText, IncrementalText, StopRule, TextCodec
from ringserve.services.gateway.turn_stream import LastingTurn, TurnStream
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.steps import Algorithm, FinishReason
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs

PLAN = TurnPlan(
    algorithm=Algorithm.PASS_Q,
    reason="few new tokens",
    new_tokens=3,
    cached_tokens=97,
    prefill_ring="prefill-0",
    decode_ring="decode-0",
    prefill_ranks=2,
    decode_ranks=2,
    cached_sources=(CachedSource(source="kept_on_prefill", tokens=TokenRange(0, 97)),),
    chunks=(PlannedChunk(tokens=TokenRange(97, 100), algorithm=Algorithm.PASS_Q),),
    predicted_prefill_seconds=0.5,
    alternatives=(("pass_kv", 0.7),),
    prompt_mode=PromptMode.APPEND,
)
REPORT = PrefillReport(prefill_seconds=0.4, queue_seconds=0.1, pulled_bytes=640, pull_seconds=0.05)


def finished(reason: FinishReason) -> FinishedEvent:
    return FinishedEvent(finish_reason=reason, migrated_bytes=2**40, migration_seconds=0.2, handoff_seconds=0.3)


class Leader:
    """The two verbs of a decode leader that a stream uses."""

    def __init__(self, *events: TurnEvent | RingserveError) -> None:
        self._events = list(events)
        self.asked = ""
        self.finished: list[tuple[str, int]] = []
        self.is_closed = False

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        self.finished.append((turn_id, num_tokens))

    async def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        self.asked = turn_id
        events = list(self._events)
        self._events.clear()
        try:
            for event in events:
                if isinstance(event, RingserveError):
                    raise event
                yield event
        finally:
            self.is_closed = True


NO_RULE = StopRule()


class Turn:
    """A begun turn whose events come from `leader`."""

    def __init__(self, codec: TextCodec, *events: TurnEvent | RingserveError, rule: StopRule = NO_RULE) -> None:
        request = TurnRequest(
            request_id="r",
            conversation_id="c",
            prompt_mode=PromptMode.AUTO,
            token_ids=np.arange(3),
            sampling=SamplingParameters(seed=2**64 - 1),
            deadline_seconds=5.0,
        )
        begun = BegunTurn(turn_id="t", decode_endpoint="d", prompt_tokens=100, plan=PLAN)
        self.leader = leader = Leader(*events)

        async def begin(again: TurnRequest) -> BegunTurn:
            return begun

        self.lasting = LastingTurn(request, begun, begin, lambda endpoint: leader)  # type: ignore[arg-type,return-value]
        self.noted: list[tuple[int, float | None]] = []
        self.stream = TurnStream(
            request,
            begun,
            AnswerText(IncrementalText(codec), rule),
            started=0.0,
            note_tokens=lambda num_tokens, gap: self.noted.append((num_tokens, gap)),
        )

    async def read(self) -> list[inference_pb2.GenerateResponse]:
        self.opened, *rest = [response async for response in self.stream.responses(self.lasting)]
        assert self.opened.HasField("start")
        return rest


def tokens(text: bytes) -> TokensEvent:
    return TokensEvent(token_ids=tuple(text))


async def test_the_stream_opens_with_the_plan_as_decided(byte_codec: TextCodec) -> None:
    turn = Turn(byte_codec)
    start = (await anext(turn.stream.responses(turn.lasting))).start
    assert (start.request_id, start.conversation_id) == ("r", "c")
    assert (start.prompt_tokens, start.cached_tokens) == (100, 97)
    assert (start.plan.algorithm, start.plan.reason, start.plan.prefill_seconds) == (
        inference_pb2.ALGORITHM_PASS_Q,
        "few new tokens",
        0.0,
    )


async def test_tokens_come_as_whole_characters_and_are_counted(byte_codec: TextCodec) -> None:
    euro = "€".encode()
    turn = Turn(byte_codec, REPORT, tokens(b"a" + euro[:1]), tokens(euro[1:]), finished(FinishReason.LENGTH))
    first, second, last = await turn.read()
    assert (first.chunk.text, first.chunk.completion_tokens) == ("a", 2)
    assert (second.chunk.text, second.chunk.completion_tokens) == ("€", 4)
    assert list(second.chunk.token_ids) == list(euro[1:])
    assert (second.chunk.prompt_tokens, second.chunk.cached_tokens) == (100, 97)
    assert last.complete.text == "a€"
    assert list(last.complete.output_ids) == list(b"a" + euro)
    assert turn.stream.num_tokens == 4
    assert turn.leader.asked == "t"


async def test_the_completion_accounts_for_the_whole_turn(byte_codec: TextCodec) -> None:
    turn = Turn(byte_codec, REPORT, tokens(b"ab"), finished(FinishReason.STOP))
    complete = (await turn.read())[-1].complete
    assert (complete.finish_reason, complete.matched_stop) == (inference_pb2.FINISH_REASON_STOP, ord("b"))
    usage = complete.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (100, 97, 2)
    plan = complete.plan
    assert (plan.prefill_seconds, plan.queue_seconds, plan.pulled_bytes, plan.pull_seconds) == (0.4, 0.1, 640, 0.05)
    assert (plan.migrated_bytes, plan.migration_seconds, plan.handoff_seconds) == (2**40, 0.2, 0.3)
    assert complete.seed == 2**64 - 1
    assert complete.ttft_seconds == turn.stream.ttft_seconds > 0


async def test_the_completion_shows_the_chunks_that_were_computed_instead_of_those_planned(
    byte_codec: TextCodec,
) -> None:
    chunks = (
        PlannedChunk(tokens=TokenRange(97, 98), algorithm=Algorithm.PASS_Q, num_turns=1),
        PlannedChunk(tokens=TokenRange(98, 100), algorithm=Algorithm.PASS_KV, num_turns=4),
    )
    turn = Turn(byte_codec, replace(REPORT, chunks=chunks), tokens(b"a"), finished(FinishReason.LENGTH))
    *_, last = await turn.read()
    planned = turn.opened.start.plan
    assert [(chunk.start, chunk.stop, chunk.num_turns) for chunk in planned.chunks] == [(97, 100, 0)]
    plan = last.complete.plan
    assert [(chunk.start, chunk.stop, chunk.algorithm, chunk.num_turns) for chunk in plan.chunks] == [
        (97, 98, inference_pb2.ALGORITHM_PASS_Q, 1),
        (98, 100, inference_pb2.ALGORITHM_PASS_KV, 4),
    ]
    assert plan.algorithm == inference_pb2.ALGORITHM_PASS_KV
    assert list(plan.remarks) == ["computed by pass_kv, in steps shared with other turns"]


async def test_a_turn_that_ends_by_length_matched_no_stop_token(byte_codec: TextCodec) -> None:
    complete = (await Turn(byte_codec, REPORT, tokens(b"a"), finished(FinishReason.LENGTH)).read())[-1].complete
    assert complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert not complete.HasField("matched_stop")
    assert complete.ttit_seconds == 0.0


async def test_half_a_character_at_the_end_is_shown_in_the_completion(byte_codec: TextCodec) -> None:
    turn = Turn(byte_codec, REPORT, tokens(b"a" + "€".encode()[:2]), finished(FinishReason.LENGTH))
    chunk, last = await turn.read()
    assert chunk.chunk.text == "a"
    assert last.complete.text == "a" + REPLACEMENT


async def test_the_time_between_tokens_is_the_mean_after_the_first(
    byte_codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(byte_codec, REPORT, tokens(b"a"), tokens(b"bc"), tokens(b"d"), finished(FinishReason.LENGTH))
    clock = iter([10.0, 11.0, 14.0])
    monkeypatch.setattr("ringserve.services.gateway.turn_stream.time", SimpleNamespace(monotonic=lambda: next(clock)))
    complete = (await turn.read())[-1].complete
    assert complete.ttft_seconds == 10.0
    assert complete.ttit_seconds == pytest.approx(4 / 3)


async def test_what_ended_a_failed_turn_is_raised_after_its_tokens(byte_codec: TextCodec) -> None:
    turn = Turn(byte_codec, REPORT, tokens(b"a"), TurnCancelled("aborted"))
    responses = turn.stream.responses(turn.lasting)
    await anext(responses)
    assert (await anext(responses)).chunk.text == "a"
    with pytest.raises(TurnCancelled, match="aborted"):
        await anext(responses)
    assert turn.leader.is_closed


async def test_a_stream_that_just_ends_is_a_failure(byte_codec: TextCodec) -> None:
    with pytest.raises(Unavailable, match="ended before the turn did"):
        await Turn(byte_codec, REPORT, tokens(b"a")).read()


async def test_leaving_early_closes_the_leaders_stream(byte_codec: TextCodec) -> None:
    turn = Turn(byte_codec, REPORT, tokens(b"a"), tokens(b"b"), finished(FinishReason.LENGTH))
    responses = turn.stream.responses(turn.lasting)
    await anext(responses)
    await anext(responses)
    await responses.aclose()
    assert turn.leader.is_closed


# --- stop strings and log-probabilities ------------------------------------------------------------------------------


async def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(byte_codec: TextCodec) -> None:
    """Tokens that were decoded meanwhile are neither shown nor counted."""
    turn = Turn(
        byte_codec,
        REPORT,
        *(tokens(part) for part in (b"ab", b"c<", b"/", b"e>x", b"y", b"z")),
        EndingEvent(finish_reason=FinishReason.LENGTH),
        finished(FinishReason.STOP),
        rule=StopRule(strings=("</e>",)),
    )
    *chunks, last = await turn.read()
    assert [response.chunk.text for response in chunks] == ["ab", "c", "", ""]
    assert [bytes(response.chunk.token_ids) for response in chunks] == [b"ab", b"c<", b"/", b"e>"]
    complete = last.complete
    assert (complete.text, complete.finish_reason, complete.matched_stop_str) == (
        "abc",
        inference_pb2.FINISH_REASON_STOP,
        "</e>",
    )
    assert not complete.HasField("matched_stop")
    assert bytes(complete.output_ids) == b"abc</e>"
    assert complete.usage.completion_tokens == 7
    # The second word is harmless: the first counts.
    assert turn.leader.finished[0] == ("t", 7)


async def test_an_answer_without_its_stop_string_is_finished_whole_when_it_ends_by_itself(
    byte_codec: TextCodec,
) -> None:
    turn = Turn(
        byte_codec,
        REPORT,
        tokens(b"ab<"),
        EndingEvent(finish_reason=FinishReason.LENGTH),
        finished(FinishReason.LENGTH),
        rule=StopRule(strings=("</e>",)),
    )
    chunk, last = await turn.read()
    assert (chunk.chunk.text, last.complete.text) == ("ab", "ab<"), "what was held is shown in the end"
    assert last.complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert not last.complete.HasField("matched_stop_str")
    assert turn.leader.finished == [("t", 3)]


async def test_the_wait_before_each_response_with_tokens_but_the_first_is_noted(
    byte_codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(byte_codec, tokens(b"a"), tokens(b"b"), tokens(b"cde"), finished(FinishReason.LENGTH))
    times = iter((100.0, 100.5, 104.5))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("ringserve.services.gateway.turn_stream.time", clock)
    await turn.read()
    assert turn.noted == [(1, None), (1, 0.5), (3, 4.0)]


async def test_log_probabilities_come_with_their_tokens(byte_codec: TextCodec) -> None:
    each = [
        TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top_ids=(token,), top_logprobs=(-0.5,)) for token in b"abc"
    ]
    turn = Turn(
        byte_codec,
        REPORT,
        ScoredEvent(logprobs=(each[2],)),
        TokensEvent(token_ids=tuple(b"ab"), logprobs=tuple(each[:2])),
        finished(FinishReason.STOP),
        rule=StopRule(strings=("a",)),
    )
    chunk, last = await turn.read()
    assert [item.token_id for item in chunk.chunk.logprobs] == [ord("a")], "as many as tokens"
    assert [item.token_id for item in last.complete.output_logprobs] == [ord("a")]
    assert [item.token_id for item in last.complete.prompt_logprobs] == [ord("c")]
    assert list(last.complete.output_logprobs[0].top_token_ids) == [ord("a")]
