"""Summary of a sample, ratios of paired samples, and the extra that plots need."""

from importlib import util

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.reports import Summary, paired_ratio, require_matplotlib


def test_a_summary_has_percentiles_of_values_in_any_order() -> None:
    summary = Summary.of([float(value) for value in reversed(range(101))])
    assert summary == Summary(count=101, mean=50.0, least=0.0, p50=50.0, p90=90.0, p95=95.0, p99=99.0, most=100.0)
    assert Summary.of([0.004, 0.001, 0.002], 1e3).p50 == 2.0
    assert Summary.of([3.0]) == Summary(count=1, mean=3.0, least=3.0, p50=3.0, p90=3.0, p95=3.0, p99=3.0, most=3.0)


def test_a_summary_of_nothing_is_zeros() -> None:
    assert Summary.of([]) == Summary(count=0, mean=0.0, least=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, most=0.0)


def test_a_paired_ratio_is_not_moved_by_a_machine_that_slows_down_for_both() -> None:
    assert paired_ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == 2.0


def test_missing_matplotlib_is_one_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ringserve.services.offline.reports.find_spec",
        lambda name: None if name == "matplotlib" else util.find_spec(name),
    )
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib; install it with: pip install 'ringserve\[plot\]'"):
        require_matplotlib()
