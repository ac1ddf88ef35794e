"""`ringserve down`: stop a cluster that `ringserve up` started on this machine."""

from __future__ import annotations

import argparse
import json

from ringserve.cp_core.errors import NotFound
from ringserve.services.cli.options import Subcommands
from ringserve.services.cluster.state import end_cluster, remove_state, require_state

STOP_SECONDS = 60.0
"""Seconds to end in, beyond those for the cluster's turns."""
EXAMPLE = """example:
  ringserve down
  ringserve down --name second --json
"""


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "down", help="stop a local cluster", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--name", default="default", help="name of the cluster (default: default)")
    parser.add_argument(
        "--timeout", type=float, help="seconds before the cluster is killed (default: 60 and its --drain-seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand."""
    try:
        state = require_state(options.name)
    except NotFound:
        remove_state(options.name)  # of a cluster that ended by itself, as the error tells
        raise
    seconds = STOP_SECONDS + state.drain_seconds if options.timeout is None else options.timeout
    killed = end_cluster(state, seconds)
    remove_state(options.name)
    if options.json:
        print(json.dumps({"name": options.name, "pid": state.pid, "killed": killed}))
    else:
        print(f"ringserve: cluster {options.name!r} is down")
    return 0
