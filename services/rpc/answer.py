"""Contract messages as JSON, and finished turns as JSON for the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from ringserve.client import Answer, TokenLogprobs
from ringserve.mapping import enum_names

LONG_NUMBERS = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64}


def message_dict(message: Message) -> dict[str, Any]:
    """Return a message as a dict with the contract's field names, 64-bit numbers as numbers, and short enum names."""
    values = MessageToDict(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        use_integers_for_enums=True,
    )
    _restore(values, message.DESCRIPTOR)
    return values


def _restore(values: dict[str, Any], descriptor: Any) -> None:
    for field in descriptor.fields:
        if field.name not in values:
            continue
        found = values[field.name]
        if field.type in LONG_NUMBERS:
            values[field.name] = [int(number) for number in found] if field.is_repeated else int(found)
        elif field.enum_type is not None:
            values[field.name] = enum_names(field.enum_type).get(found, "")
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in found if field.is_repeated else [found]:
                _restore(part, field.message_type)


def answer_dict(answer: Answer) -> dict[str, Any]:
    """Return the object that `ringserve generate --json` prints for one answer."""
    values: dict[str, Any] = {
        "token_ids": list(answer.token_ids),
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "matched_stop": answer.matched_stop,
        "conversation_id": answer.conversation_id,
        "usage": asdict(answer.usage),
        "plan": asdict(answer.plan),
        "ttft_seconds": answer.ttft_seconds,
        "ttit_seconds": answer.ttit_seconds,
        "seed": answer.seed,
    }
    for name, found in (("output_logprobs", answer.logprobs), ("prompt_logprobs", answer.prompt_logprobs)):
        if found:
            values[name] = [logprobs_dict(each) for each in found]
    return values


def answers_dict(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the object that `ringserve generate --json --n N` prints."""
    return {"answers": [{"index": answer.index, **answer_dict(answer)} for answer in answers]}


def logprobs_dict(logprobs: TokenLogprobs) -> dict[str, Any]:
    """Return a token's log-probability. `top` lists [token id, log-probability], the most likely first."""
    return {
        "token_id": logprobs.token_id,
        "logprob": logprobs.logprob,
        "rank": logprobs.rank,
        "top": [list(pair) for pair in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)],
    }
