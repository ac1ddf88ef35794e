"""Plot of a report."""

from importlib import util
from pathlib import Path

import pytest

from bench.figures import Figures
from bench.report import Report, Row, write_plot
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.reports import require_matplotlib

ROWS = tuple(
    Row(name="ring", ranks=ranks, tokens=tokens, seconds=Figures(tokens / ranks, tokens / ranks, tokens / ranks, 1))
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


def test_missing_matplotlib_is_one_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ringserve.services.offline.reports.find_spec",
        lambda name: None if name == "matplotlib" else util.find_spec(name),
    )
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib; install it with: pip install 'ringserve\[plot\]'"):
        require_matplotlib()
