"""NIXL agent whose READs each copy one contiguous range (one NIXL descriptor).

The thread of a `PullAgent` makes an agent and calls it. Only this file imports NIXL.

NIXL cannot cancel a READ. Only the end of a READ guarantees that no more bytes land.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringserve.cp_core.errors import ConfigError

RDMA_DEVICES = Path("/sys/class/infiniband")


def ucx_settings(rdma_devices: Path = RDMA_DEVICES) -> str:
    """Return NIXL's settings for UCX. UCX_... variables in the environment override them.

    Emulated RMA is forbidden, since a reader's death could end the process that it reads. An agent listens on every
    interface, and whoever reaches it may read and write the whole process. TCP is therefore off if there is RDMA, and
    otherwise limited to loopback, where the processes of this host find each other. Data go by cma, cuda_ipc and RDMA.
    READs by cuda_ipc must be requested: by default UCX allows only WRITEs on a GPU without a link to another GPU.
    """
    has_rdma = rdma_devices.is_dir() and any(rdma_devices.iterdir())
    forced = "PROTO_EMULATION_ENABLE=n,CUDA_IPC_ENABLE_GET_ZCOPY=on,"
    return forced + ("TLS=^tcp" if has_rdma else "NET_DEVICES=lo")


class Disconnected(ConnectionError):
    """READ that ended because its peer is lost, or that never began. No more bytes land."""


class NixlRead:
    """READ in progress. Keep its handle until the READ is over, because dropping the handle tries to cancel it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.is_done = False


class Unfinished(Exception):
    """Error of a READ that may still be running: bytes may still land."""

    def __init__(self, reason: str, read: NixlRead) -> None:
        super().__init__(reason)
        self.read = read


def has_nixl() -> bool:
    """Return True if a NIXL package is installed."""
    return bool(_packages())


def load_nixl() -> Any:
    """Import NIXL's Python interface. Raises ConfigError."""
    packages = _packages()
    if not packages:
        raise ConfigError("kv_transfer.carrier: 'nixl' needs a package; install it: pip install 'ringserve[nixl]'")
    raises = logging.raiseExceptions
    try:
        api = importlib.import_module(f"{packages[0]}._api")
    except Exception as error:
        raise ConfigError(f"kv_transfer.carrier: 'nixl' needs {packages[0]}, which does not load: {error}") from error
    finally:
        # The import changes this process's logging error handling, and logs to stdout.
        logging.raiseExceptions = raises
    told = logging.getLogger("nixl")
    told.handlers.clear()
    told.propagate = True
    told.setLevel(logging.WARNING)
    return api


def _packages() -> list[str]:
    """Return the installed NIXL packages, first the one for torch's CUDA version."""
    own = (torch.version.cuda or "12").partition(".")[0]
    names = [f"nixl_cu{major}" for major in sorted(("12", "13"), key=lambda major: major != own)]
    return [name for name in names if importlib.util.find_spec(name) is not None]


class NixlAgent:
    """Agent with registered memory. `close` destroys it, which ends its READs."""

    def __init__(self, name: str, device: torch.device, engine: str | None = None) -> None:
        """Make the agent. `engine` replaces `ucx_settings`. Raises ConfigError and NIXL's errors."""
        api = load_nixl()
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        self._device = device
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", {"engine_config": engine or ucx_settings()})

    def register(self, memory: torch.Tensor) -> None:
        """Register memory for READs, on both ends."""
        row = _row(memory.data_ptr(), memory.nbytes, memory.device.index or 0)
        self._agent.register_memory(row, _kind(memory.device.type))

    def metadata(self) -> bytes:
        """Return the metadata that peers need to read the registered memory."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add(self, name: str, metadata: bytes) -> None:
        """Add a new peer. Raises Disconnected if the metadata are not its own."""
        try:
            told = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise Disconnected(f"its metadata are refused: {_reason(error)}") from error
        told = told.decode() if isinstance(told, bytes) else told
        if told != name:
            self._agent.remove_remote_agent(told)
            raise Disconnected(f"its metadata are those of {told!r}")

    def remove(self, name: str) -> None:
        """Forget a peer that has no READ in progress."""
        self._agent.remove_remote_agent(name)

    def read(self, peer: str, here: torch.Tensor, address: int, device: str, device_index: int) -> NixlRead:
        """Start reading a peer's bytes into `here`, as many as fit. Raises Disconnected, Unfinished."""
        agent = self._agent
        own = _row(here.data_ptr(), here.nbytes, here.device.index or 0)
        try:
            there = agent.get_xfer_descs(_row(address, here.nbytes, device_index), _kind(device))
            handle = agent.initialize_xfer("READ", agent.get_xfer_descs(own, _kind(here.device.type)), there, peer)
        except Exception as error:
            raise Disconnected(_reason(error)) from error
        read = NixlRead(handle)
        self._follow(read, agent.transfer)
        return read

    def look(self, read: NixlRead) -> None:
        """Set a READ's `is_done` if it is over. Raises Disconnected, Unfinished."""
        self._follow(read, self._agent.check_xfer_state)

    def progress(self) -> None:
        """Serve peers that connect, or read by transports that need the target's help."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Destroy the agent. Its READs are then over, unless the caller still holds a `NixlRead`. Idempotent."""
        self._agent = None

    def _follow(self, read: NixlRead, call: Any) -> None:
        try:
            read.is_done = call(read.handle) == "DONE"
        except Exception as error:
            if type(error).__name__ != "nixlRemoteDisconnectError":
                raise Unfinished(_reason(error), read) from error
            self._agent.release_xfer_handle(read.handle)
            raise Disconnected(_reason(error)) from error
        if read.is_done:
            self._agent.release_xfer_handle(read.handle)


def _kind(device: str) -> str:
    return "VRAM" if device == "cuda" else "DRAM"


def _row(address: int, num_bytes: int, device_index: int) -> Any:
    return np.array([[address, num_bytes, device_index]], np.uint64)


def _reason(error: Exception) -> str:
    return f"NIXL says {error or type(error).__name__}"
