"""Forms of linear layers: joined ones have the bits of stock modules, those of 8-bit floats what their numbers say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, Parameter

from ringserve.cp_core.attention import native
from ringserve.cp_core.attention.partial import PagedShards
from ringserve.workers.model import layers, shared
from ringserve.workers.model.layers import (
    ATTENTION_LAYERS,
    FP8,
    JOINED,
    LARGEST_FP8,
    MLP_LAYERS,
    Columns,
    Fp8Linear,
    FusedLayer,
    FusedNorm,
    GatedMlp,
    PackedLinear,
    join_layers,
    pack,
    quantize_mlps,
    rotating_forward,
    scaled_rows,
)
from ringserve.workers.model.loading import LoadedModel, load_model
from tests.programs import require
from tests.workers.model.test_pieces import Mixing
from tests.workers.models import FAMILY_SWITCHES, KINDS, save_family

IDS, POSITIONS = torch.tensor([5, 250, 17, 5]), torch.tensor([0, 31, 7, 100])


@pytest.fixture
def kernels() -> None:
    """Skip a test without a compiler. With a compiler, fail it if there is no library."""
    if native.library() is None:
        require("c++", "g++", "clang++")
        pytest.fail("there is a compiler and no library: pip install -e . again")


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


class LlamaRMSNorm(PlainRMSNorm):
    """Llama's norm in any type: the quotient is rounded before it is multiplied."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * quotient.to(rows.dtype)


def test_a_norm_of_bfloat16_rounds_where_the_module_does() -> None:
    norm = LlamaRMSNorm().bfloat16()
    fused = FusedNorm.try_of(norm)
    assert fused is not None
    rows = (torch.randn(200, 37) * 10.0 ** torch.arange(-18, 19)).bfloat16()
    assert fused(rows).dtype == torch.bfloat16
    assert (fused(rows) != norm(rows)).float().mean() < 1e-3
    assert FusedNorm.try_of(PlainRMSNorm(offset=0.5).bfloat16()) is None


def hold_bfloat16(*sizes: int) -> torch.Tensor:
    """Draw fp32 numbers that are bfloat16, zeros of both signs and infinity among them."""
    numbers = torch.randn(sizes).bfloat16().float()
    numbers[0, :3] = torch.tensor([-0.0, 0.0, torch.inf])
    return numbers


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_rows", [1, 7, 40, 300])
def test_weights_that_are_bfloat16_are_stored_as_such_and_give_the_same_bits(num_rows: int) -> None:
    weight, rows = hold_bfloat16(50, 70), torch.randn(num_rows, 70)
    linear = Linear(70, 50).requires_grad_(False)
    linear.weight.copy_(weight)
    PackedLinear.pack(linear)
    assert isinstance(linear, PackedLinear)
    assert linear.packed.dtype == torch.bfloat16
    with native.rows_alone():
        wide = native.multiply(rows, native.pack_weight(weight), 50, linear.bias)
        assert torch.equal(linear(rows), wide)
    torch.testing.assert_close(linear(rows)[:, 1:], wide[:, 1:])


@pytest.mark.usefixtures("kernels")
def test_one_other_number_keeps_a_weight_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "shared_directory", lambda: tmp_path)
    weight = torch.randn(50, 70).bfloat16().float()
    weight[49, 69] += 2.0**-20
    linears = [Linear(70, 50).requires_grad_(False) for _ in range(2)]
    for linear, given in zip(linears, (weight, weight.bfloat16().float()), strict=True):
        linear.weight.copy_(given)
    pack(torch.nn.Sequential(*linears), "a weight that is nearly bfloat16")  # in shared memory
    assert [each.packed.dtype for each in linears if isinstance(each, PackedLinear)] == [torch.float32, torch.bfloat16]
    rows = torch.randn(4, 70)
    torch.testing.assert_close(linears[0](rows), rows @ weight.T + linears[0].bias)
    torch.testing.assert_close(linears[1](rows), rows @ weight.bfloat16().float().T + linears[1].bias)


class Gated(Module):
    """MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(64, 96, False), Linear(64, 96, False), Linear(96, 64)
        self.act_fn = torch.nn.SiLU()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return down


@pytest.mark.parametrize("num_rows", [1, 9, 33, 200])
def test_an_mlp_of_bfloat16_rounds_where_the_module_does(num_rows: int) -> None:
    """Only where kernels multiply bfloat16: oneDNN would round less often, so there the module's code stays."""
    mlp = Gated().bfloat16().requires_grad_(False)
    rows = torch.randn(1, num_rows, 64).bfloat16()
    wanted = mlp(rows)
    pack(mlp)
    fused = GatedMlp.try_of(mlp)
    assert (fused is not None) == native.multiplies(torch.bfloat16)
    if fused is not None:
        assert (fused(rows) != wanted).float().mean() < 0.02
        torch.testing.assert_close(fused(rows), wanted, rtol=2**-6, atol=2**-9)
    gate = Gated().requires_grad_(False)
    gate.gate_proj.weight.copy_(gate.gate_proj.weight.bfloat16())
    wanted = gate(rows.float())
    pack(gate)
    assert native.library() is None or GatedMlp.try_of(gate) is None, "two types in one call"
    torch.testing.assert_close(gate(rows.float()), wanted)


def attention_of(family: str) -> Module:
    """Return an attention module of a family without weights: its code is what counts."""
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    name = next(name for name in vars(modeling) if name.endswith("Attention") and name.lower().startswith(family[:3]))
    attention: Module = vars(modeling)[name].__new__(vars(modeling)[name])
    Module.__init__(attention)
    return attention


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "granite", "olmo2"])
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_positions_in_one_call_are_those_of_the_family(family: str, dtype: torch.dtype) -> None:
    """Of heads that lie among others, for few rows and many; a NaN stays in its row; other shapes are left to it."""
    attention = attention_of(family)
    forward = rotating_forward(attention)
    assert isinstance(forward, MethodType)
    own, stock = (function.__globals__["apply_rotary_pos_emb"] for function in (forward, type(attention).forward))
    assert own is not stock
    for num_rows, dim in ((1, 64), (16, 64), (33, 80), (100, 24)):
        product = torch.randn(1, num_rows, 7 * dim).to(dtype)
        q, k = (product[..., a * dim : b * dim].unflatten(-1, (-1, dim)).transpose(1, 2) for a, b in ((0, 4), (4, 6)))
        cos, sin = torch.randn(2, 1, num_rows, dim).to(dtype)
        for found, wanted in zip(own(q, k, cos, sin), stock(q, k, cos, sin), strict=True):
            assert found.dtype == dtype
            if dtype == torch.bfloat16:
                assert torch.equal(found, wanted)
            torch.testing.assert_close(found, wanted)
    product[0, 3] = torch.nan
    turned, _ = own(q, k, cos, sin)
    assert turned.isnan().any(-1).any(1)[0].tolist() == [row == 3 for row in range(100)]
    flat = (each.transpose(1, 2) for each in (q, k))
    others = own(*flat, cos, sin, unsqueeze_dim=2)
    assert all(
        torch.equal(each.transpose(1, 2)[:, :, 4:], some[:, :, 4:])
        for each, some in zip(others, stock(q, k, cos, sin), strict=True)
    )


@pytest.mark.parametrize("family", ["cohere", "gpt_oss"])
def test_a_family_that_turns_heads_otherwise_keeps_its_code(family: str) -> None:
    """Cohere pairs neighbours, and the angles of gpt-oss are half as many."""
    assert rotating_forward(attention_of(family)) is None
    assert rotating_forward(Linear(3, 3)) is None


def fused_in(model: LoadedModel) -> list[bool]:
    """Return, for each decoder layer, whether it runs in two calls."""
    return [isinstance(each.forward, FusedLayer) for each in model.body.modules() if hasattr(each, "self_attn")]


def states_of_rows(model: LoadedModel, num_rows: int) -> torch.Tensor:
    with torch.inference_mode():
        ids = torch.arange(num_rows) * 7 % 256
        return model.hidden_states(ids, torch.arange(num_rows) * 3, Mixing())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_two_calls_computes_what_its_modules_do(
    kind: str, dtype: str, model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases (qwen2) and norms of heads (qwen3), for rows that one product takes and for more."""
    if dtype == "bfloat16" and not native.multiplies(torch.bfloat16):
        return  # its weights are oneDNN's then
    monkeypatch.setattr(layers, "LEAST_PRODUCT_ROWS", 30)
    monkeypatch.setattr(layers, "PRODUCT_NUMBERS", 30)
    stock, fused = (load_model(model_paths[kind], dtype, "cpu") for _ in range(2))
    fused.pack_weights(with_head=False)
    assert fused_in(fused) == [True, True]
    for num_rows in (1, 5, 33, 100, 200):
        found, wanted = states_of_rows(fused, num_rows), states_of_rows(stock, num_rows)
        assert found.dtype == wanted.dtype
        most = 1e-5 if dtype == "float32" else 2e-2
        assert (found - wanted).float().norm() <= most * wanted.float().norm(), num_rows


@pytest.mark.usefixtures("kernels")
def test_a_row_of_a_layer_in_two_calls_has_the_same_bits_beside_any_others(model_paths: Mapping[str, Path]) -> None:
    """So a draft changes no token. A NaN stays in its row."""
    model = load_model(model_paths["qwen3"], "float32", "cpu")
    model.pack_weights(with_head=False)
    with native.rows_alone():
        all_rows, one = states_of_rows(model, 150), states_of_rows(model, 1)
    assert torch.equal(all_rows[:1], one)
    layer = next(each.forward for each in model.body.modules() if isinstance(each.forward, FusedLayer))
    states, angles = torch.randn(1, 20, 64), tuple(torch.randn(2, 1, 20, model.info.head_dim))
    states[0, 3] = torch.nan
    out = layer(states, position_embeddings=angles, ring_step=Mixing())
    assert out.isnan().any(-1)[0].tolist() == [row == 3 for row in range(20)]


class OnPages:
    """Step of five rows over poisoned pages: a sequence with two drafts, one of a token, and one of 300."""

    PAGE = 16
    LENGTHS = (20, 21, 22, 1, 300)

    def __init__(self, model: LoadedModel, *, in_one_call: bool) -> None:
        self.in_one_call = in_one_call
        generator = torch.Generator().manual_seed(1)
        pages = torch.randperm(24, generator=generator).tolist()
        of_sequences = [[pages.pop() for _ in range(-(-length // self.PAGE))] for length in (22, 1, 300)]
        of_rows = [of_sequences[number] for number in (0, 0, 0, 1, 2)]
        self.table = torch.tensor([[*each, *[0] * (19 - len(each))] for each in of_rows], dtype=torch.int32)
        slots = [page * self.PAGE + at for pages in of_sequences for page in pages for at in range(self.PAGE)]
        stored = [*slots[:19], *slots[48:347]]  # tokens before the rows' own
        self.slots = torch.tensor([*slots[19:22], slots[32], slots[347]])
        shape = (24 * self.PAGE, model.info.num_kv_heads, model.info.head_dim)
        self.layers = [torch.full((2, *shape), torch.nan, dtype=model.model.dtype) for _ in range(2)]
        for both in self.layers:
            both[:, stored] = torch.randn(2, len(stored), *shape[1:], generator=generator).to(model.model.dtype)

    def own_layer(
        self, layer: int, dtype: torch.dtype, run: Callable[[native.OwnRows], torch.Tensor]
    ) -> torch.Tensor | None:
        if not self.in_one_call:
            return None
        lengths = torch.tensor(self.LENGTHS, dtype=torch.int32)
        k, v = self.layers[layer]
        assert k.dtype == dtype
        return run(native.PagedRows(k, v, self.slots, self.table, lengths, self.PAGE, max(self.LENGTHS)))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        assert not self.in_one_call
        both = self.layers[layer]
        both[:, self.slots] = torch.stack([k, v])
        k, v = both.view(2, -1, self.PAGE, *both.shape[2:])
        shards = PagedShards(k, v, self.table, self.LENGTHS, torch.tensor(self.LENGTHS, dtype=torch.int32))
        return native.NativeCpu().paged_attention(q, shards, scale=scale).out.to(q.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_one_call_stores_and_attends_with_the_bits_of_two_calls(
    kind: str, dtype: str, model_paths: Mapping[str, Path]
) -> None:
    if dtype == "bfloat16" and not native.multiplies(torch.bfloat16):
        return  # its weights are oneDNN's then
    model = load_model(model_paths[kind], dtype, "cpu")
    model.pack_weights(with_head=False)
    found = []
    for in_one_call in (True, False):
        step = OnPages(model, in_one_call=in_one_call)
        with torch.inference_mode(), native.rows_alone():
            states = model.hidden_states(torch.arange(5) * 7, torch.tensor(OnPages.LENGTHS) - 1, step)
        found.append([states, *step.layers])
    assert found[0][0].isfinite().all()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "taken"),
    [
        ("cwm", [True, True]),
        ("smollm3", [True, False]),  # the second has no positions
        ("qwen2_moe", [True, False]),  # the second has experts
        *((family, [False, False]) for family in ("granite", "gemma3_text", "olmo2", "cohere", "phi3", "ministral3")),
    ],
)
def test_only_layers_that_compute_this_run_in_two_calls(family: str, taken: list[bool], tmp_path: Path) -> None:
    """Others have factors, more norms, other pairs of numbers, joined weights, or scales by position."""
    switches = next(each for each in FAMILY_SWITCHES[family] if "partial_rotary_factor" not in each)
    path = save_family(family, switches, tmp_path / family)
    stock, packed = (load_model(path, "float32", "cpu") for _ in range(2))
    packed.pack_weights(with_head=False)
    assert sorted(fused_in(packed)) == sorted(taken)
    torch.testing.assert_close(states_of_rows(packed, 9), states_of_rows(stock, 9), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_a_layer_with_a_hook_or_of_a_cut_model_keeps_its_modules(model_paths: Mapping[str, Path]) -> None:
    cut = load_model(model_paths["llama_gqa"], "float32", "cpu", tp=2, tp_rank=1)
    cut.pack_weights(with_head=False)
    assert fused_in(cut) == [False, False]
    hooked = load_model(model_paths["llama_gqa"], "float32", "cpu")
    hooked.attention[1].register_forward_hook(lambda *_: None)
    hooked.pack_weights(with_head=False)
    assert fused_in(hooked) == [True, False]


@pytest.mark.usefixtures("kernels")
def test_a_call_that_a_layer_in_two_calls_does_not_know_goes_to_its_modules(model_paths: Mapping[str, Path]) -> None:
    """Such as arguments without names. To pack the model again changes nothing."""
    model = load_model(model_paths["llama_gqa"], "float32", "cpu")
    model.pack_weights(with_head=False)
    layer = next(each for each in model.body.modules() if isinstance(each.forward, FusedLayer))
    forward = layer.forward
    model.pack_weights(with_head=False)
    assert layer.forward is forward
    states, mask = torch.randn(1, 4, 64), None
    named = {"position_embeddings": tuple(torch.randn(2, 1, 4, model.info.head_dim)), "ring_step": Mixing()}
    assert torch.equal(layer(states, mask, **named), type(layer).forward(layer, states, mask, **named))


class Doubling:
    """Step that attends with twice the scale of another one."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        found: torch.Tensor = self._step.attend(layer, q, k, v, 2 * scale)
        return found


@pytest.mark.usefixtures("kernels")
def test_a_layer_that_attends_with_another_scale_than_its_module_says_keeps_its_modules(
    model_paths: Mapping[str, Path],
) -> None:
    model = load_model(model_paths["llama_gqa"], "float32", "cpu")
    model.pack_weights(with_head=False)
    layer = next(each for each in model.body.modules() if isinstance(each.forward, FusedLayer))
    del layer.forward
    assert FusedLayer.try_of(layer) is not None
    attention: Any = layer.self_attn
    own = attention.forward
    attention.forward = lambda *args, ring_step, **named: own(*args, ring_step=Doubling(ring_step), **named)
    assert FusedLayer.try_of(layer) is None
