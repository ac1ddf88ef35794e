"""Every message of the contract says exactly what its dataclass says: there and back again is identity.

Values are drawn by the dataclasses' own types. A message without a dataclass is named here.
"""

from __future__ import annotations

import dataclasses
import types
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve import views
from ringserve.client import results
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.mapping import Mapper, Mirror, pack_ids, unpack_ids
from ringserve.orchestration.protocol.inventory import Registered, RingInventory
from ringserve.orchestration.protocol.plans import PromptMode, TurnPlan
from ringserve.orchestration.protocol.turns import (
    Admit,
    BegunTurn,
    EndingEvent,
    FinishedEvent,
    ForkedKv,
    ForkKv,
    KvQuota,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    Reservation,
    Reserve,
    ResumeTurn,
    RetainedKv,
    RetainingRing,
    RingRegistration,
    ScoredEvent,
    SendKv,
    SentKv,
    TakeKv,
    TakenKv,
    TokensEvent,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from ringserve.services.rpc.wire import contract
from ringserve.services.rpc.wire.contract import (
    event_from,
    event_to,
    from_message,
    ids_from,
    ids_to,
    prompt_mode_from,
    shards_from,
    shards_to,
    to_message,
)
from ringserve.v1 import inference_pb2, rings_pb2, router_pb2
from ringserve.views import ConversationInfo, ConversationPage, RingInfo, RingRates, ServerInfo
from ringserve.workers.protocol.steps import FinishReason, TokenIds
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs

M = TypeVar("M", bound=Message)

SIXTY_FOUR_BITS = {"seed", "pulled_bytes", "migrated_bytes", "capacity_tokens"}
SIGNED = {"priority"}
TOKEN_FIELDS = {"token_ids", "penalized_ids", "draft_text", "prediction", "answer"}
WORDS = {
    "algorithm": ["", "pass_kv", "chain"],
    "role": ["", "prefill", "decode"],
    "lost_role": ["", "prefill", "decode"],
    "state": ["ready", "lost", "away"],
}
"""Words of fields that are enums in the contract."""
small = st.integers(0, 2**32 - 1)
signed = st.integers(-(2**31), 2**31 - 1)
large = st.integers(0, 2**64 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=8)
positions = st.integers(0, 2**28)
token_ranges = st.tuples(positions, positions).map(lambda pair: TokenRange(min(pair), max(pair)))
shard_maps = st.lists(st.lists(token_ranges, max_size=3).map(tuple), max_size=4).map(
    lambda ranks: ShardMap.of(tuple(ranks))
)

SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: small,
    float: st.floats(0, 1e30),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    TokenIds: token_ids.map(lambda ids: np.asarray(ids, dtype=np.int64)),
    TokenRange: token_ranges,
    ShardMap: shard_maps,
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Draw any value of a type as the control plane's dataclasses use it."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if kind is type(None):
        return st.none()
    if isinstance(kind, types.UnionType):
        return st.one_of([values_of(part) for part in get_args(kind)])
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is Ellipsis:
            return st.lists(values_of(parts[0]), max_size=3).map(tuple)
        return st.tuples(*(values_of(part) for part in parts))
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    hints = get_type_hints(kind)
    special: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(SIXTY_FOUR_BITS, large) | dict.fromkeys(SIGNED, signed)
    for name in WORDS.keys() & set(hints):
        if hints[name] is str:
            special[name] = st.sampled_from(WORDS[name])
    for name in TOKEN_FIELDS & set(hints):
        special[name] = values_of(TokenIds) if hints[name] == TokenIds else st.builds(tuple, token_ids)
    return st.builds(
        kind, **{name: special[name] if name in special else values_of(hint) for name, hint in hints.items()}
    )


def requests() -> st.SearchStrategy[TurnRequest]:
    """Draw turn requests. Their mode is never NEW, which only the router sets."""
    return values_of(TurnRequest).filter(lambda request: request.prompt_mode is not PromptMode.NEW)


def comparable(value: Any) -> Any:
    """Return a value that compares by ==: an array would compare element by element."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), {name: comparable(getattr(value, name)) for name in names}
    return value.tolist() if isinstance(value, np.ndarray) else value


def sent(message: M) -> M:
    """Return the message that arrives at the other end."""
    return type(message).FromString(message.SerializeToString())


PAIRS: list[tuple[Any, type[Message]]] = [
    (SamplingParameters, rings_pb2.Sampling),
    (TokenLogprobs, inference_pb2.TokenLogprobs),
    (KvQuota, router_pb2.KvQuota),
    (TurnRequest, router_pb2.BeginTurnRequest),
    (BegunTurn, router_pb2.BeginTurnResponse),
    (TurnPlan, inference_pb2.Plan),
    (Reserve, rings_pb2.ReserveRequest),
    (Reservation, rings_pb2.ReserveResponse),
    (PrefillTurn, rings_pb2.PrefillRequest),
    (RetainingRing, rings_pb2.KvSource),
    (PrefillReport, rings_pb2.PrefillReport),
    (PrefillDone, rings_pb2.PrefillResponse),
    (Admit, rings_pb2.AdmitRequest),
    (SendKv, rings_pb2.SendKvRequest),
    (SentKv, rings_pb2.SendKvResponse),
    (TakeKv, rings_pb2.TakeKvRequest),
    (TakenKv, rings_pb2.TakeKvResponse),
    (TokensEvent, rings_pb2.Tokens),
    (ScoredEvent, rings_pb2.PromptScored),
    (EndingEvent, rings_pb2.Ending),
    (FinishedEvent, rings_pb2.Finished),
    (ResumeTurn, router_pb2.ResumeTurnRequest),
    (TurnOutcome, router_pb2.EndTurnRequest),
    (RingRegistration, router_pb2.RegisterRingRequest),
    (RingInventory, router_pb2.RingInventory),
    (Registered, router_pb2.RegisterRingResponse),
    (RingRates, inference_pb2.RingRates),
    (RingInfo, inference_pb2.RingInfo),
    (ConversationInfo, inference_pb2.GetConversationResponse),
    (ConversationPage, inference_pb2.ListConversationsResponse),
    (ForkKv, rings_pb2.ForkKvRequest),
    (ForkedKv, rings_pb2.ForkKvResponse),
    (RetainedKv, rings_pb2.GetRetainedResponse),
    (ServerInfo, inference_pb2.GetServerInfoResponse),
]

CLIENT_PAIRS: list[tuple[type, type[Message]]] = [
    (results.Plan, inference_pb2.Plan),
    (results.Usage, inference_pb2.Usage),
    (results.TokenLogprobs, inference_pb2.TokenLogprobs),
    (views.ModelInfo, inference_pb2.GetModelInfoResponse),
    (views.ServerInfo, inference_pb2.GetServerInfoResponse),
    (views.ConversationInfo, inference_pb2.GetConversationResponse),
    (views.ConversationSummary, inference_pb2.ConversationSummary),
    (views.Aborted, inference_pb2.AbortResponse),
]

HAND_WRITTEN = {"BeginForkRequest", "Alternative", "RankShard", "Range", "TurnEvent"} | {
    *("TurnReading", "ReadTurn", "Left", "TurnsEvents", "ReadingEvent", "ReadingFailure"),
}
"""Messages that a hand-written pair of functions converts, or a call reads field by field."""

PUBLIC = {
    "GenerateRequest",
    "CountTokensRequest",
    "TokenizedInput",
    "ChatInput",
    "ChatMessage",
    "SamplingParams",
    "Choices",
    "Resume",
    "GenerateResponse",
    "GenerateStart",
    "GenerateStreamChunk",
    "GenerateComplete",
}
"""Messages that gateway and client write and read field by field."""


@pytest.mark.parametrize(("kind", "message"), PAIRS, ids=[kind.__name__ for kind, _ in PAIRS])
def test_there_and_back_again_is_identity(kind: Any, message: type[Message]) -> None:
    values = requests() if kind is TurnRequest else values_of(kind)

    @settings(max_examples=50, deadline=None)
    @given(values)
    def returns_as_it_was(value: Any) -> None:
        assert comparable(from_message(kind, sent(to_message(message, value)))) == comparable(value)

    returns_as_it_was()


@given(values_of(TurnEvent))
def test_events_arrive_as_they_were(event: TurnEvent) -> None:
    assert event_from(sent(event_to(event))) == event


def test_every_message_of_the_contract_has_its_dataclass() -> None:
    """Require that a message is mapped, or has a call's few scalar parameters, or is named above."""
    for kind, message in PAIRS:
        contract.MAPPER._writer(message, kind)
        contract.MAPPER._reader(kind, message)
    for client_kind, message in CLIENT_PAIRS:
        results.MAPPER.from_message(client_kind, message())
    mapped = {message.__name__ for _, message in (*contract.MAPPER._readers, *results.MAPPER._readers)}
    for module in (inference_pb2, rings_pb2, router_pb2):
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            is_parameters = name.endswith(("Request", "Response")) and all(
                field.message_type is None for field in descriptor.fields
            )
            assert name in mapped | HAND_WRITTEN | PUBLIC or is_parameters, f"{name} has no dataclass"
            assert name not in mapped & PUBLIC, f"{name} is mapped"


@dataclasses.dataclass(frozen=True)
class Pages:
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Start:
    start: int


@dataclasses.dataclass(frozen=True)
class Words:
    start: str
    stop: int


def test_a_field_on_one_side_only_is_refused() -> None:
    mapper = Mapper()
    assert mapper.to_message(inference_pb2.Range, Pages(1, 2)) == inference_pb2.Range(start=1, stop=2)
    with pytest.raises(TypeError, match=r"ringserve\.v1\.Range has fields that Start lacks: \['stop'\]"):
        mapper.to_message(inference_pb2.Range, Start(1))
    with pytest.raises(TypeError, match=r"Pages\.start has no mirror in ringserve\.v1\.EndTurnResponse"):
        mapper.from_message(Pages, router_pb2.EndTurnResponse())
    with pytest.raises(TypeError, match=r"ringserve\.v1\.Range\.start cannot hold str"):
        mapper.from_message(Words, inference_pb2.Range())


def test_a_field_that_other_code_fills_is_named() -> None:
    mapper = Mapper({Start: Mirror(elsewhere=("stop",))})
    assert mapper.from_message(Start, inference_pb2.Range(start=3, stop=4)) == Start(3)


@given(shard_maps)
def test_shards_arrive_with_what_each_rank_holds(shards: ShardMap) -> None:
    messages = [sent(message) for message in shards_to(shards)]
    assert shards_from(messages) == shards
    assert tuple(message.num_tokens for message in messages) == shards.held


@given(token_ids)
def test_token_ids_arrive_as_64_bit_numbers(ids: list[int]) -> None:
    data = ids_to(np.asarray(ids, dtype=np.int64))
    array = ids_from(data)
    assert array.dtype == np.int64
    assert array.tolist() == ids
    assert data == pack_ids(ids)
    assert unpack_ids(data) == tuple(ids)


def test_bytes_that_are_no_token_ids_are_refused() -> None:
    for read in (ids_from, unpack_ids):
        with pytest.raises(InvalidRequest, match="token_ids: 7 bytes are no whole number of ids of 4 bytes"):
            read(bytes(7))


def test_a_prompt_mode_the_contract_does_not_define_is_nothing() -> None:
    assert prompt_mode_from(4) is None
    assert prompt_mode_from(inference_pb2.PROMPT_MODE_APPEND) is PromptMode.APPEND


@given(values_of(TurnPlan), st.sampled_from(FinishReason))
def test_what_the_client_reads_are_plain_words(plan: TurnPlan, reason: FinishReason) -> None:
    message = to_message(inference_pb2.Plan, plan)
    read = results.MAPPER.from_message(results.Plan, message)
    assert read.algorithm in (*PREFILL_ALGORITHMS, "decode_ring")
    assert read.prompt_mode in ("", "new", "append", "whole_history")
    for shown, planned in zip(read.ring_alternatives, plan.ring_alternatives, strict=True):
        assert dataclasses.asdict(shown) == dataclasses.asdict(planned) | {"total_seconds": planned.total_seconds}
    ending = FinishedEvent(finish_reason=reason, migrated_bytes=0, migration_seconds=0.0, handoff_seconds=0.0)
    assert event_to(ending).finished.finish_reason in ("stop", "length", "abort")
