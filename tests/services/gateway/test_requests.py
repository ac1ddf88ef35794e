"""Requests that a client may send, and the error message for every other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.plans import Bound, PromptMode
from ringserve.orchestration.protocol.turns import KvQuota
from ringserve.services.auth.authenticator import ScopedRouter
from ringserve.services.auth.tenants import ANYBODY, Tenant
from ringserve.services.gateway.requests import RequestReader
from ringserve.services.gateway.text import TextCodec
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias
from tests.orchestration.fake_ranks import MODEL

Request = inference_pb2.GenerateRequest
MODEL_WITH_ENDS = dataclasses.replace(MODEL, vocab_size=261, max_positions=1000, eos_token_ids=(257, 260))
MAX_SECONDS = 600.0
NOBODYS = ScopedRouter(None, ANYBODY)  # type: ignore[arg-type]
"""Scope without a tenant: ids stay as they are."""
APPEND = inference_pb2.PROMPT_MODE_APPEND
WHOLE = inference_pb2.PROMPT_MODE_WHOLE_HISTORY


@pytest.fixture(scope="module")
def reader(byte_codec: TextCodec) -> RequestReader:
    return RequestReader(MODEL_WITH_ENDS, byte_codec, MAX_SECONDS, ("tiny",))


def text_request(text: str = "hi", **fields: object) -> inference_pb2.GenerateRequest:
    return Request(text=text, **fields)  # type: ignore[arg-type]


def sampled(**params: object) -> inference_pb2.GenerateRequest:
    return text_request(sampling_params=inference_pb2.SamplingParams(**params))  # type: ignore[arg-type]


def chat(*messages: tuple[str, str], mode: int = 0) -> inference_pb2.GenerateRequest:
    return Request(
        chat=inference_pb2.ChatInput(
            messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
        ),
        prompt_mode=mode,  # type: ignore[arg-type]
    )


def tokenized(*ids: int) -> inference_pb2.GenerateRequest:
    return Request(tokenized=inference_pb2.TokenizedInput(input_ids=ids))


# --- what is read ----------------------------------------------------------------------------------------------------


def test_ids_and_quota_of_a_turn_are_its_tenants(reader: RequestReader) -> None:
    acme = ScopedRouter(None, Tenant(name="acme", max_kv_tokens=7))  # type: ignore[arg-type]
    turn = reader.read(text_request(request_id="r", conversation_id="c"), None, acme)
    assert (turn.request_id, turn.conversation_id) == ("acme/r", "acme/c")
    assert turn.kv_quota == KvQuota(tenant="acme", max_tokens=7)
    unnamed = reader.read(text_request(), None, acme)
    assert unnamed.request_id.startswith("acme/req-")
    assert unnamed.conversation_id == ""


def test_drafts_have_a_limit_and_a_text_of_their_own(reader: RequestReader) -> None:
    router = ScopedRouter(None, Tenant(name="acme"))  # type: ignore[arg-type]
    request = text_request(prediction="abc")
    request.sampling_params.max_draft_tokens = 0
    turn = reader.read(request, None, router)
    assert (turn.prediction.tolist(), turn.sampling.max_drafts) == ([97, 98, 99], 0)
    unset = reader.read(text_request(), None, router)
    assert (unset.prediction.tolist(), unset.sampling.max_drafts) == ([], None)
    with pytest.raises(InvalidRequest, match=r"prediction: \d+ characters are too many"):
        reader.read(text_request(prediction="x" * 10_000_000), None, router)


def test_bad_words_are_banned_at_the_beginning_and_after_a_space(reader: RequestReader) -> None:
    turn = reader.read(sampled(bad_words=["ab", " c"], allowed_token_ids=[7, 3, 7]), None, NOBODYS)
    assert tuple(each.token_ids for each in turn.sampling.banned) == ((32, 97, 98), (32, 99), (97, 98), (99,))
    assert turn.sampling.allowed_ids == (3, 7)


@pytest.mark.parametrize(
    ("kept", "params", "wanted"),
    [
        (3, {}, b"789"),
        (50, {}, b"0123456789" * 5),
        (-1, {}, b"0123456789" * 99 + b"012345678"),
        (-1, {"max_tokens": 998}, b"89"),
    ],
)
def test_a_truncated_prompt_keeps_its_end(
    reader: RequestReader, kept: int, params: dict[str, Any], wanted: bytes
) -> None:
    text = "0123456789" * 200
    for given in (text_request(text), tokenized(*text.encode())):
        given.truncate_prompt_tokens = kept
        given.sampling_params.CopyFrom(inference_pb2.SamplingParams(**params))
        tokens = bytes(reader.read(given, None, NOBODYS).token_ids.tolist())
        assert (len(tokens), tokens[-2:]) == (len(wanted), b"89")


def test_a_conversation_is_not_truncated(reader: RequestReader) -> None:
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens: 3 is not allowed with a conversation_id"):
        reader.read(text_request(conversation_id="c", truncate_prompt_tokens=3), None, NOBODYS)
    for kept in (1000, 0, -2):
        with pytest.raises(
            InvalidRequest, match=rf"truncate_prompt_tokens: {kept} is out of range; allowed are 1 to 999"
        ):
            reader.read(text_request(truncate_prompt_tokens=kept), None, NOBODYS)


def test_a_cache_key_is_a_tenants_own_and_its_name_goes_no_further(reader: RequestReader) -> None:
    def key(tenant: str, given: str) -> str:
        router = ScopedRouter(None, Tenant(name=tenant))  # type: ignore[arg-type]
        return reader.read(text_request(cache_key=given), None, router).cache_key

    assert key("acme", "") == ""
    assert key("acme", "Ada Lovelace") == key("acme", "Ada Lovelace")
    others = key("acme", "Bob"), key("", "Ada Lovelace"), key("zeta", "Ada Lovelace")
    assert len({key("acme", "Ada Lovelace"), *others}) == 4
    assert "Ada" not in key("acme", "Ada Lovelace")


def test_a_bare_prompt_gets_every_default(reader: RequestReader) -> None:
    turn = reader.read(text_request("hé"), None, NOBODYS)
    assert turn.token_ids.tolist() == list("hé".encode())
    assert turn.conversation_id == ""
    assert turn.prompt_mode is PromptMode.AUTO
    assert turn.deadline_seconds == MAX_SECONDS
    assert (turn.sampling.temperature, turn.sampling.max_tokens, turn.is_open_ended) == (0.0, 1000, True)
    assert turn.sampling.stop_token_ids == (257, 260)
    assert turn.request_id.startswith("req-")
    assert turn.request_id != reader.read(text_request(), None, NOBODYS).request_id


def test_an_algorithm_is_taken_by_its_name_and_chosen_where_there_is_none(reader: RequestReader) -> None:
    assert reader.read(text_request(), None, NOBODYS).algorithm is None
    pass_q = text_request(algorithm=inference_pb2.ALGORITHM_PASS_Q)
    assert reader.read(pass_q, None, NOBODYS).algorithm is Algorithm.PASS_Q
    with pytest.raises(InvalidRequest, match=r"algorithm: 99 is unknown; allowed are pass_kv, .*; without it"):
        reader.read(text_request(algorithm=99), None, NOBODYS)


def test_what_the_client_names_is_kept(reader: RequestReader) -> None:
    turn = reader.read(text_request(request_id="r1", conversation_id="Ünï 1", prompt_mode=WHOLE), None, NOBODYS)
    assert (turn.request_id, turn.conversation_id, turn.prompt_mode) == ("r1", "Ünï 1", PromptMode.WHOLE_HISTORY)


def test_token_ids_are_taken_as_they_are(reader: RequestReader) -> None:
    assert reader.read(tokenized(0, 260, 5), None, NOBODYS).token_ids.tolist() == [0, 260, 5]


def test_a_chat_is_the_whole_history_by_the_models_template(reader: RequestReader, byte_codec: TextCodec) -> None:
    for mode in (0, WHOLE):
        turn = reader.read(chat(("system", "be"), ("user", "hi"), mode=mode), None, NOBODYS)
        assert turn.prompt_mode is PromptMode.WHOLE_HISTORY
        assert turn.token_ids.tolist() == byte_codec.encode_chat([("system", "be"), ("user", "hi")]).tolist()


@pytest.mark.parametrize(
    ("left", "deadline"), [(None, MAX_SECONDS), (5.0, 5.0), (1e9, MAX_SECONDS), (0.0, 0.001), (-3.0, 0.001)]
)
def test_the_shorter_of_the_clients_deadline_and_ours_holds(
    reader: RequestReader, left: float | None, deadline: float
) -> None:
    assert reader.read(text_request(), left, NOBODYS).deadline_seconds == deadline


def test_stop_tokens_are_the_callers_and_the_models(reader: RequestReader) -> None:
    assert reader.read(sampled(stop_token_ids=[9, 3, 9]), None, NOBODYS).sampling.stop_token_ids == (3, 9, 257, 260)


def test_ignoring_the_end_of_sequence_leaves_the_callers_own_stop_tokens(reader: RequestReader) -> None:
    assert reader.read(sampled(ignore_eos=True), None, NOBODYS).sampling.stop_token_ids == ()
    turn = reader.read(sampled(ignore_eos=True, stop_token_ids=[257]), None, NOBODYS)
    assert turn.sampling.stop_token_ids == (257,)


def test_waiting_and_a_time_to_live_are_for_who_asks(reader: RequestReader) -> None:
    turn = reader.read(text_request(conversation_id="c"), None, NOBODYS)
    assert (turn.wait, turn.conversation_ttl_seconds) == (False, None)
    for seconds in (0.0, 2.5, 1e9):
        turn = reader.read(
            text_request(conversation_id="c", conversation_ttl_seconds=seconds, wait=True), None, NOBODYS
        )
        assert (turn.wait, turn.conversation_ttl_seconds) == (True, seconds)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_given_seed_is_kept(reader: RequestReader, seed: int) -> None:
    assert reader.read(sampled(seed=seed), None, NOBODYS).sampling.seed == seed


def test_a_seed_that_was_not_given_is_drawn(reader: RequestReader) -> None:
    drawn = {reader.read(text_request(), None, NOBODYS).sampling.seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 100.0])
@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_the_limits_themselves_are_allowed(reader: RequestReader, temperature: float, max_tokens: int) -> None:
    sampling = reader.read(sampled(temperature=temperature, max_tokens=max_tokens), None, NOBODYS).sampling
    assert (sampling.temperature, sampling.max_tokens) == (temperature, max_tokens)


def test_what_is_not_given_changes_nothing(reader: RequestReader) -> None:
    sampling = reader.read(sampled(seed=3), None, NOBODYS).sampling
    ends = sampling.stop_token_ids
    assert sampling == SamplingParameters(seed=3, stop_token_ids=ends, max_tokens=1000)
    assert not any([sampling.changes_logits, sampling.filters, sampling.ends_by_text])


def test_every_field_arrives(reader: RequestReader) -> None:
    params: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "max_tokens": 9,
        "seed": 4,
    }
    request = sampled(**params, logit_bias={5: -1.5, 2: 3}, stop=["x"], ignore_eos=True, logprobs=0, prompt_logprobs=2)
    assert reader.read(request, None, NOBODYS).sampling == SamplingParameters(
        **params,
        logit_bias=(TokenBias(2, 3.0), TokenBias(5, -1.5)),
        ends_by_text=True,
        logprobs=0,
        prompt_logprobs=2,
    )


def test_no_token_would_be_left_to_draw(byte_codec: TextCodec) -> None:
    tiny = RequestReader(
        dataclasses.replace(MODEL, vocab_size=2, eos_token_ids=(1,)), byte_codec, MAX_SECONDS, ("tiny",)
    )
    request = tokenized(0)
    request.sampling_params.CopyFrom(inference_pb2.SamplingParams(min_tokens=1, stop_token_ids=[0]))
    with pytest.raises(InvalidRequest, match="min_tokens: 1 is not allowed if every token is a stop token"):
        tiny.read(request, None, NOBODYS)


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_a_priority_is_kept(reader: RequestReader, priority: int) -> None:
    assert reader.read(text_request(priority=priority), None, NOBODYS).priority == priority


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_made", "says"),
    [
        (lambda: Request(), "input: none given; send text, tokenized or chat"),
        (lambda: text_request(""), "input.text: the prompt has 0 tokens, at least 1 is needed"),
        (lambda: tokenized(), "input.tokenized: the prompt has 0 tokens, at least 1 is needed"),
        (lambda: chat(), "input.chat.messages: none given; at least 1 is needed"),
        (
            lambda: tokenized(1, 261, 4000000000),
            "input.tokenized[1]: token 261 is outside the vocabulary; allowed are 0 to 260",
        ),
        (
            lambda: chat(("user", "x"), ("bot", "y")),
            "input.chat.messages[1].role: 'bot' is not allowed; use one of system, user, assistant, tool",
        ),
        (
            lambda: chat(("user", "x"), mode=APPEND),
            "prompt_mode: chat messages are the whole history; APPEND needs text or token ids",
        ),
        (lambda: chat(*[("user", "x")] * 4097), "input.chat.messages: 4097 are too many; at most 4096 are allowed"),
        (lambda: text_request(prompt_mode=7), "prompt_mode: 7 is not one of 0, 1, 2"),
        (lambda: text_request(prompt_mode=3), "prompt_mode: 3 is not one of 0, 1, 2"),
        (lambda: sampled(n=0), "sampling_params.n: 0 is out of range; allowed are 1 to 16"),
        (lambda: text_request(priority=101), "priority: 101 is out of range; allowed are -100 to 100"),
        (lambda: text_request(priority=-101), "priority: -101 is out of range; allowed are -100 to 100"),
        (
            lambda: sampled(temperature=-0.1),
            "sampling_params.temperature: -0.1 is out of range; allowed are 0 to 100",
        ),
        (lambda: sampled(temperature=100.1), "sampling_params.temperature: 100.1 is out of range"),
        (lambda: sampled(temperature=float("nan")), "sampling_params.temperature: nan is out of range"),
        (lambda: sampled(temperature=float("inf")), "sampling_params.temperature: inf is out of range"),
        (lambda: sampled(max_tokens=0), "sampling_params.max_tokens: 0 is out of range; allowed are 1 to 1000"),
        (lambda: sampled(max_tokens=1001), "sampling_params.max_tokens: 1001 is out of range"),
        (
            lambda: sampled(stop_token_ids=[1, 261]),
            "sampling_params.stop_token_ids[1]: token 261 is outside the vocabulary; allowed are 0 to 260",
        ),
        (
            lambda: sampled(stop_token_ids=[1] * 257),
            "sampling_params.stop_token_ids: 257 are given, at most 256 are allowed",
        ),
        *(
            (
                lambda seconds=seconds: text_request(conversation_id="c", conversation_ttl_seconds=seconds),
                f"conversation_ttl_seconds: {seconds} is out of range; allowed are 0 (never) to 1e+09",
            )
            for seconds in (-1.0, 1.1e9, float("nan"), float("inf"))
        ),
        (
            lambda: text_request(conversation_ttl_seconds=5.0),
            "conversation_ttl_seconds: 5 is given without a conversation_id",
        ),
        (
            lambda: sampled(top_p=0.0),
            "sampling_params.top_p: 0.0 is out of range; allowed are numbers above 0, up to 1",
        ),
        (lambda: sampled(top_p=float("nan")), "sampling_params.top_p: nan is out of range"),
        (lambda: sampled(min_p=1.5), "sampling_params.min_p: 1.5 is out of range; allowed are 0 to 1"),
        (
            lambda: sampled(presence_penalty=-2.5),
            "sampling_params.presence_penalty: -2.5 is out of range; allowed are -2 to 2",
        ),
        (lambda: sampled(frequency_penalty=3), "sampling_params.frequency_penalty: 3.0 is out of range"),
        (
            lambda: sampled(repetition_penalty=0.0),
            "sampling_params.repetition_penalty: 0.0 is out of range; allowed are 0.01 to 100",
        ),
        (
            lambda: sampled(logit_bias={3: 200.0}),
            "sampling_params.logit_bias[3]: 200.0 is out of range; allowed are -100 to 100",
        ),
        (
            lambda: sampled(logit_bias={261: 1.0}),
            "sampling_params.logit_bias: token 261 is outside the vocabulary; allowed are 0 to 260",
        ),
        (
            lambda: sampled(min_tokens=9, max_tokens=8),
            "sampling_params.min_tokens: 9 is out of range; allowed are 0 to 8",
        ),
        (
            lambda: sampled(stop=["a", ""]),
            "sampling_params.stop[1]: 0 characters are out of range; allowed are 1 to 256",
        ),
        (lambda: sampled(stop=["a"] * 17), "sampling_params.stop: 17 strings are out of range; allowed are 0 to 16"),
        (lambda: sampled(stop=["\ufffd"]), "sampling_params.stop[0]: '\ufffd' holds the replacement character U+FFFD"),
        (lambda: sampled(logprobs=21), "sampling_params.logprobs: 21 is out of range; allowed are 0 to 20"),
        (
            lambda: sampled(prompt_logprobs=21),
            "sampling_params.prompt_logprobs: 21 is out of range; allowed are 0 to 20",
        ),
        (
            lambda: text_request(sampling_params=inference_pb2.SamplingParams(n=2), conversation_id="c"),
            "sampling_params.n: 2 answers cannot all continue one conversation; allowed with a conversation_id is 1",
        ),
        (lambda: sampled(n=17), "sampling_params.n: 17 is out of range; allowed are 1 to 16"),
        (lambda: text_request(request_id="r" * 257), "request_id: 257 characters are too many; at most 256"),
        (lambda: text_request(conversation_id="c" * 257), "conversation_id: 257 characters are too many; at most 256"),
        (lambda: text_request(conversation_id="a\nb"), r"conversation_id: 'a\nb' holds characters that cannot be"),
        (lambda: text_request(request_id="\x00"), r"request_id: '\x00' holds characters that cannot be printed"),
    ],
)
def test_a_wrong_field_is_refused_with_its_value_and_what_is_allowed(
    reader: RequestReader, request_made: Callable[[], inference_pb2.GenerateRequest], says: str
) -> None:
    with pytest.raises(InvalidRequest, match="^" + re.escape(says)) as caught:
        reader.read(request_made(), None, NOBODYS)
    assert "\n" not in str(caught.value)


def test_a_text_with_tokens_that_the_model_does_not_have_never_reaches_a_rank(byte_codec: TextCodec) -> None:
    small = RequestReader(dataclasses.replace(MODEL, vocab_size=100), byte_codec, MAX_SECONDS, ("tiny",))
    with pytest.raises(InvalidRequest, match=r"input\.text\[1\]: token 122 is outside the vocabulary"):
        small.read(text_request("azb"), None, NOBODYS)


def test_a_tenant_may_ask_for_the_priorities_of_its_configuration_only(reader: RequestReader) -> None:
    tenant = ScopedRouter(None, Tenant(name="acme", min_priority=-5, max_priority=10))  # type: ignore[arg-type]
    assert reader.read(text_request(priority=10), None, tenant).priority == 10
    for value in (-6, 11, 100):
        with pytest.raises(InvalidRequest, match=f"priority: {value} is out of range; allowed are -5 to 10"):
            reader.read(text_request(priority=value), None, tenant)


def test_a_text_that_no_prompt_can_hold_is_refused_before_it_is_tokenized(
    reader: RequestReader, byte_codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MODEL_WITH_ENDS.max_positions * byte_codec.max_characters

    def tokenized_anyway(*values: object, **options: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(TextCodec, "encode", tokenized_anyway)
    monkeypatch.setattr(TextCodec, "encode_chat", tokenized_anyway)
    with pytest.raises(InvalidRequest, match=f"input.text: {limit + 1} characters are too many; .* length is 1000 tok"):
        reader.read(text_request("x" * (limit + 1)), None, NOBODYS)
    with pytest.raises(InvalidRequest, match=f"input.chat: {limit + 2} characters are too many"):
        reader.read(chat(("user", "x" * limit), ("user", "xx")), None, NOBODYS)
    with pytest.raises(AssertionError, match="it was tokenized"):
        reader.read(text_request("x" * limit), None, NOBODYS)


def test_a_bound_is_read_as_it_is_given_and_alone(reader: RequestReader) -> None:
    def bound(**fields: object) -> Bound | None:
        return reader.read(text_request(**fields), None, NOBODYS).bound  # type: ignore[arg-type]

    assert bound() is None
    assert bound(max_loss=0.0) == Bound(name="max_loss", limit=0.0)
    assert bound(max_loss=0.25, algorithm=inference_pb2.ALGORITHM_PASS_KV) == Bound(name="max_loss", limit=0.25)
    assert bound(max_ttft=1.5) == Bound(name="max_ttft", limit=1.5)
    for fields, said in (
        ({"max_loss": 0.1, "max_ttft": 2.0}, "max_loss: 0.1 is given beside max_ttft"),
        ({"max_loss": -0.1}, "max_loss: -0.1 is not allowed; give nats, 0 or more"),
        ({"max_loss": float("nan")}, "max_loss: nan is not allowed"),
        ({"max_ttft": 0.0}, "max_ttft: 0 is not allowed; give seconds above 0"),
        (
            {"max_loss": 0.1, "algorithm": inference_pb2.ALGORITHM_PASS_Q},
            "algorithm: ALGORITHM_PASS_Q is always exact; with max_loss",
        ),
    ):
        with pytest.raises(InvalidRequest, match=said):
            bound(**fields)


def test_the_tokenizers_own_end_counts_in_chats_alone(byte_codec: TextCodec) -> None:
    """A fine-tune's config.json names the base model's end, and its tokenizer the end of a message."""
    reader = RequestReader(dataclasses.replace(MODEL_WITH_ENDS, eos_token_ids=(260,)), byte_codec, MAX_SECONDS, ("t",))
    (end,) = byte_codec.chat_ends
    talk = chat(("user", "hi"))
    assert reader.read(talk, None, NOBODYS).sampling.stop_token_ids == tuple(sorted((end, 260)))
    assert reader.read(text_request(), None, NOBODYS).sampling.stop_token_ids == (260,)
    talk.sampling_params.ignore_eos = True
    assert reader.read(talk, None, NOBODYS).sampling.stop_token_ids == ()


def test_only_a_text_has_tokens_that_the_tokenizer_put_before_it(byte_codec: TextCodec) -> None:
    class Codec(TextCodec):
        def __init__(self) -> None:
            self.__dict__ |= byte_codec.__dict__ | {"num_special": 1}

    reader = RequestReader(MODEL_WITH_ENDS, Codec(), MAX_SECONDS, ("t",))
    asked = (text_request(), chat(("user", "hi")), tokenized(1, 2))
    assert [reader.read(request, None, NOBODYS).num_special for request in asked] == [1, 0, 0]
