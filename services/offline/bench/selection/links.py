"""Links between the ranks of a ring on one machine: a network namespace for each rank, cables to a bridge, and a rate.

    hub namespace:  ring-N (bridge) -- port-PID ...        rank's namespace:  eth0, its egress shaped by `tc tbf`

Nothing has to be removed: a namespace lives as long as its processes, and takes its devices along. Whoever is not root
is root in a user namespace of its own, where the kernel allows that.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cp_core.errors import ConfigError, Unavailable
from cp_core.transport.interface import RingTransport
from services.offline.bench.ring_processes import Network

Command = tuple[str, ...]

COMMAND_SECONDS = 20.0
CLONE_NEWNET = 0x40000000
PROGRAMS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DEVICE = "eth0"

# What passes at once after a silence. A real link lets nothing pass, so it is short: it hides the time of small
# messages. Two whole frames have to fit.
BURST_SECONDS = 0.5e-3
LEAST_BURST_BYTES = 2 * 1514
# What may wait to be sent. A queue that drops would measure TCP's recovery.
QUEUE_SECONDS = 1.0
LEAST_QUEUE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Bits a second in each direction, as `tc` counts them: with the headers of every frame."""

    bits_per_second: float

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        unit = next((unit for unit in ("gbit", "mbit") if self.bits_per_second >= UNITS[unit]), "kbit")
        return f"{self.bits_per_second / UNITS[unit]:g}{unit}"


def parse_rate(text: str) -> LinkRate:
    """As `tc` writes it. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--rates: {text!r} is no rate; allowed are those like 500kbit, 50mbit, 1gbit")
    return LinkRate(float(found[1]) * UNITS[found[2]])


class Links(Network, Protocol):
    """A network whose links can be given a rate."""

    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        """In a rank's process, between steps: what it sends by from now on, at `rate`. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class ShapedLinks:
    """Of one ring; no other of this process has its `number`, 1 to 255. `make_bridge` comes before its ranks."""

    number: int

    @property
    def host(self) -> str:
        return address_of(self.number, 0)

    def make_bridge(self) -> None:
        """In the hub namespace. Raises Unavailable."""
        run_all(bridge_commands(self.number))

    def enter(self) -> None:
        """Leave for a network namespace of one's own: what this thread, and those that it starts, open from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise Unavailable(f"no network namespace: {os.strerror(ctypes.get_errno())}")

    def connect(self, rank: int, pid: int) -> None:
        run_all(cable_commands(self.number, pid))

    def settle(self, rank: int) -> None:
        run_all(address_commands(self.number, rank))

    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        """The kernel shapes what the same transport sends."""
        run_all(shape_commands(rate))
        return transport


def address_of(number: int, rank: int) -> str:
    return f"10.77.{number}.{rank + 1}"


def bridge_commands(number: int) -> list[Command]:
    """In the hub namespace."""
    name = f"ring-{number}"
    return [("ip", "link", "add", "name", name, "type", "bridge"), ("ip", "link", "set", name, "up")]


def cable_commands(number: int, pid: int) -> list[Command]:
    """In the hub namespace: from the bridge into that of process `pid`."""
    port = f"port-{pid}"
    return [
        ("ip", "link", "add", "name", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid)),
        ("ip", "link", "set", port, "master", f"ring-{number}", "up"),
    ]


def address_commands(number: int, rank: int) -> list[Command]:
    """In the rank's namespace. A rank reaches itself by `lo`."""
    return [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{address_of(number, rank)}/24", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
    ]


def shape_commands(rate: LinkRate) -> list[Command]:
    """In the rank's namespace: what leaves it, to all others together, at this rate."""
    burst = max(LEAST_BURST_BYTES, round(rate.bytes_per_second * BURST_SECONDS))
    queue = max(LEAST_QUEUE_BYTES, round(rate.bytes_per_second * QUEUE_SECONDS))
    shaper = ("tbf", "rate", f"{rate.bits_per_second:.0f}bit", "burst", str(burst), "limit", str(queue))
    return [("tc", "qdisc", "replace", "dev", DEVICE, "root", *shaper)]


def run_all(commands: Sequence[Command]) -> None:
    """One after the other. Raises Unavailable with what the first that fails says."""
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        except FileNotFoundError:
            raise Unavailable(f"{command[0]} is not installed") from None
        except subprocess.TimeoutExpired:
            raise Unavailable(f"`{' '.join(command)}` did not end in {COMMAND_SECONDS:g} s") from None
        if done.returncode:
            raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def isolation() -> Command:
    """What to put before a command so that it runs in a network namespace of its own, where it may make others.

    Raises Unavailable where neither root nor a user namespace of one's own may do that, or a program is missing.
    """
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed; on Debian it is in {package}")
    answers = []
    for prefix in (("unshare", "--net", "--"), ("unshare", "--user", "--map-root-user", "--net", "--")):
        try:
            run_all([(*prefix, "ip", "link", "set", "lo", "up")])
        except Unavailable as error:
            answers.append(str(error))
        else:
            return prefix
    raise Unavailable(
        f"this machine lets nobody but root make network namespaces (of user namespaces it says: {answers[-1]}); "
        f"run it as root"
    )
