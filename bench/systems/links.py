"""Claims that rings measure on links of known rate, each rank in a network namespace of its own.

The systems bench runs these pure functions. On two cores computation hardly overlaps with messages, and other work
on the machine disturbs the times. So a missed claim is reported, but is no failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.selection.links import parse_rate
from bench.selection.measure import SelectionSettings
from bench.selection.results import WANTED, JudgedCell, RingResult, SelectionReport
from bench.systems.claims import Claim, Figure, Source
from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PASS_Q
from ringserve.cp_core.cost.selector import TIE
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.calibration.measurement import Cell

MODEL = "builtin:tiny"
FIRST = Cell(cached_tokens=0, new_tokens=768)
CELLS = (
    FIRST,
    Cell(cached_tokens=512, new_tokens=256),
    Cell(cached_tokens=4000, new_tokens=64),
    Cell(cached_tokens=4000, new_tokens=768),
)
FIT_CELLS = tuple(Cell(cached_tokens=cached, new_tokens=new) for cached in (0, 2000) for new in (32, 160, 512))
SHARE_OF_PREDICTED = 0.85
LEAST_ROUNDS = 3
"""Fewest rounds of a measurement: in a single round one disturbed prefill would decide whether `auto` is right."""


def link_settings(ranks: Sequence[int], rates: Sequence[str], rounds: int) -> SelectionSettings:
    """Return the settings of rings of these sizes at rates in the notation of `tc`.

    Raises ConfigError for a text that is no rate, and for too few rounds.
    """
    if rounds < LEAST_ROUNDS:
        raise ConfigError(f"--rounds: {rounds} is out of range; allowed are {LEAST_ROUNDS} or more with source s")
    return SelectionSettings(
        model=MODEL,
        ranks=tuple(ranks),
        rates=tuple(dict.fromkeys(map(parse_rate, rates))),
        cells=CELLS,
        fit_cells=FIT_CELLS,
        rounds=rounds,
        has_tensor=True,
    )


def link_claims(report: SelectionReport) -> list[Claim]:
    """Return the claims on the rings of a report. An interrupted measurement reports only the rates that it reached."""
    rings = report.rings
    return [_gains(rings), _selector(rings), _beside_two(rings), _tensor_parallel(rings), _waits(rings)]


def _gains(rings: Sequence[RingResult]) -> Claim:
    """Compare what a chain gains over pass-KV with what the fitted model predicts."""
    figures = []
    for ring in rings:
        (cell,) = (each for each in ring.cells if each.cell == FIRST)
        measured = cell.medians[PASS_KV] / cell.medians[CHAIN]
        predicted = cell.predicted[PASS_KV] / cell.predicted[CHAIN]
        name = f"{ring.ranks} ranks, {ring.rate}: pass-KV over chain {measured:.2f}, predicted {predicted:.2f}"
        figures.append(Figure.at_least(name, measured, SHARE_OF_PREDICTED * predicted))
    return Claim(
        source=Source.LINKS,
        name=f"pass-KV over chain, T = {FIRST.new_tokens}, P = 0",
        published="-",
        accepted=f"{SHARE_OF_PREDICTED:g} of predicted",
        figures=tuple(figures),
    )


def _selector(rings: Sequence[RingResult]) -> Claim:
    """Compare the loss of `auto` over all cells with the wanted one."""
    losses = [(ring, score.loss) for ring in rings for score in ring.scores if score.name == "auto"]
    missed = [(ring, loss) for ring, loss in losses if loss > WANTED]
    is_noise = all(ring.noise is not None and loss <= ring.noise for ring, loss in missed)
    return Claim(
        source=Source.LINKS,
        name="auto, loss over the best of each cell",
        published="-",
        accepted=f"at most {WANTED:.0%}",
        figures=tuple(Figure.at_most(f"{ring.ranks} ranks, {ring.rate}", loss, WANTED) for ring, loss in losses),
        why="noise: choosing by half of the rounds loses as much in the others" if missed and is_noise else "",
    )


def _beside_two(rings: Sequence[RingResult]) -> Claim:
    """Compare the choices of `auto` with the better of pass-KV and pass-Q, in the cell in which `auto` does worst."""

    def excess(cell: JudgedCell) -> float:
        return cell.medians[cell.chosen["auto"]] / min(cell.medians[PASS_KV], cell.medians[PASS_Q]) - 1.0

    return Claim(
        source=Source.LINKS,
        name="auto over the better of pass-KV, pass-Q",
        published="-",
        accepted=f"{TIE:.0%} at most, any cell",
        figures=tuple(
            Figure.at_most(f"{ring.ranks} ranks, {ring.rate}", max(map(excess, ring.cells)), TIE) for ring in rings
        ),
    )


def _tensor_parallel(rings: Sequence[RingResult]) -> Claim:
    """Compare weights cut over the ranks with tokens cut over them, on the same links."""
    return Claim(
        source=Source.LINKS,
        name=f"CP table 7: TP over pass-KV, T = {FIRST.new_tokens}",
        published="1.42, 1.81",
        accepted="1 or more",
        figures=tuple(
            Figure.at_least(f"{ring.ranks} ranks, {ring.rate}", each.over_pass_kv, 1.0)
            for ring in rings
            for each in ring.tensor
        ),
    )


def _waits(rings: Sequence[RingResult]) -> Claim:
    """Compare the shares of a step in which ranks wait for messages."""
    return Claim(
        source=Source.LINKS,
        name="CSPS fig. 5: waits, NTP over TP",
        published="13-34% / 39-62%",
        accepted="NTP below TP always",
        figures=tuple(
            Figure.at_most(
                f"{ring.ranks} ranks, {ring.rate}: {each.ntp_waits:.0%} / {each.waits:.0%}",
                each.ntp_waits / each.waits,
                1.0,
            )
            for ring in rings
            for each in ring.tensor
        ),
    )
