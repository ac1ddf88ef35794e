"""`ringserve drain`, `undrain` and `restart`: take rings out of service and bring them back, without losing a turn."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from ringserve.cp_core.errors import ConfigError
from ringserve.services.cli.command import argument, command, flag, option
from ringserve.services.cli.options import ClusterName, ConfigOptions, JsonFlag
from ringserve.services.cluster.kubernetes import KubectlProgram, Rollout
from ringserve.services.cluster.operator import RouterAccess, drain_node, drain_ring, restart_ring, undrain_ring
from ringserve.services.cluster.state import require_ready, secret_of
from ringserve.views import RingDrain

TurnSeconds = Annotated[float, Option(metavar="N", help="how long turns may go on")]


START_SECONDS = 180.0
KUBERNETES_START_SECONDS = 1800.0
"""Same as the chart's `timeouts.start`, which includes the pull of the image."""


def show_progress(line: str) -> None:
    """Print a step to standard error: scripts read the outcome on standard output."""
    print("ringserve:", line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """The router, which operators' commands call; clients call gateways only."""

    target: str = option("router (default: that of the local cluster)", "HOST:PORT", "")
    name: ClusterName = "default"
    config: ConfigOptions
    json: JsonFlag = False

    def access(self) -> RouterAccess:
        """Return the access to the router. Raises NotFound, ConfigError."""
        router = self.target or require_ready(self.name).router
        return RouterAccess(
            endpoint=router,
            secret=secret_of(router),
            tls=self.config.load().internal_tls.files,
            progress=show_progress,
        )

    def show(self, outcome: dict[str, Any], sentence: str) -> int:
        """Print the result, and return the exit status."""
        print(json.dumps(outcome) if self.json else f"ringserve: {sentence}")
        return 0


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    ring: str = argument("name of the ring, as 'ringserve status' shows it", default="")
    router: RouterOptions
    node: str = option("instead of a ring: address of a node that goes away", "ADDRESS", "")
    seconds: TurnSeconds = 600.0
    force: bool = flag("drain even if no other ring of its role takes turns")


@dataclass(frozen=True, kw_only=True)
class UndrainOptions:
    ring: str = argument("name of the ring")
    router: RouterOptions
    seconds: float = option("how long to wait until it serves", "N", 180.0)


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    rings: list[str] = argument("names of rings, restarted one after the other", default=[])
    router: RouterOptions
    seconds: TurnSeconds = 600.0
    start_seconds: float | None = option(
        "how long each may take to serve again (default: 180; 1800 on Kubernetes)", "N", None
    )
    kubernetes: str = option(
        "instead of rings: a RayCluster of the Helm chart, by kubectl; pods without its newest template are replaced",
        "RAYCLUSTER",
        "",
    )
    namespace: str = option("with --kubernetes: namespace of the RayCluster (default: kubectl's)", "NAME", "")
    context: str = option("with --kubernetes: context of kubectl (default: its current one)", "NAME", "")
    all: bool = flag("with --kubernetes: replace every pod, also those that have the newest template")
    forget: bool = flag("with --kubernetes: replace a head without a journal volume, and forget its conversations")


@command(
    "ringserve drain decode-0",
    "ringserve drain prefill-1 --seconds 60 --target 10.0.0.5:6380 --config cluster.yaml",
    "ringserve drain --node 10.0.0.7",
    notes="""The ring takes no new turns, lets the running ones finish, moves the retained KV of conversations to other
rings of its role, most recently used first, and leaves; 'ringserve undrain' brings it back. With --node every ring with
a rank on that node leaves, and is started again when the node is gone.""",
)
def drain(options: DrainOptions) -> int:
    router = options.router
    if bool(options.ring) == bool(options.node):
        raise ConfigError("ring: name one ring, or with --node the node whose rings are to leave")
    if options.node:
        rings = asyncio.run(drain_node(router.access(), options.node, seconds=options.seconds))
        outcome: dict[str, Any] = {"node": options.node, "rings": rings, "drained": True}
        return router.show(outcome, f"{', '.join(rings)} have left" if rings else f"no ring is on {options.node}")
    found = asyncio.run(drain_ring(router.access(), options.ring, seconds=options.seconds, force=options.force))
    outcome = {"ring": options.ring, "drained": True, **_moves(found)}
    back = f"'ringserve undrain {options.ring}' brings it back"
    return router.show(outcome, f"{options.ring} has left; {back}{_moves_sentence(found)}")


@command("ringserve undrain decode-0")
def undrain(options: UndrainOptions) -> int:
    asyncio.run(undrain_ring(options.router.access(), options.ring, seconds=options.seconds))
    return options.router.show({"ring": options.ring, "serves": True}, f"{options.ring} serves")


@command(
    "ringserve restart decode-0",
    "ringserve restart prefill-0 prefill-1 decode-0 decode-1",
    "ringserve restart --kubernetes chat-ringserve --namespace serving",
    notes="""One ring after the other takes no new turns, lets the running ones finish, and is started again. New turns
go to other rings meanwhile; if no other ring of the same role serves, they wait until the restarted ring is back. On
Kubernetes the pods of one ring after the other drain, are deleted and come back with their newest template, as after
'helm upgrade'; the head comes last. If the release changes, or the head is replaced and has no ray.gcsStorage, all pods
are replaced together.""",
)
def restart(options: RestartOptions) -> int:
    if bool(options.rings) == bool(options.kubernetes):
        raise ConfigError("rings: name the rings to restart, or with --kubernetes the RayCluster of a release")
    if options.kubernetes:
        return _roll_out(options)

    async def one_after_the_other() -> None:
        seconds, start_seconds = options.seconds, options.start_seconds or START_SECONDS
        for ring in options.rings:
            await restart_ring(options.router.access(), ring, seconds=seconds, start_seconds=start_seconds)

    asyncio.run(one_after_the_other())
    return options.router.show({"rings": options.rings, "serves": True}, f"{', '.join(options.rings)} restarted")


def _roll_out(options: RestartOptions) -> int:
    rollout = Rollout(
        kubectl=KubectlProgram(namespace=options.namespace, context=options.context),
        name=options.kubernetes,
        start_seconds=options.start_seconds or KUBERNETES_START_SECONDS,
        progress=show_progress,
        everything=options.all,
        forget=options.forget,
    )
    done = rollout.run()
    sentence = f"{', '.join(done)} replaced, all rings serve" if done else "nothing to replace"
    return options.router.show({"replaced": done, "serves": True}, sentence)


def _moves(drain: RingDrain | None) -> dict[str, int]:
    if drain is None:
        return {}
    return {
        "moved": drain.moved,
        "left": drain.left,
        "no_room": drain.no_room,
        "failed": drain.failed,
        "moved_bytes": drain.moved_bytes,
    }


def _moves_sentence(drain: RingDrain | None) -> str:
    """Return how many conversations of the ring were moved; later turns compute the others again."""
    if drain is None:
        return ""
    stayed = [
        (drain.left, "had no time"),
        (drain.no_room, "found no room elsewhere"),
        (drain.failed, "could not be moved"),
    ]
    others = "".join(f", {count} {why}" for count, why in stayed if count)
    return f"; {drain.moved} conversations were moved{others}"
