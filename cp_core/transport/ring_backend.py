"""Choice of the transport of a ring by device or by name, free of torch: configuration is checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringserve.cp_core.errors import ConfigError

# "auto" takes the first one of the device; docs/decisions/0004 says why.
SERVING: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("sockets",), "cuda": ("nccl", "sockets")}
RING_TRANSPORTS: Final = ("auto", "nccl", "sockets")


def select_ring_backend(name: str, device_type: str, gpus_per_rank: float = 1.0) -> str:
    """Return the transport called `name`, or the one that "auto" means on `device_type` ("cpu", "cuda").

    Ranks that share a GPU take sockets: NCCL refuses two on one device. Raises ConfigError for an unknown transport,
    and for one that does not serve the device.
    """
    if name not in RING_TRANSPORTS:
        raise ConfigError(f"{name!r} is no ring transport; allowed are {', '.join(RING_TRANSPORTS)}")
    serving, shares = SERVING.get(device_type), device_type == "cuda" and gpus_per_rank < 1.0
    if serving is None:
        raise ConfigError(f"no ring transport serves device {device_type!r}; devices are {', '.join(SERVING)}")
    if shares and name == "nccl":
        raise ConfigError(
            f"ring transport 'nccl' takes one rank on a GPU, and gpus_per_rank is {gpus_per_rank:g}; allowed there are "
            f"auto, sockets"
        )
    if shares:
        return "sockets"
    if name == "auto":
        return serving[0]
    if name not in serving:
        allowed = ", ".join(("auto", *serving))
        raise ConfigError(f"ring transport {name!r} does not serve device {device_type!r}; allowed there are {allowed}")
    return name
