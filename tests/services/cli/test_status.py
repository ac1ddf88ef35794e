"""Output of `ringserve status`, on a terminal and as a picture."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from cp_core.errors import ConfigError
from ringserve.v1 import inference_pb2
from services.cli import status
from services.cli.main import build_parser

INFO = inference_pb2.GetServerInfoResponse(
    version="1.2",
    selector="auto",
    conversations=7,
    running_turns=2,
    rings=[
        inference_pb2.RingInfo(
            role="prefill",
            name="prefill-0",
            state="ready",
            num_ranks=2,
            kv_usage=[inference_pb2.RankKvUsage(free_blocks=5, active_blocks=2, kept_blocks=1, total_blocks=8)],
        )
    ],
    drains=[inference_pb2.RingDrain(role="decode", ring="decode-1", running_turns=3, moved=4, left=5)],
)


def shown(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    client = SimpleNamespace(server_info=lambda: INFO)
    monkeypatch.setattr(status, "client_of", lambda options: nullcontext(client))
    return status.run(build_parser().parse_args(["status", *options]))


def test_the_picture_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    path = tmp_path / "status.svg"
    assert shown(monkeypatch, "--svg", str(path)) == 0
    # The picture has its own non-breaking spaces.
    drawn = "".join(ElementTree.parse(path).getroot().itertext()).replace("\N{NO-BREAK SPACE}", " ")
    printed = capsys.readouterr().out
    for part in ("prefill-0", "7 conversations, 2 running turns", "decode-1 drains: 3 turns, 4 conversations moved"):
        assert part in drawn
        assert part in printed


def test_a_picture_that_cannot_be_written_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--svg: /nowhere/at/all\.svg cannot be written: No such file"):
        shown(monkeypatch, "--svg", "/nowhere/at/all.svg")
