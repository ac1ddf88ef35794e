"""Selection bench of rings on slow links: with delayed messages, and in namespaces where the machine allows them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from bench.__main__ import EXIT_INTERRUPTED, main
from bench.namespaces import isolation
from bench.rings.model_rank import with_layers
from bench.rings.ring_processes import Loopback
from bench.selection.links import LinkRate, parse_rate
from bench.selection.measure import (
    SelectionSettings,
    Show,
    measure_selection,
    measured_in_namespaces,
)
from bench.selection.rank import Difference
from bench.selection.results import (
    SelectionReport,
    closing_lines,
    gains_table,
    losses_table,
    predictions_table,
    ring_lines,
    selection_json,
    write_selection_plot,
    wrong_table,
)
from bench.systems.delayed import DelayedTransport
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.cp_core.transport.interface import RingTransport, Work
from ringserve.services.offline.calibration.measurement import Cell
from ringserve.services.offline.terminal import Tell
from tests.programs import require
from tests.waiting import WAIT_SECONDS

LONG, SHORT = Cell(cached_tokens=1500, new_tokens=24), Cell(cached_tokens=0, new_tokens=96)
FIT_CELLS = tuple(Cell(cached_tokens=cached, new_tokens=new) for cached in (0, 700) for new in (16, 80))
SLOW = parse_rate("8mbit")
# Least bytes on the link: keys and values of half of all tokens, in one layer.
LONG_PASS_KV_BYTES = (LONG.cached_tokens + LONG.new_tokens) // 2 * 2 * 2 * 64 * 4
LONG_PASS_KV_SECONDS = 0.9 * LONG_PASS_KV_BYTES / SLOW.bytes_per_second
"""No machine is faster: the link bounds it."""


@dataclass(frozen=True, slots=True)
class DelayedLinks(Loopback):
    """Loopback whose messages take as long as on links of the rate."""

    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        return DelayedTransport(transport, 1e-4, rate.bytes_per_second)


class Garbling(DelayedTransport):
    """Transport that loses the partial results of pass-Q."""

    def all_to_all(self, send: Sequence[torch.Tensor], recv: Sequence[torch.Tensor]) -> Work:
        work = super().all_to_all(send, [torch.empty_like(each) for each in recv])
        for each in recv:
            each.zero_()
        return work


@dataclass(frozen=True, slots=True)
class GarblingLinks(Loopback):
    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        return Garbling(transport, 1e-4, rate.bytes_per_second)


@pytest.fixture(scope="module")
def settings() -> Iterator[SelectionSettings]:
    """Return settings with a model of one layer, so that links dominate."""
    torch.manual_seed(0)
    with with_layers("builtin:tiny", 1) as model:
        yield SelectionSettings(
            model=str(model),
            ranks=(2,),
            rates=(SLOW,),
            cells=(SHORT, LONG),
            fit_cells=FIT_CELLS,
            rounds=1,
            has_tensor=True,
        )


@pytest.fixture(scope="module")
def report(settings: SelectionSettings) -> SelectionReport:
    names: list[str] = []
    shown: list[SelectionReport] = []
    report = measure_selection(settings, lambda num_ranks: DelayedLinks(), names.append, shown.append)
    assert len(names) == settings.num_measurements
    assert shown == [report], "one rate"
    return report


@pytest.mark.slow
def test_auto_chooses_by_what_it_predicts_and_is_judged_by_what_was_measured(report: SelectionReport) -> None:
    (ring,) = report.rings
    assert (ring.ranks, ring.rate) == (2, SLOW)
    short, long = ring.cells
    assert (short.cell, long.cell) == (SHORT, LONG)
    for cell in ring.cells:
        assert cell.predicted[cell.chosen["auto"]] <= 1.02 * min(cell.predicted.values()), "a tie, or the fastest"
        assert cell.medians[cell.best] == min(cell.medians.values())
    losses = {score.name: score.loss for score in ring.scores}
    assert losses["best of each cell"] == 0.0
    assert min(losses.values()) == 0.0
    assert min(long.seconds["pass_kv"]) > LONG_PASS_KV_SECONDS, "a prefix of 1500 tokens went through the link"
    # Load on the machine only slows a link.
    assert 0 < ring.measured.link_bytes_per_second < 1.05 * SLOW.bytes_per_second


@pytest.mark.slow
def test_ranks_that_share_the_weights_are_measured_beside_those_that_share_the_tokens(report: SelectionReport) -> None:
    ((cell,),) = (ring.tensor for ring in report.rings)
    assert cell.new_tokens == SHORT.new_tokens
    assert cell.over_pass_kv > 0.0
    assert 0.0 < cell.ntp_waits < 1.0
    assert 0.0 < cell.waits < 1.0


@pytest.mark.slow
def test_both_algorithms_gave_the_same_outputs(report: SelectionReport) -> None:
    assert report.disagreements == ()
    assert any("the same logits and tokens" in line for line in closing_lines(report))


@pytest.mark.slow
def test_a_ring_whose_algorithms_disagree_is_names(settings: SelectionSettings) -> None:
    garbled = measure_selection(replace(settings, rates=(parse_rate("1gbit"),)), lambda num_ranks: GarblingLinks())
    assert garbled.disagreements
    assert all("were sampled after the same prompt" in text for text in garbled.disagreements)
    assert any("the algorithms DISAGREE: 2 ranks, " in line for line in closing_lines(garbled))


@pytest.mark.parametrize(
    ("most", "largest", "is_same"), [(1e-6, 1.0, True), (1e-2, 1.0, False), (float("nan"), 1.0, False), (0, 0, True)]
)
def test_logits_may_differ_by_rounding_and_never_be_nan(most: float, largest: float, is_same: bool) -> None:
    assert Difference(most=most, largest=largest).is_rounding is is_same


@pytest.mark.slow
def test_the_report_is_a_table_json_and_a_picture(report: SelectionReport, tmp_path: Path) -> None:
    assert losses_table(report).row_count == len(report.rings[0].scores)
    assert predictions_table(report).row_count == 2
    assert "fit " in ring_lines(report)[0]
    assert gains_table(report).row_count == 2
    (ring,) = report.rings
    short, long = (replace(cell, chosen={"auto": cell.best}) for cell in ring.cells)
    assert wrong_table(replace(report, rings=(replace(ring, cells=(short, long)),))) is None
    wrong = replace(ring, cells=(short, replace(long, chosen={"auto": "pass_kv"})))
    table = wrong_table(replace(report, rings=(wrong,)))
    assert table is not None
    assert table.row_count == 1, "the long one"
    found = json.loads(selection_json(report))["rings"][0]
    assert (found["rate"], len(found["cells"]), found["cells"][0]["cell"]["new_tokens"]) == ("8mbit", 2, 96)
    assert len(found["rows"]) == 3 * len(FIT_CELLS), "what was fitted is there to be fitted anew"
    write_selection_plot(report, tmp_path / "selection.png")
    assert (tmp_path / "selection.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot: cannot write"):
        write_selection_plot(report, tmp_path / "nowhere" / "selection.png")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_an_interrupted_bench_has_printed_the_rates_that_it_finished(
    report: SelectionReport,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(settings: SelectionSettings, tell: Tell, show: Show) -> SelectionReport:
        show(report)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM interrupts")

    monkeypatch.setattr("bench.selection.measure.measured_in_namespaces", measured)
    assert main(["selection", *arguments]) == EXIT_INTERRUPTED
    printed = capsys.readouterr().out
    if arguments:
        assert len(json.loads(printed)["rings"]) == 1
    else:
        assert "way to choose" in printed
        assert "auto loses" in printed


# --- in namespaces ---------------------------------------------------------------------------------------------------


def why_no_namespaces() -> str:
    """Return why this machine makes no namespaces, or an empty text."""
    try:
        isolation()
    except Unavailable as refusal:
        return str(refusal)
    return ""


def is_refused(settings: SelectionSettings) -> bool:
    """Return True if namespaces are refused, after checking the reason and that nothing was measured."""
    require("ip")
    require("tc")
    why, names = why_no_namespaces(), list[str]()
    if not why:
        return False
    assert why.endswith("run it as root")
    with pytest.raises(Unavailable, match=re.escape(why)):
        measured_in_namespaces(settings, names.append)
    assert names == []
    return True


@pytest.mark.slow
def test_ranks_in_namespaces_meet_on_links_of_the_rate_or_the_refusal_names_root(
    settings: SelectionSettings,
) -> None:
    own_devices, own_children = sorted(os.listdir("/sys/class/net")), psutil.Process().children(recursive=True)
    names: list[str] = []
    if is_refused(settings):
        return
    shown: list[SelectionReport] = []
    report = measured_in_namespaces(settings, names.append, shown.append)
    assert shown == [report]
    assert len(names) == settings.num_measurements
    assert report.disagreements == ()
    (ring,) = report.rings
    assert 0 < ring.measured.link_bytes_per_second < 1.05 * SLOW.bytes_per_second
    by_cell = {cell.cell: cell for cell in ring.cells}
    assert min(by_cell[LONG].seconds["pass_kv"]) > LONG_PASS_KV_SECONDS
    assert sorted(os.listdir("/sys/class/net")) == own_devices
    assert psutil.Process().children(recursive=True) == own_children


@pytest.mark.slow
def test_an_interrupted_or_refused_measurement_leaves_nothing_running(settings: SelectionSettings) -> None:
    own_children = psutil.Process().children(recursive=True)
    running: list[psutil.Process] = []

    def interrupt(what: str) -> None:
        running.extend(each for each in psutil.Process().children(recursive=True) if each not in own_children)
        raise KeyboardInterrupt

    if is_refused(settings):
        assert psutil.Process().children(recursive=True) == own_children
        return
    with pytest.raises(KeyboardInterrupt):
        measured_in_namespaces(settings, interrupt)
    assert len(running) >= 3, "the measuring process and two ranks"
    # They are children of the measuring process, so they are polled.
    _, alive = psutil.wait_procs(running, timeout=WAIT_SECONDS)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--ranks", "1"), "--ranks: '1' is no size of a ring with links; allowed are 2 to 16"),
        (("--rates", "fast"), "--rates: 'fast' is no rate"),
        (("--new", "0"), "--new: '0' is not a number of tokens"),
        (("--new", "32", "--cached", "0"), "--new, --cached: 32 tokens after 0 are also a cell of --fit-new"),
        (("--rounds", "0"), "--rounds: 0 is out of range; allowed are 1 or more"),
        (
            ("--cached", "9m"),
            "--new, --cached: 9000768 tokens are too long for builtin:tiny; allowed are at most 131072",
        ),
        (("--model", "builtin:none"), "there is no builtin model 'none'"),
        (("--plot", "/nowhere/at/all.png"), "--plot: /nowhere/at/all.png cannot be written, its directory"),
    ],
)
def test_wrong_option_is_refused_in_one_sentence_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main(["selection", *arguments]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"bench: {sentence}")
