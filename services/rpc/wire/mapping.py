"""Field mapper between frozen dataclasses and protobuf messages, by field name and type.

A mapper writes the source of one converter a (message, dataclass) pair on first use and compiles it, as `dataclasses`
does for `__init__`: a conversion costs what the same lines written by hand would. Every field must have a mirror of a
fitting type on the other side; a field without one is a TypeError at that first use.

| dataclass field | message field |
|---|---|
| int, float, bool, str | scalar |
| StrEnum | string |
| Enum named in `enums` | enum |
| dataclass | message |
| tuple of these | repeated |
| tuple[int, ...] | bytes: token ids, little-endian int32 |
| X or None | field with presence; without presence the empty value is None |
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cp_core.errors import InvalidRequest

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Convert = Callable[[Any], Any]

TOKEN_BYTES = 4
"""Size of a token id on the wire."""

_WHOLE = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64} | {
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
_SCALARS: Mapping[type, set[int]] = MappingProxyType(
    {
        bool: {FieldDescriptor.CPPTYPE_BOOL},
        int: _WHOLE,
        float: {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT},
        str: {FieldDescriptor.CPPTYPE_STRING},
    }
)


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """Exceptions of one dataclass from "same name on both sides".

    `renamed` gives the message's name of a field; several names flatten a nested dataclass into the outer message.
    `derived` are properties that a message shows and a reader ignores. `elsewhere` are message fields that other code
    fills.
    """

    renamed: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


NO_EXCEPTIONS = Mirror()


class Mapper:
    """Converters of a set of dataclasses.

    `special` has hand-written (write, read) pairs by type; `enums` the numbers of enums that are enums on the wire too,
    where a number without a member reads as the first.
    """

    def __init__(
        self,
        mirrors: Mapping[type, Mirror] = MappingProxyType({}),
        special: Mapping[Any, tuple[Convert, Convert]] = MappingProxyType({}),
        enums: Mapping[Any, Mapping[Any, int]] = MappingProxyType({}),
    ) -> None:
        self._mirrors = mirrors
        self._special = special
        self._enums = enums
        self._writers: dict[tuple[type, type], Convert] = {}
        self._readers: dict[tuple[type, type], Convert] = {}

    def to_message(self, message: type[M], value: object) -> M:
        """Return `value`, a dataclass, as a message of this class."""
        key = (message, type(value))
        written: M = (self._writers.get(key) or self._writer(*key))(value)
        return written

    def from_message(self, kind: type[T], message: Message) -> T:
        """Return a message as a dataclass of this class. Raises InvalidRequest for bytes that are no token ids."""
        key = (kind, type(message))
        read: T = (self._readers.get(key) or self._reader(*key))(message)
        return read

    def _writer(self, message: type, kind: type) -> Convert:
        source, parts = _Source("value", M=message), []
        for name, hint, targets in self._fields(kind, message):
            if len(targets) > 1:
                parts += [f"{each.name}=value.{name}.{each.name}" for each in targets]
            else:
                parts.append(f"{targets[0].name}={self._written(source, hint, targets[0], f'value.{name}')}")
        parts += [f"{name}=value.{name}" for name in self._mirrors.get(kind, NO_EXCEPTIONS).derived]
        write = self._writers[message, kind] = source.compiled(f"M({', '.join(parts)})")
        return write

    def _reader(self, kind: type, message: type) -> Convert:
        source, parts = _Source("message", K=kind), []
        for name, hint, targets in self._fields(kind, message):
            if len(targets) > 1:
                values = ", ".join(f"message.{each.name}" for each in targets)
                parts.append(f"{name}={source.bind(hint)}({values})")
            else:
                parts.append(f"{name}={self._read(source, hint, targets[0])}")
        read = self._readers[kind, message] = source.compiled(f"K({', '.join(parts)})")
        return read

    def _fields(self, kind: type, message: Any) -> list[tuple[str, Any, tuple[FieldDescriptor, ...]]]:
        """Pair each field of a dataclass with its type and its fields of the message. Raises TypeError."""
        descriptor: Descriptor = message.DESCRIPTOR
        known, mirror, hints = descriptor.fields_by_name, self._mirrors.get(kind, NO_EXCEPTIONS), get_type_hints(kind)
        paired, unpaired = [], set(known) - set(mirror.elsewhere) - set(mirror.derived)
        for each in fields(kind):
            renamed = mirror.renamed.get(each.name, each.name)
            names = renamed if isinstance(renamed, tuple) else (renamed,)
            if not unpaired.issuperset(names):
                raise TypeError(f"{kind.__name__}.{each.name} has no mirror in {descriptor.full_name}")
            unpaired.difference_update(names)
            paired.append((each.name, hints[each.name], tuple(known[name] for name in names)))
        if unpaired:
            raise TypeError(f"{descriptor.full_name} has fields that {kind.__name__} lacks: {sorted(unpaired)}")
        return paired

    def _written(self, source: _Source, hint: Any, target: FieldDescriptor, value: str) -> str:
        """Return the expression that turns `value` into what the field takes."""
        kind, is_optional = _without_none(hint)
        if kind in self._special:
            code = f"{source.bind(self._special[kind][0])}({value})"
        elif kind in self._enums and target.enum_type is not None:
            code = f"{source.bind(dict(self._enums[kind]))}[{value}]"
        elif get_origin(kind) is tuple:
            code = self._items(source, kind, target, value, is_read=False)
        elif _is_record(kind):
            code = f"{source.bind(self._writer(_class_of(target), kind))}({value})"
        else:
            _check_scalar(kind, target)
            return f'{value} or ""' if is_optional and not target.has_presence else value
        return f"None if {value} is None else {code}" if is_optional else code

    def _read(self, source: _Source, hint: Any, target: FieldDescriptor) -> str:
        """Return the expression that reads a field of `message`."""
        (kind, is_optional), value = _without_none(hint), f"message.{target.name}"
        if kind in self._special:
            code = f"{source.bind(self._special[kind][1])}({value})"
        elif kind in self._enums and target.enum_type is not None:
            members = {number: member for member, number in self._enums[kind].items()}
            code = f"{source.bind(members)}.get({value}, {source.bind(next(iter(self._enums[kind])))})"
        elif get_origin(kind) is tuple:
            code = self._items(source, kind, target, value, is_read=True)
        elif _is_record(kind):
            code = f"{source.bind(self._reader(kind, _class_of(target)))}({value})"
        else:
            _check_scalar(kind, target)
            code = f"{source.bind(kind)}({value})" if issubclass(kind, Enum) else value
        if not is_optional:
            return code
        return (
            f'{code} if message.HasField("{target.name}") else None'
            if target.has_presence
            else f"{code} if {value} else None"
        )

    def _items(self, source: _Source, kind: Any, target: FieldDescriptor, value: str, *, is_read: bool) -> str:
        item, *rest = get_args(kind)
        if rest != [Ellipsis]:
            raise TypeError(f"{target.full_name}: {kind} needs a hand-written pair")
        if item is int and target.type == FieldDescriptor.TYPE_BYTES:
            return f"{source.bind(unpack_ids if is_read else pack_ids)}({value})"
        if _is_record(item):
            convert = self._reader(item, _class_of(target)) if is_read else self._writer(_class_of(target), item)
            items = f"[{source.bind(convert)}(item) for item in {value}]"
            return f"tuple({items})" if is_read else items
        _check_scalar(item, target)
        return f"tuple({value})" if is_read else value


class _Source:
    """Source of one converter, a function of `argument`, and the objects that its names stand for."""

    def __init__(self, argument: str, **names: Any) -> None:
        self._argument = argument
        self._names = names

    def bind(self, value: Any) -> str:
        """Return a name for `value`."""
        name = f"n{len(self._names)}"
        self._names[name] = value
        return name

    def compiled(self, expression: str) -> Convert:
        convert: Convert = eval(f"lambda {self._argument}: {expression}", self._names)
        return convert


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian int32."""
    numbers = tuple(ids)
    return struct.pack(f"<{len(numbers)}i", *numbers)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Return the token ids of little-endian int32 bytes. Raises InvalidRequest."""
    check_ids(data)
    return struct.unpack(f"<{len(data) // TOKEN_BYTES}i", data)


def check_ids(data: bytes) -> None:
    """Raise InvalidRequest for bytes that are no whole number of token ids."""
    if len(data) % TOKEN_BYTES:
        raise InvalidRequest(f"token_ids: {len(data)} bytes are no whole number of ids of {TOKEN_BYTES} bytes")


def _without_none(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, UnionType):
        (kind,) = (part for part in get_args(hint) if part is not type(None))
        return kind, True
    return hint, False


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind)


def _class_of(target: FieldDescriptor) -> type[Message]:
    if target.message_type is None:
        raise TypeError(f"{target.full_name} is no message")
    return GetMessageClass(target.message_type)


def _check_scalar(kind: Any, target: FieldDescriptor) -> None:
    plain = str if issubclass(kind, str) else kind
    if target.cpp_type not in _SCALARS.get(plain, ()):
        raise TypeError(f"{target.full_name} cannot hold {kind.__name__}")
