"""`python -m bench systems`: claims of the papers on their systems beside ours, and what is accepted.

The bench command line registers it with `add`; `run` measures the chosen sources one after the other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.options import Subcommands
from bench.report import interrupted_by_sigterm, progress_lines, told_load
from bench.systems.claims import (
    SOURCES,
    Claim,
    Source,
    claims_json,
    claims_table,
    closing_lines,
    write_claims_plot,
)
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.reports import load_now, require_matplotlib
from ringserve.services.offline.terminal import console, print_table

if TYPE_CHECKING:
    from bench.selection.measure import SelectionSettings

EXAMPLE = """example:
  python -m bench systems
  python -m bench systems --source m,v,s --plot systems.png
"""
HELP = """Figures that KV-Runahead (arXiv 2405.05329), CSPS (2409.15104) and CP (2411.01783) publish, and our own ones,
from three sources:
  m  the cost model with the papers' sizes
  v  messages of real rings on delayed links, in virtual time: the same on every machine
  s  rings in network namespaces on links of 20 to 1,000 Mbit/s; takes minutes, needs root or user namespaces, and
     iproute2
The exit status is 1 if a figure of m or v is out of its range and nothing explains it."""
PIPE_WIDTH = 170
DEFAULT = "m,v"
RATES = "20mbit,50mbit,200mbit,1gbit"
MOST_RANKS = 16


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "systems",
        help="claims of the papers on their systems beside ours",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--source", metavar="SOURCE,...", default=DEFAULT, help=f"some of {','.join(SOURCES)} (default: {DEFAULT})"
    )
    parser.add_argument(
        "--ranks", type=_count_list, default=[2, 4], metavar="N,...", help="ring sizes of source s (default: 2,4)"
    )
    parser.add_argument(
        "--rates", default=RATES, metavar="RATE,...", help=f"rates of each rank's link of source s (default: {RATES})"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every prefill of source s (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the claims as one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the figures; needs matplotlib, the extra `plot`"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    sources = _sources(options.source)
    if options.rounds < 1:
        raise ConfigError(f"--rounds: {options.rounds} is out of range; allowed are 1 or more")
    if "s" in sources:  # refused before the others are computed
        _link_settings(options)
    if options.plot is not None:
        require_matplotlib()
    before, claims = load_now(), []
    for source in sources:
        claims += _measure(source, options)
    load = before, load_now()
    if options.plot is not None:
        write_claims_plot(claims, options.plot)
    if options.json:
        print(claims_json(claims, load))
    else:
        print_table(console(pipe_width=PIPE_WIDTH), claims_table(claims))
        print(*closing_lines(claims), sep="\n")
        print(told_load(load))
    return int(any(claim.fails for claim in claims))


def _sources(text: str) -> list[Source]:
    """Parse distinct sources, in the order of Source. Raises ConfigError."""
    names = [name.strip().lower() for name in text.split(",")]
    if unknown := [name for name in names if name not in SOURCES]:
        raise ConfigError(f"--source: {unknown[0]!r} is no source; allowed are {', '.join(SOURCES)}")
    return [source for source in Source if source in names]


def _count_list(text: str) -> list[int]:
    """Parse distinct ring sizes of 2 or more."""
    counts = list(dict.fromkeys(text.split(",")))
    if not all(count.isdecimal() and 2 <= int(count) <= MOST_RANKS for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed are sizes of 2 to {MOST_RANKS}")
    return list(map(int, counts))


def _measure(source: Source, options: argparse.Namespace) -> list[Claim]:
    # Imported late: they import torch, which would slow the start of other commands.
    if source is Source.MODEL:
        from bench.systems.model import model_claims

        return model_claims()
    if source is Source.MESSAGES:
        from bench.systems.messages import message_claims

        return message_claims()
    return _measure_links(options)


def _link_settings(options: argparse.Namespace) -> SelectionSettings:
    from bench.systems.links import link_settings

    return link_settings(options.ranks, options.rates.split(","), options.rounds)


def _measure_links(options: argparse.Namespace) -> list[Claim]:
    """Measure rings on links. After an interruption return the claims on the rates that were finished."""
    from bench.selection.measure import measured_in_namespaces
    from bench.selection.results import SelectionReport, ring_lines
    from bench.systems.links import link_claims

    settings = _link_settings(options)
    done: list[SelectionReport] = []
    try:
        with interrupted_by_sigterm(), progress_lines(settings.num_measurements) as tell:
            measured_in_namespaces(settings, tell, done.append)
    except KeyboardInterrupt:
        print(f"interrupted after {len(done)} of {len(settings.ranks) * len(settings.rates)} rings", file=sys.stderr)
        if not done:
            raise
    claims = link_claims(done[-1])
    print(*ring_lines(done[-1]), *(figure.name for figure in claims[0].figures), sep="\n", file=sys.stderr)
    return claims
