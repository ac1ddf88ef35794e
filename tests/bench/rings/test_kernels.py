"""Bench of kernels, at sizes of a CPU: every kind of case is measured by every backend that can."""

from __future__ import annotations

import pytest
import torch

from bench.__main__ import main
from bench.report import table
from bench.rings.attention import AttentionShape
from bench.rings.kernels import NUM_KINDS, KernelBench, Sizes, measure_kernels
from ringserve.cp_core.attention import native
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.errors import ConfigError
from ringserve.workers.model.layers import packed_dtypes
from tests.programs import require

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
SIZES = Sizes(
    prefill=((32, 32, True), (4, 64, False)),
    windows=((40, 8),),
    decode=((3, 40),),
    merges=((8, 2),),
    vocabulary=50,
    copied_bytes=1 << 10,
    linear=(1, 9),
    linear_features=(32, 48),
    linear_bytes=1 << 13,
)
CPU = torch.device("cpu")


def test_every_kind_of_kernel_is_measured_and_told() -> None:
    told: list[str] = []
    figures = measure_kernels(SHAPE, CPU, torch.float32, SIZES, 1, told.append)
    assert told == ["copy", "prefill", "windows", "decode", "linear", "merge", "sampling"]
    assert len(told) == NUM_KINDS
    if native.library() is None:
        require("c++", "g++", "clang++")
    assert [(each.keys["what"], each.keys["kernel"]) for each in figures[:19]] == [
        ("copy", "torch"),
        *[("prefill", "native_cpu"), ("prefill", "torch_cpu_flash")] * 2,
        *[("window", "native_cpu"), ("window", "torch_cpu_flash")],
        ("decode", "native_cpu"),
        *[("linear", name) for name in ("torch", "onednn", "native", "native_bfloat16", "native_alone")] * 2,
        ("merge", "merge"),
    ]
    assert [each.keys["kernel"] for each in figures[19:]] == ["greedy", "drawn", "top_p"] * 2
    assert all(each.value("milliseconds") > 0 and each.value("rate") > 0 for each in figures)
    assert table([each.cells() for each in figures]).row_count == len(figures)


def test_linear_layers_are_measured_in_the_asked_type() -> None:
    bench = KernelBench(SHAPE, CPU, torch.bfloat16, [TorchCpuFlash()], 1)
    forms = ("torch", *(["onednn"] if torch.bfloat16 in packed_dtypes() else []), "native", "native_alone")
    assert [each.keys["kernel"] for each in bench.linear(SIZES)] == [*forms] * 2


def test_decode_is_measured_by_kernels_that_follow_block_tables_alone() -> None:
    bench = KernelBench(SHAPE, CPU, torch.float32, [TorchCpuFlash(), ReferenceAttention()], 1)
    assert [(each.keys["case"], each.keys["kernel"]) for each in bench.decode(SIZES)] == [("3 x 40", "reference")]


def test_where_there_is_no_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--device", "cuda"]) != 0
    assert "--device: 'cuda', but torch finds no GPU here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no GPU here"):
        measure_kernels(SHAPE, torch.device("cuda", 0), torch.bfloat16, SIZES, 1, print)


def test_a_type_is_that_of_kernels_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--dtype", "bfloat16"]) != 0
    assert "--dtype: needs --device; rings are measured in float32" in capsys.readouterr().err
