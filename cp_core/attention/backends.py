"""All attention kernels, those that "auto" tries fastest first, and the choice of one when a rank loads its model."""

from __future__ import annotations

import torch

from ringserve.cp_core.attention.flash_attn import FlashAttention
from ringserve.cp_core.attention.flash_attn_3 import FlashAttention3
from ringserve.cp_core.attention.native import NativeCpu
from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.attention.torch_cuda import TorchCudaFlash
from ringserve.cp_core.attention.triton_decode import TritonDecode
from ringserve.cp_core.errors import ConfigError

Backend = (
    type[NativeCpu]
    | type[TorchCpuFlash]
    | type[FlashAttention3]
    | type[TritonDecode]
    | type[TorchCudaFlash]
    | type[FlashAttention]
    | type[ReferenceAttention]
)

BACKENDS: tuple[Backend, ...] = (
    NativeCpu,
    TorchCpuFlash,
    FlashAttention3,
    TritonDecode,
    TorchCudaFlash,
    FlashAttention,
    ReferenceAttention,
)


def select_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend called `name`, or for "auto" the fastest backend that supports `device` and `dtype`.

    Raises ConfigError if the name is unknown, or if the backend does not support this device and dtype or is not
    installed. "auto" never chooses the slow reference kernel: it raises ConfigError if no other backend fits.

    Example: `select_backend("auto", "cpu", torch.float32)` is `native_cpu` if it is compiled.
    """
    device = torch.device(device)
    if name == "auto":
        fast = [kind for kind in BACKENDS if kind.is_fast and kind.supports(device, dtype)]
        if not fast:
            raise ConfigError(
                f"attention_backend is 'auto', but no fast kernel supports {dtype} on {device}; use 'reference'"
            )
        return fast[0]()
    for kind in BACKENDS:
        if kind.name == name:
            if not kind.supports(device, dtype):
                raise ConfigError(f"attention_backend {name!r} does not support {dtype} on {device}")
            return kind()
    allowed = ", ".join(["auto", *(kind.name for kind in BACKENDS)])
    raise ConfigError(f"attention_backend is {name!r}; allowed are {allowed}")
