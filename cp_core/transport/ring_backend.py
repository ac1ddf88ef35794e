"""Choice of the transport of a ring by device or by name, free of torch: configuration is checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cp_core.errors import ConfigError

# "auto" takes the first one of the device; docs/decisions/0004 says why.
SERVING: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("sockets",), "cuda": ("nccl",)}
RING_TRANSPORTS: Final = ("auto", "nccl", "sockets")


def select_ring_backend(name: str, device_type: str) -> str:
    """Return the transport called `name`, or the one that "auto" means on `device_type` ("cpu", "cuda").

    Raises ConfigError for an unknown transport, and for one that does not serve the device.
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
