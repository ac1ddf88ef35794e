"""Every message says exactly what its dataclass says: there and back again is identity.

Values are drawn by the dataclasses' own types, so a field that a message forgets is found.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_core.cost.model import RingRates
from cp_core.layout.shards import ShardMap, TokenRange
from orchestration.protocol.kv import ForkedKv, ForkKv, RetainedKv, SendKv, SentKv, TakeKv, TakenKv
from orchestration.protocol.turns import (
    Admit,
    FinishedEvent,
    KvQuota,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    PromptMode,
    Reservation,
    Reserve,
    ResumeTurn,
    RetainingRing,
    RingRegistration,
    TurnEvent,
    TurnOutcome,
    TurnPlan,
    TurnRequest,
)
from orchestration.protocol.views import ConversationList, ConversationView, RingStatus, ServerView
from ringserve.v1 import inference_pb2
from services.rpc.wire import conversations, kv, plans, sampling, turns
from services.rpc.wire import rings as rings
from services.rpc.wire.layouts import shards_from, shards_to, token_array
from workers.protocol.decode_commands import FinishReason
from workers.protocol.prefill_steps import TokenIds
from workers.sampling.parameters import SamplingParameters, TokenLogprobs

M = TypeVar("M", bound=Message)

SIXTY_FOUR_BITS = {"seed", "pulled_bytes", "migrated_bytes", "capacity_tokens"}
SIGNED = {"priority"}
small = st.integers(0, 2**32 - 1)
signed = st.integers(-(2**31), 2**31 - 1)
large = st.integers(0, 2**64 - 1)
token_ids = st.lists(small, max_size=8)
positions = st.integers(0, 2**28)
token_ranges = st.tuples(positions, positions).map(lambda pair: TokenRange(min(pair), max(pair)))
shard_maps = st.lists(st.lists(token_ranges, max_size=3).map(tuple), max_size=4).map(
    lambda ranks: ShardMap(tuple(ranks))
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
    """Any value of a type as the control plane's dataclasses use it."""
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
    special = dict.fromkeys(SIXTY_FOUR_BITS, large) | dict.fromkeys(SIGNED, signed)
    return st.builds(
        kind, **{name: special[name] if name in special else values_of(hint) for name, hint in hints.items()}
    )


def requests() -> st.SearchStrategy[TurnRequest]:
    """Turn requests; NEW is what the router finds, not what a request says."""
    return values_of(TurnRequest).filter(lambda request: request.prompt_mode is not PromptMode.NEW)


def comparable(value: Any) -> Any:
    """Dataclasses compare by their fields, but an array does not compare to a truth."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), {name: comparable(getattr(value, name)) for name in names}
    return value.tolist() if isinstance(value, np.ndarray) else value


def sent(message: M) -> M:
    """What arrives at the other end."""
    return type(message).FromString(message.SerializeToString())


PAIRS: list[tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = [
    (values_of(SamplingParameters), sampling.sampling_to, sampling.sampling_from),
    (values_of(TokenLogprobs), sampling.logprobs_to, sampling.logprobs_from),
    (values_of(KvQuota), turns.quota_to, turns.quota_from),
    (requests(), turns.turn_request_to, turns.turn_request_from),
    (values_of(TurnPlan), plans.plan_to, plans.plan_from),
    (values_of(Reserve), turns.reserve_to, turns.reserve_from),
    (values_of(Reservation), turns.reservation_to, turns.reservation_from),
    (values_of(PrefillTurn), turns.prefill_turn_to, turns.prefill_turn_from),
    (values_of(RetainingRing), turns.retaining_ring_to, turns.retaining_ring_from),
    (values_of(PrefillReport), turns.report_to, turns.report_from),
    (values_of(PrefillDone), turns.prefill_done_to, turns.prefill_done_from),
    (values_of(Admit), turns.admit_to, turns.admit_from),
    (values_of(SendKv), kv.send_kv_to, kv.send_kv_from),
    (values_of(SentKv), kv.sent_to, kv.sent_from),
    (values_of(TakeKv), kv.take_kv_to, kv.take_kv_from),
    (values_of(TakenKv), kv.taken_to, kv.taken_from),
    (values_of(TurnEvent), turns.event_to, turns.event_from),
    (values_of(ResumeTurn), turns.resume_to, turns.resume_from),
    (values_of(TurnOutcome), turns.outcome_to, turns.outcome_from),
    (values_of(RingRegistration), rings.registration_to, rings.registration_from),
    (values_of(RingRates), rings.rates_to, rings.rates_from),
    (values_of(RingStatus), rings.status_to, rings.status_from),
    (values_of(ConversationView), conversations.conversation_to, conversations.conversation_from),
    (values_of(ConversationList), conversations.list_to, conversations.list_from),
    (values_of(ForkKv), conversations.fork_to, conversations.fork_from),
    (values_of(ForkedKv), conversations.forked_to, conversations.forked_from),
    (values_of(RetainedKv), conversations.retained_to, conversations.retained_from),
    (values_of(ServerView), rings.server_to, rings.server_from),
]


@pytest.mark.parametrize(("values", "to", "back"), PAIRS, ids=[to.__name__ for _, to, _ in PAIRS])
def test_there_and_back_again_is_identity(
    values: st.SearchStrategy[Any], to: Callable[[Any], Any], back: Callable[[Any], Any]
) -> None:
    @settings(max_examples=50, deadline=None)
    @given(values)
    def returns_as_it_was(value: Any) -> None:
        assert comparable(back(sent(to(value)))) == comparable(value)

    returns_as_it_was()


def test_every_pair_is_tested() -> None:
    modules = (turns, plans, rings, kv, sampling, conversations)
    written = {name for module in modules for name in vars(module) if name.endswith("_to")}
    assert written - {"shards_to", "chunks_to", "all_logprobs_to"} == {to.__name__ for _, to, _ in PAIRS}


@given(shard_maps)
def test_shards_arrive_with_what_each_rank_holds(shards: ShardMap) -> None:
    messages = [sent(message) for message in shards_to(shards)]
    assert shards_from(messages) == shards
    assert tuple(message.num_tokens for message in messages) == shards.held


@given(token_ids)
def test_token_ids_arrive_as_64_bit_numbers(ids: list[int]) -> None:
    array = token_array(ids)
    assert array.dtype == np.int64
    assert array.tolist() == ids


def test_a_prompt_mode_the_contract_does_not_define_is_nothing() -> None:
    assert turns.prompt_mode_from(3) is None
    assert turns.prompt_mode_from(inference_pb2.PROMPT_MODE_APPEND) is PromptMode.APPEND


@given(values_of(TurnPlan), st.sampled_from(FinishReason))
def test_what_the_client_reads_are_plain_words(plan: TurnPlan, reason: FinishReason) -> None:
    message = plans.plan_to(plan)
    assert message.algorithm in ("pass_kv", "pass_q", "decode_ring")
    assert message.prompt_mode in ("auto", "new", "append", "whole_history")
    ending = FinishedEvent(finish_reason=reason, migrated_bytes=0, migration_seconds=0.0, handoff_seconds=0.0)
    assert turns.event_to(ending).finished.finish_reason in ("stop", "length", "abort")
