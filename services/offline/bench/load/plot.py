"""A picture of a replayed trace. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.offline.bench.load.replay import Outcome
from services.offline.bench.load.summary import LoadReport
from services.offline.bench.plot import save_figure


def write_load_plot(report: LoadReport, outcomes: Sequence[Outcome], path: Path) -> None:
    """Time to first token over the time of arrival, and how large a share of requests and tokens waited how long.

    Raises ConfigError for the path.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.5), layout="constrained")
    figure.suptitle(f"load: {report.settings}")
    over_time, first, between = figure.subplots(1, 3)
    over_time.set(xlabel="arrival, s", ylabel="TTFT, s", yscale="log")
    first.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
    between.set(xlabel="time between tokens, s", ylabel="share of tokens", xscale="log")
    for kind in sorted({outcome.arrival.kind for outcome in outcomes}):
        served = [each for each in outcomes if each.arrival.kind == kind and each.ttft is not None]
        times = [each.ttft for each in served if each.ttft is not None]
        over_time.plot([each.arrival.at for each in served], times, ".", label=kind)
        for axes, values in ((first, times), (between, [gap for each in served for gap in each.gaps])):
            if values:
                axes.ecdf(values, label=kind)
    for axes in (over_time, first, between):
        axes.grid(True, which="both", alpha=0.3)
    over_time.legend()
    save_figure(figure, path)
