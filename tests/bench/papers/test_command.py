"""`python -m bench papers`: rows, targets and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main


def test_reproduction_prints_row_by_row_and_says_which_targets_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["papers"]) == 0
    shown = capsys.readouterr().out
    assert "CP16+TP8 T=1000000" in shown
    assert "TTFT, first half by the second, rms: 0.034, at most 0.05: met" in shown
    assert "Table 8, its other columns, rms: 0.136, at most 0.05: MISSED" in shown
    assert main(["papers", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["prefills"]) == 40


def test_figures_like_the_papers_are_written(tmp_path: Path) -> None:
    assert main(["papers", "--plot", str(tmp_path / "figures")]) == 0
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert [name[:8] for name in written] == ["figure-6", "figure-7", "figure-8", "figure-9"]
    assert all((tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in written)


def test_figures_need_a_place_to_write_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["papers", "--plot", str(file / "figures")]) == 1
    assert "--plot: cannot make the directory" in capsys.readouterr().err
