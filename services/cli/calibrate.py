"""`ringserve calibrate`: measure serving rings, and write the profile that their router plans by."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from cp_core.cost.profile import format_profile
from cp_core.errors import ConfigError
from ringserve.client import Client
from services.cli.options import Subcommands, add_serving_options, client_of, serving
from services.offline.bench.report import require_matplotlib
from services.offline.calibration.fitting import Calibration, calibrate, profile_from_rings, shape_of
from services.offline.calibration.measurement import Calibrator, grid, max_sequence_tokens
from services.offline.calibration.report import (
    calibration_json,
    calibration_table,
    closing_lines,
    write_calibration_plot,
)
from services.offline.terminal import console, print_table, progress_bar
from services.offline.units import parse_token_counts
from workers.protocol.prefill_steps import CALIBRATED_ALGORITHMS

EXAMPLE = """example:
  ringserve calibrate --write measured.json
  ringserve calibrate --start --config cluster.yaml --tokens 1k,8k,64k --cached 0,64k,512k --plot calibration.png
  ringserve up --config cluster.yaml --set router.profile=measured.json
"""
HELP = """Runs a grid of prefills by both algorithms and fits to them the rates that the rings measured of themselves:
rates, links, overheads, and the empirical selector. Serve nothing else meanwhile."""
PROFILE_NAME = "measured"


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure serving rings, and fit a profile to plan by",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_serving_options(parser)
    parser.add_argument("--tokens", metavar="T,...", help="new tokens (default: of 32,128,512,2048 those that fit)")
    parser.add_argument("--cached", metavar="P,...", help="cached tokens (default: of 0,1024,4096 those that fit)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of every prefill; the median counts (default: 5)")
    parser.add_argument("--timeout", type=float, default=300.0, help="deadline of each turn, seconds (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the profile, for router.profile and --hardware"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the fit; needs matplotlib, the extra `plot`"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    new_tokens = None if options.tokens is None else parse_token_counts("--tokens", options.tokens)
    cached_tokens = None if options.cached is None else parse_token_counts("--cached", options.cached, least=0)
    _check(options)
    if options.plot is not None:
        require_matplotlib()
    with serving(options) as target, client_of(options, target) as client:
        calibration = _calibrate(client, options, new_tokens, cached_tokens)
    if options.write is not None:
        options.write.write_text(format_profile(calibration.profile), encoding="utf-8")
    if options.plot is not None:
        write_calibration_plot(calibration, options.plot)
    if options.json:
        print(calibration_json(calibration))
        return 0
    print_table(console(), calibration_table(calibration))
    print(*closing_lines(calibration), sep="\n")
    if options.write is not None:
        print(f"written: {options.write}; plan by it with --set router.profile={options.write}")
    return 0


def _calibrate(
    client: Client, options: argparse.Namespace, new_tokens: list[int] | None, cached_tokens: list[int] | None
) -> Calibration:
    model, server = client.model_info(), client.server_info()
    cells = grid(new_tokens, cached_tokens, max_sequence_tokens(model, server))
    name = PROFILE_NAME if options.write is None else options.write.stem
    before = profile_from_rings(model, server.rings, name)
    calibrator = Calibrator(client, repeats=options.repeats, timeout=options.timeout, seed=options.seed)
    with progress_bar(len(cells) * len(CALIBRATED_ALGORITHMS) * options.repeats, "prefills") as tell:
        measurements = calibrator.prefills(cells, tell)
    steps = calibrator.steps(sorted({cell.cached_tokens + cell.new_tokens for cell in cells}))
    rings = sorted({f"{each.ring} ({each.sample.cp} x {each.sample.tp})" for each in measurements})
    source = (
        f"ringserve calibrate: {len(measurements)} prefills of {model.model_path} on {', '.join(rings)}, "
        f"median of {options.repeats}. Decode: time between tokens of single sequences. Not measured: KV links beside "
        f"those of the ring, memory beyond weights and KV, row, hop and sum times of decode."
    )
    return calibrate(shape_of(model), replace(before, source=source), measurements, steps)


def _check(options: argparse.Namespace) -> None:
    """Check what would otherwise fail only after measuring. Raises ConfigError."""
    if options.repeats < 1:
        raise ConfigError(f"--repeats: {options.repeats} is out of range; allowed are 1 or more")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout: {options.timeout} is no duration; allowed are numbers above 0")
    for key in ("write", "plot"):
        path = getattr(options, key)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{key}: {path} cannot be written, its directory does not exist")
