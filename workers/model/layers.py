"""Linear layers in the forms that kernels read fastest: packed for CPUs, joined, or 8-bit floats.

A loaded model calls these functions. A layer changes its form in place, once, after the ring has cut its share of the
weights.

Shapes: T rows, C input features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, SiLU

from ringserve.cp_core.attention import native
from ringserve.workers.model.hugging_face import SiLUActivation
from ringserve.workers.model.info import multiplies_bfloat16
from ringserve.workers.model.shared import shared_bytes


class PackedLinear(Linear):
    """CPU linear layer whose weight is stored in the order in which kernels read it.

    Weights are read by this package's kernels (`is_native`) if they are compiled here, those of bfloat16 only if the
    processor multiplies such numbers; all others are read by oneDNN's. fp32 weights of which each number is a bfloat16
    are stored as such: half of the bytes are read, and the sums are the same. oneDNN would reorder a plain weight in
    every call. That costs more for few rows than for hundreds: one row takes 1.2 times as long in fp32 and 1.4 times in
    bf16, and 8 rows twice as long.
    """

    packed: Tensor
    is_native: bool

    @staticmethod
    def pack(linear: Linear, packed: Tensor | None = None) -> None:
        """Turn `linear` into a packed layer in place. Forward hooks stay; the plain weight is dropped.

        `packed` is its weight as `native.pack_weight` orders it, if that has been done.
        """
        weight = linear.weight.detach()
        num_rows = PACKED_ROWS if weight.dtype == torch.float32 else None
        del linear.weight
        linear.__class__ = PackedLinear
        assert isinstance(linear, PackedLinear)
        linear.is_native = _is_native(weight)
        if linear.is_native:
            linear.packed = native.pack_weight(weight.to(_stored_dtype(weight))) if packed is None else packed
        else:
            linear.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), num_rows)

    def forward(self, input: Tensor) -> Tensor:
        """Map input[..., in_features] -> [..., out_features]."""
        if self.is_native:
            return native.multiply(input, self.packed, self.out_features, self.bias)
        rows = with_least_rows(input, self.packed)
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        assert isinstance(out, Tensor)
        return out if rows is input else out[..., : input.shape[-2], :]


def _is_native(weight: Tensor) -> bool:
    return native.multiplies(weight.dtype)


def _stored_dtype(weight: Tensor) -> torch.dtype:
    """Return bfloat16 for a weight of which each number is one, else its dtype.

    Example: a model that was stored in bfloat16 and is served in float32.
    """
    numbers = weight.detach().flatten()
    for some in (numbers[:FIRST_NUMBERS], *numbers.split(CHECKED_NUMBERS)) if weight.dtype == torch.float32 else ():
        if some.view(torch.int32).bitwise_and(0xFFFF).any():
            return weight.dtype
    return torch.bfloat16


FIRST_NUMBERS, CHECKED_NUMBERS = 1 << 10, 1 << 20
"""How many numbers of a weight are checked first, which is enough for most, and then at a time."""


def with_least_rows(input: Tensor, packed: Tensor) -> Tensor:
    """Return input[..., T, C], padded with rows of zeros if oneDNN multiplies more rows in less time.

    With AVX-512 it multiplies four rows by an fp32 weight in 0.7 to 0.9 of the time for one, two or three rows. With
    AVX2 they take 1.2 to 1.3 times as long.
    """
    missing = LEAST_ROWS - input.shape[-2]
    if missing <= 0 or packed.dtype != torch.float32:
        return input
    return torch.nn.functional.pad(input, (0, 0, 0, missing))


# Limit on the numbers of an MLP's widest tensor that are computed at a time: memory of a larger one would be allocated
# in every layer, which takes a tenth of the MLP's time.
PRODUCT_NUMBERS = 1 << 21
# Minimum rows of a part, since all weights of the MLP are read for each part.
LEAST_PRODUCT_ROWS = 384


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Forward pass of the MLP that all served families have: down(silu(gate(x)) * up(x)).

    The kernels apply silu and the product while their results are in the processor's cache, which saves two passes over
    the widest tensors of a layer.
    """

    gate: PackedLinear
    up: PackedLinear
    down: Module

    @classmethod
    def try_of(cls, mlp: Module) -> GatedMlp | None:
        """Return the forward pass of an `mlp`, or None for other modules and if its first two layers have hooks.

        In bf16 oneDNN would round less often than transformers; this package's kernels round in the same places as
        transformers. The kernels want the first two layers in one type.
        """
        gate, up, down = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
        if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, Module)):
            return None
        is_silu = isinstance(getattr(mlp, "act_fn", None), SiLU | SiLUActivation)
        is_plain = is_silu and (gate.is_native or gate.packed.dtype == torch.float32)
        is_plain &= gate.packed.dtype == up.packed.dtype
        if gate.is_native and any(getattr(each, "bias", None) is not None for each in (gate, up)):
            return None
        return cls(gate, up, down) if is_plain and not (gate._forward_hooks or up._forward_hooks) else None

    def __call__(self, input: Tensor) -> Tensor:
        """Map input[..., hidden_size] -> [..., hidden_size]."""
        gate, up = self.gate, self.up
        if gate.is_native:
            most = max(LEAST_PRODUCT_ROWS, PRODUCT_NUMBERS // gate.out_features)
            if input.shape[-2] > most:
                return torch.cat([self(part) for part in input.split(most, dim=-2)], dim=-2)
            product = native.multiply(input, gate.packed, gate.out_features, second=up.packed)
        else:
            rows = with_least_rows(input, gate.packed)
            activated = torch.ops.mkldnn._linear_pointwise(rows, gate.packed, gate.bias, "swish", [], "")
            product = torch.ops.mkldnn._linear_pointwise.binary(rows, activated, up.packed, up.bias, "mul")
            product = product[..., : input.shape[-2], :]
        out = self.down(product)
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """Forward pass of an RMS norm in one call instead of six: x / sqrt(mean(x^2) + epsilon) * weight.

    In bf16 the quotient is rounded before it is multiplied, as in Llama's.
    """

    weight: Tensor
    epsilon: float

    @classmethod
    def try_of(cls, norm: Module) -> FusedNorm | None:
        """Return the forward pass of an RMS norm on a CPU; None for other modules and if kernels are not compiled.

        Families differ in the weight (Gemma multiplies by 1 + weight) and may differ in more: what gives other numbers
        than the module itself is not taken.
        """
        weight: object = getattr(norm, "weight", None)
        epsilon: object = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not (type(norm).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(epsilon, float)):
            return None
        is_plain = weight.ndim == 1 and weight.dtype in native.DTYPES and weight.device.type == "cpu"
        if not is_plain or native.library() is None or norm._forward_hooks or norm._forward_pre_hooks:
            return None
        # Large and small rows: a norm that forgets epsilon, or adds it elsewhere, differs in the small ones.
        rows = torch.linspace(-1.0, 1.0, 4 * weight.shape[0]).view(4, -1) * torch.tensor([[1e-4], [1e-2], [1.0], [1e2]])
        wanted = norm(rows.to(weight.dtype))
        for scales in (weight.detach(), 1.0 + weight.detach()):
            found = cls(scales, epsilon)
            if _are_alike(found(rows.to(weight.dtype)), wanted):
                return found
        return None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Map hidden_states[..., C] -> [..., C]."""
        return native.normalize(hidden_states, self.weight, self.epsilon)


def _are_alike(found: Tensor, wanted: Tensor) -> bool:
    """Return True if numbers differ at most by the order of a sum; in bf16, few of them and only in the last bit."""
    if wanted.dtype == torch.float32:
        return torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    return bool((found != wanted).float().mean() <= MAX_ROUNDED) and torch.allclose(found, wanted, rtol=2**-7, atol=0.0)


MAX_ROUNDED = 0.01
"""Maximum share of bf16 numbers that a difference in the last bit of fp32 rounds to a neighbour."""

ROTATION = "apply_rotary_pos_emb"
"""Function that the attention of most families turns its queries and keys with."""


def rotating_forward(attention: Module) -> Callable[..., Any] | None:
    """Return an attention module's forward pass that applies rotary positions by one CPU kernel instead of ten calls.

    Its code stays the module's own: only the function that it calls for the positions is replaced. None for other
    modules, for families whose function gives other numbers (Cohere pairs neighbours), and if kernels are not compiled.
    """
    forward = type(attention).forward
    code, stock = getattr(forward, "__code__", None), getattr(forward, "__globals__", {}).get(ROTATION)
    if code is None or ROTATION not in code.co_names or stock is None or not _rotates_alike(stock):
        return None
    found = {**forward.__globals__, ROTATION: partial(_rotated, stock)}
    replaced = FunctionType(code, found, forward.__name__, forward.__defaults__, forward.__closure__)
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(replaced, attention)


@cache
def _rotates_alike(stock: Callable[..., Any]) -> bool:
    """Return True if a family's function turns halves of heads, as the kernel does."""
    if native.library() is None:
        return False
    generator, num_rows = torch.Generator().manual_seed(0), 16
    q, k = (torch.randn(1, heads, num_rows, 64, generator=generator) for heads in (4, 2))
    angles = [torch.randn(1, num_rows, 64, generator=generator) for _ in range(2)]
    for dtype in native.DTYPES:
        tensors = [each.to(dtype) for each in (q, k, *angles)]
        try:
            wanted = stock(*tensors)
        except (RuntimeError, TypeError, ValueError):
            return False
        if not all(map(_are_alike, _rotated(stock, *tensors), wanted)):
            return False
    return True


def _rotated(
    stock: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Rotate q[1, H, T, D] and k[1, K, T, D] as `stock` does, and by `stock` if the kernel lacks the case."""
    tensors = (q, k, cos, sin)
    is_plain = not others and not named and q.ndim == 4 and cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
    is_plain &= q.dtype in native.DTYPES and all(
        each.dtype == q.dtype and each.shape[0] == 1 and each.stride(-1) == 1 for each in tensors
    )
    if not is_plain:
        found: tuple[Tensor, Tensor] = stock(q, k, cos, sin, *others, **named)
        return found
    turned = (native.rotate(each[0].transpose(0, 1), cos[0], sin[0]) for each in (q, k))
    rotated_q, rotated_k = (each.transpose(0, 1).unsqueeze(0) for each in turned)
    return rotated_q, rotated_k


class FusedLayer:
    """Forward pass of a decoder layer in two calls around its attention, or in one, instead of fifteen modules.

    The numbers stay the modules': each layer is compared with them once. Python and the dispatch of torch took more
    than half of the time of a step of 16 tokens.
    """

    def __init__(self, layer: Module, attention: Any, mlp: GatedMlp, norms: Sequence[FusedNorm | None]) -> None:
        """Fuse a `layer`; `norms` are those before attention and MLP, and of the heads of queries and keys."""
        joined, out = attention.get_submodule(JOINED), attention.o_proj
        first, second, q_norm, k_norm = norms
        assert first is not None and second is not None, "every layer has both"
        dtype = first.weight.dtype
        self._stock: Callable[..., Any] = layer.forward
        self._attention = attention
        self._weights = [joined, out, mlp, *norms]  # whose addresses the kernels get
        self._most = max(LEAST_PRODUCT_ROWS, PRODUCT_NUMBERS // mlp.gate.out_features)
        dim = attention.head_dim
        kv_heads = (joined.out_features - out.in_features) // (2 * dim)

        def at(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        down: Any = mlp.down
        self._layer = native.Layer(
            norm=at(first.weight),
            joined=at(joined.packed),
            joined_bias=at(joined.bias),
            q_norm=at(q_norm.weight if q_norm else None),
            k_norm=at(k_norm.weight if k_norm else None),
            out=at(out.packed),
            out_bias=at(out.bias),
            mlp_norm=at(second.weight),
            gate=at(mlp.gate.packed),
            up=at(mlp.up.packed),
            down=at(down.packed),
            down_bias=at(down.bias),
            features=out.out_features,
            heads=out.in_features // dim,
            kv_heads=kv_heads,
            dim=dim,
            middle=mlp.gate.out_features,
            is_wide=dtype == torch.float32,
            joined_types=native.types_of(dtype, joined.packed),
            out_types=native.types_of(dtype, out.packed),
            gate_types=native.types_of(dtype, mlp.gate.packed),
            down_types=native.types_of(dtype, down.packed),
            norm_epsilon=first.epsilon,
            q_epsilon=q_norm.epsilon if q_norm else 0.0,
            k_epsilon=k_norm.epsilon if k_norm else 0.0,
            mlp_epsilon=second.epsilon,
        )
        self._dtype = dtype
        self._attends = native.attends(self._layer)

    @classmethod
    def try_of(cls, layer: Module) -> FusedLayer | None:
        """Return the forward pass of a decoder layer whose parts have their fast forms already; None for others.

        None, too, for layers with hooks, such as those whose weights are cut over ranks, and for families that compute
        anything else: more norms, other factors, experts, other positions.
        """
        attention, mlp = getattr(layer, "self_attn", None), getattr(getattr(layer, "mlp", None), "forward", None)
        joined, out = getattr(attention, JOINED, None), getattr(attention, "o_proj", None)
        dim = getattr(attention, "head_dim", None)
        if not (isinstance(attention, Module) and isinstance(mlp, GatedMlp) and isinstance(dim, int)):
            return None
        if not (isinstance(joined, PackedLinear) and isinstance(out, PackedLinear)):
            return None
        products = (joined, out, mlp.gate, mlp.up, mlp.down)
        if not all(isinstance(each, PackedLinear) and each.is_native for each in products):
            return None
        modules = [layer, *(each for each in layer.modules() if each is not attention)]
        if attention._forward_hooks or any(each._forward_hooks or each._forward_pre_hooks for each in modules):
            return None
        norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        forms = [getattr(each, "forward", None) for each in norms]
        if not all(isinstance(form, FusedNorm) or each is None for each, form in zip(norms, forms, strict=True)):
            return None
        if None in norms[:2] or (norms[2] is None) != (norms[3] is None):
            return None
        weights = [form.weight for form in forms if form is not None]
        if len({each.dtype for each in weights}) > 1 or any(len(each) != dim for each in weights[2:]):
            return None
        kv_features = (joined.out_features - out.in_features) // 2
        if kv_features <= 0 or kv_features % dim or out.in_features % kv_features:
            return None
        found = cls(layer, attention, mlp, forms)
        return found if found._is_alike() else None

    def _is_alike(self) -> bool:
        """Return True if the layer gives the numbers of its modules."""
        made, generator = self._layer, torch.Generator().manual_seed(0)
        step = _SomeAttention(made.heads // made.kv_heads)
        states = torch.randn(1, CHECKED_ROWS, made.features, generator=generator).to(self._dtype)
        angles = [torch.randn(1, CHECKED_ROWS, made.dim, generator=generator).to(self._dtype) for _ in range(2)]
        named = {"position_embeddings": tuple(angles), "attention_mask": None, "ring_step": step}
        try:
            wanted = self._stock(states, **named)
        except Exception:  # of any kind: a family's layer wants more than these, such as positions
            return False
        if not isinstance(wanted, Tensor):
            return False
        most = 1e-5 if self._dtype == torch.float32 else 1e-3  # rotary positions may differ in a number's last bit
        return bool((self(states, **named) - wanted).float().norm() <= most * wanted.float().norm())

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """Map hidden_states[1, T, C] -> [1, T, C] as the layer's modules do."""
        made, angles, step = self._layer, named.get("position_embeddings"), named.get("ring_step")
        shape = (1, hidden_states.shape[1], made.dim)
        if args or step is None or hidden_states.dtype != self._dtype or not isinstance(angles, tuple):
            return self._stock(hidden_states, *args, **named)
        if any(each.shape != shape or each.dtype != self._dtype for each in angles):
            return self._stock(hidden_states, *args, **named)
        states, cos, sin = hidden_states[0].contiguous(), angles[0].contiguous(), angles[1].contiguous()
        attention = self._attention
        if self._attends and (own_layer := getattr(step, "own_layer", None)) is not None:

            def run(own: native.OwnRows) -> Tensor:
                return native.whole_layer(made, own, states, cos, sin, attention.scaling, self._most)

            whole = own_layer(attention.layer_idx, self._dtype, run)
            if whole is not None:
                return whole.unsqueeze(0)
        q, k, v = native.before_attention(made, states, cos, sin)
        attended = step.attend(attention.layer_idx, q, k, v, attention.scaling)
        attended = attended.to(self._dtype).contiguous()
        return native.after_attention(made, states, attended, self._most).unsqueeze(0)


CHECKED_ROWS = 3


class _SomeAttention:
    """Step whose attention shows all its arguments in its result: each row's, the layer, and the scale."""

    def __init__(self, group: int) -> None:
        self._group = group

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return (1.0 + scale) * q + ((1.0 + layer) * k - 2.0 * v).repeat_interleave(self._group, dim=1)


# Number of rows that fp32 weights are packed for. oneDNN uses the same order for any larger number of rows.
PACKED_ROWS = 256
LEAST_ROWS = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


def packed_dtypes() -> set[torch.dtype]:
    """Return the weight dtypes that are packed on this machine's CPU."""
    if not torch.backends.mkldnn.is_available():
        return set()
    return {torch.float32, torch.bfloat16} if multiplies_bfloat16() else {torch.float32}


def pack(module: Module, key: str = "") -> None:
    """Pack the linear CPU layers in `module`: fp32 layers, and bf16 layers if the CPU multiplies bf16.

    Processes of this machine that give the same `key` share the memory of layers that this package's kernels read. It
    must say everything that their weights depend on.
    """
    dtypes = packed_dtypes()
    linears = [
        each
        for each in module.modules()
        if type(each) is Linear and each.weight.dtype in dtypes and each.weight.device.type == "cpu"
    ]
    shared = _packed_together([each.weight.detach() for each in linears], key) if key else None
    for place, linear in enumerate(linears):
        PackedLinear.pack(linear, None if shared is None else shared[place])


def _packed_together(weights: Sequence[Tensor], key: str) -> list[Tensor] | None:
    """Return packed weights in memory that processes with this key share; None if that is not possible."""
    if not all(map(_is_native, weights)):
        return None
    dtypes = [_stored_dtype(weight) for weight in weights]
    shapes = [native.packed_shape(weight, dtype) for weight, dtype in zip(weights, dtypes, strict=True)]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    ends = list(accumulate(-(-size // LINE_BYTES) * LINE_BYTES for size in sizes))

    def cut(memory: Tensor) -> list[Tensor]:
        parts = zip([0, *ends[:-1]], sizes, shapes, dtypes, strict=True)
        return [memory[at : at + size].view(dtype).view(shape) for at, size, shape, dtype in parts]

    def fill(memory: Tensor) -> None:
        for weight, packed in zip(weights, cut(memory), strict=True):
            native.pack_weight(weight.to(packed.dtype), packed)

    memory = shared_bytes(f"{key} version {native.VERSION}, {shapes} {dtypes}", ends[-1], fill) if ends else None
    return None if memory is None else cut(memory)


LINE_BYTES = 64
"""Bytes of a cache line, at whose start each weight begins."""


ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj")
MLP_LAYERS = ("gate_proj", "up_proj")


class Columns(Module):
    """Columns [start, stop) of a joined layer's product. It replaces one of the joined layers."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start = start
        self.stop = stop

    def forward(self, product: Tensor) -> Tensor:
        """Return the view [..., stop - start] of product[..., all columns]."""
        return product[..., self.start : self.stop]


def join_layers(body: Module, names: Sequence[str]) -> None:
    """Join the layers called `names` into one, in each module that has them all, so that one product replaces several.

    The module's input becomes the product, and each of its layers returns its columns, so the module's code stays as it
    is. A module stays unchanged if its layers have another form already, or if only some have a bias.
    """
    for module in list(body.modules()):
        layers = [layer for name in names if type(layer := getattr(module, name, None)) is Linear]
        if len(layers) < len(names) or len({layer.bias is None for layer in layers}) > 1:
            continue
        weight = torch.cat([layer.weight.detach() for layer in layers])
        has_bias = layers[0].bias is not None
        joined = Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
        joined.weight = Parameter(weight, requires_grad=False)
        if has_bias:
            joined.bias = Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
        start = 0
        for name, layer in zip(names, layers, strict=True):
            setattr(module, name, Columns(start, start + layer.out_features))
            start += layer.out_features
        module.add_module(JOINED, joined)
        module.register_forward_pre_hook(_multiply, with_kwargs=True)


JOINED = "joined_proj"


def _multiply(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the module's input (first argument or keyword `hidden_states`) by the joined layers' product."""
    joined = module.get_submodule(JOINED)
    if args:
        return (joined(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": joined(kwargs["hidden_states"])}


FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max
FP8_MULTIPLE = 16
"""GPU kernels need both sizes of an 8-bit float matrix to be multiples of this."""


class Fp8Linear(Linear):
    """Linear layer of 8-bit floats (e4m3) with a scale per output feature and a scale per input row.

    Each input row has its own scale, so rows are independent, and a NaN stays in its row.
    """

    quantized: Tensor
    scales: Tensor

    @staticmethod
    def quantize(linear: Linear) -> None:
        """Turn `linear` into an 8-bit float layer in place. Forward hooks stay; the weight is dropped."""
        quantized, scales = scaled_rows(linear.weight.detach())
        del linear.weight
        linear.__class__ = Fp8Linear
        linear.register_buffer("quantized", quantized, persistent=False)
        linear.register_buffer("scales", scales.t().contiguous(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map input[..., C] -> [..., out_features], in the input's dtype."""
        rows, scales = scaled_rows(input.flatten(0, -2))
        out = torch._scaled_mm(rows, self.quantized.t(), scales, self.scales, bias=self.bias, out_dtype=input.dtype)
        whole: Tensor = out.unflatten(0, input.shape[:-1])
        return whole


def scaled_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows[T, C] to 8-bit floats, whose largest number is 448. Return them with their fp32[T, 1] factors."""
    wide = rows.float()
    # A row of zeros needs a scale too.
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST_FP8
    return (wide / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scales


def quantize_mlps(body: Module) -> None:
    """Turn the joined layers of all MLPs into 8-bit float layers: two thirds of a model's weights and work."""
    for module in list(body.modules()):
        down, joined = getattr(module, "down_proj", None), getattr(module, JOINED, None)
        for layer in (joined, down):
            if down is not None and type(layer) is Linear:
                Fp8Linear.quantize(layer)
