"""`ringserve status`: rings of a cluster and their load."""

from __future__ import annotations

import argparse
import io
from collections import Counter
from pathlib import Path

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from cp_core.errors import ConfigError
from ringserve.v1 import inference_pb2
from services.cli.options import Subcommands, add_target_options, client_of

EXAMPLE = """example:
  ringserve status
  ringserve status --target 127.0.0.1:50051 --json
  ringserve status --svg status.svg
"""
PICTURE_COLUMNS = 150


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "status", help="show rings and KV", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    add_target_options(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw what is printed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    with client_of(options) as client:
        info = client.server_info()
    if options.json:
        print(
            MessageToJson(
                info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
            )
        )
    else:
        _show(Console(), info)
    if options.svg is not None:
        _draw(info, options.svg)
    return 0 if info.rings and all(ring.state == "ready" for ring in info.rings) else 1


def _draw(info: inference_pb2.GetServerInfoResponse, path: Path) -> None:
    """Draw the status as SVG. Raises ConfigError."""
    console = Console(record=True, file=io.StringIO(), width=PICTURE_COLUMNS)
    _show(console, info)
    try:
        console.save_svg(str(path), title="ringserve status")
    except OSError as error:
        raise ConfigError(f"--svg: {path} cannot be written: {error.strerror}") from error


def _show(console: Console, info: inference_pb2.GetServerInfoResponse) -> None:
    console.print(_table(info))
    lines = [
        pool_sizes(info),
        (
            f"version {info.version}, up {info.uptime_seconds:.0f} s, selector {info.selector}, "
            f"{info.conversations} conversations, {info.running_turns} running turns"
            + (f", {info.turns_waiting_for_rings} waiting for rings" if info.turns_waiting_for_rings else "")
        ),
        *(_drain_line(drain) for drain in info.drains),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(info: inference_pb2.GetServerInfoResponse) -> Table:
    table = Table(
        "ring",
        "state",
        "ranks",
        "attention, transport, decode",
        "running",
        "waiting",
        "KV blocks free/active/retained of total, a rank",
        "preempted",
        "rebuilds",
    )
    for ring in info.rings:
        usage = ", ".join(
            f"{rank.free_blocks}/{rank.active_blocks}/{rank.kept_blocks} of {rank.total_blocks}"
            for rank in ring.kv_usage
        )
        table.add_row(
            ring.name,
            _state(ring),
            f"{ring.num_ranks} x {ring.tp}" if ring.tp > 1 else str(ring.num_ranks),
            ", ".join(name for name in (ring.attention_backend, ring.ring_transport, ring.decode_variant) if name),
            str(ring.num_requests_running),
            _waiting(ring),
            usage,
            str(ring.num_preemptions),
            str(ring.rebuilds),
        )
    return table


def _state(ring: inference_pb2.RingInfo) -> str:
    words = {"draining": ring.draining, "restarting": ring.restarting}
    return ", ".join([ring.state, *(word for word, holds in words.items() if holds)])


def _drain_line(drain: inference_pb2.RingDrain) -> str:
    """Return how far a ring is with leaving, or how it left."""
    stayed = drain.no_room + drain.failed
    return (
        f"{drain.ring} {'has left' if drain.has_left else 'drains'}: {drain.running_turns} turns, {drain.moved} "
        f"conversations moved, {drain.left} left to move, {stayed} stay behind"
    )


def pool_sizes(info: inference_pb2.GetServerInfoResponse) -> str:
    """Return how many rings of which size each role has, the largest first."""
    rings = Counter((ring.role, ring.num_ranks, ring.tp) for ring in info.rings)
    told = {role: "" for role in dict.fromkeys(ring.role for ring in info.rings)}
    for (role, cp, tp), count in sorted(rings.items(), key=lambda item: (-item[0][1], -item[0][2])):
        size = f"cp {cp} x tp {tp}" if tp > 1 else f"cp {cp}"
        told[role] += f"{',' if told[role] else ''} {count} of {size}"
    return "; ".join(f"{role} rings:{sizes}" for role, sizes in told.items())


def _waiting(ring: inference_pb2.RingInfo) -> str:
    """Return waiting turns, and for a prefill ring their work beside its bound."""
    if not ring.max_waiting_work:
        return str(ring.num_requests_waiting)
    return f"{ring.num_requests_waiting} ({ring.waiting_work:,.0f} of {ring.max_waiting_work:,.0f} work units)"
