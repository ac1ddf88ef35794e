"""A finished turn as the command line prints it."""

from __future__ import annotations

import json

import pytest

from cp_core.errors import Unavailable
from ringserve.v1 import inference_pb2
from services.rpc.answer import answer_dict, answers_dict, collect, collect_all, message_dict, plan_line

Response = inference_pb2.GenerateResponse


def complete(text: str = "") -> inference_pb2.GenerateComplete:
    return inference_pb2.GenerateComplete(
        output_ids=[1, 2],
        text=text,
        finish_reason="length",
        usage=inference_pb2.Usage(prompt_tokens=10, cached_tokens=7, completion_tokens=2),
        plan=inference_pb2.Plan(
            algorithm="pass_q",
            reason="because",
            new_tokens=3,
            cached_tokens=7,
            prefill_ring="p",
            decode_ring="d",
            cached_sources=[inference_pb2.CachedSource(source="kept_on_prefill", start=0, stop=7)],
            migrated_bytes=2**40,
            alternatives=[inference_pb2.Alternative(algorithm="pass_kv", predicted_prefill_seconds=0.5)],
        ),
        ttft_seconds=0.25,
        ttit_seconds=0.0125,
        seed=2**64 - 1,
    )


def chunk(text: str) -> inference_pb2.GenerateResponse:
    return Response(chunk=inference_pb2.GenerateStreamChunk(text=text))


def test_text_is_handed_on_as_it_comes_and_the_rest_at_the_end() -> None:
    shown: list[str] = []
    start = Response(start=inference_pb2.GenerateStart())
    responses = iter([start, chunk("a"), chunk("😀"), Response(complete=complete("a😀!"))])
    assert collect(responses, shown.append) == complete("a😀!")
    assert shown == ["a", "😀", "!"]


def test_a_stream_without_a_completion_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="ended without a completion"):
        collect(iter([chunk("a")]))


def test_the_printed_object_holds_what_is_promised() -> None:
    printed = json.loads(json.dumps(answer_dict(complete("hi"), "c")))
    assert printed["token_ids"] == [1, 2]
    assert (printed["text"], printed["finish_reason"], printed["conversation_id"]) == ("hi", "length", "c")
    assert printed["usage"] == {"prompt_tokens": 10, "cached_tokens": 7, "completion_tokens": 2}
    assert (printed["ttft_seconds"], printed["ttit_seconds"], printed["seed"]) == (0.25, 0.0125, 2**64 - 1)
    plan = printed["plan"]
    assert (plan["algorithm"], plan["reason"], plan["new_tokens"], plan["cached_tokens"]) == ("pass_q", "because", 3, 7)


def test_a_plan_has_every_field_and_numbers_stay_numbers() -> None:
    plan = message_dict(complete().plan)
    # Only the plan of an approximate turn says how sparse it is.
    assert set(plan) == {field.name for field in inference_pb2.Plan.DESCRIPTOR.fields} - {"sparse"}
    assert plan["migrated_bytes"] == 2**40
    assert plan["pulled_bytes"] == 0
    for field in inference_pb2.Plan.DESCRIPTOR.fields:
        if field.type != field.TYPE_STRING and field.message_type is None:
            assert isinstance(plan[field.name], int | float), field.name


def test_a_plan_fits_in_one_line() -> None:
    assert plan_line(complete()) == (
        "pass_q: T=3 P=7 on p -> d, TTFT 0.250 s, prefill 0.000 s (predicted 0.000), TTIT 12.5 ms, "
        "2 tokens (length); because"
    )


def test_the_line_of_a_plan_says_which_rings_were_lost() -> None:
    failed_over = complete()
    failed_over.plan.failovers.add(
        role="decode", cause="killed", after_tokens=5, prefill_ring="p", decode_ring="e", lost_seconds=1.5
    )
    assert plan_line(failed_over) == (
        f"{plan_line(complete())}; lost its decode after 5 tokens (killed) and went on at p -> e after 1.50 s"
    )


def test_answers_come_in_the_order_of_their_numbers_and_only_the_first_is_shown() -> None:
    shown: list[str] = []
    first, second = complete("ab"), complete("xy")
    second.index = 1
    other = Response(chunk=inference_pb2.GenerateStreamChunk(text="x", index=1))
    responses = iter([other, chunk("a"), Response(complete=second), Response(complete=first)])
    assert collect_all(responses, shown.append) == [first, second]
    assert shown == ["a", "b"]
    assert [each["index"] for each in answers_dict([first, second])["answers"]] == [0, 1]


def test_what_ended_an_answer_is_told_and_log_probabilities_where_there_are_any() -> None:
    answer = complete()
    assert answer_dict(answer, "")["matched_stop"] is None
    assert "output_logprobs" not in answer_dict(answer, "")
    answer.matched_stop = 0
    assert answer_dict(answer, "")["matched_stop"] == 0
    answer.matched_stop_str = "END"
    assert answer_dict(answer, "")["matched_stop"] == "END"
    answer.output_logprobs.add(token_id=5, logprob=-0.5, rank=1, top_token_ids=[5, 7], top_logprobs=[-0.5, -1.0])
    assert answer_dict(answer, "")["output_logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "rank": 1, "top": [[5, -0.5], [7, -1.0]]}
    ]
