"""A chat as its user meets it: a whole gateway in this process, and inputs line by line."""

from __future__ import annotations

import asyncio
import builtins
import io
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ringserve.client import Answer, Client, Piece, Sampling, Usage
from ringserve.client.sync_client import AnswerStream
from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.cli import chat as chat_module
from ringserve.services.cli.chat import AnswerWriter, Chat, figures, read_transcript
from tests.services.local_gateway import LocalGateway, codec, gateway, model_path
from tests.waiting import eventually

__all__ = ["codec", "gateway", "model_path"]
SHORT = Sampling(max_tokens=4)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGSERVE_STATE", str(tmp_path))
    return tmp_path


async def talk(
    gateway: LocalGateway,
    act: Callable[[Chat], None],
    *,
    conversation: str = "",
    sampling: Sampling = SHORT,
) -> Chat:
    """Run a chat in a thread, as the gateway serves in this one. The chat is ended."""

    def run() -> Chat:
        with Client(gateway.target) as client:
            chat = Chat(client, conversation, sampling)
            chat.begin()
            act(chat)
            chat.end()
            return chat

    return await asyncio.to_thread(run)


def typed(*lines: str) -> Callable[[Chat], None]:
    def act(chat: Chat) -> None:
        for line in lines:
            chat.take(line)

    return act


def roles(chat: Chat) -> list[str]:
    return [message.role for message in chat.messages]


async def test_an_empty_line_asks_nothing_and_an_answer_ends_with_one_line_of_figures(
    gateway: LocalGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = await talk(gateway, typed("", "   ", "hello", "and then?"))
    assert roles(chat) == ["user", "assistant"] * 2
    first, *told = capsys.readouterr().err.splitlines()
    assert first.startswith(f"Conversation {chat.conversation}; it is deleted when the chat ends")
    assert len(told) == 2
    assert all(" s to first token, " in line and " cached, cut after 4 tokens" in line for line in told)


async def test_the_next_turn_computes_only_what_is_new(
    gateway: LocalGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    await talk(gateway, typed("hello", "and then?", "/plan"))
    err = capsys.readouterr().err
    assert " 0 of " in err
    assert re.search(r"^tokens +\d+ new, [1-9]\d* cached", err, re.MULTILINE)


async def test_an_unnamed_conversation_and_its_transcript_end_with_the_chat(gateway: LocalGateway) -> None:
    chat = await talk(gateway, typed("hello"))
    assert read_transcript(chat.conversation) is None
    assert gateway.service.router.num_conversations == 0


async def test_a_named_conversation_goes_on_where_it_was_left(
    gateway: LocalGateway, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await talk(gateway, typed("hello"), conversation="thesis")
    (transcript,) = (state / "chats").iterdir()
    assert stat.S_IMODE(transcript.stat().st_mode) == 0o600
    assert "go on with: ringserve chat --conversation thesis" in capsys.readouterr().err
    again = await talk(gateway, typed("and then?"), conversation="thesis")
    assert again.messages[:2] == first.messages
    assert gateway.service.router.num_conversations == 1
    told = capsys.readouterr().err
    assert "> hello" in told  # the last exchange is shown
    assert " 0 of " not in told  # the history is cached


async def test_a_conversation_whose_messages_are_unknown_is_not_overwritten(gateway: LocalGateway) -> None:
    def begin() -> None:
        with Client(gateway.target) as client:
            client.ask("hello", sampling=SHORT, conversation_id="others")

    await asyncio.to_thread(begin)
    with pytest.raises(InvalidRequest, match="--conversation: 'others' was not begun by a chat of this user"):
        await talk(gateway, typed(), conversation="others")


async def test_ctrl_c_ends_the_answer_and_not_the_chat(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow = AnswerStream.__next__

    def interrupted(self: AnswerStream) -> Piece:
        if has_piece and not has_stopped:
            has_stopped.append(True)
            raise KeyboardInterrupt
        has_piece.append(True)
        return follow(self)

    has_piece: list[bool] = []
    has_stopped: list[bool] = []
    monkeypatch.setattr(AnswerStream, "__next__", interrupted)
    long = Sampling(max_tokens=60, ignore_eos=True)
    chat = await talk(gateway, typed("hello", "and then?"), sampling=long)
    assert roles(chat) == ["user", "assistant"] * 2
    assert len(chat.messages[1].content) < len(chat.messages[3].content)
    assert "stopped" in capsys.readouterr().err.splitlines()
    await eventually(lambda: not gateway.service.router.num_running, 10.0)


async def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_model(gateway: LocalGateway) -> None:
    """A stop token stands for the model's end."""
    every = Sampling(stop_token_ids=range(256))
    chat = await talk(gateway, typed("hello", "x" * 4096), sampling=every)
    assert roles(chat) == ["user", "assistant"] * 2
    assert chat._last is not None
    assert chat._last.finish_reason == "stop"


async def test_commands_change_the_conversation_as_help_says(
    gateway: LocalGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(chat: Chat) -> None:
        chat.take("/system Answer briefly.")
        chat.take("hello")
        original = chat.conversation
        chat.take("/retry")
        assert roles(chat) == ["system", "user", "assistant"]
        chat.take("/fork other")
        assert chat.conversation == "other"
        chat.take("//help")
        assert chat.messages[-2].content == "/help"
        kept = read_transcript(original)
        assert kept is not None
        assert len(kept) == 3
        capsys.readouterr()
        chat.take("/system")
        assert capsys.readouterr().err == "Answer briefly.\n"
        chat.take("/help")
        help_text = capsys.readouterr().err
        assert all(name in help_text for name in chat._commands)

    await talk(gateway, act)
    assert gateway.service.router.num_conversations == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "/nonsense",
            "ringserve: /nonsense: there is no such command; allowed are /plan, /retry, /fork, /system, /help",
        ),
        ("/retry", "ringserve: /retry: nothing was asked yet"),
        ("/fork", "ringserve: /fork: nothing was asked yet"),
        ("/plan", "ringserve: /plan: no answer was finished yet"),
        ("caf\udce9", "ringserve: input: character 4 is no UTF-8 text; convert it to UTF-8"),
    ],
)
async def test_what_cannot_be_done_is_told_and_the_chat_goes_on(
    gateway: LocalGateway, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    chat = await talk(gateway, typed(line, "hello"))
    assert roles(chat) == ["user", "assistant"]
    assert said in capsys.readouterr().err.splitlines()


async def test_an_error_leaves_the_messages_as_they_were(
    gateway: LocalGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = await talk(gateway, typed("hello", "x" * 100_000))
    assert roles(chat) == ["user", "assistant"]
    assert "prompt tokens" in capsys.readouterr().err


def test_lines_that_end_with_a_backslash_are_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one\\", "two", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    assert chat_module._ask() == "one\ntwo"
    assert chat_module._ask() == ""


@pytest.mark.parametrize(("error", "answer"), [(EOFError, None), (KeyboardInterrupt, "")])
def test_ctrl_d_ends_the_chat_and_ctrl_c_only_the_line(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], answer: str | None
) -> None:
    def fail(prompt: str) -> str:
        raise error

    monkeypatch.setattr(builtins, "input", fail)
    assert chat_module._ask() == answer


def test_figures_of_an_answer_that_ended_by_itself_fit_one_short_line() -> None:
    usage = Usage(prompt_tokens=70, cached_tokens=36, completion_tokens=9)
    answer = Answer(usage=usage, ttft_seconds=0.31, ttit_seconds=0.053, finish_reason="stop")
    assert figures(answer) == "0.3 s to first token, 53 ms a token, 36 of 70 cached"


class Screen(io.StringIO):
    """Terminal that knows the two sequences which an answer has: back by columns, and erase to the end of the line."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        lines = [""]
        for back, end, character in re.findall(r"\x1b\[(\d+)D(\x1b\[K)|(.|\n)", self.getvalue()):
            if end:
                lines[-1] = lines[-1][: -int(back)]
            elif character == "\n":
                lines.append("")
            else:
                lines[-1] += character
        return lines


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_on_a_terminal_breaks_between_words_however_its_pieces_are_cut(size: int) -> None:
    text = "A ring of ranks  computes one long prompt.\n\n- exactly, and without hyphens-that-break\nend " + "x" * 45
    screen = Screen()
    writer = AnswerWriter(screen, 20)
    for start in range(0, len(text), size):
        writer.write(text[start : start + size])
    lines = screen.lines()
    assert [line.rstrip() for line in lines[:7]] == [
        *("A ring of ranks", "computes one long", "prompt.", "", "- exactly, and", "without", "hyphens-that-break"),
    ]
    # The last word is longer than a line: the terminal breaks it.
    assert "".join(lines[7:]) == "end " + "x" * 45


def test_an_answer_that_is_piped_stays_as_it_is() -> None:
    output = io.StringIO()
    AnswerWriter(output, 10).write("more words than ten columns have")
    assert output.getvalue() == "more words than ten columns have"
