"""Compile Triton's kernels for GPUs that are not here: `python -m tests.cp_core.attention.triton_compiling`."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringserve.cp_core.attention import triton_kernels

# Bytes of shared memory that a program may have on the smallest GPU served (sm_86, sm_89).
SHARED_MEMORY = 99 << 10
# Arguments that are no multiples of 16; those of a real launch that are have been told so.
ODD = {"lengths", "firsts", "ends", "first", "stop", "num_rows", "num_splits", "scale_log2"}


def compiled(
    kernel: Any, capability: int, types: dict[str, Any], constants: dict[str, object], stages: int, warps: int = 4
) -> None:
    """Compile a kernel whose arguments are int32 unless `types` says otherwise."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name not in ODD and not isinstance(signature[name], tuple)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"], f"{kernel.__name__} has no machine code"
    assert made.metadata.shared <= SHARED_MEMORY, f"{kernel.__name__} takes {made.metadata.shared} bytes"


def main() -> None:
    pointers = {"part_out": "*fp32", "part_lse": "*fp32", "out": "*fp32", "lse": "*fp32", "scale_log2": "fp32"}
    attending = {**pointers, "table": "*i32", "lengths": "*i32", "firsts": "*i32", "ends": "*i32"}
    for capability, dtype, dims, keys in ((90, "bf16", 128, 64), (80, "fp32", 256, 16)):
        types = {**attending, **dict.fromkeys(("q", "k_pages", "v_pages"), f"*{dtype}")}
        constants: dict[str, object] = {"PAGE_TOKENS": 16, "GROUP": 4, "ROWS": 16, "HEAD_DIM": dims, "KEYS": keys}
        constants |= {"PADDED_DIM": dims, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
        for has_firsts, is_together in ((False, False), (True, False), (True, True)):
            told = constants | {"HAS_FIRSTS": has_firsts, "IS_TOGETHER": is_together}
            told["ROWS"] = 32 if is_together else 16
            warps = 8 if is_together and dims == 256 else 4
            compiled(triton_kernels._attend_split, capability, types, told, stages=3, warps=warps)
        band = {name: constants[name] for name in ("GROUP", "HEAD_DIM", "PADDED_DIM", "KEYS", "PRECISION")}
        band["ROWS"] = 128 if dims == 128 else 32
        types |= {name: f"*{dtype}" for name in ("k", "v")} | {"first": "*i32", "stop": "*i32"}
        compiled(triton_kernels._attend_band, capability, types, band, stages=2, warps=8 if dims == 128 else 4)
    parts: dict[str, Any] = {name: ("i32", "i32") for name in ("out_rows", "out_heads", "lse_rows", "lse_heads")}
    parts |= {"outs": ("*bf16", "*fp32"), "lses": ("*fp32", "*fp32")}
    merged: dict[str, object] = {"NUM_PARTS": 2, "HEAD_DIM": 128, "PADDED_DIM": 128, "ROWS": 16}
    compiled(triton_kernels._merge_parts, 90, {**pointers, **parts}, merged, stages=3)
    joined: dict[str, object] = {"HEAD_DIM": 128, "PADDED_DIM": 128}
    compiled(triton_kernels._join_splits, 90, pointers, joined, stages=3)


if __name__ == "__main__":
    main()
