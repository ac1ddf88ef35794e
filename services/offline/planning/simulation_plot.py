"""A picture of simulated runs: what clients wait for, by the hour and by the size of their turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.offline.bench.plot import save_figure
from services.offline.simulator.results import SimulationResult


def write_simulation_plot(results: Sequence[SimulationResult], path: Path) -> None:
    """A line for each placement. Hours and sizes without a turn are left out. Raises ConfigError for the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    by_hour, by_size = figure.subplots(1, 2, sharey=True)
    for result in results:
        hours = [(hour, each) for hour, each in enumerate(result.ttft_of_hour) if each.count]
        sizes = [(name, each) for name, each in result.ttft_of_size.items() if each.count]
        (line,) = by_hour.plot([hour for hour, _ in hours], [each.p99 for _, each in hours], label=result.placement)
        names = [name for name, _ in sizes]
        color = line.get_color()
        by_size.plot(names, [each.p99 for _, each in sizes], marker="o", color=color, label=f"{result.placement} p99")
        by_size.plot(names, [each.p50 for _, each in sizes], marker="o", color=color, linestyle="--")
    by_hour.set(xlabel="hour in which a turn was asked", ylabel="TTFT in seconds, p99", yscale="log")
    by_size.set(xlabel="new tokens of the turn (dashed: p50)", yscale="log")
    for axes in (by_hour, by_size):
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    save_figure(figure, path)
