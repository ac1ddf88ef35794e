"""`ringserve check`: read a model directory as a rank does, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringserve.cp_core.errors import InvalidRequest
from ringserve.services.cli.command import argument, command, one_of
from ringserve.services.cli.options import JsonFlag
from ringserve.services.config import DEVICES
from ringserve.services.config.sections import default_dtype
from ringserve.services.offline.terminal import console, print_table, simple_table
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import ELEMENT_BYTES, WeightFiles, read_fingerprint, read_json, tensor_sizes
from ringserve.workers.model.support import quantization_of
from ringserve.workers.protocol.ranks import ModelInfo

if TYPE_CHECKING:
    from ringserve.services.gateway.text import TextCodec

AUTO = "auto"
KV_TOKENS = 100_000


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    model: str = argument("model directory, or a built-in model", "DIR")
    dtype: str = one_of("type of weights and activations, as model.dtype", (AUTO, *sorted(ELEMENT_BYTES)), AUTO)
    device: str = one_of("device of the ranks", DEVICES, "cpu")
    json: JsonFlag = False


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """Properties of a model directory as a service sees it. Sizes in bytes; `remarks` are sentences.

    `quantization` is the form in which the weights are stored, empty for plain ones. `windows` lists each layer's
    sliding window in tokens, 0 for full attention; it is empty if all layers have full attention.
    """

    name: str
    family: str
    dtype: str
    quantization: str
    fingerprint: str
    files: int
    file_bytes: int
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    windows: tuple[int, ...]
    weight_bytes: dict[int, int]
    kv_token_bytes: int
    chat_ends: tuple[int, ...]
    tools: str
    remarks: tuple[str, ...]


@command("ringserve check ./my-model", "ringserve check ./my-model --device cuda --json")
def check(options: CheckOptions) -> int:
    dtype = default_dtype(options.device) if options.dtype == AUTO else options.dtype
    found = examine(resolve_model_path(options.model), dtype, options.device)
    if options.json:
        print(json.dumps(asdict(found)))
        return 0
    table = simple_table("", "", left_aligned=("",))
    for name, text in _lines(found):
        table.add_row(name, text)
    print_table(console(), table)
    return 0


def examine(path: Path, dtype: str, device: str) -> ModelCheck:
    """Read a model directory whole: files, shapes of all weights, tokenizer. Raises ModelRefused for the first fault.

    Weights that are stored in `dtype` are mapped, not read.
    """
    # Here, not above: torch and transformers take seconds to import, and help needs neither.
    from ringserve.services.gateway.text import TextCodec
    from ringserve.workers.model.loading import load_model

    info = load_model(path, dtype, "cpu").info
    codec = TextCodec(path)
    files, sizes = WeightFiles.find(path).paths, tensor_sizes(info)
    tools, remarks = _chat(codec)
    return ModelCheck(
        name=path.resolve().name,
        family=info.model_type,
        dtype=dtype,
        quantization=quantization_of(read_json(path / "config.json")),
        fingerprint=read_fingerprint(path),
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        parameters=info.num_parameters,
        layers=info.num_layers,
        heads=info.num_heads,
        kv_heads=info.num_kv_heads,
        context=info.max_positions,
        windows=info.windows,
        weight_bytes={tp: -(-info.num_parameters // tp) * info.element_bytes for tp in sizes},
        kv_token_bytes=_kv_bytes(info, dtype, device),
        chat_ends=tuple(sorted({*info.eos_token_ids, *codec.chat_ends})),
        tools=tools,
        remarks=remarks,
    )


def _kv_bytes(info: ModelInfo, dtype: str, device: str) -> int:
    """Return the bytes of a token's KV: of the model's type on a GPU, float32 on a CPU."""
    return info.kv_bytes_per_token // info.kv_element_bytes * ELEMENT_BYTES[dtype if device == "cuda" else "float32"]


def _chat(codec: TextCodec) -> tuple[str, tuple[str, ...]]:
    """Return the form of tool calls, and remarks on chats."""
    from ringserve.services.gateway.openai.tools import find_call_form

    if not codec.has_chat_template:
        return "none", ("it has no chat template: chats are refused, texts and token ids are served",)
    try:
        form = find_call_form(codec.chat_template(()))
    except InvalidRequest:
        return "none", ("its chat template takes no tools: requests with tools are refused",)
    if form is None:
        return "unknown", ("its tool calls have a form that is not known: they stay text",)
    return form.name, ()


def _lines(found: ModelCheck) -> Iterator[tuple[str, str]]:
    yield "model", f"{found.name}: {found.family}, served"
    files = "a file" if found.files == 1 else f"{found.files} files"
    yield "weights", f"{found.parameters / 1e6:,.0f} M parameters in {files} of {_size(found.file_bytes)}"
    if found.quantization:
        yield "stored in", f"{found.quantization}; {found.dtype} once they are read"
    yield "fingerprint", found.fingerprint
    yield "context", f"{found.context:,} tokens"
    yield "attention", f"{found.layers} layers, {found.heads} heads, {found.kv_heads} KV heads"
    for window in sorted({*found.windows} - {0}):
        yield "windows", f"{window:,} tokens in {found.windows.count(window)} of {found.layers} layers"
    for tp, size in found.weight_bytes.items():
        yield f"weights of a rank, tp={tp}", f"{_size(size)} in {found.dtype}"
    yield f"KV of {KV_TOKENS:,} tokens", f"{_size(KV_TOKENS * found.kv_token_bytes)}, shared by the ranks of a ring"
    yield "ends of a chat answer", ", ".join(map(str, found.chat_ends)) or "none"
    yield "form of tool calls", found.tools
    for remark in found.remarks:
        yield "remark", remark


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
