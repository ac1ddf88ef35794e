"""Field mapper between frozen dataclasses and protobuf messages, by field name and type.

Clients and the processes of a cluster use it. A mapper makes a converter for each (message, dataclass) pair when the
pair is first used; later conversions need not look at types. Every field must have a mirror of a fitting type on the
other side; a field without one is a TypeError at that first use.

| dataclass field | message field |
|---|---|
| int, float, bool, str | scalar |
| str, StrEnum | string, or enum by its short name: "pass_q" is ALGORITHM_PASS_Q, and "" is the number 0 |
| Enum named in `enums` | enum |
| dataclass | message |
| tuple of these | repeated |
| tuple[int, ...] | bytes: token ids, little-endian int32 |
| X or None | field with presence; in a field without presence the empty value stands for None |
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import MappingProxyType, UnionType
from typing import Any, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ringserve.errors import InvalidRequest

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Convert = Callable[[Any], Any]


class EnumOfContract(Protocol):
    """Enum type of generated protobuf code, such as `inference_pb2.FinishReason`."""

    @property
    def DESCRIPTOR(self) -> Any: ...


TOKEN_BYTES = 4
"""Size of a token id on the wire."""


@cache
def enum_names(enum: EnumDescriptor) -> Mapping[int, str]:
    """Return the short names of an enum by number: without its prefix, in lower case, and "" for UNSPECIFIED."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    named = {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}
    return MappingProxyType(named | {0: ""})


@cache
def enum_numbers(enum: EnumDescriptor) -> Mapping[str, int]:
    """Return the numbers of an enum by short name."""
    return MappingProxyType({name: number for number, name in enum_names(enum).items()})


def enum_name(enum: EnumOfContract, number: int) -> str:
    """Return the short name of a number of a contract's enum; "" for one that is not known here."""
    return enum_names(enum.DESCRIPTOR).get(number, "")


def enum_number(enum: EnumOfContract, name: str) -> Any:
    """Return the number of a short name. Raises KeyError."""
    return enum_numbers(enum.DESCRIPTOR)[name]


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
    """Deviations of one dataclass from the rule that a field has the same name on both sides.

    `renamed` maps a field to its name in the message; several names are the fields of a nested dataclass, which lie in
    the outer message. `derived` are properties of the dataclass that are written into the message and not read back.
    `elsewhere` are message fields that other code fills.
    """

    renamed: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


SAME_NAMES = Mirror()


class Mapper:
    """Converters of a set of dataclasses.

    `special` has hand-written (write, read) pairs by type. `enums` has the numbers of the members of an Enum that is an
    enum in the message too; a number without a member is read as the first member.
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
        steps: list[tuple[str, Convert, Convert | None]] = []
        for name, hint, targets in self._fields(kind, message):
            if len(targets) > 1:
                steps += [(each.name, attrgetter(f"{name}.{each.name}"), None) for each in targets]
            else:
                steps.append((targets[0].name, attrgetter(name), self._to_field(hint, targets[0])))
        steps += [(name, attrgetter(name), None) for name in self._mirrors.get(kind, SAME_NAMES).derived]

        def write(value: object) -> Any:
            return message(
                **{name: get(value) if convert is None else convert(get(value)) for name, get, convert in steps}
            )

        self._writers[message, kind] = write
        return write

    def _reader(self, kind: type, message: type) -> Convert:
        steps: list[tuple[str, Convert]] = []
        for name, hint, targets in self._fields(kind, message):
            if len(targets) > 1:
                steps.append((name, _read_flattened(hint, [each.name for each in targets])))
            else:
                steps.append((name, self._from_field(hint, targets[0])))

        def read(value: Message) -> Any:
            return kind(**{name: get(value) for name, get in steps})

        self._readers[kind, message] = read
        return read

    def _fields(self, kind: type, message: Any) -> list[tuple[str, Any, tuple[FieldDescriptor, ...]]]:
        """Pair each field of a dataclass with its type and its fields of the message. Raises TypeError."""
        descriptor: Descriptor = message.DESCRIPTOR
        known, mirror, hints = descriptor.fields_by_name, self._mirrors.get(kind, SAME_NAMES), get_type_hints(kind)
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

    def _to_field(self, hint: Any, target: FieldDescriptor) -> Convert | None:
        """Return the conversion of a value into what the field takes; None if the value is taken as it is."""
        kind, is_optional = _without_none(hint)
        convert: Convert | None
        if kind in self._special:
            convert = self._special[kind][0]
        elif kind in self._enums and target.enum_type is not None:
            convert = dict(self._enums[kind]).__getitem__
        elif _is_word(kind) and target.enum_type is not None:
            convert = enum_numbers(target.enum_type).__getitem__
        elif get_origin(kind) is tuple:
            convert = self._to_items(kind, target)
        elif is_dataclass(kind):
            convert = self._writer(_find_class(target), cast(type, kind))
        else:
            _check_scalar(kind, target)
            return _empty_for_none if is_optional and not target.has_presence else None
        return _pass_none(convert) if is_optional and convert is not None else convert

    def _from_field(self, hint: Any, target: FieldDescriptor) -> Convert:
        """Return the function that reads a field of a message."""
        (kind, is_optional), name = _without_none(hint), target.name
        get, convert = attrgetter(name), self._from_value(kind, target)
        if not is_optional:
            return get if convert is None else lambda message: convert(get(message))

        def read(message: Message) -> Any:
            value = get(message)
            if not (message.HasField(name) if target.has_presence else value):
                return None
            return value if convert is None else convert(value)

        return read

    def _from_value(self, kind: Any, target: FieldDescriptor) -> Convert | None:
        if kind in self._special:
            return self._special[kind][1]
        if kind in self._enums and target.enum_type is not None:
            members = {number: member for member, number in self._enums[kind].items()}
            first = next(iter(self._enums[kind]))
            return lambda number: members.get(number, first)
        if _is_word(kind) and target.enum_type is not None:
            names = enum_names(target.enum_type)
            if kind is str:
                return lambda number: names.get(number, "")
            return lambda number: kind(names.get(number, ""))
        if get_origin(kind) is tuple:
            return self._from_items(kind, target)
        if is_dataclass(kind):
            return self._reader(cast(type, kind), _find_class(target))
        _check_scalar(kind, target)
        return kind if issubclass(kind, Enum) else None

    def _to_items(self, kind: Any, target: FieldDescriptor) -> Convert | None:
        item = _find_item_type(kind, target)
        if item is int and target.type == FieldDescriptor.TYPE_BYTES:
            return pack_ids
        if is_dataclass(item):
            convert = self._writer(_find_class(target), cast(type, item))
            return lambda values: [convert(value) for value in values]
        _check_scalar(item, target)
        return None

    def _from_items(self, kind: Any, target: FieldDescriptor) -> Convert:
        item = _find_item_type(kind, target)
        if item is int and target.type == FieldDescriptor.TYPE_BYTES:
            return unpack_ids
        if is_dataclass(item):
            convert = self._reader(cast(type, item), _find_class(target))
            return lambda values: tuple([convert(value) for value in values])
        _check_scalar(item, target)
        return tuple


def _read_flattened(kind: type, names: Sequence[str]) -> Convert:
    """Return the reader of a nested dataclass whose fields lie in the outer message, in this order."""
    return lambda message: kind(*(getattr(message, name) for name in names))


def _is_word(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, str)


def _pass_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _empty_for_none(value: str | None) -> str:
    return value or ""


def _find_item_type(kind: Any, target: FieldDescriptor) -> Any:
    item, *rest = get_args(kind)
    if rest != [Ellipsis]:
        raise TypeError(f"{target.full_name}: {kind} needs a (write, read) pair in `special`")
    return item


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


def _find_class(target: FieldDescriptor) -> type[Message]:
    if target.message_type is None:
        raise TypeError(f"{target.full_name} is no message")
    return GetMessageClass(target.message_type)


def _check_scalar(kind: Any, target: FieldDescriptor) -> None:
    plain = str if issubclass(kind, str) else kind
    if target.cpp_type not in _SCALARS.get(plain, ()):
        raise TypeError(f"{target.full_name} cannot hold {kind.__name__}")
