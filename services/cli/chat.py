"""`ringserve chat`: a conversation on the terminal.

Its messages are kept in `chats/` of the state directory; a conversation without a name is deleted at the end, also in
the service.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len

from ringserve.client import Answer, Client, Message, Sampling
from ringserve.cp_core.errors import ConfigError, InvalidRequest, NotFound, RingserveError
from ringserve.services.cli.command import check_text, command, flag, option
from ringserve.services.cli.generate import SamplingOptions, show_plan
from ringserve.services.cli.options import TargetOptions
from ringserve.services.cluster.state import state_directory

HELP = """/plan          show how the last answer was computed
/retry         ask again; if the temperature is 0, draw this answer at 0.7
/fork [NAME]   go on in a copy of the conversation; the original stays
/system TEXT   set the system message, /system alone shows it
/help          show this list
Ctrl-C ends an answer, Ctrl-D the chat. A line that ends with \\ goes on in
the next. // begins a text with a slash."""
RETRY_TEMPERATURE = 0.7


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    gateway: TargetOptions
    conversation: str = option("continue or begin this conversation, and do not delete it at the end", "ID", "")
    system: str = option("a system message to begin with", default="")
    plan: bool = flag("show the plan after every answer")
    max_tokens: int | None = option("new tokens at most (default: no limit)", default=None)
    sampling: SamplingOptions


@command(
    "ringserve chat",
    "ringserve chat --conversation thesis",
    'ringserve chat --target 127.0.0.1:50051 --system "Be brief." --max-tokens 128',
    description="Talk with the model. Without --conversation the conversation is deleted at the end.\n\n\b\n" + HELP,
)
def chat(options: ChatOptions) -> int:
    sampling = options.sampling.sampling(max_tokens=options.max_tokens)
    with options.gateway.client() as client:
        chat = Chat(client, options.conversation, sampling, shows_plan=options.plan)
        if options.system:
            chat.set_system(check_text("--system", options.system))
        chat.begin()
        while (line := _ask()) is not None:
            chat.take(line)
        chat.end()
    return 0


class Chat:
    """Conversation with one user: lines come in, answers and figures go to the terminal.

    Every turn sends all messages; the rings still hold the KV of those that the turn before sent. The transcript is
    written after each answer, so that a chat whose terminal was closed can go on.
    """

    def __init__(self, client: Client, conversation: str, sampling: Sampling, *, shows_plan: bool = False) -> None:
        """Begin or continue a conversation; an empty id begins one that `end` deletes.

        Raises ConfigError; InvalidRequest if the service has this conversation but this user has no transcript of it.
        """
        self._client = client
        self._is_kept = bool(conversation)
        self.conversation = conversation or f"chat-{uuid.uuid4().hex[:12]}"
        self._sampling = sampling
        self._shows_plan = shows_plan
        self._last: Answer | None = None
        known = read_transcript(self.conversation)
        if known is None and conversation:
            self._check_unused()
        self.messages: tuple[Message, ...] = known or ()
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/plan": self._show_plan,
            "/retry": self._retry,
            "/fork": self._fork,
            "/system": self._system,
            "/help": lambda rest: _tell(HELP),
        }

    def begin(self) -> None:
        """Tell the name of the conversation, and its last exchange if it continues."""
        stays = "it stays when the chat ends" if self._is_kept else "it is deleted when the chat ends"
        _tell(f"Conversation {self.conversation}; {stays}. /help lists commands, Ctrl-D ends.")
        for message in [each for each in self.messages if each.role != "system"][-2:]:
            _tell(f"{'> ' if message.role == 'user' else ''}{message.content}")

    def take(self, line: str) -> None:
        """Take one input: a message, a command, or nothing. Errors are told, and the chat goes on."""
        try:
            text = check_text("input", line.strip())
            if text.startswith("/") and not text.startswith("//"):
                name, _, rest = text.partition(" ")
                if name not in self._commands:
                    raise InvalidRequest(f"{name}: there is no such command; allowed are {', '.join(self._commands)}")
                self._commands[name](rest.strip())
            elif text:
                self._answer(text.removeprefix("/"), self._sampling)
        except RingserveError as error:
            _tell(f"ringserve: {error}")

    def end(self) -> None:
        """Delete the conversation, unless it was named or forked."""
        if self._is_kept:
            if self.messages:
                _tell(f"go on with: ringserve chat --conversation {self.conversation}")
            return
        remove_transcript(self.conversation)
        try:
            self._client.delete_conversation(self.conversation)
        except NotFound:
            return  # no turn was run
        except RingserveError as error:  # such as Busy: an answer that was just stopped is still ending
            _tell(f"ringserve: the conversation {self.conversation} could not be deleted: {error}")

    def set_system(self, text: str) -> None:
        others = [message for message in self.messages if message.role != "system"]
        self.messages = (Message(role="system", content=text), *others)

    def _answer(self, text: str, sampling: Sampling) -> None:
        """Run one turn. Ctrl-C ends it and keeps the answer so far; an error leaves the messages as they were."""
        asked = (*self.messages, Message(role="user", content=text))
        answer = None
        pieces: list[str] = []
        try:
            answer = self._stream(asked, sampling, pieces)
        except KeyboardInterrupt:
            print()
            _tell("stopped")
        except RingserveError:
            if pieces:
                print()
            raise
        else:
            print()
        self.messages = (*asked, Message(role="assistant", content="".join(pieces)))
        write_transcript(self.conversation, self.messages)
        if answer is not None:
            self._last = answer
            _tell(figures(answer))
            if self._shows_plan:
                show_plan(answer)

    def _show_plan(self, rest: str) -> None:
        if self._last is None:
            raise InvalidRequest("/plan: no answer was finished yet")
        show_plan(self._last)

    def _retry(self, rest: str) -> None:
        place = max((number for number, each in enumerate(self.messages) if each.role == "user"), default=None)
        if place is None:
            raise InvalidRequest("/retry: nothing was asked yet")
        before, text = self.messages, self.messages[place].content
        sampling = replace(self._sampling, seed=None, temperature=self._sampling.temperature or RETRY_TEMPERATURE)
        self.messages = before[:place]
        try:
            self._answer(text, sampling)
        except RingserveError:
            self.messages = before
            raise

    def _fork(self, name: str) -> None:
        if not self.messages:
            raise InvalidRequest("/fork: nothing was asked yet")
        new = name or f"{self.conversation}-{uuid.uuid4().hex[:4]}"
        if read_transcript(new) is not None:
            raise InvalidRequest(f"/fork: there is a chat {new!r} already; choose another name")
        self._client.fork_conversation(self.conversation, new)
        write_transcript(new, self.messages)
        _tell(f"now in {new}; the original: ringserve chat --conversation {self.conversation}")
        self.conversation, self._is_kept = new, True

    def _system(self, text: str) -> None:
        if text:
            self.set_system(text)
        else:
            found = [message.content for message in self.messages if message.role == "system"]
            _tell(found[0] if found else "there is no system message")

    def _check_unused(self) -> None:
        """Check that the service has no conversation of this id. Raises InvalidRequest."""
        try:
            self._client.conversation(self.conversation)
        except NotFound:
            return
        raise InvalidRequest(
            f"--conversation: {self.conversation!r} was not begun by a chat of this user, so its messages are not "
            f"known here; choose another id"
        )

    def _stream(self, messages: Sequence[Message], sampling: Sampling, pieces: list[str]) -> Answer:
        """Run a turn; print its pieces and append them to `pieces`."""
        terminal = AnswerWriter(sys.stdout)
        with self._client.stream(
            messages,
            sampling=sampling,
            conversation_id=self.conversation,
            wait=True,  # an answer that was just stopped may still be ending
        ) as stream:
            for piece in stream:
                pieces.append(piece.text)
                terminal.write(piece.text)
            return stream.answer()


class AnswerWriter:
    """Writer of an answer as it comes. On a terminal it breaks lines between words; elsewhere it writes them as is."""

    PARTS = re.compile(r"\n|[^\S\n]+|\S+")

    def __init__(self, output: TextIO, width: int | None = None) -> None:
        """`width` is the terminal's, in columns, of which the last stays free; None asks the terminal."""
        self._output = output
        columns = width or shutil.get_terminal_size().columns
        self._width = columns - 1 if output.isatty() else 0
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Write a piece. Once a word no longer fits its line, it is erased there and goes whole to the next line."""
        shown = "".join(map(self._placed, self.PARTS.findall(text))) if self._width else text
        print(shown, end="", flush=True, file=self._output)

    def _placed(self, part: str) -> str:
        cells = cell_len(part)
        if part == "\n":
            self._word, self._column = "", 0
            return part
        if part.isspace():
            self._word, fits = "", self._column + cells < self._width
            self._column = self._column + cells if fits else 0
            return part if fits else "\n"
        word_cells, self._word = cell_len(self._word), self._word + part
        if self._column + cells > self._width and self._column > word_cells and word_cells + cells <= self._width:
            self._column = word_cells + cells
            erased = f"\x1b[{word_cells}D\x1b[K" if word_cells else ""
            return f"{erased}\n{self._word}"
        self._column = (self._column + cells) % (self._width + 1)
        return part


def figures(answer: Answer) -> str:
    """Return the figures of a turn in one short line."""
    usage = answer.usage
    parts = [f"{answer.ttft_seconds:.1f} s to first token"]
    if usage.completion_tokens > 1:
        parts.append(f"{1000 * answer.ttit_seconds:.0f} ms a token")
    if usage.accepted_draft_tokens:
        parts.append(f"{usage.accepted_draft_tokens} drafted")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} cached")
    if answer.finish_reason == "length":
        parts.append(f"cut after {usage.completion_tokens} tokens")
    return ", ".join(parts)


def _tell(text: str) -> None:
    """Print a remark of the program, dim on a terminal, on standard error."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _ask() -> str | None:
    """Read one input, which continues on the next line after a backslash; None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else "> ")
        except EOFError:
            return None
        except UnicodeDecodeError:
            _tell("ringserve: input: it is not UTF-8 text")
            return ""
        except KeyboardInterrupt:
            print()
            return ""
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def read_transcript(conversation: str) -> tuple[Message, ...] | None:
    """Return the messages of a conversation, None if this user has none of it. Raises ConfigError."""
    path = _transcript_path(conversation)
    try:
        return tuple(Message(**each) for each in json.loads(path.read_text(encoding="utf-8"))["messages"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"--conversation: {path} is no transcript of a chat; remove it") from None


def write_transcript(conversation: str, messages: Sequence[Message]) -> None:
    """Write the messages of a conversation, readable for this user alone. Raises ConfigError."""
    path = _transcript_path(conversation)
    draft = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.touch(mode=0o600)
        content = {"conversation": conversation, "messages": [asdict(message) for message in messages]}
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"RINGSERVE_STATE: {path} cannot be written: {error.strerror}") from error


def remove_transcript(conversation: str) -> None:
    """Remove the messages of a conversation. Idempotent."""
    _transcript_path(conversation).unlink(missing_ok=True)


def _transcript_path(conversation: str) -> Path:
    """Return the file of a conversation, named by a hash: an id may have characters that a file name cannot."""
    return state_directory() / "chats" / f"{hashlib.sha256(conversation.encode()).hexdigest()[:32]}.json"
