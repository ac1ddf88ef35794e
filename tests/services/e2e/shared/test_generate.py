"""Turns and conversations through the gateway and the command line, token for token those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids
from tests.workers.models import random_tokens

APPEND = inference_pb2.PROMPT_MODE_APPEND
WHOLE_HISTORY = inference_pb2.PROMPT_MODE_WHOLE_HISTORY


def generate(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    """Return the output of `ringserve generate --json`."""
    finished = cluster.ringserve.run("generate", "--target", cluster.gateway, "--json", *arguments)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def test_generate_prints_one_object_with_all_that_the_contract_names(
    cluster: Cluster, inference: Inference, stock: StockModel, codec: TextCodec
) -> None:
    hints = ("--no-cache", "--cache-key", "ada")
    answer = generate(cluster, "--prompt", "Names are bound by assignment.", "--max-tokens", "8", *hints)
    prompt = codec.encode("Names are bound by assignment.").tolist()
    assert answer["token_ids"] == stock.greedy(prompt, 8).token_ids
    assert answer["text"] == codec.decode(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    assert 0 <= answer["usage"].pop("accepted_draft_tokens") < 8
    assert answer["usage"] == {"prompt_tokens": len(prompt), "cached_tokens": 0, "completion_tokens": 8}
    assert answer["ttft_seconds"] > 0
    assert answer["ttit_seconds"] >= 0, "0 where all tokens came in one message"
    plan = answer["plan"]
    assert (plan["new_tokens"], plan["cached_tokens"], plan["prompt_mode"]) == (len(prompt), 0, "new")
    assert plan["algorithm"] in PREFILL_ALGORITHMS
    assert plan["algorithm"].replace("_", "-").lower() in plan["reason"].lower()
    assert (plan["prefill_ring"], plan["decode_ring"]) == ("prefill-0", "decode-0")
    assert plan["prefill_seconds"] > 0
    assert plan["predicted_prefill_seconds"] > 0
    # Two layers, keys and values, two KV heads of 16 fp32 numbers a token: everything moved, exactly once.
    assert plan["migrated_bytes"] == len(prompt) * 2 * 2 * 2 * 16 * 4
    assert plan["migration_seconds"] > 0


def test_a_prediction_of_the_answer_saves_steps_and_changes_no_token(inference: Inference, codec: TextCodec) -> None:
    """On rings of several ranks, of an answer in letters: the bytes of others are no text."""

    def ask(max_drafts: int | None, prediction: str) -> inference_pb2.GenerateComplete:
        letters = dict.fromkeys(range(97, 123), 100.0)
        params = inference_pb2.SamplingParams(max_tokens=48, max_draft_tokens=max_drafts, logit_bias=letters)
        request = ids(random_tokens(61, seed=23))
        request.sampling_params.CopyFrom(params)
        request.prediction = prediction
        return inference.answer(request)

    plain = ask(0, "")
    assert plain.usage.accepted_draft_tokens == 0
    assert codec.encode(plain.text).tolist() == list(plain.output_ids)
    drafted = ask(None, plain.text)
    assert list(drafted.output_ids) == list(plain.output_ids)
    # How many depends on what the steps take: on a busy machine drafts may seem not to pay.
    assert drafted.usage.accepted_draft_tokens > 0


def test_three_turns_that_send_only_what_is_new_reuse_everything_before(
    cluster: Cluster, inference: Inference, stock: StockModel, tmp_path: Path
) -> None:
    history: list[int] = []
    retained = apart = 0
    for turn, num_new in enumerate((83, 5, 30)):
        new = random_tokens(num_new, seed=turn)
        file = tmp_path / f"turn{turn}.json"
        file.write_text(json.dumps(new))
        answer = generate(cluster, "--prompt-ids", str(file), "--conversation", "three", "--max-tokens", "7")
        prompt = history + new
        assert answer["token_ids"] == stock.greedy(prompt, 7).token_ids, f"turn {turn}"
        # The last token of an answer was never fed back: it has no KV yet.
        cached = max(0, len(history) - 1)
        assert 0 <= answer["usage"].pop("accepted_draft_tokens") < answer["usage"]["completion_tokens"]
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "cached_tokens": cached,
            "completion_tokens": 7,
        }
        plan = answer["plan"]
        assert (plan["new_tokens"], plan["cached_tokens"]) == (len(prompt) - cached, cached)
        # A block; a chain gives new tokens to fewer ranks where more would not pay.
        apart = max(apart, num_new if plan["algorithm"] == "chain" else 0, 16)
        if turn:
            assert plan["prompt_mode"] == "append"
            assert plan["cached_sources"] == [
                {"source": "kept_on_prefill", "start": 0, "stop": retained, "ring": ""},
                {"source": "pulled_from_decode", "start": retained, "stop": cached, "ring": ""},
            ]
            assert plan["pulled_bytes"] == (cached - retained) * 2 * 2 * 2 * 16 * 4
        history, retained = prompt + answer["token_ids"], len(prompt)
    held = inference.conversation("three")
    assert (held.num_tokens, held.num_turns, held.running_request_id) == (len(history), 3, "")
    for placement in held.placements:
        shares = [rank.num_tokens for rank in placement.ranks]
        assert sum(shares) == placement.num_tokens
        assert max(shares) - min(shares) <= apart, f"{placement.role}: too far apart"
    inference.delete("three")


def test_a_follow_up_that_the_decode_ring_computes_moves_no_kv_and_the_next_one_may(
    cluster: Cluster, inference: Inference, stock: StockModel, tmp_path: Path
) -> None:
    history: list[int] = []
    for turn, (num_new, algorithm) in enumerate(((70, "pass_kv"), (9, "decode_ring"), (2, "decode_ring"), (80, ""))):
        new = random_tokens(num_new, seed=50 + turn)
        file = tmp_path / f"turn{turn}.json"
        file.write_text(json.dumps(new))
        asked = ("--algorithm", algorithm) if algorithm else ()
        answer = generate(cluster, "--prompt-ids", str(file), "--conversation", "direct", "--max-tokens", "7", *asked)
        prompt = history + new
        assert answer["token_ids"] == stock.greedy(prompt, 7).token_ids, f"turn {turn}"
        plan, cached = answer["plan"], max(0, len(history) - 1)
        assert (plan["new_tokens"], plan["cached_tokens"]) == (len(prompt) - cached, cached)
        if algorithm == "decode_ring":
            assert (plan["algorithm"], plan["prefill_ring"], plan["decode_ring"]) == (algorithm, "decode-0", "decode-0")
            assert plan["reason"].endswith(": the request asked for it")
            assert plan["cached_sources"] == [{"source": "kept_on_decode", "start": 0, "stop": cached, "ring": ""}]
            assert (plan["migrated_bytes"], plan["pulled_bytes"]) == (0, 0)
            assert plan["prefill_seconds"] > 0
            assert [chunk["algorithm"] for chunk in plan["chunks"]] == [algorithm]
            assert {each["ring"] for each in plan["ring_alternatives"]} == {"decode-0", "prefill-0"}
        history = prompt + answer["token_ids"]
    # The prefill ring was left behind by two turns, and has fetched them for the last.
    assert plan["cached_sources"] == [
        {"source": "kept_on_prefill", "start": 0, "stop": 70, "ring": ""},
        {"source": "pulled_from_decode", "start": 70, "stop": cached, "ring": ""},
    ]
    corrections = inference.ring("decode").corrections
    assert {each.algorithm for each in corrections} == {"decode_ring"}
    assert sum(each.num_turns for each in corrections) == 2
    inference.delete("direct")
    file.write_text(json.dumps(random_tokens(3)))
    refused = cluster.ringserve.run(
        "generate", "--target", cluster.gateway, "--prompt-ids", str(file), "--algorithm", "decode_ring"
    )
    assert refused.returncode != 0
    assert "algorithm: decode_ring is for up to 128 new tokens" in refused.stderr


def test_a_whole_history_and_an_edit_of_it_reuse_only_what_is_the_same(inference: Inference, stock: StockModel) -> None:
    first = random_tokens(64, seed=10)
    history = first + list(inference.answer(ids(first, conversation="edited")).output_ids)
    whole = inference.answer(ids([*history, 1, 2, 3], conversation="edited", mode=WHOLE_HISTORY))
    assert list(whole.output_ids) == stock.greedy([*history, 1, 2, 3], 6).token_ids
    assert (whole.plan.prompt_mode, whole.usage.cached_tokens) == (WHOLE_HISTORY, len(history) - 1)

    edited = [*history[:40], (history[40] + 1) % 256, *history[41:], 9]
    answer = inference.answer(ids(edited, conversation="edited", mode=WHOLE_HISTORY))
    assert list(answer.output_ids) == stock.greedy(edited, 6).token_ids
    assert answer.usage.cached_tokens == 40

    # The conversation is now the edited one.
    prompt = [*edited, *answer.output_ids, 4, 5]
    appended = inference.answer(ids([4, 5], conversation="edited", mode=APPEND))
    assert list(appended.output_ids) == stock.greedy(prompt, 6).token_ids
    assert appended.usage.prompt_tokens == len(prompt)
    inference.delete("edited")


def test_asking_the_same_again_computes_one_token(inference: Inference, stock: StockModel) -> None:
    prompt = random_tokens(50, seed=11)
    expected = stock.greedy(prompt, 6).token_ids
    for cached in (0, 49):
        answer = inference.answer(ids(prompt, conversation="again", mode=WHOLE_HISTORY))
        assert list(answer.output_ids) == expected
        assert answer.usage.cached_tokens == cached
    inference.delete("again")


def test_chat_messages_go_through_the_models_template_and_reuse_the_common_beginning(
    cluster: Cluster, inference: Inference, stock: StockModel, codec: TextCodec, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a name?"}]
    file = tmp_path / "messages.json"
    history: list[int] = []
    for turn in range(2):
        file.write_text(json.dumps(messages))
        answer = generate(cluster, "--messages", str(file), "--conversation", "chat", "--max-tokens", "6")
        prompt = codec.encode_chat([(message["role"], message["content"]) for message in messages]).tolist()
        assert answer["token_ids"] == stock.greedy(prompt, 6).token_ids
        pairs = enumerate(zip(history, prompt, strict=False))
        same = next((place for place, (old, new) in pairs if old != new), min(len(history), len(prompt)))
        assert answer["usage"]["cached_tokens"] == min(same, max(0, len(history) - 1))
        assert bool(turn) == (answer["usage"]["cached_tokens"] > 20)
        history = prompt + answer["token_ids"]
        messages += [{"role": "assistant", "content": answer["text"]}, {"role": "user", "content": "And a scope?"}]
    inference.delete("chat")


def test_a_stream_is_a_start_then_chunks_then_a_completion_that_repeats_them(
    inference: Inference, codec: TextCodec
) -> None:
    start, *chunks, complete = inference.stream(ids(random_tokens(20, seed=12), max_tokens=40, request_id="shape"))
    assert start.WhichOneof("response") == "start"
    assert (start.start.request_id, start.start.prompt_tokens, start.start.plan.new_tokens) == ("shape", 20, 20)
    assert {chunk.WhichOneof("response") for chunk in chunks} == {"chunk"}
    tokens = [token for chunk in chunks for token in chunk.chunk.token_ids]
    text = "".join(chunk.chunk.text for chunk in chunks)
    assert tokens == list(complete.complete.output_ids)
    assert len(tokens) == 40
    assert complete.complete.text == codec.decode(tokens)
    assert complete.complete.text.startswith(text)


def test_a_seed_gives_the_same_tokens_again_and_another_seed_gives_others(inference: Inference) -> None:
    def tokens(seed: int) -> list[int]:
        request = ids(random_tokens(30, seed=13), max_tokens=20, temperature=2.0, seed=seed)
        answer = inference.answer(request)
        assert answer.seed == seed
        return list(answer.output_ids)

    assert tokens(5) == tokens(5) != tokens(6)


def test_a_stop_token_ends_the_answer_and_is_its_last_token(inference: Inference, stock: StockModel) -> None:
    prompt = random_tokens(30, seed=14)
    expected = stock.greedy(prompt, 8).token_ids
    for stop in (expected[0], expected[4]):
        answer = inference.answer(ids(prompt, max_tokens=8, stops=[stop]))
        assert list(answer.output_ids) == expected[: expected.index(stop) + 1]
        assert (answer.finish_reason, answer.matched_stop) == (inference_pb2.FINISH_REASON_STOP, stop)


def test_without_json_the_answer_is_on_standard_output_and_the_plan_beside_it(
    cluster: Cluster, codec: TextCodec
) -> None:
    command = ("generate", "--name", cluster.name, "--prompt", "-", "--max-tokens", "5")
    finished = cluster.ringserve.run_process(*command, typed="What is bound?")
    assert finished.returncode == 0, finished.stderr
    expected = generate(cluster, "--prompt", "What is bound?", "--max-tokens", "5")
    assert finished.stdout == expected["text"] + "\n"
    assert "tokens     14 new, 0 cached, 5 answered (length)\n" in finished.stderr
    assert "rings      prefill-0 -> decode-0\n" in finished.stderr


@pytest.mark.parametrize("typed", ["hello\nand then?\n\n", ""])
def test_a_chat_on_the_terminal_forgets_its_conversation_at_the_end(
    cluster: Cluster, inference: Inference, typed: str
) -> None:
    before = inference.info().conversations
    finished = cluster.ringserve.run(*("chat", "--plan", "--target", cluster.gateway, "--max-tokens", "4"), typed=typed)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("rings      prefill-0 -> decode-0") == len(typed.split("\n\n")[0].splitlines())
    assert inference.info().conversations == before
