"""Claims that rings measure on links of known rate, each rank in a network namespace of its own.

Two cores show no overlap of computation, and other work on the machine disturbs: a miss here fails nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from cp_core.cost.model import CHAIN, PASS_KV
from services.offline.bench.selection.links import parse_rate
from services.offline.bench.selection.measure import SelectionSettings, measured_in_namespaces
from services.offline.bench.selection.results import WANTED, RingResult, SelectionReport
from services.offline.bench.systems.claims import Claim, Figure, Source
from services.offline.calibration.measurement import Cell
from services.offline.terminal import Tell

MODEL = "builtin:tiny"
RATES = ("20mbit", "50mbit", "200mbit", "1gbit")
FIRST = Cell(cached_tokens=0, new_tokens=768)
CELLS = (
    FIRST,
    Cell(cached_tokens=512, new_tokens=256),
    Cell(cached_tokens=4000, new_tokens=64),
    Cell(cached_tokens=4000, new_tokens=768),
)
FIT_CELLS = tuple(Cell(cached_tokens=cached, new_tokens=new) for cached in (0, 2000) for new in (32, 160, 512))
SHARE_OF_PREDICTED = 0.85


def link_claims(ranks: Sequence[int], rounds: int, tell: Tell) -> list[Claim]:
    """Measure rings of these sizes; takes about ten minutes. Raises Unavailable without namespaces."""
    settings = SelectionSettings(
        model=MODEL,
        ranks=tuple(ranks),
        rates=tuple(map(parse_rate, RATES)),
        cells=CELLS,
        fit_cells=FIT_CELLS,
        rounds=rounds,
        has_tensor=True,
    )
    report = measured_in_namespaces(settings, tell)
    return [_gains(report.rings), _selector(report), _tensor_parallel(report.rings), _waits(report.rings)]


def _gains(rings: Sequence[RingResult]) -> Claim:
    """Compare what a chain gains over pass-KV with what the fitted model predicts."""
    figures = []
    for ring in rings:
        (cell,) = (each for each in ring.cells if each.cell == FIRST)
        measured = cell.medians[PASS_KV] / cell.medians[CHAIN]
        predicted = cell.predicted[PASS_KV] / cell.predicted[CHAIN]
        name = f"{ring.ranks} ranks, {ring.rate}: {measured:.2f}, predicted {predicted:.2f}"
        figures.append(Figure.at_least(name, measured, SHARE_OF_PREDICTED * predicted))
    return Claim(
        source=Source.LINKS,
        name=f"pass-KV over chain, T = {FIRST.new_tokens}, P = 0",
        published="-",
        accepted=f"{SHARE_OF_PREDICTED:g} of predicted",
        figures=tuple(figures),
    )


def _selector(report: SelectionReport) -> Claim:
    """Compare the loss of `auto` over all cells with the wanted one."""
    figures = [
        Figure.at_most(f"{ring.ranks} ranks, {ring.rate}", way.loss, WANTED)
        for ring in report.rings
        for way in ring.ways
        if way.name == "auto"
    ]
    return Claim(
        source=Source.LINKS,
        name="auto, loss over the best of each cell",
        published="-",
        accepted=f"at most {WANTED:.0%}",
        figures=tuple(figures),
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
