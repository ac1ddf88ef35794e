"""Reports of measured losses of sparse prefills: a table, a JSON object, a plot. `ringserve calibrate` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.table import Table

from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses
from ringserve.services.offline.calibration.sparse import Result
from ringserve.services.offline.reports import save_figure
from ringserve.services.offline.terminal import simple_table


def losses_table(losses: SparseLosses) -> Table:
    """Return a table with a line for each length and share of keys."""
    headers = ("tokens", "ranks", "keep", "loss, nats", "right", "right if exact", "questions")
    title = f"losses of {losses.model}: KL divergence of answer tokens from exact attention"
    table = simple_table(*headers, title=title)
    for each in losses.measured:
        table.add_row(
            str(each.num_tokens),
            str(each.num_ranks),
            f"{each.keep:g}",
            f"{each.loss:.4f}",
            f"{each.accuracy:.0%}",
            f"{each.exact_accuracy:.0%}",
            str(each.num_questions),
        )
    return table


def losses_json(losses: SparseLosses, results: Sequence[Result]) -> str:
    """Format one JSON object: the mean losses, and the result of every question."""
    return json.dumps({**asdict(losses), "questions": [asdict(each) for each in results]})


def write_losses_plot(losses: SparseLosses, results: Sequence[Result], path: Path) -> None:
    """Draw loss and answered questions over the share of keys, and loss over depth.

    Raises ConfigError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.4), layout="constrained")
    ranks = losses.measured[0].num_ranks
    figure.suptitle(f"Sparse prefill of {losses.model} on {ranks} ranks: distance from exact attention")
    keeps = sorted({each.keep for each in losses.measured})
    by_keep = figure.add_subplot(1, 3, 1, xlabel="share of other ranks' keys", ylabel="loss, nats a token")
    answered = figure.add_subplot(1, 3, 2, xlabel="share of other ranks' keys", ylabel="questions answered")
    by_depth = figure.add_subplot(1, 3, 3, xlabel="depth of the answer in the text", ylabel="loss, nats a token")
    for index, num_tokens in enumerate(sorted({each.num_tokens for each in losses.measured})):
        line = sorted(_of_length(losses, num_tokens), key=lambda each: each.keep)
        color, label = f"C{index}", f"{num_tokens} tokens"
        shares = [each.keep for each in line]
        by_keep.plot(shares, [each.loss for each in line], "o-", color=color, label=label)
        answered.plot(shares, [each.accuracy for each in line], "o-", color=color, label=label)
        answered.axhline(line[0].exact_accuracy, color=color, linestyle=":", alpha=0.6)
    for index, keep in enumerate(keeps):
        depths = sorted({each.depth for each in results})
        means = [fmean(each.loss for each in results if (each.keep, each.depth) == (keep, depth)) for depth in depths]
        by_depth.plot(depths, means, "o-", color=f"C{index + 3}", label=f"keep {keep:g}")
    for axes in (by_keep, answered):
        axes.set_xscale("log", base=2)
        axes.set_xticks(keeps, [f"{keep:g}" for keep in keeps])
    for axes in (by_keep, by_depth):
        axes.set_yscale("log")
    answered.set_ylim(-0.05, 1.05)
    answered.set_title("dotted: exact attention", fontsize=9)
    for axes in (by_keep, answered, by_depth):
        axes.grid(True, alpha=0.3)
    by_keep.legend(fontsize=8)
    answered.legend(fontsize=8)
    by_depth.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # no corner is free of lines
    save_figure(figure, path)


def _of_length(losses: SparseLosses, num_tokens: int) -> list[MeasuredLoss]:
    return [each for each in losses.measured if each.num_tokens == num_tokens]
