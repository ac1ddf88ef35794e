"""Measuring several things in turn, round after round, so that a machine that drifts drifts under all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.offline.bench.figures import Figures
from services.offline.bench.sample import Sample


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be measured. `run` answers with one sample a rank."""

    name: str
    ranks: int
    run: Callable[[], list[Sample]]


@dataclass(slots=True)
class Series:
    """The samples of one contender, one entry a round. A ring is as slow as its slowest rank."""

    contender: Contender
    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [max(sample.seconds for sample in ranks) for ranks in self.rounds]

    @property
    def cpu_seconds(self) -> list[float]:
        """Of the busiest rank."""
        return [max(sample.cpu_seconds for sample in ranks) for ranks in self.rounds]

    @property
    def wait_seconds(self) -> list[float]:
        return [max(sample.wait_seconds for sample in ranks) for ranks in self.rounds]

    @property
    def figures(self) -> Figures:
        return Figures.of(self.seconds)

    @property
    def peak_memory_bytes(self) -> int:
        return max(sample.peak_memory_bytes for ranks in self.rounds for sample in ranks)


def alternate(
    contenders: Sequence[Contender], num_rounds: int, tell: Callable[[str], None] = lambda name: None
) -> dict[tuple[str, int], Series]:
    """Measure all contenders once a round, every second round backwards; the series by (name, ranks).

    `tell` hears of each measurement that is done.
    """
    series = {(each.name, each.ranks): Series(each) for each in contenders}
    for number in range(num_rounds):
        for one in list(series.values())[:: -1 if number % 2 else 1]:
            one.rounds.append(one.contender.run())
            tell(f"{one.contender.name}, {one.contender.ranks}")
    return series
