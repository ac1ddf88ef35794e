"""Links of known rate between ranks on one machine: a network namespace for each rank, egress shaped by `tc tbf`.

The selection bench makes the links, and its ranks shape them. Commands of `ip` and `tc` change only its own namespaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from bench.namespaces import (
    DEVICE,
    Command,
    address_commands,
    address_of,
    bridge_commands,
    cable_commands,
    enter_new,
    run_all,
)
from bench.rings.ring_processes import Network
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.interface import RingTransport

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# Bytes that pass at once after an idle time. A long burst would hide the time of small messages; the least one holds
# two whole frames.
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
    """Shaped links of one ring with a unique `number`, 1 to 255; call `make_bridge` before its ranks start."""

    number: int

    @property
    def host(self) -> str:
        return address_of(self.number, 0)

    def make_bridge(self) -> None:
        """Make the ring's bridge, in the hub namespace. Raises Unavailable."""
        run_all(bridge_commands(self.number))

    def enter(self) -> None:
        """Move this thread, and all that it starts, into a new network namespace."""
        enter_new()

    def connect(self, rank: int, pid: int) -> None:
        run_all(cable_commands(self.number, pid))

    def settle(self, rank: int) -> None:
        run_all(address_commands(self.number, rank))

    def shape(self, transport: RingTransport, rate: LinkRate) -> RingTransport:
        """Let the kernel shape the traffic of the same transport."""
        run_all(shape_commands(rate))
        return transport


def shape_commands(rate: LinkRate) -> list[Command]:
    """Return the command that shapes a rank's egress to all peers together, in its namespace."""
    burst = max(LEAST_BURST_BYTES, round(rate.bytes_per_second * BURST_SECONDS))
    queue = max(LEAST_QUEUE_BYTES, round(rate.bytes_per_second * QUEUE_SECONDS))
    shaper = ("tbf", "rate", f"{rate.bits_per_second:.0f}bit", "burst", str(burst), "limit", str(queue))
    return [("tc", "qdisc", "replace", "dev", DEVICE, "root", *shaper)]
