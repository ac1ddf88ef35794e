"""Choice of a ring's transport by device or name, for joining ranks and for checks of the configuration.

It imports no torch, so that the configuration can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringserve.cp_core.errors import ConfigError

# Transports that each device can serve with. "auto" takes the first; docs/decisions/0004 says why.
SERVING: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("sockets",), "cuda": ("nccl", "sockets")}
RING_TRANSPORTS: Final = ("auto", "nccl", "sockets")


def select_ring_backend(name: str, device_type: str, gpus_per_rank: float = 1.0) -> str:
    """Return the transport called `name`, or the choice of "auto" on `device_type` ("cpu", "cuda").

    Ranks that share a GPU use sockets, since NCCL refuses two ranks on one device. Raises ConfigError if the transport
    is unknown or does not support the device. Example: `select_ring_backend("auto", "cpu")` is "sockets".
    """
    if name not in RING_TRANSPORTS:
        raise ConfigError(f"{name!r} is no ring transport; allowed are {', '.join(RING_TRANSPORTS)}")
    serving, shares = SERVING.get(device_type), device_type == "cuda" and gpus_per_rank < 1.0
    if serving is None:
        raise ConfigError(f"no ring transport supports device {device_type!r}; allowed are {', '.join(SERVING)}")
    if shares and name == "nccl":
        raise ConfigError(
            f"ring transport 'nccl' needs a whole GPU per rank, and gpus_per_rank is {gpus_per_rank:g}; "
            f"allowed are auto, sockets"
        )
    if shares:
        return "sockets"
    if name == "auto":
        return serving[0]
    if name not in serving:
        allowed = ", ".join(("auto", *serving))
        raise ConfigError(f"ring transport {name!r} does not support device {device_type!r}; allowed are {allowed}")
    return name
