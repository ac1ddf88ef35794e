"""Encoding of dataclasses by their annotations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import TypeAliasType, TypeVar

from ringserve.workers.protocol.encoding import Codec
from ringserve.workers.protocol.steps import TokenIds


class Color(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    number: int
    color: Color | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    pairs: tuple[tuple[str, float], ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    flag: bool = False
    tokens: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64), compare=False)


@pytest.mark.parametrize("number", [0, -1, (1 << 64) - 1, 1 << 64, -(1 << 70)])
def test_what_was_encoded_comes_back(number: int) -> None:
    inner = Inner(number, Color.RED)
    value = Outer(inner, inner, (inner, Inner(1)), (("a", 0.1),), ((1, 2), ()), True, np.array([1 << 40, 2]))
    back = Codec(Outer).decode(Codec(Outer).encode(value))
    assert back == value
    assert isinstance(back.inner.color, Color)
    assert back.tokens.tolist() == [1 << 40, 2]


def test_a_field_without_an_encoding_is_named_before_anything_is_written() -> None:
    @dataclass(frozen=True)
    class Wrong:
        names: dict[str, int]

    with pytest.raises(TypeError, match="no encoding of dict"):
        Codec(Wrong)


def test_an_array_type_may_be_an_alias_by_name_as_numpys_is_since_2_5() -> None:
    Kind = TypeVar("Kind", bound=np.generic)
    Array = TypeAliasType("Array", npt.NDArray[Kind], type_params=(Kind,))

    @dataclass(frozen=True)
    class Holder:
        tokens: Array[np.int64]

    Holder.__annotations__["tokens"] = Array[np.int64]
    back = Codec(Holder).decode(Codec(Holder).encode(Holder(np.array([3, 4]))))
    assert back.tokens.tolist() == [3, 4]
