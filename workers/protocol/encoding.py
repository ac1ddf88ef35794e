"""Encoding of frozen dataclasses as bytes: journal rows, and batch changes between the ranks of a decode ring.

The journal and the decode loops use it; it keeps no state. Annotations are the schema. A dataclass becomes a msgpack
map by field names, a tuple a list, an enum its value, and an int64 array its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

T = TypeVar("T")
Rule = Callable[[Any], Any] | None
"""Conversion of a value; None keeps the value as it is."""
INTEGERS = range(-(1 << 63), 1 << 64)
"""Integers that msgpack carries. Any other, such as a Python caller's large seed, is written as decimal text."""


class Codec(Generic[T]):
    """Encoding of one dataclass and of all dataclasses in its fields.

    Example: `Codec(TokenBias).decode(Codec(TokenBias).encode(TokenBias(3, -1.0)))` is `TokenBias(3, -1.0)`.
    """

    def __init__(self, kind: type[T]) -> None:
        """Read the annotations. Raises TypeError for a field of a kind that has no encoding."""
        self._write, self._read = _dataclass_rules(kind)

    def encode(self, value: T) -> bytes:
        """Return the value's bytes."""
        return bytes(msgpack.packb(self._write(value)))

    def decode(self, data: bytes) -> T:
        """Decode a value; arrays are read-only. Raises TypeError if a field without a default is missing."""
        value: T = self._read(msgpack.unpackb(data, use_list=False))
        return value


def _dataclass_rules(kind: type[Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    rules = [(field.name, *_rules(hints[field.name])) for field in fields(kind)]
    readers = {name: read for name, _, read in rules}

    def write(value: Any) -> dict[str, Any]:
        values = ((name, write, getattr(value, name)) for name, write, _ in rules)
        return {name: each if write is None else write(each) for name, write, each in values}

    def read(values: dict[str, Any]) -> Any:
        named = {name: each if (read := readers[name]) is None else read(each) for name, each in values.items()}
        return kind(**named)

    return write, read


def _rules(hint: Any) -> tuple[Rule, Rule]:
    """Return how a value of this annotation is written and read."""
    origin, inner = get_origin(hint), get_args(hint)
    if (aliased := getattr(origin, "__value__", None)) is not None:  # a `type` alias, such as NDArray since numpy 2.5
        return _rules(aliased[inner])
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_rules(hint)
    if origin is UnionType and len(inner) == 2 and NoneType in inner:
        write, read = _rules(next(each for each in inner if each is not NoneType))
        return _unless_none(write), _unless_none(read)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        # No call per integer, because block tables are long.
        write, read = (None, None) if inner[0] is int else _rules(inner[0])
        return _of_each(write), _of_each(read)
    if origin is tuple and all(each in (str, float, bool) for each in inner):
        return None, None
    if origin is np.ndarray:
        return (
            lambda array: np.asarray(array, dtype=np.int64).tobytes(),
            lambda data: np.frombuffer(data, dtype=np.int64),
        )
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda member: member.value, hint
    if hint is int:
        return lambda number: number if number in INTEGERS else str(number), int
    if hint in (str, float, bool):
        return None, None
    raise TypeError(f"no encoding of {hint}")


def _unless_none(rule: Rule) -> Rule:
    return None if rule is None else lambda value: None if value is None else rule(value)


def _of_each(rule: Rule) -> Rule:
    return None if rule is None else lambda values: tuple(map(rule, values))
