"""Commands of `ip` that join network namespaces by cables (pairs of veth devices) to a bridge.

    hub namespace:  ring-N (bridge) -- port-PID ...        member's namespace:  eth0

The selection bench and the chaos bench run them. The hub namespace has the bridge of network N; each member is a
process, PID, in a namespace of its own. A namespace and its devices vanish with its last process. Without root, they
are made in a user namespace, if the kernel allows that. Only `enter_new` and `run_all` change the machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

from ringserve.cp_core.errors import Unavailable

Command = tuple[str, ...]

COMMAND_SECONDS = 20.0
CLONE_NEWNET = 0x40000000
PROGRAMS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
DEVICE = "eth0"


def enter_new() -> None:
    """Move this thread, and all that it starts, into a new network namespace. Raises Unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise Unavailable(f"no network namespace: {os.strerror(ctypes.get_errno())}")


def address_of(number: int, member: int) -> str:
    """Return the address of a member, 0 to 253, of the network with this number."""
    return f"10.77.{number}.{member + 1}"


def bridge_commands(number: int) -> list[Command]:
    """Return the commands for a network's bridge, in the hub namespace."""
    name = f"ring-{number}"
    return [("ip", "link", "add", "name", name, "type", "bridge"), ("ip", "link", "set", name, "up")]


def hub_commands(number: int) -> list[Command]:
    """Return the commands for a bridge whose hub namespace is itself member 0 of the network."""
    # Without an address of its own, a bridge uses a port's hardware address. If that port went, the address would
    # change, and the other members would no longer reach the hub.
    hardware = ("ip", "link", "set", f"ring-{number}", "address", f"02:00:00:00:00:{number:02x}")
    join = ("ip", "address", "add", f"{address_of(number, 0)}/24", "dev", f"ring-{number}")
    return [("ip", "link", "set", "lo", "up"), *bridge_commands(number), hardware, join]


def cable_commands(number: int, pid: int) -> list[Command]:
    """Return the commands for the cable from the bridge to process `pid`, in the hub namespace."""
    port = f"port-{pid}"
    return [
        ("ip", "link", "add", "name", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid)),
        ("ip", "link", "set", port, "master", f"ring-{number}", "up"),
    ]


def cut_commands(pid: int, *, is_cut: bool) -> list[Command]:
    """Return the command that cuts the cable to process `pid` or joins it again, in the hub namespace.

    What is sent into a cut cable is lost in silence.
    """
    return [("ip", "link", "set", f"port-{pid}", "down" if is_cut else "up")]


def address_commands(number: int, member: int) -> list[Command]:
    """Return the commands for a member's address, in its namespace; `lo` leads to the member itself."""
    return [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{address_of(number, member)}/24", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
    ]


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

    Raises Unavailable if no namespace can be made, neither directly nor in a user namespace, or a program is missing.
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
