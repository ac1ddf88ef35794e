"""The attention kernels there are, fastest first. A new one is a class of this shape and a line in BACKENDS."""

from __future__ import annotations

from cp_core.attention.flash_attn import FlashAttention
from cp_core.attention.reference import ReferenceAttention
from cp_core.attention.torch_cpu import TorchCpuFlash
from cp_core.attention.torch_cuda import TorchCudaFlash

Backend = type[TorchCpuFlash] | type[TorchCudaFlash] | type[FlashAttention] | type[ReferenceAttention]

BACKENDS: tuple[Backend, ...] = (TorchCpuFlash, TorchCudaFlash, FlashAttention, ReferenceAttention)
