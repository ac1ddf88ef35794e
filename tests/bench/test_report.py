"""Plot of a report."""

from pathlib import Path

import pytest

from bench.report import Report, Row, write_plot
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.reports import Summary

ROWS = tuple(
    Row(name="ring", ranks=ranks, tokens=tokens, seconds=Summary.of([tokens / ranks]))
    for ranks in (1, 2)
    for tokens in (1024, 4096)
)
REPORT = Report(bench="prefill", settings="a model", rows=ROWS, targets=())


def test_plot_is_written_as_a_png(tmp_path: Path) -> None:
    path = tmp_path / "figures.png"
    write_plot(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_that_cannot_be_written_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "figures.png"
    with pytest.raises(ConfigError, match=f"--plot: cannot write {path}"):
        write_plot(REPORT, path)
