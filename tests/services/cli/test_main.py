"""Errors as a user of the console program meets them: one sentence, and never the system's own words alone."""

from __future__ import annotations

import argparse

import pytest

from services.cli import down, main


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
