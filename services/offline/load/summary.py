"""Summary of a replayed trace: percentiles by kind, throughput, goodput under bounds, and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ringserve.services.offline.load.replay import OK, Outcome
from ringserve.services.offline.reports import Summary, plain_seconds, save_figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Goodput bounds, in seconds: the TTFT of a request, and the mean of its TTIT."""

    ttft: float
    ttit: float

    def are_met(self, outcome: Outcome) -> bool:
        return (
            outcome.status == OK
            and outcome.ttft is not None
            and outcome.ttft <= self.ttft
            and outcome.ttit <= self.ttit
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSummary:
    """Summary of the requests of one kind, or of `all`.

    `ttit` is over every gap between two tokens, `lag` the delay of sending. `statuses` counts the outcomes; `good` is
    the share of the sent requests that met both bounds.
    """

    kind: str
    requests: int
    statuses: dict[str, int]
    ttft: Summary
    ttit: Summary
    queue: Summary
    lag: Summary
    good: float


FIRST_TURNS = 10
"""Number of first turns that `PredictionErrors` counts apart: later turns are predicted with corrections by these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionErrors:
    """Medians of |predicted over measured - 1| of prefill seconds: of the first turns, and of all later ones."""

    first: float
    later: float | None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> PredictionErrors | None:
        """Return the errors over successful turns with a predicted and a measured prefill; None if there are none."""
        in_time = sorted(
            (each for each in outcomes if each.status == OK and min(each.prefill) > 0), key=lambda each: each.sent
        )
        errors = [abs(predicted / measured - 1.0) for predicted, measured in (each.prefill for each in in_time)]
        if not errors:
            return None
        later = errors[FIRST_TURNS:]
        return cls(first=median(errors[:FIRST_TURNS]), later=median(later) if later else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Load report; rates are over the `seconds` from the first request sent to the last one ended.

    `load` is the machine's 1-minute load before and after the run.
    """

    settings: str
    seconds: float
    requests_per_second: float
    good_requests_per_second: float
    prompt_tokens_per_second: float
    completion_tokens_per_second: float
    bounds: Bounds
    kinds: tuple[KindSummary, ...]
    notes: tuple[str, ...] = ()
    load: tuple[float, float] = (0.0, 0.0)
    cached_share: float = 0.0
    predictions: PredictionErrors | None = None


def summarize(
    outcomes: Sequence[Outcome], bounds: Bounds, settings: str, load: tuple[float, float] = (0.0, 0.0)
) -> LoadReport:
    """Summarize `outcomes`, of which there must be at least one."""
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    done = [outcome for outcome in outcomes if outcome.status == OK]
    num_prompt = sum(outcome.arrival.prompt_tokens for outcome in done)
    names = sorted({outcome.arrival.kind for outcome in outcomes})
    by_kind = {name: [each for each in outcomes if each.arrival.kind == name] for name in names}
    if len(by_kind) > 1:
        by_kind["all"] = list(outcomes)
    return LoadReport(
        settings=settings,
        seconds=seconds,
        requests_per_second=len(done) / seconds,
        good_requests_per_second=sum(map(bounds.are_met, outcomes)) / seconds,
        prompt_tokens_per_second=num_prompt / seconds,
        completion_tokens_per_second=sum(outcome.num_tokens for outcome in outcomes) / seconds,
        bounds=bounds,
        kinds=tuple(_summary(name, of_kind, bounds) for name, of_kind in by_kind.items()),
        notes=tuple(
            f"{status}, for example: {reason}"
            for status, reason in sorted({each.status: each.reason for each in reversed(outcomes)}.items())
            if reason
        ),
        load=load,
        predictions=PredictionErrors.of(outcomes),
        cached_share=sum(each.cached_tokens for each in done) / max(1, num_prompt),
    )


def _summary(kind: str, outcomes: Sequence[Outcome], bounds: Bounds) -> KindSummary:
    return KindSummary(
        kind=kind,
        requests=len(outcomes),
        statuses=dict(Counter(outcome.status for outcome in outcomes)),
        ttft=Summary.of([outcome.ttft for outcome in outcomes if outcome.ttft is not None]),
        ttit=Summary.of([gap for outcome in outcomes for gap in outcome.gaps]),
        queue=Summary.of([outcome.queue for outcome in outcomes if outcome.status == OK]),
        lag=Summary.of([outcome.sent - outcome.arrival.at for outcome in outcomes]),
        good=sum(map(bounds.are_met, outcomes)) / len(outcomes),
    )


def write_load_plot(report: LoadReport, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw TTFT over the time of arrival, and the distributions of TTFT and of gaps between tokens.

    Raises ConfigError if `path` cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.5), layout="constrained")
    figure.suptitle(f"load: {report.settings}")
    over_time, first, between = figure.subplots(1, 3)
    over_time.set(xlabel="arrival, s", ylabel="TTFT", yscale="log")
    first.set(xlabel="TTFT", ylabel="share of requests", xscale="log")
    between.set(xlabel="time between tokens", ylabel="share of tokens", xscale="log")
    for kind in sorted({outcome.arrival.kind for outcome in outcomes}):
        served = [each for each in outcomes if each.arrival.kind == kind and each.ttft is not None]
        times = [each.ttft for each in served if each.ttft is not None]
        over_time.plot([each.arrival.at for each in served], times, ".", label=kind)
        for axes, values in ((first, times), (between, [gap for each in served for gap in each.gaps])):
            if values:
                axes.ecdf(values, label=kind)
    for axis in (over_time.yaxis, first.xaxis, between.xaxis):
        plain_seconds(axis)
    for axes in (first, between):
        axes.tick_params(axis="x", rotation=45)
    for axes in (over_time, first, between):
        axes.grid(True, which="both", alpha=0.3)
    over_time.legend()
    save_figure(figure, path)
