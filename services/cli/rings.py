"""`ringserve drain`, `undrain` and `restart`: take rings out of service and bring them back, without losing a turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.views import DrainView
from ringserve.services.cli.options import Subcommands, add_router_options, config_of, router_of
from ringserve.services.cluster.operator import RouterAccess, drain_node, drain_ring, restart_ring, undrain_ring
from ringserve.services.cluster.state import secret_of

DRAIN = """example:
  ringserve drain decode-0
  ringserve drain prefill-1 --seconds 60 --target 10.0.0.5:6380 --config cluster.yaml
  ringserve drain --node 10.0.0.7

The ring takes no new turns, ends those that run, moves the retained KV of conversations to other rings of its role,
most recently used first, and leaves; 'ringserve undrain' brings it back.
With --node every ring with a rank on that node leaves, and is started again when the node is gone.
"""
UNDRAIN = """example:
  ringserve undrain decode-0
"""
RESTART = """example:
  ringserve restart decode-0
  ringserve restart prefill-0 prefill-1 decode-0 decode-1

One ring after the other takes no new turns, ends those that run, and is started again. New turns go to other rings
meanwhile; where there is no other of its role, they wait for it.
"""


def add(commands: Subcommands) -> None:
    drain = _add(commands, "drain", "take a ring out of service without losing a turn", DRAIN, run_drain)
    drain.add_argument("ring", nargs="?", default="", help="name of the ring, as 'ringserve status' shows it")
    drain.add_argument("--node", default="", help="instead of a ring: address of a node that goes away")
    _add_drain_seconds(drain)
    drain.add_argument("--force", action="store_true", help="drain also where no other ring of its role takes turns")
    undrain = _add(commands, "undrain", "bring a ring back that drains or has drained", UNDRAIN, run_undrain)
    undrain.add_argument("ring", help="name of the ring")
    undrain.add_argument("--seconds", type=float, default=180.0, help="how long to wait until it serves (default: 180)")
    restart = _add(commands, "restart", "start rings again without losing a turn", RESTART, run_restart)
    restart.add_argument("rings", nargs="+", metavar="ring", help="names of rings, restarted one after the other")
    _add_drain_seconds(restart)
    restart.add_argument(
        "--start-seconds", type=float, default=180.0, help="how long each may take to serve again (default: 180)"
    )


def _add(
    commands: Subcommands, name: str, summary: str, example: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, epilog=example, formatter_class=argparse.RawTextHelpFormatter)
    add_router_options(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)
    return parser


def _add_drain_seconds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600.0, help="how long turns may go on (default: 600)")


def run_drain(options: argparse.Namespace) -> int:
    if bool(options.ring) == bool(options.node):
        raise ConfigError("ring: name one ring, or with --node the node whose rings are to leave")
    if options.node:
        return _run_drain_node(options)
    drain = asyncio.run(drain_ring(_access(options), options.ring, seconds=options.seconds, force=options.force))
    outcome = {"ring": options.ring, "drained": True, **_moves(drain)}
    until = f"until 'ringserve undrain {options.ring}'"
    return _print_outcome(options, outcome, f"{options.ring} has left {until}{_moves_sentence(drain)}")


def _moves(drain: DrainView | None) -> dict[str, int]:
    if drain is None:
        return {}
    return {
        "moved": drain.num_moved,
        "left": drain.num_left,
        "no_room": drain.num_no_room,
        "failed": drain.num_failed,
        "moved_bytes": drain.moved_bytes,
    }


def _moves_sentence(drain: DrainView | None) -> str:
    """Return how many conversations of the ring were moved; later turns compute the others again."""
    if drain is None:
        return ""
    stayed = [
        (drain.num_left, "had no time"),
        (drain.num_no_room, "found no room elsewhere"),
        (drain.num_failed, "could not be moved"),
    ]
    others = "".join(f", {count} {why}" for count, why in stayed if count)
    return f"; {drain.num_moved} conversations were moved{others}"


def _run_drain_node(options: argparse.Namespace) -> int:
    rings = asyncio.run(drain_node(_access(options), options.node, seconds=options.seconds))
    outcome = {"node": options.node, "rings": rings, "drained": True}
    return _print_outcome(
        options, outcome, f"{', '.join(rings)} have left" if rings else f"no ring is on {options.node}"
    )


def run_undrain(options: argparse.Namespace) -> int:
    asyncio.run(undrain_ring(_access(options), options.ring, seconds=options.seconds))
    return _print_outcome(options, {"ring": options.ring, "serves": True}, f"{options.ring} serves")


def run_restart(options: argparse.Namespace) -> int:
    async def one_after_the_other() -> None:
        for ring in options.rings:
            await _restart(options, ring)

    asyncio.run(one_after_the_other())
    return _print_outcome(options, {"rings": options.rings, "serves": True}, f"{', '.join(options.rings)} restarted")


def _restart(options: argparse.Namespace, ring: str) -> Awaitable[None]:
    return restart_ring(_access(options), ring, seconds=options.seconds, start_seconds=options.start_seconds)


def _access(options: argparse.Namespace) -> RouterAccess:
    """Return the access to the router. Raises NotFound, ConfigError."""
    router = router_of(options)
    return RouterAccess(
        endpoint=router,
        secret=secret_of(router),
        tls=config_of(options).internal_tls.files,
        progress=lambda line: print("ringserve:", line, file=sys.stderr, flush=True),
    )


def _print_outcome(options: argparse.Namespace, outcome: dict[str, Any], sentence: str) -> int:
    print(json.dumps(outcome) if options.json else f"ringserve: {sentence}")
    return 0
