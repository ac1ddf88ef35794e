"""What carries a ring's messages: chosen by device, or by name. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cp_core.errors import ConfigError

# The first of each device is what "auto" takes; docs/decisions/0004 says why.
SERVING: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("sockets", "gloo"), "cuda": ("nccl",)}
RING_TRANSPORTS: Final = ("auto", "gloo", "nccl", "sockets")


def select_ring_backend(name: str, device_type: str) -> str:
    """The backend called `name`, or the one that "auto" means on `device_type` ("cpu", "cuda").

    Raises ConfigError for an unknown one, and for one that does not serve the device.
    """
    if name not in RING_TRANSPORTS:
        raise ConfigError(f"{name!r} is no ring transport; allowed are {', '.join(RING_TRANSPORTS)}")
    serving = SERVING.get(device_type)
    if serving is None:
        raise ConfigError(f"no ring transport serves device {device_type!r}; devices are {', '.join(SERVING)}")
    if name == "auto":
        return serving[0]
    if name not in serving:
        allowed = ", ".join(("auto", *serving))
        raise ConfigError(f"ring transport {name!r} does not serve device {device_type!r}; allowed there are {allowed}")
    return name
