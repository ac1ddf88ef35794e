"""Results of a simulated run: a tally of millions of turns in plain arrays, its percentiles, and their plot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.offline.bench.report import save_figure

HOUR = 3600.0
SIZES = {"short": 8_000, "document": 250_000, "longest": 1 << 62}
"""Most new tokens of a turn in each class of size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """Finished turn.

    `asked` is the time of its first request; `queue_seconds` run until its first step, without the fetch of KV;
    `ttft_seconds` until its first token, `decode_seconds` on the decode ring until its last. `new_tokens` of the prompt
    were never computed before.
    Of the tokens before them `moved_tokens` came from the decode ring, `recomputed_tokens` were computed again, and
    the other tokens were cached.
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
class Percentiles:
    """Percentiles of `count` values, in seconds; zeros without any."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Result of all turns of one placement.

    `cached_share` is of all prompt tokens, `busy_share` of the prefill rings' time, `batch_share` of the places in
    decode batches over the whole run, `pass_q_share` of the turns. `ttft_of_size` is by new tokens (`SIZES`),
    `ttft_of_hour` by the hour of a turn's first request. `num_refusals` counts rings without room for a turn,
    `num_retries` turns that found no ring and asked again. `computed_tokens` are those of the rings' steps.
    """

    placement: str
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
    ttft: Percentiles
    queue: Percentiles
    ttft_of_size: dict[str, Percentiles]
    ttft_of_hour: tuple[Percentiles, ...]
    ttit_mean: float
    busy_share: float
    busiest_share: float
    batch_share: float
    largest_batch: int


@dataclass(slots=True)
class Tally:
    """Tally of the turns that have ended."""

    ttft: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in SIZES})
    queue: array[float] = field(default_factory=lambda: array("d"))
    hours: list[array[float]] = field(default_factory=list)
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
        hour = int(record.asked // HOUR)
        while len(self.hours) <= hour:
            self.hours.append(array("d"))
        self.hours[hour].append(record.ttft_seconds)
        self.num_pass_q += record.is_pass_q
        self.prompt_tokens += record.prompt_tokens
        self.new_tokens += record.new_tokens
        self.moved_tokens += record.moved_tokens
        self.recomputed_tokens += record.recomputed_tokens
        self.output_tokens += record.output_tokens
        self.decode_seconds += record.decode_seconds


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the percentiles of values in any order."""
    if not values:
        return Percentiles(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, most=0.0)
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(
        count=len(ordered), mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, most=ordered[-1]
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ascending values that `share` of them do not exceed."""
    place = max(0, -(-int(share * len(ordered) * 1_000_000) // 1_000_000) - 1)
    return ordered[place]


def write_simulation_plot(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw TTFT by hour and by size, a line for each placement, without empty hours and sizes.

    Raises ConfigError for the path.
    """
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
