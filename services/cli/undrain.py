"""`ringserve undrain`: bring a ring back that drains or has drained."""

from __future__ import annotations

import argparse
import asyncio
import json

from services.cli.options import Subcommands, add_router_options, config_of, router_of
from services.rings import undrain_ring

EXAMPLE = """example:
  ringserve undrain decode-0
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "undrain",
        help="bring a ring back that drains or has drained",
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ring", help="name of the ring")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to wait until it serves (default: 180)")
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    router, tls = router_of(options), config_of(options).internal_tls.files
    asyncio.run(undrain_ring(router, tls, options.ring, seconds=options.seconds))
    print(json.dumps({"ring": options.ring, "serves": True}) if options.json else f"ringserve: {options.ring} serves")
    return 0
