"""Command lines and errors as a user of the console program meets them: one sentence on standard error."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys

import pytest

from ringserve.services.cli import up
from ringserve.services.cli.main import PLACES, main, parse
from ringserve.services.telemetry.metrics.registry import package_version
from tests.waiting import WAIT_SECONDS

VERBS = [("conversations", verb) for verb in ("list", "show", "fork", "delete")]
COMMANDS = [(), *((name,) for name in PLACES), *VERBS]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file"), "'ringserve down' failed in a call of the system: No such file"),
        (OSError(28, "No space", "/tmp/x"), "'ringserve down' failed, /tmp/x cannot be used: No space"),
        (OSError(18, "Bad link", "/a", None, "/b"), "'ringserve down' failed, /a and /b cannot be used: Bad link"),
        (OSError("odd"), "'ringserve down' failed in a call of the system: odd"),
        (OSError(), "'ringserve down' failed in a call of the system: OSError"),
    ],
)
def test_an_error_of_the_system_says_what_was_tried_and_why_it_failed(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(up, "require_state", fail)
    assert main(["down"]) == 1
    assert capsys.readouterr().err == f"ringserve: {said}\n"


PROMPT = ("generate", "--prompt", "x")
HINT = "; 'ringserve generate --help' lists what is allowed"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("stauts",), 2, "no such command 'stauts'; did you mean 'status', 'restart'?; 'ringserve --help' lists"),
        (("generate", "--promt", "hi"), 2, f"--promt: there is no such option; did you mean --prompt?{HINT}"),
        (("bench", "--qqq=3"), 2, "--qqq: there is no such option; 'ringserve bench --help' lists what is allowed"),
        ((*PROMPT, "--max", "3"), 2, "--max: there is no such option"),  # of several options
        ((*PROMPT, "--n"), 2, "--n: it requires an argument"),
        ((*PROMPT, "--choice"), 2, "--choice: it requires an argument"),
        ((*PROMPT, "--json=x"), 2, "--json: it does not take a value"),
        ((*PROMPT, "more"), 2, f"got unexpected extra argument(s) (more){HINT}"),
        (("explain", "--tokens", "1"), 2, "--model: no value is given; 'ringserve explain --help' lists"),
        (("conversations", "fork", "a"), 2, "new: no value is given; 'ringserve conversations fork --help' lists"),
        (("conversations",), 2, "missing command; 'ringserve conversations --help' lists what is allowed"),
        (("bench", "store"), 2, "store: there is no such bench; 'ringserve bench --help' shows the options"),
        # Values that are not what an option takes.
        ((*PROMPT, "--n", "one"), 2, "--n: 'one' is no integer"),
        ((*PROMPT, "--top-p", "x"), 2, "--top-p: 'x' is no number"),
        ((*PROMPT, "--mode", "x"), 2, "--mode: 'x' is not allowed; allowed are auto, append, whole-history"),
        (("bench", "--rate", "0"), 2, "--rate: '0' is not allowed; give a number above 0"),
        # Options that exclude or need each other.
        (("generate",), 2, "--prompt, --prompt-ids, --messages: give exactly one of them"),
        ((*PROMPT, "--messages", "m"), 2, "--prompt, --prompt-ids, --messages: give exactly one of them"),
        ((*PROMPT, "--regex", "a", "--choice", "b"), 2, "--json-schema, --json-object, --regex, --choice, --grammar: "),
        ((*PROMPT, "--mode", "append"), 1, "--mode: append needs a conversation; give --conversation ID"),
        # Values out of range.
        ((*PROMPT, "--priority", "101"), 1, "--priority: 101 is out of range; allowed are -100 to 100"),
        (("conversations", "fork", "a", "b", "--at-token", "0"), 1, "--at-token: 0 is out of range; allowed are 1 to"),
        (("calibrate", "--repeats", "0"), 1, "--repeats: 0 is out of range; allowed are 1 or more"),
        ((*PROMPT, "--n", "0"), 1, "--n: 0 is out of range; allowed are 1 to 4294967295"),
        ((*PROMPT, "--max-tokens", "-5"), 1, "--max-tokens: -5 is out of range; allowed are 1 to 4294967295"),
        ((*PROMPT, "--timeout", "-1"), 1, "--timeout: -1 is not allowed; give seconds above 0"),
        # Texts.
        (("generate", "--prompt", "caf\udce9"), 1, "argument 3: character 4 is no UTF-8 text; convert it to UTF-8"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused_in_one_sentence(
    arguments: tuple[str, ...], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"ringserve: {said}")
    assert len(shown.err.splitlines()) == 1


def test_options_may_be_shortened_repeat_their_values_and_take_texts_with_dashes() -> None:
    words = ["generate", "--prompt=--promt", "--max-tok", "3", "--stop", "a", "b", "--stop-token-ids", "5", "--stop=-c"]
    options = parse(words).options
    assert (options.prompt, options.max_tokens) == ("--promt", 3)
    assert (options.sampling.stop, options.sampling.stop_token_ids) == (["a", "b", "-c"], [5])
    assert parse(["status", "--", "--wide"]).options.ring == "--wide"


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_its_examples_can_be_run(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.isascii()
    examples = re.findall(r"^    ringserve (.*)", shown.replace("\\\n        ", ""), re.MULTILINE)
    assert bool(examples) == bool(name)
    for example in examples:
        parse(shlex.split(example.partition(" > ")[0]))


def test_the_program_alone_shows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", shown, re.MULTILINE) for name in PLACES)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ringserve {package_version()}\n"


HEAVY = ("torch", "transformers", "ray", "matplotlib")


def loaded_by(line: str) -> tuple[str, list[str]]:
    """Run a line of Python in a new process. Return what it prints, and which of the heavy packages it imports."""
    code = (
        f"import sys\nfrom ringserve.services.cli.main import main, parse\ntry: {line}\nexcept SystemExit: pass\n"
        f"print('loaded', *[name for name in {HEAVY} if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout
    text, _, loaded = shown.rpartition("loaded")
    return text, loaded.split()


@pytest.mark.parametrize("line", ["main(['--help'])", "parse(['status'])", "main(['generate', '--help'])"])
def test_a_command_does_not_wait_for_packages_that_few_commands_use(line: str) -> None:
    """With torch and transformers a command line takes seven times as long."""
    assert loaded_by(line)[1] == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ringserve st", ["status"]),
        ("ringserve conversations ", ["list", "show", "fork", "delete"]),
        ("ringserve status --wi", ["--wide"]),
        ("ringserve gateway --device ", ["cpu", "cuda"]),
    ],
)
def test_a_shell_completes_commands_options_and_values(
    line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_RINGSERVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    text, loaded = loaded_by("main([])")
    assert (text.split(), loaded) == (offered, [])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_prompt_on_standard_input_that_is_no_text_is_refused(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = "strict" if encoding == "utf-8" else "surrogateescape"  # as Python opens it, by locale
    stdin = io.TextIOWrapper(io.BytesIO("café".encode("latin-1")), encoding=encoding, errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["generate", "--prompt", "-", "--target", "127.0.0.1:9"]) == 1
    place = "byte 4" if encoding == "utf-8" else "character 4"
    assert capsys.readouterr().err == f"ringserve: standard input: {place} is no UTF-8 text; convert it to UTF-8\n"


def test_a_pipe_that_is_closed_ends_a_command_without_a_word() -> None:
    command = [sys.executable, "-m", "ringserve.services.cli.main", "config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, said) == (1, b"")
