"""Wire format of KV frames: every frame decodes as it was encoded, and nothing else decodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.errors import TransferError
from ringserve.workers.kv.frames import (
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    VERSION,
    AbandonFrame,
    CardFrame,
    Frame,
    LayerFrame,
    Reach,
    ReachedFrame,
    ReadFrame,
    RefusedFrame,
    SettledFrame,
    SettleFrame,
    SlotRef,
    decode_header,
    decode_prefix,
    encode,
)
from tests.workers.kv.kv_peers import key_of

CARD = CardFrame(
    destination="decode-0/1",
    agent="prefill-0/1:0:9f",
    metadata=b"\x00\xff" * 200,
    device="cuda",
    device_index=3,
    slots_address=(1 << 64) - 1,
    words_address=1 << 47,
    slot_bytes=1 << 24,
    num_slots=8,
)


def layer(starts: list[int], counts: list[int]) -> LayerFrame:
    pieces = np.array(starts), np.array(counts)
    return LayerFrame(key_of(), 3, "bfloat16", 2, 4, *pieces, checksum=(1 << 32) - 1, num_layers=5)


def header_of(**changes: Any) -> bytes:
    """Make a layer frame's header with some fields replaced."""
    frame = encode(layer([4, 9], [5, 1]))[PREFIX.size :]
    packed: bytes = msgpack.packb(msgpack.unpackb(frame) | changes)
    return packed


@pytest.mark.parametrize(
    "frame",
    [
        SettleFrame(key_of()),
        AbandonFrame(key_of(), "the turn was cancelled"),
        SettledFrame(key_of(), 1 << 33),
        RefusedFrame(key_of(attempt=2), True, "another life"),
        CARD,
        ReachedFrame(Reach.UNREACHED, "no way"),
        ReadFrame(7),
    ],
)
def test_a_frame_without_payload_is_decoded_as_it_was(frame: Frame) -> None:
    encoded = encode(frame)
    assert decode_prefix(encoded[: PREFIX.size]) == (len(encoded) - PREFIX.size, 0)
    assert decode_header(encoded[PREFIX.size :], 0) == frame


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), min_size=1, max_size=50), st.integers(0, 1 << 20))
def test_a_layer_frame_is_decoded_as_it_was(gaps: list[tuple[int, int]], payload_bytes: int) -> None:
    starts, counts, position = [], [], 0
    for gap, count in gaps:
        starts.append(position + gap)
        counts.append(count)
        position += gap + count
    encoded = encode(layer(starts, counts), payload_bytes)
    assert decode_prefix(encoded[: PREFIX.size]) == (len(encoded) - PREFIX.size, payload_bytes)
    decoded = decode_header(encoded[PREFIX.size :], payload_bytes)
    assert isinstance(decoded, LayerFrame)
    assert (decoded.key, decoded.layers, decoded.dtype) == (key_of(), range(3, 8), "bfloat16")
    assert (decoded.head_start, decoded.head_stop) == (2, 4)
    assert decoded.checksum == (1 << 32) - 1
    assert (decoded.starts.tolist(), decoded.counts.tolist()) == (starts, counts)


@pytest.mark.parametrize(
    ("prefix", "fault"),
    [
        (PREFIX.pack(b"GET ", VERSION, 10, 0), "not a KV frame"),
        (PREFIX.pack(MAGIC, VERSION + 1, 10, 0), "version 4"),
        (PREFIX.pack(MAGIC, VERSION, 0, 0), "header of 0 bytes"),
        (PREFIX.pack(MAGIC, VERSION, MAX_HEADER_BYTES + 1, 0), "header of"),
        (PREFIX.pack(MAGIC, VERSION, 10, MAX_PAYLOAD_BYTES + 1), "payload of"),
        (PREFIX.pack(MAGIC, VERSION, 10, (1 << 64) - 1), "payload of"),
    ],
)
def test_a_prefix_out_of_bounds_is_refused(prefix: bytes, fault: str) -> None:
    with pytest.raises(TransferError, match=fault):
        decode_prefix(prefix)


def pairs(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kind": "execute"}, "of kind 'execute' with a payload"),
        ({"kind": None}, "'kind' is not a text"),
        ({"kind": "settle"}, "with a payload"),
        ({"key": ["a", 1, "b"]}, "'key' is not a list of 4"),
        ({"key": ["a", -1, "b", "c"]}, "'key' is not an integer"),
        ({"key": ["a", True, "b", "c"]}, "'key' is not an integer"),
        ({"key": ["a" * 1025, 1, "b", "c"]}, "'key' is not a text"),
        ({"layers": 3}, "'layers' is not a list of 2"),
        ({"layers": [-1, 1]}, "'layers' is not an integer"),
        ({"layers": ["0", 1]}, "'layers' is not an integer"),
        ({"layers": [0, 1 << 41]}, "'layers' is not an integer"),
        ({"layers": [3, 0]}, "of no layers"),
        ({"dtype": 7}, "'dtype' is not a text"),
        ({"checksum": "0"}, "'checksum' is not an integer"),
        ({"checksum": -1}, "'checksum' is not an integer"),
        ({"slot": [1, 2]}, "'slot' is not a list of 3"),
        ({"slot": [1, -2, 64]}, "'slot' is not an integer"),
        ({"slot": [1, 2, 0]}, "of 0 bytes in a slot"),
        ({"slot": [1, 2, MAX_PAYLOAD_BYTES + 1]}, "bytes in a slot"),
        ({"slot": [1, 2, 64]}, "with a slot and a payload of 64 bytes"),
        ({"heads": [3, 3]}, "heads"),
        ({"heads": [1]}, "'heads' is not a list of 2"),
        ({"pieces": b""}, "pairs"),
        ({"pieces": b"x" * 17}, "pairs"),
        ({"pieces": [[0, 1]]}, "pairs"),
        ({"pieces": pairs(-1, 5)}, "out of bounds"),
        ({"pieces": pairs(0, 0)}, "out of bounds"),
        ({"pieces": pairs(0, -4)}, "out of bounds"),
        ({"pieces": pairs(0, 1 << 62)}, "out of bounds"),
        ({"pieces": pairs(0, 5, 4, 5)}, "not ascending"),
        ({"pieces": pairs(9, 2, 0, 2)}, "not ascending"),
        ({"pieces": pairs(*([0, 1] * 32769))}, "pairs"),
    ],
)
def test_a_field_of_the_wrong_kind_or_size_is_refused_by_name(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(TransferError, match=fault):
        decode_header(header_of(**changes), 64)


def test_a_layer_frame_names_the_slot_of_its_payload() -> None:
    frame = dataclasses.replace(layer([4], [5]), slot=SlotRef(7, 40, 1280))
    encoded = encode(frame)
    assert decode_prefix(encoded[: PREFIX.size])[1] == 0
    decoded = decode_header(encoded[PREFIX.size :], 0)
    assert isinstance(decoded, LayerFrame)
    assert decoded.slot == SlotRef(7, 40, 1280)


@pytest.mark.parametrize(
    ("frame", "changes", "fault"),
    [
        (CARD, {"metadata": "text"}, "'metadata' are no"),
        (CARD, {"metadata": b""}, "'metadata' are no"),
        (CARD, {"metadata": bytes(1 << 17)}, "'metadata' are no"),
        (CARD, {"agent": 5}, "'agent' is not a text"),
        (CARD, {"slots_address": -1}, "'slots_address' is not an integer"),
        (CARD, {"num_slots": True}, "'num_slots' is not an integer"),
        (ReachedFrame(Reach.OFF, ""), {"reach": "maybe"}, "'reach' is none of reached, stale"),
        (ReadFrame(1), {"slot": None}, "'slot' is not an integer"),
    ],
)
def test_a_field_of_a_card_or_of_its_answers_is_checked(frame: Frame, changes: dict[str, Any], fault: str) -> None:
    header = msgpack.packb(msgpack.unpackb(encode(frame)[PREFIX.size :]) | changes)
    with pytest.raises(TransferError, match=fault):
        decode_header(header, 0)


def test_a_frame_of_unknown_kind_is_refused() -> None:
    with pytest.raises(TransferError, match="unknown kind 'execute'"):
        decode_header(header_of(kind="execute"), 0)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(garbage: bytes) -> None:
    with pytest.raises(TransferError):
        decode_header(garbage, 0)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(["kind", "key", "layer", "dtype", "heads", "pieces", "checksum", "slot"]), anything)
def test_any_value_in_any_field_is_decoded_or_refused(name: str, value: object) -> None:
    try:
        frame = decode_header(header_of(**{name: value}), 64)
    except TransferError:
        return
    assert isinstance(frame, LayerFrame)


def test_a_header_that_claims_a_huge_list_is_refused_without_making_room_for_it() -> None:
    # A msgpack array32 of 2**32 - 1 elements, without the elements.
    with pytest.raises(TransferError, match="broken header"):
        decode_header(b"\x81\xa3key\xdd\xff\xff\xff\xff", 0)
