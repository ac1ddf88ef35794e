"""Messages that are valid protobuf and hostile in every field, made from the contract itself: new fields join."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

TEXTS = [
    "",
    "x",
    "a\nb",
    "\x00",
    "\u202e",
    "é" * 50,
    "🦀" * 70,
    "'; --",
    "%s%n",
    "{{7*7}}",
    "../" * 20,
    "<|end|>",
    "z" * 5000,
]
NAMES = ["", "c1", "c2", "c1/", "acme/c1", "\x7f", "ü", "z" * 256, "z" * 257]
REALS = [0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), 99.0]
UNSIGNED = [0, 1, 2, 5, 255, 299, 300, 8191, 2**31, 2**32 - 1]
SIGNED = [0, 1, -1, 2, 100, 101, -101, 2**31 - 1, -(2**31)]
MAX_DEPTH = 4


def filled(draw: random.Random, message: Any, share: float, depth: int = 0) -> Any:
    """Return the message, with about `share` of its fields set to a value of their type."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() >= share or depth > MAX_DEPTH:
            continue
        if field.is_repeated:
            _add(draw, getattr(message, field.name), field, share, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            part = getattr(message, field.name)
            part.SetInParent()
            filled(draw, part, share, depth + 1)
        else:
            setattr(message, field.name, _value(draw, field))
    return message


def _add(draw: random.Random, target: Any, field: FieldDescriptor, share: float, depth: int) -> None:
    for _ in range(draw.choice([0, 1, 2, 20, 300])):
        if field.message_type is None:
            target.append(_value(draw, field))
        elif not field.message_type.GetOptions().map_entry:
            item: Message = target.add()
            filled(draw, item, share, depth + 1)


def _value(draw: random.Random, field: FieldDescriptor) -> Any:
    kinds = FieldDescriptor
    match field.type:
        case kinds.TYPE_STRING:
            return draw.choice(NAMES if field.name.endswith(("_id", "_ids", "token", "prefix")) else TEXTS)
        case kinds.TYPE_BYTES:
            return draw.choice(TEXTS).encode()
        case kinds.TYPE_BOOL:
            return draw.random() < 0.5
        case kinds.TYPE_DOUBLE | kinds.TYPE_FLOAT:
            return draw.choice(REALS)
        case kinds.TYPE_ENUM:
            return draw.choice([0, 1, 2, 3, -1, 77])
        case kinds.TYPE_UINT64:
            return draw.choice([*UNSIGNED, 2**63, 2**64 - 1])
        case kinds.TYPE_UINT32:
            return draw.choice(UNSIGNED)
        case _:
            return draw.choice(SIGNED)
