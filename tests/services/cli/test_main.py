"""Errors as a user of the console program meets them: one sentence, and never the system's own words alone."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest

import ringserve
from ringserve.services.cli import down, main
from ringserve.services.telemetry.metrics.registry import package_version
from tests.waiting import WAIT_SECONDS


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(2, "No such file or directory"),
            "ringserve: 'ringserve down' failed in a call of the system: No such file or directory\n",
        ),
        (
            OSError(28, "No space left on device", "/tmp/x"),
            "ringserve: 'ringserve down' failed, /tmp/x cannot be used: No space left on device\n",
        ),
        (
            OSError(18, "Invalid cross-device link", "/a", None, "/b"),
            "ringserve: 'ringserve down' failed, /a and /b cannot be used: Invalid cross-device link\n",
        ),
        (OSError("odd"), "ringserve: 'ringserve down' failed in a call of the system: odd\n"),
        (OSError(), "ringserve: 'ringserve down' failed in a call of the system: OSError\n"),
    ],
)
def test_an_error_of_the_system_says_what_was_tried_and_why_it_failed(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(down, "run", fail)
    assert main.main(["down"]) == 1
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["generate", "--promt", "hi"], 2, "--promt: there is no such option; did you mean --prompt?"),
        (["generate"], 2, "one of the arguments --prompt --prompt-ids --messages is required"),
        (["bench", "load", "--nope=3"], 2, "--nope: there is no such option"),
        (["nonsense"], 2, "argument COMMAND: invalid choice: 'nonsense'"),
        (["generate", "--prompt", "caf\udce9"], 1, "argument 3: byte 4 is no UTF-8 text; convert it to UTF-8"),
        (["generate", "--prompt", "x", "--n", "0"], 1, "--n: 0 is not allowed; give at least 1"),
        (["generate", "--prompt", "x", "--max-tokens", "-5"], 1, "--max-tokens: -5 is not allowed; give at least 1"),
        (["generate", "--prompt", "x", "--timeout", "-1"], 1, "--timeout: -1 is not allowed; give seconds above 0"),
        (["generate", "--prompt", "x", "--mode", "append"], 1, "--mode: append needs a conversation; give --conversat"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_in_one_sentence(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main.main(arguments)
    except SystemExit as ended:  # argparse's way
        found = int(str(ended.code))
    shown = capsys.readouterr()
    assert (found, shown.out) == (status, "")
    assert shown.err.startswith(f"ringserve: {said}")
    assert len(shown.err.splitlines()) == 1


def test_options_may_be_shortened_and_texts_may_begin_with_dashes() -> None:
    options = main.build_parser().parse_args(["generate", "--prompt", "x", "--max-tok", "3"])
    assert options.max_tokens == 3
    assert main.build_parser().parse_args(["generate", "--prompt=--promt"]).prompt == "--promt"


def test_the_program_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    assert "start a cluster on this machine" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ringserve {package_version()}\n"


def test_a_command_does_not_wait_for_packages_that_few_commands_use() -> None:
    """Parse a command line in a new process: with torch and transformers it takes seven times as long."""
    code = (
        "import sys; from ringserve.services.cli.main import build_parser; build_parser().parse_args(['status']); "
        "print([name for name in ('torch', 'transformers', 'ray', 'matplotlib') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    )
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_prompt_on_standard_input_that_is_no_text_is_refused(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = "strict" if encoding == "utf-8" else "surrogateescape"  # as Python opens it, by locale
    stdin = io.TextIOWrapper(io.BytesIO("café".encode("latin-1")), encoding=encoding, errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert main.main(["generate", "--prompt", "-", "--target", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "ringserve: standard input: byte 4 is no UTF-8 text; convert it to UTF-8\n"


def test_a_client_of_another_release_beside_the_server_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "package_version", lambda: "9.0.0")
    assert main.main(["status"]) == 1
    assert capsys.readouterr().err == (
        f"ringserve: release: ringserve 9.0.0 is installed with ringserve-client {ringserve.__version__}; "
        f"run pip install ringserve-client==9.0.0\n"
    )
