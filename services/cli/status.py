"""`ringserve status`: rings of a cluster and their load. It asks a gateway or the router, and changes nothing."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ringserve.client import RingInfo, ServerInfo
from ringserve.cp_core.errors import ConfigError, NotFound, Unavailable
from ringserve.services.cli.command import argument, command, flag, option
from ringserve.services.cli.options import ConfigOptions, JsonFlag, TargetOptions
from ringserve.services.cluster.operator import RouterAccess, read_server_info
from ringserve.services.cluster.state import (
    OR_TARGET,
    ClusterStage,
    ClusterState,
    require_state,
    secret_of,
    starting_line,
)
from ringserve.services.offline.terminal import listing, print_table
from ringserve.views import RankKvUsage, RingDrain

EXIT_NOT_SERVING = 3
PICTURE_COLUMNS = 100
BAR_COLUMNS = 10
ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    ring: str = argument("name of a ring: show its details", default="")
    gateway: TargetOptions
    router: str = option("ask the router, as operators' commands do, and no gateway", "HOST:PORT", "")
    config: ConfigOptions
    wide: bool = flag("show more columns, for wide terminals")
    json: JsonFlag = False
    svg: Path | None = option("also draw what is printed", default=None)


@command(
    "ringserve status",
    "ringserve status prefill-0",
    "ringserve status --target 127.0.0.1:50051 --json",
    "ringserve status --router 10.0.0.5:6380 --config cluster.yaml",
    "ringserve status --wide --svg status.svg",
    notes="Exit status: 0 if the cluster serves, 3 if it is starting or a role has no ring that accepts turns.",
)
def status(options: StatusOptions) -> int:
    if options.router:
        tls = options.config.load().internal_tls.files
        access = RouterAccess(endpoint=options.router, tls=tls, progress=print, secret=secret_of(options.router))
        return _show_info(asyncio.run(read_server_info(access)), options)
    if not options.gateway.target:
        state = require_state(options.gateway.name, OR_TARGET)
        if state.stage is ClusterStage.STARTING:
            return _show_starting(state, as_json=options.json)
    try:
        with options.gateway.client() as client:
            info = client.server_info()
    except Unavailable as error:
        reason = "" if options.gateway.target else require_state(options.gateway.name).reason
        raise Unavailable(f"{error}; {reason}" if reason else str(error)) from error
    return _show_info(info, options)


def _show_info(info: ServerInfo, options: StatusOptions) -> int:
    """Print the state, and return the exit status."""
    if options.json:
        print(json.dumps(asdict(info)))
    else:
        _show(Console(), info, options)
    if options.svg is not None:
        _draw(info, options)
    return EXIT_NOT_SERVING if _missing_roles(info) else 0


def _show_starting(state: ClusterState, *, as_json: bool) -> int:
    if as_json:
        shown = ("name", "stage", "pid", "rings_serving", "num_rings", "log")
        print(json.dumps({key: getattr(state, key) for key in shown}))
    else:
        print(f"ringserve: {starting_line(state)}: {state.progress[-1] if state.progress else 'loading'}")
    return EXIT_NOT_SERVING


def _missing_roles(info: ServerInfo) -> list[str]:
    """Return the roles without a ring that accepts turns."""
    serving = {ring.role for ring in info.rings if ring.state == "ready" and not ring.draining}
    return [role for role in ROLES if role not in serving]


def _draw(info: ServerInfo, options: StatusOptions) -> None:
    """Draw the status as SVG. Raises ConfigError."""
    console = Console(record=True, file=io.StringIO(), width=PICTURE_COLUMNS)
    _show(console, info, options)
    try:
        console.save_svg(str(options.svg), title="ringserve status")
    except OSError as error:
        raise ConfigError(f"--svg: {options.svg} cannot be written: {error.strerror}") from error


def _show(console: Console, info: ServerInfo, options: StatusOptions) -> None:
    if options.ring:
        console.print(_ring_table(_ring_of(info, options.ring)))
        return
    print_table(console, _wide_table(info) if options.wide else _table(info, is_ascii=console.options.ascii_only))
    lines = [
        *(f"no {role} ring accepts turns: the cluster does not serve" for role in _missing_roles(info)),
        *([pool_sizes(info)] if info.rings else []),
        (
            f"version {info.version}, up {info.uptime_seconds:.0f} s, selector {info.selector}, "
            f"{info.conversations} conversations, {info.running_turns} running turns"
            + (f", {info.turns_waiting_for_rings} waiting for rings" if info.turns_waiting_for_rings else "")
        ),
        *(_drain_line(drain) for drain in info.drains),
        *(f"{ring.name}: {ring.decode_reason}" for ring in info.rings if ring.decode_reason),
        *(f"{ring.name} cannot be rebuilt: {ring.failure}" for ring in info.rings if ring.failure),
    ]
    for line in lines:  # a terminal wraps lines itself, a picture does not
        console.print(line, markup=False, highlight=False, soft_wrap=not console.record)


def _table(info: ServerInfo, *, is_ascii: bool) -> Table:
    """Return a line for each ring, including rings that have left, and for each role without a ring."""
    table = listing("ring", "state", "running", "waiting", "KV, fullest rank")
    for ring in info.rings:
        waiting = str(ring.num_requests_waiting)
        if ring.max_waiting_work and ring.num_requests_waiting:
            waiting += f" ({ring.waiting_work / ring.max_waiting_work:.0%} full)"
        table.add_row(
            ring.name, _state(ring), str(ring.num_requests_running), waiting, _fullest(ring, is_ascii=is_ascii)
        )
    shown = {ring.name for ring in info.rings}
    left = [drain for drain in info.drains if drain.has_left and drain.ring not in shown]
    for drain in left:
        table.add_row(drain.ring, "left", "", "", "")
    present = {ring.role for ring in info.rings} | {drain.role for drain in left}
    for role in ROLES:
        if role not in present:
            table.add_row(f"({role})", "none", "", "", "")
    return table


def _fullest(ring: RingInfo, *, is_ascii: bool) -> str:
    """Draw the active, retained and free blocks of the rank with the fewest free ones, and tell the share in use."""
    ranks = [rank for rank in ring.kv_usage if rank.total_blocks]
    if not ranks:
        return ""
    rank = min(ranks, key=lambda rank: rank.free_blocks / rank.total_blocks)
    active, retained = (count / rank.total_blocks for count in (rank.active_blocks, rank.kept_blocks))
    signs = "#=." if is_ascii else "█▒·"
    used = round((active + retained) * BAR_COLUMNS)
    full = min(used, round(active * BAR_COLUMNS))
    bar = signs[0] * full + signs[1] * (used - full) + signs[2] * (BAR_COLUMNS - used)
    return f"{bar} {active + retained:.0%}"


def _wide_table(info: ServerInfo) -> Table:
    table = listing(
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
        table.add_row(
            ring.name,
            _state(ring),
            _ranks(ring),
            _backends(ring),
            str(ring.num_requests_running),
            _waiting(ring),
            "\n".join(dict.fromkeys(_usage(rank) for rank in ring.kv_usage)),
            str(ring.num_preemptions),
            str(ring.rebuilds),
        )
    return table


def _ring_of(info: ServerInfo, name: str) -> RingInfo:
    """Return a ring by name. Raises NotFound."""
    for ring in info.rings:
        if ring.name == name:
            return ring
    raise NotFound(f"ring: there is no ring {name!r}; the rings are {', '.join(ring.name for ring in info.rings)}")


def _ring_table(ring: RingInfo) -> Table:
    """Return the details of a ring, with a line for each rank."""
    table = Table("", ring.name, box=SIMPLE, show_edge=False, pad_edge=False)
    rows = {
        "role": ring.role,
        "state": _state(ring),
        "ranks": _ranks(ring),
        "attention, transport, decode": _backends(ring),
        "turns": f"{ring.num_requests_running} running, {_waiting(ring)} waiting",
        "preemptions": str(ring.num_preemptions),
        "rebuilds": str(ring.rebuilds),
        "room for KV": f"{ring.capacity_tokens} tokens",
        "endpoint": ring.endpoint,
        "metrics": ring.metrics_endpoint,
        "nodes": ", ".join(ring.nodes),
        "processes": ", ".join(map(str, ring.rank_pids)),
    }
    for key, value in rows.items():
        if value:
            table.add_row(key, value)
    for number, rank in enumerate(ring.kv_usage):
        table.add_row(f"KV blocks of rank {number}", f"{_usage(rank)} (free/active/retained)")
    for each in ring.corrections:
        told = f"{each.factor:.2f} ({each.num_turns} turns of {each.min_work:,} work units and more)"
        table.add_row(f"measured/predicted, {each.algorithm}", told)
    return table


def _ranks(ring: RingInfo) -> str:
    return f"{ring.num_ranks} x {ring.tp}" if ring.tp > 1 else str(ring.num_ranks)


def _backends(ring: RingInfo) -> str:
    """Return the backends with which a ring computes."""
    return ", ".join(name for name in (ring.attention_backend, ring.ring_transport, ring.decode_variant) if name)


def _usage(rank: RankKvUsage) -> str:
    return f"{rank.free_blocks}/{rank.active_blocks}/{rank.kept_blocks} of {rank.total_blocks}"


def _state(ring: RingInfo) -> str:
    word = "restarting" if ring.restarting else "draining" if ring.draining else ""
    return f"{ring.state}, {word}" if word else ring.state


def _drain_line(drain: RingDrain) -> str:
    """Return how far the drain of a ring has come, or how it ended."""
    stayed = drain.no_room + drain.failed
    return (
        f"{drain.ring} {'has left' if drain.has_left else 'drains'}: {drain.running_turns} turns, {drain.moved} "
        f"conversations moved, {drain.left} left to move, {stayed} stay behind"
    )


def pool_sizes(info: ServerInfo) -> str:
    """Return how many rings of which size each role has, the largest first."""
    rings = Counter((ring.role, ring.num_ranks, ring.tp) for ring in info.rings)
    told = {role: "" for role in dict.fromkeys(ring.role for ring in info.rings)}
    for (role, cp, tp), count in sorted(rings.items(), key=lambda item: (-item[0][1], -item[0][2])):
        size = f"cp {cp} x tp {tp}" if tp > 1 else f"cp {cp}"
        told[role] += f"{',' if told[role] else ''} {count} of {size}"
    return "; ".join(f"{role} rings:{sizes}" for role, sizes in told.items())


def _waiting(ring: RingInfo) -> str:
    """Return waiting turns, and for a prefill ring their work beside its bound."""
    if not ring.max_waiting_work:
        return str(ring.num_requests_waiting)
    return f"{ring.num_requests_waiting} ({ring.waiting_work:,.0f} of {ring.max_waiting_work:,.0f} work units)"
