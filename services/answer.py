"""One finished turn as the command line prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict

from cp_core.errors import Unavailable
from ringserve.v1 import inference_pb2


def collect(
    responses: Iterator[inference_pb2.GenerateResponse], on_text: Callable[[str], None] = lambda text: None
) -> inference_pb2.GenerateComplete:
    """Read a turn to its end, handing on text as it comes. Raises what ended it, or Unavailable if nothing did."""
    shown = 0
    for response in responses:
        if response.HasField("chunk"):
            on_text(response.chunk.text)
            shown += len(response.chunk.text)
        elif response.HasField("complete"):
            on_text(response.complete.text[shown:])
            return response.complete
    raise Unavailable("the stream ended without a completion")


def plan_dict(plan: inference_pb2.Plan) -> dict[str, Any]:
    """A plan with the contract's field names; 64-bit numbers stay numbers."""
    values = MessageToDict(plan, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for key in ("migrated_bytes", "pulled_bytes"):
        values[key] = int(values[key])
    return values


def answer_dict(complete: inference_pb2.GenerateComplete, conversation_id: str) -> dict[str, Any]:
    """The object that `ringserve generate --json` prints."""
    return {
        "token_ids": list(complete.output_ids),
        "text": complete.text,
        "finish_reason": complete.finish_reason,
        "conversation_id": conversation_id,
        "usage": {
            "prompt_tokens": complete.usage.prompt_tokens,
            "cached_tokens": complete.usage.cached_tokens,
            "completion_tokens": complete.usage.completion_tokens,
        },
        "plan": plan_dict(complete.plan),
        "ttft_seconds": complete.ttft_seconds,
        "ttit_seconds": complete.ttit_seconds,
        "seed": complete.seed,
    }


def plan_line(complete: inference_pb2.GenerateComplete) -> str:
    """The plan in one line, for people."""
    plan = complete.plan
    return (
        f"{plan.algorithm}: T={plan.new_tokens} P={plan.cached_tokens} on {plan.prefill_ring} -> {plan.decode_ring}, "
        f"TTFT {complete.ttft_seconds:.3f} s, TTIT {1000 * complete.ttit_seconds:.1f} ms, "
        f"{complete.usage.completion_tokens} tokens ({complete.finish_reason}); {plan.reason}"
    )
