"""Links of known rate between ranks on one machine: a network namespace for each rank and cables to a bridge.

    hub namespace:  ring-N (bridge) -- port-PID ...        rank's namespace:  eth0, its egress shaped by `tc tbf`

A namespace and its devices vanish with its last process. Without root, a user namespace serves where the kernel allows
it.
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

# Bytes that pass at once after an idle time. It is short, since it hides the time of small messages, but holds two
# whole frames.
BURST_SECONDS = 0.5e-3
LEAST_BURST_BYTES = 2 * 1514
# Bytes that may wait to be sent. A queue that drops packets would measure TCP's recovery.
QUEUE_SECONDS = 1.0
LEAST_QUEUE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Rate of a link in each direction; like `tc` it counts the headers of every frame."""

    bits_per_second: float

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        unit = next((unit for unit in ("gbit", "mbit") if self.bits_per_second >= UNITS[unit]), "kbit")
        return f"{self.bits_per_second / UNITS[unit]:g}{unit}"


def parse_rate(text: str) -> LinkRate:
    """Parse a rate in the notation of `tc`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--rates: {text!r} is no rate; allowed are those like 500kbit, 50mbit, 1gbit")
    return LinkRate(float(found[1]) * UNITS[found[2]])


class Links(Network, Protocol):
    """Network whose links take a rate."""

    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        """Return the transport at `rate` for later steps; called in a rank's process. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class ShapedLinks:
    """Shaped links of one ring with a unique `number`, 1 to 255; `make_bridge` precedes its ranks."""

    number: int

    @property
    def host(self) -> str:
        return address_of(self.number, 0)

    def make_bridge(self) -> None:
        """Make the ring's bridge, in the hub namespace. Raises Unavailable."""
        run_all(bridge_commands(self.number))

    def enter(self) -> None:
        """Move this thread, and all that it starts, into a new network namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise Unavailable(f"no network namespace: {os.strerror(ctypes.get_errno())}")

    def connect(self, rank: int, pid: int) -> None:
        run_all(cable_commands(self.number, pid))

    def settle(self, rank: int) -> None:
        run_all(address_commands(self.number, rank))

    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        """Let the kernel shape the traffic of the same transport."""
        run_all(shape_commands(rate))
        return transport


def address_of(number: int, rank: int) -> str:
    return f"10.77.{number}.{rank + 1}"


def bridge_commands(number: int) -> list[Command]:
    """Return the commands for a ring's bridge, in the hub namespace."""
    name = f"ring-{number}"
    return [("ip", "link", "add", "name", name, "type", "bridge"), ("ip", "link", "set", name, "up")]


def cable_commands(number: int, pid: int) -> list[Command]:
    """Return the commands for the cable from the bridge to process `pid`, in the hub namespace."""
    port = f"port-{pid}"
    return [
        ("ip", "link", "add", "name", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid)),
        ("ip", "link", "set", port, "master", f"ring-{number}", "up"),
    ]


def address_commands(number: int, rank: int) -> list[Command]:
    """Return the commands for a rank's address, in its namespace; `lo` leads to the rank itself."""
    return [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{address_of(number, rank)}/24", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
    ]


def shape_commands(rate: LinkRate) -> list[Command]:
    """Return the command that shapes a rank's egress to all peers together, in its namespace."""
    burst = max(LEAST_BURST_BYTES, round(rate.bytes_per_second * BURST_SECONDS))
    queue = max(LEAST_QUEUE_BYTES, round(rate.bytes_per_second * QUEUE_SECONDS))
    shaper = ("tbf", "rate", f"{rate.bits_per_second:.0f}bit", "burst", str(burst), "limit", str(queue))
    return [("tc", "qdisc", "replace", "dev", DEVICE, "root", *shaper)]


def run_all(commands: Sequence[Command]) -> None:
    """Run commands in order. Raises Unavailable with the output of the first that fails."""
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
    """Return the prefix of a command that runs it in a new network namespace, where it may make others.

    Raises Unavailable where neither root nor a user namespace is allowed to, or a program is missing.
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
        f"this machine lets only root make network namespaces (a user namespace failed: {answers[-1]}); run it as root"
    )
