"""Worth of each part of the scheduling under load (decisions 0007 and 0008), with the same arrivals for all.

    python -m bench scheduling --rate 2 --duration 60 --every 10
    python -m bench scheduling --only "with long"

The variants are short prompts alone, short prompts with a long one at fixed intervals, and the latter with long prefill
steps. Each variant runs `ringserve bench --start` with its own settings. The output is one JSON object a line: seconds
of the short requests, and the ratio of their p99 to that of short prompts alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from bench.options import Subcommands

VARIANTS: dict[str, tuple[str, ...]] = {
    "short alone": (),
    "with long": (),
    "with long, long steps": ("prefill.step_seconds=0", "prefill.chunk_tokens=65536"),
}
ALONE = "short alone"


def add(commands: Subcommands) -> None:
    parser = commands.add_parser("scheduling", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", type=float, default=2.0, help="short requests a second")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two long prompts")
    parser.add_argument(
        "--only",
        action="append",
        choices=VARIANTS,
        metavar="NAME",
        help=f"run only this one and the first; repeatable: {' | '.join(VARIANTS)}",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for all; repeatable")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    alone = 0.0
    for name, settings in VARIANTS.items():
        if name != ALONE and options.only and name not in options.only:
            continue
        report = _measure(options, name, (*options.set, *settings))
        short = next(kind for kind in report["kinds"] if kind["kind"] == "short")
        alone = alone or short["ttft"]["p99"]
        line = {
            "variant": name,
            "ttft_p50": short["ttft"]["p50"],
            "ttft_p99": short["ttft"]["p99"],
            "ttft_p99_over_alone": short["ttft"]["p99"] / alone,
            "ttit_p50": short["ttit"]["p50"],
            "ttit_p99": short["ttit"]["p99"],
            "statuses": {kind["kind"]: kind["statuses"] for kind in report["kinds"] if kind["kind"] != "all"},
            "good_requests_per_second": report["good_requests_per_second"],
            "completion_tokens_per_second": report["completion_tokens_per_second"],
            "long_ttft": [kind["ttft"] for kind in report["kinds"] if kind["kind"] == "long"],
        }
        print(json.dumps({key: _rounded(value) for key, value in line.items()}), flush=True)
    return 0


def _measure(options: argparse.Namespace, name: str, settings: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "ringserve.services.cli.main", "bench", "--start", "--json", "--mix", "short:1"]
    command += ["--rate", str(options.rate), "--duration", str(options.duration)]
    if name != ALONE:
        command += ["--every", f"long:{options.every:g}"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return {key: _rounded(each) for key, each in value.items()} if isinstance(value, dict) else value
