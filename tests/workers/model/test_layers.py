"""Forms of linear layers: joined ones have the bits of stock modules, those of 8-bit floats what their numbers say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, Parameter

from ringserve.workers.model.layers import (
    ATTENTION_LAYERS,
    FP8,
    JOINED,
    LARGEST_FP8,
    MLP_LAYERS,
    Columns,
    Fp8Linear,
    FusedNorm,
    join_layers,
    quantize_mlps,
    scaled_rows,
)
from ringserve.workers.model.loading import LoadedModel, load_model
from tests.workers.model.test_pieces import Mixing
from tests.workers.models import KINDS

IDS, POSITIONS = torch.tensor([5, 250, 17, 5]), torch.tensor([0, 31, 7, 100])


def states_of(model: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.hidden_states(IDS, POSITIONS, Mixing())


@pytest.mark.parametrize("share", [{}, {"tp": 2, "tp_rank": 1}])
@pytest.mark.parametrize("kind", KINDS)
def test_joined_layers_compute_what_each_of_them_did_and_exist_once(
    kind: str, share: Mapping[str, Any], model_paths: Mapping[str, Path]
) -> None:
    """With biases (qwen2), norms of heads (qwen3), fewer KV heads, and a tensor parallel share of them."""
    stock, joined = (load_model(model_paths[kind], "float32", "cpu", **share) for _ in range(2))
    num_parameters = sum(each.numel() for each in stock.body.parameters())
    for _ in range(2):
        join_layers(joined.body, ATTENTION_LAYERS)
        join_layers(joined.body, MLP_LAYERS)
    assert not joined.can_be_cut
    assert sum(each.numel() for each in joined.body.parameters()) == num_parameters
    for part, names in (("self_attn", ATTENTION_LAYERS), ("mlp", MLP_LAYERS)):
        module, original = (each.body.get_submodule(f"layers.1.{part}") for each in (joined, stock))
        assert all(isinstance(getattr(module, name), Columns) for name in names)
        rows = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(3))
        product = module.get_submodule(JOINED)(rows)
        for name in names:
            torch.testing.assert_close(getattr(module, name)(product), getattr(original, name)(rows))
    if not share:
        torch.testing.assert_close(states_of(joined), states_of(stock))


def test_rows_of_8_bit_floats_keep_three_bits_of_every_number_and_a_nan_in_its_row() -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-6], [1], [1e4], [0], [1]])
    rows[4, 7] = torch.nan
    quantized, scales = scaled_rows(rows)
    assert quantized.dtype == FP8
    back = quantized.float() * scales
    # Half a unit in the last of three bits, and half a step where numbers have none left.
    allowed = rows.abs() / 16 + scales * 2.0**-10
    assert (back - rows)[:4].abs().le(allowed[:4]).all()
    assert quantized[:3].float().abs().amax(dim=1).tolist() == [LARGEST_FP8] * 3
    assert back[4].isnan().all()
    assert back[:4].isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_of_8_bit_floats_multiplies_its_numbers_exactly(has_bias: bool) -> None:
    """The oracle multiplies the same 8-bit numbers in fp64: what is left is the rounding of the result to bfloat16."""
    torch.manual_seed(2)
    linear = Linear(64, 48, bias=has_bias, dtype=torch.bfloat16).requires_grad_(False)
    linear.register_forward_hook(lambda _module, _inputs, output: output * 2)
    plain = Linear(64, 48, bias=has_bias, dtype=torch.bfloat16).requires_grad_(False)
    plain.load_state_dict(linear.state_dict())
    rows = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    rows[1, 4] = torch.nan
    Fp8Linear.quantize(linear)
    assert "weight" not in dict(linear.named_parameters())
    out = linear(rows) / 2
    (weights, weight_scales), (numbers, scales) = scaled_rows(plain.weight), scaled_rows(rows.flatten(0, 1))
    exact = (numbers.double() * scales) @ (weights.double() * weight_scales).t()
    exact = (exact + plain.bias.double() if has_bias else exact).view(2, 9, 48)
    assert out.dtype == torch.bfloat16
    assert out[1, 4].isnan().all()
    is_whole = ~torch.isnan(exact)
    assert torch.equal(is_whole, ~torch.isnan(out))
    torch.testing.assert_close(out[is_whole].double(), exact[is_whole], rtol=2**-7, atol=1e-3)
    # Of the plain product it is as far as two roundings to three bits are.
    error = (out - plain(rows)).float()[is_whole].norm() / plain(rows).float()[is_whole].norm()
    assert 0.005 < error < 0.06


def test_mlps_alone_become_layers_of_8_bit_floats(model_paths: Mapping[str, Path]) -> None:
    plain, quantized = (load_model(model_paths["llama_gqa"], "bfloat16", "cpu") for _ in range(2))
    for names in (ATTENTION_LAYERS, MLP_LAYERS):
        join_layers(quantized.body, names)
    quantize_mlps(quantized.body)
    found = {name for name, module in quantized.body.named_modules() if isinstance(module, Fp8Linear)}
    assert found == {f"layers.{layer}.mlp.{name}" for layer in range(2) for name in ("joined_proj", "down_proj")}
    error = (states_of(quantized) - states_of(plain)).float().norm() / states_of(plain).float().norm()
    assert 0.0 < error < 0.2


class PlainRMSNorm(Module):
    """Llama's norm; `offset` is added to the weight, as Gemma does, and `inner` to the root instead of the square."""

    def __init__(self, offset: float = 0.0, inner: float = 0.0) -> None:
        super().__init__()
        self.weight = Parameter(torch.linspace(0.5, 1.5, 37), requires_grad=False)
        self.eps = 1e-5
        self._offset, self._inner = offset, inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        root = (rows.pow(2).mean(-1, keepdim=True) + self.eps - self._inner).sqrt() + self._inner
        return rows / root * (self.weight + self._offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_in_one_call_gives_the_numbers_of_the_module(offset: float) -> None:
    """Rows of all sizes and of zeros; each NaN stays in its row."""
    norm = PlainRMSNorm(offset)
    fused = FusedNorm.try_of(norm)
    assert fused is not None
    for shape in ((37,), (1, 1, 37), (2, 40, 37), (0, 37)):
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-18, 19)
        torch.testing.assert_close(fused(rows), norm(rows), rtol=2e-6, atol=0)
    rows = torch.zeros(3, 37)
    rows[1, 4] = torch.nan
    assert fused(rows).isnan().all(dim=1).tolist() == [False, True, False]
    strided = torch.randn(37, 5).T
    torch.testing.assert_close(fused(strided), norm(strided))


def test_a_norm_that_computes_anything_else_or_has_a_hook_stays_as_it_is() -> None:
    hooked = PlainRMSNorm()
    hooked.register_forward_hook(lambda _module, _inputs, output: output + 1)
    for norm in (PlainRMSNorm(inner=1e-6), PlainRMSNorm(offset=0.5), hooked, PlainRMSNorm().double(), Linear(3, 3)):
        assert FusedNorm.try_of(norm) is None
