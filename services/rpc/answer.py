"""Finished turns as JSON and as lines of text, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cp_core.errors import Unavailable
from ringserve.v1 import inference_pb2


def collect(
    responses: Iterator[inference_pb2.GenerateResponse], on_text: Callable[[str], None] = lambda text: None
) -> inference_pb2.GenerateComplete:
    """Read a turn to its end, and pass on text as it comes. Raises the turn's error, or Unavailable for a lost end."""
    return collect_all(responses, on_text)[0]


def collect_all(
    responses: Iterator[inference_pb2.GenerateResponse], on_text: Callable[[str], None] = lambda text: None
) -> list[inference_pb2.GenerateComplete]:
    """Read every answer of a request to its end, in the order of their numbers; pass on the first one's text."""
    shown = 0
    answers = []
    for response in responses:
        if response.HasField("chunk") and response.chunk.index == 0:
            on_text(response.chunk.text)
            shown += len(response.chunk.text)
        elif response.HasField("complete"):
            answers.append(response.complete)
            if response.complete.index == 0:
                on_text(response.complete.text[shown:])
    if not answers:
        raise Unavailable("the stream ended without a completion")
    return sorted(answers, key=lambda answer: answer.index)


LONG_NUMBERS = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64}


def message_dict(message: Message) -> dict[str, Any]:
    """Return a message with the contract's field names; 64-bit numbers stay numbers, as JSON's readers expect."""
    values = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _restore_numbers(values, message.DESCRIPTOR)
    return values


def _restore_numbers(values: dict[str, Any], descriptor: Any) -> None:
    for field in descriptor.fields:
        if field.name not in values:
            continue
        found = values[field.name]
        if field.type in LONG_NUMBERS:
            values[field.name] = [int(number) for number in found] if field.is_repeated else int(found)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in found if field.is_repeated else [found]:
                _restore_numbers(part, field.message_type)


def answer_dict(complete: inference_pb2.GenerateComplete, conversation_id: str) -> dict[str, Any]:
    """Return the object that `ringserve generate --json` prints for one answer."""
    values: dict[str, Any] = {
        "token_ids": list(complete.output_ids),
        "text": complete.text,
        "finish_reason": complete.finish_reason,
        "matched_stop": matched_stop(complete),
        "conversation_id": conversation_id,
        "usage": {
            "prompt_tokens": complete.usage.prompt_tokens,
            "cached_tokens": complete.usage.cached_tokens,
            "completion_tokens": complete.usage.completion_tokens,
        },
        "plan": message_dict(complete.plan),
        "ttft_seconds": complete.ttft_seconds,
        "ttit_seconds": complete.ttit_seconds,
        "seed": complete.seed,
    }
    for name in ("output_logprobs", "prompt_logprobs"):
        if found := getattr(complete, name):
            values[name] = [logprobs_dict(each) for each in found]
    return values


def answers_dict(answers: Sequence[inference_pb2.GenerateComplete]) -> dict[str, Any]:
    """Return the object that `ringserve generate --json --n N` prints."""
    return {"answers": [{"index": answer.index, **answer_dict(answer, "")} for answer in answers]}


def logprobs_dict(logprobs: inference_pb2.TokenLogprobs) -> dict[str, Any]:
    """Return a token's log-probability; `top` are [token id, log-probability], the most likely first."""
    return {
        "token_id": logprobs.token_id,
        "logprob": logprobs.logprob,
        "rank": logprobs.rank,
        "top": [list(pair) for pair in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)],
    }


def matched_stop(complete: inference_pb2.GenerateComplete) -> int | str | None:
    """Return the stop string or token that ended the answer; None: its length did."""
    if complete.HasField("matched_stop_str"):
        return complete.matched_stop_str
    return complete.matched_stop if complete.HasField("matched_stop") else None


def plan_line(complete: inference_pb2.GenerateComplete) -> str:
    """Return the plan in one line, for people."""
    plan = complete.plan
    losses = "".join(
        f"; lost its {each.role} after {each.after_tokens} tokens ({each.cause}) and went on at {each.prefill_ring} -> "
        f"{each.decode_ring} after {each.lost_seconds:.2f} s"
        for each in plan.failovers
    )
    sparse = f", sparse {plan.sparse.keep:g}" if plan.HasField("sparse") else ""
    measured = f"prefill {plan.prefill_seconds:.3f} s (predicted {plan.predicted_prefill_seconds:.3f})"
    return (
        f"{plan.algorithm}{sparse}: T={plan.new_tokens} P={plan.cached_tokens} on {plan.prefill_ring} -> "
        f"{plan.decode_ring}, TTFT {complete.ttft_seconds:.3f} s, {measured}, "
        f"TTIT {1000 * complete.ttit_seconds:.1f} ms, "
        f"{complete.usage.completion_tokens} tokens ({complete.finish_reason}); {plan.reason}{losses}"
    )
