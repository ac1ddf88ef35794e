"""A finished turn as the command line prints it."""

from __future__ import annotations

import json
from dataclasses import replace

from ringserve.client import Answer, Plan, TokenLogprobs, Usage
from ringserve.client.results import MAPPER, Alternative, CachedSource
from ringserve.services.rpc.answer import answer_dict, answers_dict, message_dict
from ringserve.v1 import inference_pb2


def complete(text: str = "") -> Answer:
    return Answer(
        conversation_id="c",
        token_ids=(1, 2),
        text=text,
        finish_reason="length",
        usage=Usage(prompt_tokens=10, cached_tokens=7, completion_tokens=2),
        plan=Plan(
            algorithm="pass_q",
            reason="because",
            new_tokens=3,
            cached_tokens=7,
            prefill_ring="p",
            decode_ring="d",
            cached_sources=(CachedSource(source="kept_on_prefill", start=0, stop=7),),
            migrated_bytes=2**40,
            alternatives=(Alternative(algorithm="pass_kv", predicted_prefill_seconds=0.5),),
        ),
        ttft_seconds=0.25,
        ttit_seconds=0.0125,
        seed=2**64 - 1,
    )


def test_the_printed_object_holds_what_is_promised() -> None:
    printed = json.loads(json.dumps(answer_dict(complete("hi"))))
    assert printed["token_ids"] == [1, 2]
    assert (printed["text"], printed["finish_reason"], printed["conversation_id"]) == ("hi", "length", "c")
    usage = {"prompt_tokens": 10, "cached_tokens": 7, "completion_tokens": 2, "accepted_draft_tokens": 0}
    assert printed["usage"] == usage
    assert (printed["ttft_seconds"], printed["ttit_seconds"], printed["seed"]) == (0.25, 0.0125, 2**64 - 1)
    plan = printed["plan"]
    assert (plan["algorithm"], plan["reason"], plan["new_tokens"], plan["cached_tokens"]) == ("pass_q", "because", 3, 7)


def test_a_plan_has_every_field_and_numbers_stay_numbers() -> None:
    plan = message_dict(MAPPER.to_message(inference_pb2.Plan, complete().plan))
    # Only the plan of an approximate turn says how sparse it is.
    assert set(plan) == {field.name for field in inference_pb2.Plan.DESCRIPTOR.fields} - {"sparse"}
    assert plan["migrated_bytes"] == 2**40
    assert plan["pulled_bytes"] == 0
    for field in inference_pb2.Plan.DESCRIPTOR.fields:
        if field.type not in (field.TYPE_STRING, field.TYPE_ENUM) and field.message_type is None:
            assert isinstance(plan[field.name], int | float), field.name
    assert (plan["algorithm"], plan["prompt_mode"]) == ("pass_q", "")


def test_several_answers_are_numbered() -> None:
    assert [each["index"] for each in answers_dict([complete(), replace(complete(), index=1)])["answers"]] == [0, 1]


def test_what_ended_an_answer_is_told_and_log_probabilities_where_there_are_any() -> None:
    answer = complete()
    assert answer_dict(answer)["matched_stop"] is None
    assert "output_logprobs" not in answer_dict(answer)
    answer = replace(answer, matched_stop=0)
    assert answer_dict(answer)["matched_stop"] == 0
    scored = TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_token_ids=(5, 7), top_logprobs=(-0.5, -1.0))
    answer = replace(answer, logprobs=(scored,))
    assert answer_dict(answer)["output_logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "rank": 1, "top": [[5, -0.5], [7, -1.0]]}
    ]
