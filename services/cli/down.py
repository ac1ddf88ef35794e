"""`ringserve down`: stop a cluster that `ringserve up` started on this machine."""

from __future__ import annotations

import argparse
import json

import psutil

from cp_core.errors import Unavailable
from services.cli.options import Subcommands
from services.cluster.state import find_process, remove_state, require_state

STOP_SECONDS = 60.0
EXAMPLE = """example:
  ringserve down
  ringserve down --name second --json
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "down", help="stop a local cluster", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--name", default="default", help="name of the cluster (default: default)")
    parser.add_argument(
        "--timeout", type=float, help="seconds before it is killed (default: 60 more than its turns are given to end)"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    state = require_state(options.name)
    process = find_process(state.pid, state.started)
    killed = False
    if process is not None:
        family = [process, *process.children(recursive=True)]
        process.terminate()
        try:
            process.wait(STOP_SECONDS + state.drain_seconds if options.timeout is None else options.timeout)
        except psutil.TimeoutExpired:
            killed = True
            for member in family:
                if member.is_running():
                    member.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        if alive:
            raise Unavailable(f"{len(alive)} processes of cluster {options.name!r} could not be ended")
    remove_state(options.name)
    if options.json:
        print(json.dumps({"name": options.name, "pid": state.pid, "killed": killed}))
    else:
        print(f"ringserve: cluster {options.name!r} is down")
    return 0
