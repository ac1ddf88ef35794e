"""Output of `ringserve conversations list`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringserve.client import ConversationSummary
from ringserve.services.cli.main import main
from ringserve.services.cli.options import TargetOptions


def listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *found: ConversationSummary
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    client = SimpleNamespace(list_conversations=lambda prefix: found)
    monkeypatch.setattr(TargetOptions, "client", lambda self: nullcontext(client))
    assert main(["conversations", "list"]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_id_can_be_copied_and_no_line_is_longer_than_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["chat-4ecf49000d22", "conversation-0123456789abcdef-long", "x"]
    items = [
        ConversationSummary(conversation_id=each, num_tokens=131072, idle_seconds=86400, num_turns=7) for each in ids
    ]
    items[1] = replace(items[1], running_request_id="req-0123456789abcdef", num_waiting=2)
    items[0] = replace(items[0], ttl_seconds=3600)
    lines = listed(monkeypatch, capsys, *items)
    assert max(map(len, lines)) <= 80
    for each in ids:
        assert any(line.split()[0] == each for line in lines)
    text = "\n".join(lines)
    assert "req-0123456789abcdef +2 waiting" in text
    assert "3600 s" in text
    assert "…" not in text


def test_a_short_list_of_idle_conversations_is_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    item = ConversationSummary(conversation_id="chat-4ecf49000d22", num_tokens=131072, num_turns=1000)
    lines = listed(monkeypatch, capsys, item)
    assert len(lines) == 3
    assert "running" not in lines[0]
