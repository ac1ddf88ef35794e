"""Output of `ringserve status`, on a terminal and as a picture."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from ringserve.client import RingInfo, ServerInfo
from ringserve.services.cli.main import main
from ringserve.services.cli.options import TargetOptions
from ringserve.services.cli.status import pool_sizes
from ringserve.services.cluster.state import ClusterState, started_after_boot, write_state
from ringserve.views import RankKvUsage, RingDrain

INFO = ServerInfo(
    version="1.2",
    selector="auto",
    conversations=7,
    running_turns=2,
    rings=(
        RingInfo(
            role="prefill",
            name="prefill-0",
            state="ready",
            num_ranks=2,
            kv_usage=(RankKvUsage(free_blocks=5, active_blocks=2, kept_blocks=1, total_blocks=8),),
        ),
    ),
    drains=(RingDrain(role="decode", ring="decode-1", running_turns=3, moved=4, left=5),),
)


def shown(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    client = SimpleNamespace(server_info=lambda: INFO)
    monkeypatch.setattr(TargetOptions, "client", lambda self: nullcontext(client))
    return main(["status", "--target", "g:1", *options])


def test_the_picture_shows_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    path = tmp_path / "status.svg"
    assert shown(monkeypatch, "--svg", str(path)) == 3
    # The picture has its own non-breaking spaces.
    drawn = "".join(ElementTree.parse(path).getroot().itertext()).replace("\N{NO-BREAK SPACE}", " ")
    printed = capsys.readouterr().out
    for part in ("prefill-0", "7 conversations, 2 running turns", "decode-1 drains: 3 turns, 4 conversations moved"):
        assert part in drawn
        assert part in printed


@pytest.mark.parametrize("options", [(), ("--wide",)])
def test_no_line_of_the_picture_leaves_its_frame(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tmp_path / "status.svg"
    assert shown(monkeypatch, *options, "--svg", str(path)) == 3
    root = ElementTree.parse(path).getroot()
    frame = next(each for each in root.iter() if each.tag.endswith("rect") and each.get("rx"))
    lines = [each for each in root.iter() if each.tag.endswith("text") and each.get("textLength")]
    assert lines
    assert max(float(each.attrib["x"]) + float(each.attrib["textLength"]) for each in lines) <= float(
        frame.attrib["width"]
    )


def test_a_picture_that_cannot_be_written_is_refused_by_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, "--svg", "/nowhere/at/all.svg") == 1
    assert "--svg: /nowhere/at/all.svg cannot be written: No such file" in capsys.readouterr().err


def info_of(*rings: RingInfo, left: str = "") -> ServerInfo:
    drains = (RingDrain(role="prefill", ring=left, has_left=True),) if left else ()
    return ServerInfo(version="1.2", selector="auto", rings=rings, drains=drains)


def ring(role: str, name: str, state: str = "ready", **fields: Any) -> RingInfo:
    usage = tuple(
        RankKvUsage(free_blocks=free, active_blocks=active, kept_blocks=1, total_blocks=8)
        for free, active in ((7, 0), (2, 5))
    )
    return RingInfo(role=role, name=name, state=state, num_ranks=2, kv_usage=usage, **fields)


def printed(
    info: ServerInfo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
    columns: int = 80,
) -> tuple[int, str]:
    """Return the exit status and what is printed."""
    monkeypatch.setattr("tests.services.cli.test_status.INFO", info)
    monkeypatch.setenv("COLUMNS", str(columns))
    return shown(monkeypatch, *options), capsys.readouterr().out


LONG = "prefill-abcdefghijklmnop-12"


@pytest.mark.parametrize("options", [(), ("--wide",), (LONG,)])
def test_status_fits_80_columns_and_shortens_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    long = ring("prefill", LONG, draining=True, num_requests_waiting=40, waiting_work=4e6, max_waiting_work=5e7)
    info = info_of(long, ring("prefill", "prefill-0", num_requests_running=3), ring("decode", "decode-0"))
    status_code, text = printed(info, monkeypatch, capsys, *options)
    assert status_code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert LONG in text
    assert "…" not in text
    assert ("1/5/1 of 8" in text or "2/5/1 of 8" in text) == bool(options)  # details on demand


def test_the_fullest_rank_is_shown_as_a_bar_of_active_retained_and_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = printed(info_of(ring("prefill", "prefill-0"), ring("decode", "decode-0")), monkeypatch, capsys)
    (line,) = (line for line in text.splitlines() if line.startswith("decode-0"))
    assert line.rstrip().endswith("██████▒▒·· 75%")


@pytest.mark.parametrize(
    ("rings", "missing"),
    [
        ([ring("prefill", "prefill-0")], "decode"),
        ([ring("prefill", "prefill-0", draining=True), ring("decode", "decode-0")], "prefill"),
        ([ring("prefill", "prefill-0"), ring("decode", "decode-0", "lost")], "decode"),
        ([], "prefill"),
    ],
)
def test_a_role_of_which_no_ring_takes_turns_is_told_and_the_exit_status_is_3(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rings: list[RingInfo],
    missing: str,
) -> None:
    status_code, text = printed(info_of(*rings), monkeypatch, capsys)
    assert status_code == 3
    assert f"no {missing} ring accepts turns: the cluster does not serve" in text
    assert (f"({missing})" in text) == (missing not in {each.role for each in rings})


def test_one_lost_ring_of_several_leaves_a_cluster_that_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = info_of(
        ring("prefill", "prefill-0"), ring("prefill", "prefill-1", "lost"), ring("decode", "decode-0"), left="prefill-2"
    )
    status_code, text = printed(info, monkeypatch, capsys)
    assert status_code == 0
    words = [line.split()[:2] for line in text.splitlines()]
    assert ["prefill-1", "lost"] in words
    assert ["prefill-2", "left"] in words


def test_an_unknown_ring_is_refused_with_the_names_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = info_of(ring("prefill", "prefill-0"), ring("decode", "decode-0"))
    monkeypatch.setattr("tests.services.cli.test_status.INFO", info)
    assert shown(monkeypatch, "prefil-0") == 1
    assert "there is no ring 'prefil-0'; the rings are prefill-0, decode-0" in capsys.readouterr().err


def test_a_cluster_that_is_starting_is_shown_with_its_rings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RINGSERVE_STATE", str(tmp_path))
    started = started_after_boot(os.getpid())
    told = ("starting Ray", "ring prefill-0 serves")
    state = ClusterState(
        name="default", pid=os.getpid(), started=started, num_rings=4, rings_serving=2, progress=told, log="l"
    )
    write_state(state)
    assert main(["status"]) == 3
    assert capsys.readouterr().out == "ringserve: 'default' is starting, 2 of 4 rings: ring prefill-0 serves\n"
    assert main(["status", "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert (shown["stage"], shown["rings_serving"], shown["num_rings"]) == ("starting", 2, 4)
    assert main(["generate", "--prompt", "hello"]) == 1
    assert "'default' is starting, 2 of 4 rings" in capsys.readouterr().err


def test_pools_are_counted_by_role_and_size() -> None:
    shapes = [("prefill", 2, 1), ("prefill", 1, 1), ("prefill", 1, 1), ("prefill", 2, 2), ("decode", 3, 1)]
    rings = tuple(RingInfo(role=role, num_ranks=cp, tp=tp) for role, cp, tp in shapes)
    assert pool_sizes(ServerInfo(rings=rings)) == (
        "prefill rings: 1 of cp 2 x tp 2, 1 of cp 2, 2 of cp 1; decode rings: 1 of cp 3"
    )
    assert pool_sizes(ServerInfo()) == ""
