"""Figures of `ringserve plan`, whose axes the figures of published papers use, too. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringserve.services.offline.planning.sizing import RingForecast
from ringserve.services.offline.reports import plain_seconds, save_figure
from ringserve.services.offline.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_plan_figure(title: str, forecasts: Sequence[RingForecast], path: Path) -> None:
    """Draw TTFT and TTIT over the context, one line for each ring that fits.

    Raises ConfigError if `path` cannot be written.
    """
    figure = new_figure(11.0, 4.8, title)
    for place, name in enumerate(("ttft_seconds", "ttit_seconds"), start=1):
        axes = figure.add_subplot(
            1, 2, place, xlabel="context, tokens", ylabel="TTFT" if name == "ttft_seconds" else "TTIT, seconds"
        )
        for forecast in forecasts:
            if not forecast.refusal:
                tokens = [context.tokens for context in forecast.contexts]
                seconds = [getattr(context, name) for context in forecast.contexts]
                axes.plot(tokens, seconds, marker="o", label=f"cp {forecast.shape.cp} x tp {forecast.shape.tp}")
        log_tokens(axes, sorted({context.tokens for each in forecasts for context in each.contexts}))
        # TTIT differs by little between rings, TTFT by orders of magnitude.
        if name == "ttft_seconds":
            log_seconds(axes)
        else:
            axes.set_ylim(bottom=0.0)
        axes.legend()
    save_figure(figure, path)


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure of this size, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def log_seconds(axes: Axes) -> None:
    """Make y a logarithmic axis of seconds."""
    axes.set_yscale("log")
    plain_seconds(axes.yaxis)


def log_tokens(axes: Axes, tokens: Sequence[int]) -> None:
    """Make x a logarithmic axis of tokens, marked at `tokens`."""
    axes.set_xscale("log")
    # Margins on both sides: a single size would give an axis of zero length.
    axes.set_xlim(tokens[0] / 1.3, tokens[-1] * 1.3)
    axes.set_xticks([], minor=True)
    axes.set_xticks(tokens, [format_tokens(count) for count in tokens])
    axes.grid(True, which="both", alpha=0.3)
