"""Figures 6 to 9 of arXiv 2411.01783 redrawn, for `bench papers --plot`. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.papers.published import TP, full_prefills, published_model, table_4
from bench.papers.reproduction import reproduce
from ringserve.cp_core.cost.model import PASS_KV
from ringserve.cp_core.cost.prefill import predict_turn
from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.planning.figures import log_seconds, log_tokens, new_figure
from ringserve.services.offline.reports import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTEXTS = tuple(2_000 * 2**step for step in range(7))
LONG_CONTEXTS = (128_000, 256_000, 512_000, 1_000_000)
HOSTS = (1, 2, 4, 8)
FULL = 128_000


def write_published_figures(directory: Path) -> list[Path]:
    """Write four PNG files into `directory`, which is created. Lines are predictions, crosses published times."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot: cannot make the directory {directory}: {error}") from error
    drawn: dict[str, Callable[[], Figure]] = {
        "figure-6-latency.png": _latency,
        "figure-7-scaling.png": _scaling,
        "figure-8-long-contexts.png": _long_contexts,
        "figure-9-pass-kv-over-pass-q.png": _speed_ratio,
    }
    written = []
    for name, draw in drawn.items():
        save_figure(draw(), directory / name)
        written.append(directory / name)
    return written


def _latency() -> Figure:
    """Draw figure 6: full prefill on both platforms."""
    figure = new_figure(11.0, 4.8, "Llama 3 405B, full prefill by pass-KV, TP8 a rank (as figure 6)")
    for place, (platform, rings) in enumerate({"gtt": HOSTS, "gti": (1, 2, 4)}.items(), start=1):
        profile = read_profile(platform)
        axes = figure.add_subplot(1, 2, place, title=f"{platform.upper()}", xlabel="context, tokens", ylabel="TTFT")
        for number, cp in enumerate(rings):
            color = f"C{number}"
            axes.plot(CONTEXTS, [_full(profile, cp, TP, each) for each in CONTEXTS], color=color, label=f"CP{cp}")
            if platform == "gtt":
                _crosses(axes, cp, TP, color, CONTEXTS[-1])
        log_tokens(axes, CONTEXTS)
        log_seconds(axes)
        axes.legend()
    return figure


def _scaling() -> Figure:
    """Draw figure 7: scaling over hosts, by context parallelism and by tensor parallelism."""
    profile = read_profile("gtt")
    figure = new_figure(6.5, 4.8, "Latency of one host over that of N, 128K tokens (as figure 7)")
    axes = figure.add_subplot(xlabel="hosts of 8 GPUs", ylabel="scaling ratio")
    alone = _full(profile, 1, TP, FULL)
    published = {
        (row.sample.cp, row.sample.tp): row.sample.seconds for row in full_prefills() if row.sample.new_tokens == FULL
    }
    axes.plot(HOSTS, HOSTS, color="grey", linestyle=":", label="perfect")
    for color, name, sizes in (
        ("C0", "context parallel", [(hosts, TP) for hosts in HOSTS]),
        ("C1", "tensor parallel", [(1, hosts * TP) for hosts in HOSTS]),
    ):
        ratios = [alone / _full(profile, cp, tp, FULL) for cp, tp in sizes]
        axes.plot(HOSTS, ratios, marker="o", color=color, label=f"{name}, predicted")
        known = [(cp * tp // TP, published[1, TP] / published[cp, tp]) for cp, tp in sizes if (cp, tp) in published]
        axes.plot(*zip(*known, strict=True), "x", color=color, markersize=9, label=f"{name}, published")
    axes.set_xticks(HOSTS)
    axes.grid(True, alpha=0.3)
    axes.legend()
    return figure


def _long_contexts() -> Figure:
    """Draw figure 8: 128K to 1M tokens on 8 and 16 hosts."""
    profile = read_profile("gtt")
    figure = new_figure(6.5, 4.8, "TTFT of 128K to 1M tokens (as figure 8)")
    axes = figure.add_subplot(xlabel="context, tokens", ylabel="TTFT")
    for color, cp in (("C0", 8), ("C1", 16)):
        seconds = [_full(profile, cp, TP, each) for each in LONG_CONTEXTS]
        axes.plot(LONG_CONTEXTS, seconds, marker="o", color=color, label=f"CP{cp}")
        _crosses(axes, cp, TP, color, LONG_CONTEXTS[-1])
    log_tokens(axes, LONG_CONTEXTS)
    log_seconds(axes)
    axes.legend()
    return figure


def _speed_ratio() -> Figure:
    """Draw figure 9: pass-Q's time over pass-KV's, by miss rate, with the shipped profile."""
    rows = [row for row in reproduce().prefills if row.table == "4"]
    misses = [row.sample.new_tokens / (row.sample.new_tokens + row.sample.cached_tokens) for row in table_4()[::2]]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    figure = new_figure(6.5, 4.8, "128K tokens on CP4 by KV cache miss rate (as figure 9)")
    axes = figure.add_subplot(xlabel="miss rate T / (T + P)", ylabel="pass-Q time / pass-KV time")
    axes.plot(misses, [q.predicted / kv.predicted for kv, q in pairs], marker="o", label="predicted")
    axes.plot(misses, [q.published / kv.published for kv, q in pairs], "x", markersize=9, label="published")
    axes.axhline(1.0, color="grey", linestyle=":")
    axes.set_xscale("log")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    return figure


def _crosses(axes: Axes, cp: int, tp: int, color: str, most: int) -> None:
    """Mark the published full prefills of `cp` and `tp`, up to `most` tokens."""
    known = [
        (row.sample.new_tokens, row.sample.seconds)
        for row in full_prefills()
        if (row.sample.cp, row.sample.tp) == (cp, tp) and row.sample.new_tokens <= most
    ]
    if known:
        axes.plot(*zip(*known, strict=True), "x", color=color, markersize=9)


def _full(profile: HardwareProfile, cp: int, tp: int, tokens: int) -> float:
    model = published_model().shape
    return predict_turn(model, profile, cp=cp, tp=tp, algorithm=PASS_KV, new_tokens=tokens).total_seconds
