"""Parts of reports on measurements and plans: the summary of a sample, and plots. matplotlib is an extra.

Commands and benchmarks use them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Summary of `count` values, in their unit; zeros without any. Percentiles interpolate between two values.

    `Summary.of([4.0, 1.0, 2.0]).p50` is 2.0.
    """

    count: int
    mean: float
    least: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Summary:
        """Summarize values in any order, each multiplied by `scale`."""
        if not len(values):
            return cls(count=0, mean=0.0, least=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, most=0.0)
        scaled = np.asarray(values, dtype=np.float64) * scale
        least, p50, p90, p95, p99, most = (float(value) for value in np.percentile(scaled, (0, 50, 90, 95, 99, 100)))
        mean = float(scaled.mean())
        return cls(count=len(scaled), mean=mean, least=least, p50=p50, p90=p90, p95=p95, p99=p99, most=most)


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of above[i] / below[i], measured in one round each, so that a slow machine slows both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def load_now() -> float:
    """Return the machine's 1-minute load."""
    return os.getloadavg()[0]


def require_matplotlib() -> None:
    """Raise ConfigError without matplotlib, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'ringserve[plot]'")


def plain_seconds(axis: Axis) -> None:
    """Mark a logarithmic axis of seconds at 1, 2 and 5 of each power, in words such as 50 ms and 20 s."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    axis.set_minor_locator(NullLocator())


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure. Raises ConfigError if `path` cannot be written."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot write {path}: {error}") from error
