"""`python -m bench gateway`: tokens a second that a gateway's process passes on with one core.

The bench command line registers it with `add`; `run` measures and prints the report.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bench.options import Subcommands
from bench.report import Target, told_load
from bench.service.gateway import GatewayLoad, GatewayReport, measure_gateway
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.reports import load_now
from ringserve.services.offline.terminal import progress_bar

EXAMPLE = """example:
  python -m bench gateway
  python -m bench gateway --streams 1000 --rate 20
  python -m bench gateway --streams 300 --rate 50 --seconds 20 --json
"""
HELP = """A real gateway in a process of its own, between clients in this process and a process with a router and decode
rings, which compute nothing. All turns of a ring get a token at the same moments, --rate times a second.
The gateway's processor time per token is measured, so that other work on the machine counts little."""
MOST_STREAMS, MOST_RINGS, MOST_RATE, MOST_SECONDS = 4000, 64, 1000.0, 3600.0
CORE_RATE = 20_000.0


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "gateway",
        help="tokens a second that a gateway passes on",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    defaults = GatewayLoad()
    for name, kind, what in (
        ("streams", int, "answers at a time"),
        ("rings", int, "decode rings"),
        ("rate", float, "tokens a second of each answer"),
        ("seconds", float, "seconds of the measurement"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: {default:g})")
    model = defaults.model
    parser.add_argument("--model", default=model, help=f"model whose tokenizer makes the text (default: {model})")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    limits = {"streams": MOST_STREAMS, "rings": MOST_RINGS, "rate": MOST_RATE, "seconds": MOST_SECONDS}
    for name, most in limits.items():
        value = getattr(options, name)
        if not 0 < value <= most:
            raise ConfigError(f"--{name}: {value:g} is out of range; allowed are numbers above 0 up to {most:g}")
    load = GatewayLoad(**{name: getattr(options, name) for name in (*limits, "model")})
    before = load_now()
    with progress_bar(load.streams) as tell:
        report = measure_gateway(load, tell)
    machine, target = (before, load_now()), Target("tokens/s on a core", report.core_rate, CORE_RATE, is_at_least=True)
    if options.json:
        derived = {name: getattr(report, name) for name in ("rate", "core_rate", "microseconds")}
        print(json.dumps({**asdict(report), **derived, "target_met": target.is_met, "load": machine}))
    else:
        print(*_lines(report, machine), target, sep="\n")
    return 0


def _lines(report: GatewayReport, machine: tuple[float, float]) -> list[str]:
    share = report.processor_seconds / report.seconds
    return [
        f"{report.streams} streams, {report.rate:.0f} tokens/s for {report.seconds:.1f} s with {share:.2f} of a core",
        f"{report.microseconds:.1f} us of processor time a token, {report.tokens / report.messages:.2f} in a message",
        told_load(machine),
    ]
