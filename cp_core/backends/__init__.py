"""The attention kernels there are, fastest first. A new one is a class of this shape and a line in BACKENDS."""

from __future__ import annotations

from cp_core.backends.reference import ReferenceAttention
from cp_core.backends.torch_cpu import TorchCpuFlash

BACKENDS: tuple[type[TorchCpuFlash] | type[ReferenceAttention], ...] = (TorchCpuFlash, ReferenceAttention)
