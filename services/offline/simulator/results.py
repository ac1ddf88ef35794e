"""Results of a simulated run: a tally of millions of turns in plain arrays, its percentiles, and their plot.

The simulation fills the tally; `ringserve simulate` draws the plot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringserve.services.offline.reports import Summary, plain_seconds, save_figure
from ringserve.services.offline.units import format_tokens

SIZES = {"short": 8_000, "document": 250_000, "longest": 1 << 62}
"""Most new tokens of a turn in each class of size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """Finished turn.

    `asked` is when the turn was first sent. From then, `queue_seconds` are those until its first prefill step, less the
    fetch of KV, and `ttft_seconds` those until its first token. `decode_seconds` run from its admission to the decode
    ring until its last token. `new_tokens` of the prompt were never computed before. Of the tokens before them
    `moved_tokens` came from another ring, `recomputed_tokens` were computed again, and the other tokens were cached.
    """

    asked: float
    queue_seconds: float
    ttft_seconds: float
    decode_seconds: float
    prompt_tokens: int
    new_tokens: int
    moved_tokens: int
    recomputed_tokens: int
    output_tokens: int
    is_pass_q: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBin:
    """Turns that were asked from `start` until before `stop`, in seconds from the begin of the trace."""

    start: float
    stop: float
    values: Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Result of all turns of one placement.

    `cached_share` is of all prompt tokens, `busy_share` of the prefill rings' time, `batch_share` of the places in
    decode batches over the whole run, `pass_q_share` of the turns. `ttft_of_size` is by new tokens (`SIZES`),
    `ttft_over_time` by when a turn was first sent. `num_refusals` counts how often a ring refused a turn, for want of
    room for its KV or in its queue; `num_retries` how often a turn found no ring and asked again later.
    `computed_tokens` is the number of tokens that the prefill rings computed. `prefill_ring_seconds` and
    `decode_ring_seconds` are the seconds that rings of the role were on, summed over the rings.
    """

    placement: str
    scaling: str
    num_turns: int
    num_refusals: int
    num_retries: int
    simulated_seconds: float
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    moved_tokens: int
    recomputed_tokens: int
    cached_share: float
    pass_q_share: float
    ttft: Summary
    queue: Summary
    ttft_of_size: dict[str, Summary]
    ttft_over_time: tuple[TimeBin, ...]
    ttit_mean: float
    busy_share: float
    busiest_share: float
    batch_share: float
    largest_batch: int
    prefill_ring_seconds: float
    decode_ring_seconds: float


@dataclass(slots=True)
class Tally:
    """Tally of the turns that have ended. `ttft_in_order` has the TTFT of each turn in the order of `asked`."""

    ttft: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in SIZES})
    queue: array[float] = field(default_factory=lambda: array("d"))
    asked: array[float] = field(default_factory=lambda: array("d"))
    ttft_in_order: array[float] = field(default_factory=lambda: array("d"))
    num_refusals: int = 0
    num_retries: int = 0
    num_pass_q: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    decode_seconds: float = 0.0

    def note(self, record: TurnRecord) -> None:
        """Add a turn that has ended."""
        size = next(name for name, most in SIZES.items() if record.new_tokens <= most)
        self.ttft[size].append(record.ttft_seconds)
        self.queue.append(record.queue_seconds)
        self.asked.append(record.asked)
        self.ttft_in_order.append(record.ttft_seconds)
        self.num_pass_q += record.is_pass_q
        self.prompt_tokens += record.prompt_tokens
        self.new_tokens += record.new_tokens
        self.moved_tokens += record.moved_tokens
        self.recomputed_tokens += record.recomputed_tokens
        self.output_tokens += record.output_tokens
        self.decode_seconds += record.decode_seconds


MAX_BINS = 24
BIN_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
"""Lengths of a bin that read well on a clock."""


def bin_seconds(seconds: float) -> float:
    """Return the shortest length in BIN_SECONDS of which MAX_BINS bins cover `seconds`.

    If none is long enough, return the smallest number of whole days that is.
    """
    fitting = (length for length in BIN_SECONDS if seconds <= MAX_BINS * length)
    return float(next(fitting, BIN_SECONDS[-1] * -(-seconds // (MAX_BINS * BIN_SECONDS[-1]))))


def binned(asked: Sequence[float], values: Sequence[float]) -> tuple[TimeBin, ...]:
    """Return the values by the time at which their turns were asked, without empty bins."""
    length = bin_seconds(max(asked, default=0.0))
    found: dict[int, list[float]] = {}
    for time, value in zip(asked, values, strict=True):
        found.setdefault(int(time // length), []).append(value)
    return tuple(
        TimeBin(start=number * length, stop=(number + 1) * length, values=Summary.of(found[number]))
        for number in sorted(found)
    )


def write_simulation_plot(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw p50 and p99 of TTFT for each placement: lines over the time of the trace, and bars by size.

    Raises ConfigError if `path` cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    over_time, by_size = figure.subplots(1, 2, sharey=True)
    last = max((each.stop for result in results for each in result.ttft_over_time), default=1.0)
    unit, name = (3600.0, "hours") if last > 2 * 3600 else (60.0, "minutes") if last > 120 else (1.0, "seconds")
    sizes = [size for size in SIZES if any(result.ttft_of_size[size].count for result in results)]
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        color, bins = f"C{number}", result.ttft_over_time
        middles = [(each.start + each.stop) / 2 / unit for each in bins]
        over_time.plot(middles, [each.values.p99 for each in bins], "o-", color=color, label=f"{result.placement} p99")
        over_time.plot(middles, [each.values.p50 for each in bins], ".--", color=color, label=f"{result.placement} p50")
        places = [place + (number - (len(results) - 1) / 2) * width for place in range(len(sizes))]
        figures = [result.ttft_of_size[size] for size in sizes]
        by_size.bar(places, [each.p99 for each in figures], width, color=color, alpha=0.35)
        by_size.bar(places, [each.p50 for each in figures], width, color=color, label=result.placement)
    over_time.set(xlabel=f"{name} into the trace at which a turn was asked", ylabel="TTFT", yscale="log")
    over_time.set_xlim(0.0, last / unit)
    by_size.set(xlabel="new tokens of the turn; full colour to p50, pale to p99")
    by_size.set_xticks(range(len(sizes)), [_size_name(size) for size in sizes])
    plain_seconds(over_time.yaxis)
    for axes in (over_time, by_size):
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def _size_name(size: str) -> str:
    """Name a class of size with its bounds."""
    names = list(SIZES)
    place = names.index(size)
    low, high = SIZES[names[place - 1]] if place else 0, SIZES[size]
    if place == len(names) - 1:
        return f"{size}\nover {format_tokens(low)}"
    return f"{size}\nup to {format_tokens(high)}"
