"""Model shape and model identity, read from a model directory without torch: leaders and gateways do not load it."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringserve.cp_core.errors import ConfigError, ModelRefused
from ringserve.workers.model.support import EXPERT_KEYS, SINKS, check_supported, layer_windows, rope_limit
from ringserve.workers.protocol.ranks import ModelInfo

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


CPU_FLAGS = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""CPU flags of processors that multiply bfloat16 faster than float32."""


def multiplies_bfloat16(flags: Path = CPU_FLAGS) -> bool:
    """Return True if this machine's CPU has any of BFLOAT16_FLAGS, False if the system does not list its flags."""
    try:
        lines = flags.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    return any(BFLOAT16_FLAGS & set(line.split()) for line in lines if line.startswith("flags"))


def read_model_info(path: Path, dtype: str | None = None, name: str | None = None, device: str = "cpu") -> ModelInfo:
    """Read the shape of the model in `path`. `dtype` overrides the directory's dtype, `name` its name.

    Attention and KV have the model's dtype, or float32 for a float16 model on a CPU, whose kernels lack float16.

    Raises ModelRefused if a file is missing or unreadable, or if the model needs an unsupported feature.
    """
    config = read_json(path / "config.json")
    check_supported(config)
    chosen = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    if chosen not in ELEMENT_BYTES:
        raise ModelRefused(f"dtype {chosen!r} is not supported; use one of {', '.join(ELEMENT_BYTES)}")
    kv_dtype = "float32" if device == "cpu" and chosen == "float16" else str(chosen)
    reader = _Reader(path, config)
    num_heads = reader.count("num_attention_heads")
    mlp = _MlpWidths.read(reader)
    head_dim = reader.count("head_dim", reader.count("hidden_size") // num_heads)
    max_positions = max(reader.count("max_position_embeddings"), _yarn_positions(config))
    max_positions = min(max_positions, rope_limit(config) or max_positions)
    # A window that holds every position hides nothing.
    windows = tuple(window if window < max_positions else 0 for window in layer_windows(config))
    info = ModelInfo(
        name=name or path.resolve().name,
        model_type=str(config["model_type"]),
        dtype=str(chosen),
        num_layers=reader.count("num_hidden_layers"),
        hidden_size=reader.count("hidden_size"),
        intermediate_size=mlp.active,
        num_heads=num_heads,
        num_kv_heads=reader.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=reader.count("vocab_size"),
        max_positions=max_positions,
        num_parameters=0,
        element_bytes=ELEMENT_BYTES[str(chosen)],
        kv_dtype=kv_dtype,
        kv_element_bytes=ELEMENT_BYTES[kv_dtype],
        eos_token_ids=_eos_token_ids(path, config),
        windows=windows if any(windows) else (),
        tail_tokens=max(windows, default=0),
        has_sinks=config["model_type"] in SINKS,
    )
    if info.num_heads % info.num_kv_heads:
        raise ModelRefused(f"{info.num_heads} query heads are not a multiple of {info.num_kv_heads} key/value heads")
    return _with_parameters(info, mlp.total, tied=bool(config.get("tie_word_embeddings", False)))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Files with a model's weights. `assigned` has the file name of every tensor if an index assigns them.

    `single` is the name that one file would have: `model.safetensors` or `pytorch_model.bin`.
    """

    paths: Sequence[Path]
    single: str
    assigned: Mapping[str, str] | None = None

    @property
    def is_safetensors(self) -> bool:
        return self.single == "model.safetensors"

    @classmethod
    def find(cls, path: Path) -> WeightFiles:
        """Choose the files that transformers would read in a directory.

        These are `model.safetensors`, or else the files that `model.safetensors.index.json` names, or else all
        `*.safetensors` files, or else the same of `pytorch_model.bin`. So a copy that training left beside a model is
        not read. Raises ModelRefused.
        """
        for single in ("model.safetensors", "pytorch_model.bin"):
            if (path / single).is_file():
                return cls(paths=[path / single], single=single)
            index = path / f"{single}.index.json"
            if index.is_file():
                assigned = _read_index(index)
                names = sorted(set(assigned.values()))
                if missing := [name for name in names if not (path / name).is_file()]:
                    raise ModelRefused(f"{path} has no {missing[0]}, which its index names")
                return cls(paths=[path / name for name in names], single=single, assigned=assigned)
            if single == "model.safetensors" and (others := sorted(path.glob("*.safetensors"))):
                return cls(paths=others, single=single)
        raise ModelRefused(f"{path} has no weights: neither *.safetensors nor pytorch_model.bin")


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of every tensor. Raises ModelRefused."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused(f"{index} cannot be read: it needs a JSON object with weight_map") from error
    if not (
        isinstance(names, dict) and all(isinstance(file, str) and Path(file).name == file for file in names.values())
    ):
        raise ModelRefused(f"{index} has a weight_map whose values are not all names of files beside it")
    return names


SAMPLE_BYTES = 4096
"""Bytes of a tensor that count for a fingerprint. Training changes nearly every value of the tensors that it trains."""
IDENTITY_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model")


def read_fingerprint(path: Path) -> str:
    """Return the identity of the model in `path`, 16 hexadecimal digits: of its configuration, tokenizer and weights.

    Equal directories have equal fingerprints on every machine. Of each stored tensor, only its name, type, shape and
    the SAMPLE_BYTES in its middle are hashed, so most of a large file is not read. Example: two fine-tunes of one base
    model differ. Raises ModelRefused.
    """
    digest = hashlib.sha256()
    try:
        for name in IDENTITY_FILES:
            content = (path / name).read_bytes() if (path / name).is_file() else b""
            digest.update(struct.pack("<q", len(content)) + content)
        weights = WeightFiles.find(path)
        for file in weights.paths:
            digest.update(file.name.encode())
            for part in _sample_safetensors(file) if weights.is_safetensors else _sample_torch_file(file):
                digest.update(part)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _sample_safetensors(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            content = file.read(min(length, path.stat().st_size))
            offsets = [each["data_offsets"] for name, each in json.loads(content).items() if name != "__metadata__"]
            spans = sorted((int(first), int(last)) for first, last in offsets)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelRefused(f"{path} cannot be read as weights: its header is damaged") from error
        yield content
        for first, last in spans:
            file.seek(8 + length + max(first, (first + last - SAMPLE_BYTES) // 2))
            yield file.read(min(SAMPLE_BYTES, last - first))


def _sample_torch_file(path: Path) -> Iterator[bytes]:
    """Yield the checksums that `torch.save` stores, or all bytes in its format before torch 1.6."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                yield f"{entry.filename} {entry.file_size} {entry.CRC}".encode()
        return
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            yield part


def check_fingerprint(path: Path, expected: str) -> None:
    """Check that `path` holds the model that the service began with, unless `expected` is empty. Raises ModelRefused.

    Ranks of two models would give answers of neither.
    """
    if expected and (found := read_fingerprint(path)) != expected:
        raise ModelRefused(
            f"{path} is not the model that the service began with: its fingerprint is {found}, and was {expected}; put "
            "its files back, or stop the service and start it again"
        )


def tensor_sizes(info: ModelInfo) -> list[int]:
    """Return the numbers of tensor-parallel ranks that divide the KV heads evenly; only 1 if heads have sinks."""
    if info.has_sinks:
        return [1]
    return [size for size in range(1, info.num_kv_heads + 1) if info.num_kv_heads % size == 0]


def tensor_share(info: ModelInfo, tp: int, key: str = "tp", *, replicates_kv: bool = False) -> ModelInfo:
    """Return the shape of one of `tp` tensor-parallel ranks; `info` itself if tp is 1.

    Raises ConfigError, naming `key`, unless every rank gets the same number of whole KV heads. With `replicates_kv`,
    several ranks may share each KV head and divide its query heads evenly.
    """
    if tp == 1:
        return info
    if info.has_sinks:
        raise ConfigError(f"{key}: {tp} is not allowed for {info.name}, which has attention sinks; allowed is 1")
    heads, sizes = info.num_kv_heads, tensor_sizes(info)
    if replicates_kv:
        sizes += [size for size in range(2 * heads, info.num_heads + 1, heads) if info.num_heads % size == 0]
    if tp not in sizes:
        allowed = ", ".join(map(str, sizes))
        raise ConfigError(f"{key}: {tp} does not divide the {heads} KV heads of {info.name}; allowed are {allowed}")
    return replace(
        info,
        num_heads=info.num_heads // tp,
        num_kv_heads=max(1, heads // tp),
        intermediate_size=-(-info.intermediate_size // tp),
        vocab_size=-(-info.vocab_size // tp),
        num_parameters=-(-info.num_parameters // tp),
        tied_parameters=-(-info.tied_parameters // tp),
    )


def read_json(path: Path) -> Mapping[str, object]:
    """Read the JSON object in a file of a model directory. Raises ModelRefused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelRefused(f"{path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} does not hold a JSON object")
    return content


class _Reader:
    """Reader of positive integers in config.json. Its errors name the key."""

    def __init__(self, path: Path, config: Mapping[str, object]) -> None:
        self._path = path
        self._config = config

    def count(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or value < 1:
            raise ModelRefused(f"{self._path / 'config.json'} has {key}={value!r}; allowed is a positive integer")
        return value

    def any_count(self, keys: Sequence[str], default: int) -> int:
        """Read the first of `keys` that config.json has."""
        return next((self.count(key) for key in keys if self._config.get(key)), default)


@dataclass(frozen=True)
class _MlpWidths:
    """Features between the two products of an MLP: the features that a token uses, and the features of all experts.

    The first layers of some mixtures of experts are dense; they count as the others do.
    """

    active: int
    total: int

    @classmethod
    def read(cls, reader: _Reader) -> _MlpWidths:
        experts = reader.any_count(EXPERT_KEYS, 0)
        if not experts:
            width = reader.count("intermediate_size")
            return cls(width, width)
        width = reader.any_count(("moe_intermediate_size", "intermediate_size"), 0)
        shared = reader.any_count(("n_shared_experts", "moe_num_shared_experts"), 0) * width
        shared += reader.any_count(("shared_expert_intermediate_size",), 0)
        chosen = reader.any_count(("num_experts_per_tok", "moe_k"), 2)
        return cls(chosen * width + shared, experts * width + shared)


def _yarn_positions(config: Mapping[str, object]) -> int:
    """Return the number of positions that YaRN stretches to, 0 without it.

    `max_position_embeddings` often gives only the number before.
    Example: Qwen's recipe for 131,072 positions is factor 4 and `original_max_position_embeddings` 32768.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return 0
    return int(factor * original)


def _eos_token_ids(path: Path, config: Mapping[str, object]) -> tuple[int, ...]:
    """Read the end-of-sequence ids from generation_config.json, in which chat models list more, or from config.json."""
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    if isinstance(ids, int):
        return (ids,)
    if isinstance(ids, list) and all(isinstance(item, int) for item in ids):
        return tuple(ids)
    raise ModelRefused(f"{path} has eos_token_id={ids!r}; a token id or a list of them is needed")


def _with_parameters(info: ModelInfo, mlp_features: int, *, tied: bool) -> ModelInfo:
    """Count the parameters of all weight matrices. Biases and norms (under 0.1%) are left out."""
    attention = 2 * info.hidden_size * info.head_dim * (info.num_heads + info.num_kv_heads)
    per_layer = attention + 3 * info.hidden_size * mlp_features
    embedding = info.vocab_size * info.hidden_size
    return replace(
        info,
        num_parameters=info.num_layers * per_layer + embedding * (1 if tied else 2),
        tied_parameters=embedding if tied else 0,
    )
