"""Claims of the papers and of the project, each with its source, its figures and what is accepted; their reports.

The systems bench makes and prints the claims. Pure functions, except that `write_claims_plot` writes a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.table import Table

from bench.report import table
from ringserve.services.offline.reports import save_figure


class Source(StrEnum):
    """Source of a figure: the cost model, messages in virtual time, or rings on links of known rate."""

    MODEL = "m"
    MESSAGES = "v"
    LINKS = "s"


SOURCES = {
    Source.MODEL: "the cost model, with the papers' sizes",
    Source.MESSAGES: "messages of real rings on delayed links, in virtual time: the same on every machine",
    Source.LINKS: "rings in network namespaces on links that `tc` shapes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Figure of a claim, accepted if its ratio to `reference`, a published figure or a limit, is in range.

    If it `is_share`, it is shown in percent.
    """

    name: str
    ours: float
    reference: float
    low: float
    high: float
    is_share: bool = False

    @classmethod
    def near(cls, name: str, ours: float, reference: float, share: float) -> Figure:
        """Return a figure that may differ by a share of its reference."""
        return cls(name=name, ours=ours, reference=reference, low=1.0 - share, high=1.0 + share)

    @classmethod
    def at_most(cls, name: str, ours: float, limit: float) -> Figure:
        """Return a share that is at most `limit`."""
        return cls(name=name, ours=ours, reference=limit, low=float("-inf"), high=1.0, is_share=True)

    @classmethod
    def at_least(cls, name: str, ours: float, limit: float, *, is_share: bool = False) -> Figure:
        return cls(name=name, ours=ours, reference=limit, low=1.0, high=float("inf"), is_share=is_share)

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    def __str__(self) -> str:
        return f"{self.ours:.1%}" if self.is_share else f"{self.ours:.4g}"

    @property
    def is_met(self) -> bool:
        # A figure that is equal to a bound but for rounding is met.
        return self.low - 1e-9 <= self.ratio <= self.high + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Claim with its figures; `why` explains a miss by a measurement, and is empty if no reason is known."""

    source: Source
    name: str
    published: str
    accepted: str
    figures: tuple[Figure, ...]
    why: str = ""

    @property
    def is_met(self) -> bool:
        return all(figure.is_met for figure in self.figures)

    @property
    def verdict(self) -> str:
        if self.is_met:
            return "met"
        return "MISSED, explained" if self.why else "MISSED"

    @property
    def fails(self) -> bool:
        """Return whether the command fails. A miss on shaped links never counts: other work may have caused it."""
        return not self.is_met and not self.why and self.source is not Source.LINKS


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return a row for each claim."""
    rows = [
        {
            "from": claim.source.upper(),
            "claim": claim.name,
            "published": claim.published,
            "ours": ", ".join(map(str, claim.figures)),
            "accepted": claim.accepted,
            "verdict": claim.verdict,
        }
        for claim in claims
    ]
    title = "systems of the papers: claims, ours and what is accepted"
    return table(rows, title=title, left=("claim", "published", "ours", "accepted", "verdict"))


def closing_lines(claims: Sequence[Claim]) -> list[str]:
    """Return the sources, and every figure that is out of its range with the reason."""
    lines = [f"{source.upper()}: {SOURCES[source]}" for source in dict.fromkeys(claim.source for claim in claims)]
    for claim in claims:
        missed = [figure for figure in claim.figures if not figure.is_met]
        lines += [f"{claim.name}: {each.name} {each}, reference {each.reference:.4g}" for each in missed]
        if missed and claim.why:
            lines.append(f"  {claim.why}")
    num_met = sum(claim.is_met for claim in claims)
    return [*lines, f"{num_met} of {len(claims)} claims met"]


def claims_json(claims: Sequence[Claim], load: tuple[float, float]) -> str:
    """Format one JSON object; bounds that are open are null."""
    rows = [asdict(claim) | {"is_met": claim.is_met, "verdict": claim.verdict} for claim in claims]
    for row in rows:
        for figure in row["figures"]:
            figure |= {side: None for side in ("low", "high") if abs(figure[side]) == float("inf")}
    return json.dumps({"claims": rows, "sources": {key.value: text for key, text in SOURCES.items()}, "load": load})


MOST_RATIO = 2.0


def write_claims_plot(claims: Sequence[Claim], path: Path) -> None:
    """Draw each figure over its reference, with the accepted range as a bar. Raises ConfigError for the path."""
    from matplotlib.figure import Figure as Drawing

    rows = [(claim, figure) for claim in claims for figure in claim.figures]
    drawing = Drawing(figsize=(11.0, 0.26 * len(rows) + 1.6), layout="constrained")
    axes = drawing.add_subplot(title="ours over the published figure or the limit; bars are accepted")
    labels = []
    for place, (claim, figure) in enumerate(rows):
        low, high = max(0.0, figure.low), min(MOST_RATIO, figure.high)
        axes.barh(place, max(high - low, 0.004), left=low, height=0.7, color="#d8e8d8")
        ratio = min(MOST_RATIO, max(0.0, figure.ratio))
        axes.plot([ratio], [place], "o", color="#207040" if figure.is_met else "#c02020", markersize=5)
        axes.annotate(str(figure), (ratio, place), (6, 0), textcoords="offset points", va="center", fontsize=7)
        labels.append(f"{claim.source.upper()}  {claim.name}: {figure.name}")
    axes.axvline(1.0, color="grey", linestyle=":", linewidth=1)
    axes.set_xlim(0.0, MOST_RATIO * 1.1)
    axes.set_ylim(-0.8, len(rows) - 0.2)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    save_figure(drawing, path)
