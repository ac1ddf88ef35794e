"""Weights that were published in few bits, read as plain ones.

The reader of weight files calls it. Every form has a factor for each group of weights, and perhaps a zero point. A
weight is one product in float32, rounded once to the model's dtype, so it equals the number of the form's own library
in that dtype. Activations are not rounded, even if a file has scales for them. Sources of the forms: transformers'
Fp8Dequantize, compressed-tensors 0.20, bitsandbytes 0.50, AutoAWQ 0.2.9 (gemm), GPTQModel 7.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ringserve.cp_core.errors import ModelRefused

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Number of the four-bit group, in an int32 of AWQ, of each of eight adjacent weights."""
BITSANDBYTES_STATE = re.compile(r"\.weight\.quant_state\.bitsandbytes__(nf4|fp4)$")
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Floats of 4 bits (E2M1), by their bits."""
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class WeightFile(Protocol):
    """One file of weights; a tensor is read, or mapped, on use."""

    def keys(self) -> Any: ...

    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class _Layer:
    """Tensors of one layer, each named `name` + `joint` + the part's name. `config` is the `quantization_config`."""

    files: Mapping[str, WeightFile]
    name: str
    config: Mapping[str, Any]
    joint: str = "."

    def has(self, part: str) -> bool:
        return f"{self.name}{self.joint}{part}" in self.files

    def get(self, part: str) -> Tensor:
        name = f"{self.name}{self.joint}{part}"
        if name not in self.files:
            raise ModelRefused(f"the weights of {self.name} lack {name}")
        return self.files[name].get_tensor(name)


@dataclass(frozen=True)
class _Form:
    """Form in which a layer is stored: a tensor with this `ending` marks a layer, and `parts` are its other tensors.

    `read` returns the weight [out, in] in float32, named by the layer's name and `weight`. `joint` stands between the
    layer's name and a part's.
    """

    ending: re.Pattern[str]
    parts: tuple[str, ...]
    read: Callable[[_Layer], Tensor]
    joint: str = "."
    weight: str = ".weight"


@dataclass(frozen=True)
class _PlainWeight:
    """File with one tensor, the plain weight of a layer, which is computed when it is asked for."""

    layer: _Layer
    form: _Form
    dtype: torch.dtype

    def keys(self) -> Iterable[str]:
        return (self.layer.name + self.form.weight,)

    def get_tensor(self, name: str) -> Tensor:
        try:
            return self.form.read(self.layer).to(self.dtype)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelRefused(f"the quantized weights of {self.layer.name} cannot be read: {reason}") from error


def read_plain(
    files: Mapping[str, WeightFile], config: Mapping[str, Any], dtype: torch.dtype
) -> Mapping[str, WeightFile]:
    """Replace the tensors of every quantized layer NAME by one, `NAME.weight` of `dtype`. Others stay as they are.

    `config` is `quantization_config` of config.json, which `check_supported` has accepted. Raises ModelRefused on use
    of a weight whose tensors do not fit together.
    """
    plain = dict(files)
    for form in FORMS[str(config["quant_method"])]:
        for ending in [found for found in map(form.ending.search, files) if found is not None]:
            layer = _Layer(files, ending.string[: ending.start()], config, form.joint)
            for part in form.parts:
                plain.pop(f"{layer.name}{form.joint}{part}", None)
            plain.pop(ending.string, None)
            plain[layer.name + form.weight] = _PlainWeight(layer, form, dtype)
    return plain


def check_plain(path: Path, name: str, stored: Tensor) -> None:
    """Raise ModelRefused for a weight in few bits if config.json does not say so: its factors would be ignored."""
    if not stored.is_floating_point() or stored.dtype in FP8_TYPES:
        kind = str(stored.dtype).removeprefix("torch.")
        raise ModelRefused(f"{path} has {name} as {kind}, but config.json has no quantization_config that explains it")


def _spread(values: Tensor, shape: torch.Size, block: Iterable[int] | None) -> Tensor:
    """Spread one value, one per row or one per block over a weight [out, in]; the last blocks may be smaller.

    `block` is their size (rows, columns). Without it, or if there are not as many values as blocks, blocks divide the
    weight evenly.
    """
    values = values.float()
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.ndim == 1:
        values = values[:, None]
    sizes = list(block or ())
    for dim, (size, count) in enumerate(zip(shape, values.shape, strict=True)):
        if count == 1:
            continue
        width = sizes[dim] if sizes and -(-size // sizes[dim]) == count else max(1, size // count)
        if -(-size // width) != count:
            raise ValueError(f"{tuple(values.shape)} scales do not divide a weight of {tuple(shape)}")
        values = values.repeat_interleave(width, dim).narrow(dim, 0, size)
    return values


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words into their numbers, lowest bits first, along a dimension."""
    if bits not in (2, 4, 8):
        raise ValueError(f"weights of {bits} bits cannot be unpacked; allowed are 2, 4 and 8")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    words = packed if dim == 1 else packed.T
    numbers: Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    numbers = numbers.reshape(len(words), -1)
    return numbers if dim == 1 else numbers.T


def _read_scaled(layer: _Layer) -> Tensor:
    """Read 8-bit floats or integers with a factor for all, for each row, or for each block."""
    stored = layer.get("weight")
    scale = layer.get("weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale")
    if not scale.is_floating_point():
        raise ValueError(f"its scales are {scale.dtype}")
    weight, block = stored.float(), _block(layer.config)
    if layer.has("weight_zero_point"):
        weight -= _spread(layer.get("weight_zero_point"), stored.shape, block)
    return weight * _spread(scale, stored.shape, block)


def _block(config: Mapping[str, Any]) -> Iterable[int] | None:
    """Return the size (rows, columns) of blocks with one factor, None if config.json names none."""
    groups = config.get("config_groups") or {}
    named = [(each.get("weights") or {}).get("block_structure") for each in groups.values()]
    found = config.get("weight_block_size") or next(filter(None, named), None)
    return found if isinstance(found, list) and len(found) == 2 and all(found) else None


def _read_packed(layer: _Layer) -> Tensor:
    """Read integers of compressed-tensors: in words along the row, plus half their range, so that none is negative."""
    packed, scale = layer.get("weight_packed"), layer.get("weight_scale").float()
    rows, columns = layer.get("weight_shape").tolist()
    bits = packed.shape[1] * 32 // columns
    weight: Tensor = _unpacked(packed, bits, 1)[:, :columns].float() - 2 ** (bits - 1)
    if layer.has("weight_g_idx"):
        groups = layer.get("weight_g_idx").long()
    else:
        groups = torch.arange(columns) // (columns // scale.shape[1])
    if layer.has("weight_zero_point"):
        zeros = _unpacked(layer.get("weight_zero_point"), bits, 0)[:rows].float() - 2 ** (bits - 1)
        weight -= zeros[:, groups]
    return weight * scale[:, groups]


def _read_gptq(layer: _Layer) -> Tensor:
    """Read GPTQ: in words along the input. Its first format stores each zero point minus one, so one is added here."""
    bits = int(layer.config["bits"])
    numbers, scale = _unpacked(layer.get("qweight"), bits, 0), layer.get("scales").float()
    words = layer.get("qzeros")
    if layer.config.get("checkpoint_format") != "gptq_v2":
        words = words + sum(1 << place for place in range(0, 32, bits))
    zeros = _unpacked(words, bits, 1)[:, : scale.shape[1]]
    if layer.has("g_idx"):
        groups = layer.get("g_idx").long()
    else:
        groups = torch.arange(len(numbers)) // (len(numbers) // len(scale))
    return ((numbers - zeros[groups]).float() * scale[groups]).T


def _read_awq(layer: _Layer) -> Tensor:
    """Read AWQ, which lies in words along the output, in an order of its own."""
    numbers, zeros = (_in_order(_unpacked(layer.get(part), 4, 1)) for part in ("qweight", "qzeros"))
    scale = layer.get("scales").float()
    groups = torch.arange(len(numbers)) // (len(numbers) // len(scale))
    return ((numbers - zeros[groups]).float() * scale[groups]).T


def _in_order(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, len(AWQ_ORDER))[:, :, list(AWQ_ORDER)].reshape(len(numbers), -1)


def _read_bitsandbytes_4bit(layer: _Layer) -> Tensor:
    """Read four bits as indices of a table, two a byte, the first in the high bits; factors may be quantized again."""
    kind = "nf4" if layer.has("weight.quant_state.bitsandbytes__nf4") else "fp4"
    state = json.loads(bytes(layer.get(f"weight.quant_state.bitsandbytes__{kind}").tolist()))
    factors = layer.get("weight.absmax")
    if layer.has("weight.nested_absmax"):
        table, nested = layer.get("weight.nested_quant_map").float(), layer.get("weight.nested_absmax").float()
        spread = nested.repeat_interleave(state["nested_blocksize"])[: len(factors)]
        factors = table[factors.long()] * spread + state["nested_offset"]
    packed = layer.get("weight").flatten().view(torch.uint8)
    numbers = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
    rows, columns = state["shape"]
    weight: Tensor = layer.get("weight.quant_map").float()[numbers.long()][: rows * columns]
    weight *= factors.repeat_interleave(state["blocksize"])[: rows * columns]
    return weight.view(rows, columns)


def _read_bitsandbytes_8bit(layer: _Layer) -> Tensor:
    """Read LLM.int8: rows of integers, with the largest weight of each."""
    if layer.has("weight_format") and layer.get("weight_format").item() != 0:
        raise ValueError("it is stored in another order than by rows")
    return layer.get("weight").float() * (layer.get("SCB").float() / 127)[:, None]


def _read_mxfp4(layer: _Layer) -> Tensor:
    """Read merged experts of gpt-oss: blocks of 32 floats of 4 bits, two a byte, each block with an exponent of 2.

    They lie as [experts, out, in], and the model has [experts, in, out].
    """
    blocks, scales = layer.get("blocks"), layer.get("scales")
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    weight = torch.ldexp(torch.tensor(FP4_VALUES)[numbers.long()], scales[..., None].int() - 127)
    return weight.flatten(-2).transpose(1, 2)


SCALED = _Form(
    re.compile(r"\.weight_scale(_inv)?$"),
    ("weight", "weight_zero_point", "input_scale", "activation_scale", "output_scale"),
    _read_scaled,
)
PACKED = _Form(
    re.compile(r"\.weight_packed$"),
    ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    _read_packed,
)
GPTQ = _Form(re.compile(r"\.qweight$"), ("qzeros", "scales", "g_idx"), _read_gptq)
AWQ = _Form(re.compile(r"\.qweight$"), ("qzeros", "scales"), _read_awq)
BITSANDBYTES_4BIT = _Form(
    BITSANDBYTES_STATE,
    ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
    _read_bitsandbytes_4bit,
)
MXFP4 = _Form(re.compile(r"_blocks$"), ("scales",), _read_mxfp4, joint="_", weight="")
BITSANDBYTES_8BIT = _Form(re.compile(r"\.SCB$"), ("weight_format",), _read_bitsandbytes_8bit)
FORMS: Mapping[str, tuple[_Form, ...]] = {
    "fp8": (SCALED,),
    "compressed-tensors": (SCALED, PACKED),  # the later form counts if a layer has the tensors of both
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "bitsandbytes": (BITSANDBYTES_4BIT, BITSANDBYTES_8BIT),
    "mxfp4": (MXFP4,),
}
"""Forms that a `quant_method` may have."""
