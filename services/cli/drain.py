"""`ringserve drain`: take a ring out of service without losing a turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial

from orchestration.views import DrainView
from services.cli.options import Subcommands, add_router_options, config_of, router_of
from services.rings import drain_ring

EXAMPLE = """example:
  ringserve drain decode-0
  ringserve drain prefill-1 --seconds 60 --target 10.0.0.5:6380 --config cluster.yaml

The ring takes no new turns, ends those that run, gives what it keeps of conversations to other rings of its role, those
used last first, and leaves; 'ringserve undrain' brings it back.
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "drain",
        help="take a ring out of service without losing a turn",
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ring", help="name of the ring, as 'ringserve status' shows it")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long that may take (default: 600)")
    parser.add_argument("--force", action="store_true", help="also where no other ring of its role takes turns")
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    router, tls = router_of(options), config_of(options).internal_tls.files
    show = partial(print, "ringserve:", file=sys.stderr, flush=True)
    work = drain_ring(router, tls, options.ring, seconds=options.seconds, force=options.force, progress=show)
    drain = asyncio.run(work)
    if options.json:
        print(json.dumps({"ring": options.ring, "drained": True, **_outcome(drain)}))
    else:
        print(f"ringserve: {options.ring} has left{_told(drain)}")
    return 0


def _outcome(drain: DrainView | None) -> dict[str, int]:
    if drain is None:
        return {}
    return {
        "moved": drain.num_moved,
        "left": drain.num_left,
        "no_room": drain.num_no_room,
        "failed": drain.num_failed,
        "moved_bytes": drain.moved_bytes,
    }


def _told(drain: DrainView | None) -> str:
    """What became of the conversations that the ring kept; later turns compute again what was not moved."""
    if drain is None:
        return ""
    stayed = [
        (drain.num_left, "had no time"),
        (drain.num_no_room, "found no room elsewhere"),
        (drain.num_failed, "could not be moved"),
    ]
    others = "".join(f", {count} {why}" for count, why in stayed if count)
    return f"; {drain.num_moved} conversations were moved{others}"
