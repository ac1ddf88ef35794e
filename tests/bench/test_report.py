"""A report as a table, as JSON and as a plot."""

import json
import os
import signal
from pathlib import Path

import pytest

from bench.report import LINES, Report, Row, interrupted_by_sigterm, progress_lines, table
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.reports import Summary

ROWS = tuple(
    Row(keys={"tokens": tokens, "what": "ring", "ranks": ranks}, figures={"seconds": Summary.of([tokens / ranks])})
    for ranks in (1, 2)
    for tokens in (1024, 4096)
)
REPORT = Report(bench="prefill", settings="a model", rows=ROWS, targets=())


def test_plot_is_written_as_a_png(tmp_path: Path) -> None:
    path = tmp_path / "figures.png"
    REPORT.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_that_cannot_be_written_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "figures.png"
    with pytest.raises(ConfigError, match=f"--plot: cannot write {path}"):
        REPORT.plot(path)


def test_a_table_has_keys_then_figures_and_no_empty_column() -> None:
    row = Row(
        keys={"tokens": 8, "what": "ring"},
        figures={
            "seconds": Summary.of([0.001, 0.002, 0.009]),
            "speedup": None,
            "bytes_sent": 2.5e6,
            "wait_seconds": 1.0,
        },
    )
    assert row.cells() == {
        "tokens": "8",
        "what": "ring",
        "median ms": "2.00",
        "least": "1.00",
        "most": "9.00",
        "over 1": "",
        "sent MB": "2.50",
    }
    headers = [column.header for column in table([row.cells()]).columns]
    assert headers == ["tokens", "what", "median ms", "least", "most", "sent MB"]


def test_json_has_a_row_as_one_object() -> None:
    report = json.loads(REPORT.json())
    assert report["bench"] == "prefill"
    assert [(row["what"], row["ranks"], row["tokens"]) for row in report["rows"][:1]] == [("ring", 1, 1024)]
    assert report["rows"][0]["seconds"]["p50"] == 1024.0


@pytest.mark.parametrize(("total", "num_lines"), [(1, 1), (7, 7), (LINES, LINES), (997, LINES)])
def test_progress_without_a_terminal_is_some_lines_of_which_the_last_says_all(
    total: int, num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_lines(total) as tell:
        for number in range(total):
            tell(f"measurement {number}")
    written = capsys.readouterr().err.splitlines()
    assert len(written) == num_lines
    assert written[-1] == f"{total} of {total}: measurement {total - 1}"


def test_sigterm_interrupts_inside_the_context_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
