"""The demo without a cluster: its document, its conversation with rings in this process, and its check."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringserve.client import Client
from ringserve.cp_core.errors import ConfigError, ModelRefused
from ringserve.services.cli import demo as command
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.demo import (
    FIRST,
    FOLLOW_UP,
    FORKED,
    DemoConversation,
    DemoTurn,
    check,
    document,
    passage,
)
from ringserve.services.offline.reference import StockModel
from ringserve.workers.model.builtin import write_tokenizer
from tests.services.local_gateway import LocalGateway
from tests.workers.models import WINDOWED, random_tokens, save_model

QUESTIONS = (FIRST, FOLLOW_UP, FORKED)
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model("llama_gqa", tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def turns(model: Path) -> list[DemoTurn]:
    """Return the three turns of the demo, about the document's beginning."""

    def play(target: str, codec: TextCodec) -> list[DemoTurn]:
        with Client(target) as client:
            conversation = DemoConversation(client, codec, MAX_TOKENS)
            text = f"{document(codec, 200)}\n\n{FIRST.text}"
            first = conversation.ask(FIRST, text, shown.append)
            second = conversation.ask(FOLLOW_UP, FOLLOW_UP.text, shown.append)
            return [first, second, conversation.fork(first).ask(FORKED, FORKED.text, shown.append)]

    async def serve() -> list[DemoTurn]:
        async with LocalGateway(model, TextCodec(model)) as gateway:
            return await asyncio.to_thread(play, gateway.target, TextCodec(model))

    shown: list[str] = []
    played = asyncio.run(serve())
    assert "".join(shown) == "".join(turn.answer["text"] for turn in played)
    return played


def test_each_fact_stands_in_the_document_once(byte_codec: TextCodec) -> None:
    text = document(byte_codec)
    for question in QUESTIONS:
        assert text.count(question.fact) == 1
        assert question.fact in passage(text, question.fact)
        assert question.fact not in question.text
    assert passage(text, "Neptune") == ""


def test_the_document_can_be_cut_but_not_stretched(byte_codec: TextCodec) -> None:
    assert document(byte_codec).startswith(document(byte_codec, 300))
    assert len(document(byte_codec, 300)) == 300
    with pytest.raises(ConfigError, match="--tokens: 99999 is not allowed; the document has"):
        document(byte_codec, 99999)


def test_both_the_follow_up_and_the_fork_find_the_first_turn_cached(turns: list[DemoTurn]) -> None:
    first, second, fork = turns
    assert first.answer["usage"]["cached_tokens"] == 0
    for turn in (second, fork):
        assert turn.answer["usage"]["prompt_tokens"] == len(turn.prompt)
        assert turn.answer["usage"]["cached_tokens"] >= len(first.prompt)
    assert fork.prompt[: len(second.prompt)] != second.prompt
    assert fork.answer["conversation_id"] != second.answer["conversation_id"]


def test_the_check_passes_what_was_served_and_finds_one_wrong_token(turns: list[DemoTurn], model: Path) -> None:
    verdicts = check(turns, model, [], MAX_TOKENS, "")
    assert [(verdict.is_equal, verdict.is_right) for verdict in verdicts] == [(True, None)] * 3
    tokens: list[int] = turns[1].answer["token_ids"]
    for place in (0, 3, MAX_TOKENS - 1):
        changed = [*tokens[:place], (tokens[place] + 1) % 256, *tokens[place + 1 :]]
        turn = replace(turns[1], answer={**turns[1].answer, "token_ids": changed})
        verdicts = check([turns[0], turn, turns[2]], model, [], MAX_TOKENS, "")
        assert [verdict.is_equal for verdict in verdicts] == [True, False, True]


def test_an_answer_that_ends_too_early_is_not_equal(turns: list[DemoTurn], model: Path) -> None:
    tokens = turns[0].answer["token_ids"][:3]
    turn = replace(turns[0], answer={**turns[0].answer, "token_ids": tokens})
    assert not check([turn], model, [], MAX_TOKENS, "")[0].is_equal
    assert check([turn], model, [tokens[-1]], MAX_TOKENS, "")[0].is_equal


def test_an_answer_without_the_fact_is_wrong(turns: list[DemoTurn], model: Path) -> None:
    said = [
        replace(turn, answer={**turn.answer, "text": text})
        for turn, text in zip(turns, ("It is Marzipan.", "It is 1234.", "Unknown."), strict=True)
    ]
    # The document that was sent has two of the three facts.
    verdicts = check(said, model, [], MAX_TOKENS, "The dog is Marzipan. The code is 7319.")
    assert [verdict.is_right for verdict in verdicts] == [True, False, None]


def test_following_an_answer_makes_the_choices_of_decoding_it(model: Path) -> None:
    stock = StockModel(model)
    prompts = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 9], [1, 2, 9], [8])
    for prompt in prompts:
        decoded = stock.greedy(prompt, 7)
        followed = stock.follow(prompt, decoded.token_ids)
        assert followed.token_ids == decoded.token_ids
        assert followed.smallest_lead == pytest.approx(decoded.smallest_lead, abs=1e-4)


def test_where_the_real_model_cannot_be_had_the_demo_says_so_and_takes_the_random_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise ModelRefused("pip cannot download it: no network")

    monkeypatch.setattr(command, "prepare", refuse)
    assert command._choose_model("", Console(width=200)) == "builtin:tiny"
    sentence = "pip cannot download it: no network; the demo runs builtin:tiny, whose answers mean nothing\n"
    assert capsys.readouterr().out == sentence
    with pytest.raises(ModelRefused, match="no network"):
        command._choose_model("builtin:smollm2", Console())


def test_answers_of_a_model_with_windows_are_followed_from_any_place(tmp_path: Path) -> None:
    """The prompt goes on, and goes on from an earlier token, which lies before the windows of what is known."""
    stock = StockModel(save_model(WINDOWED, tmp_path / "model"))
    history = random_tokens(40)
    for prompt in (history, [*history, 1, 2], [*history[:20], 3]):
        answer = stock.greedy(prompt, 6).token_ids
        assert stock.follow(prompt, answer).token_ids == answer
