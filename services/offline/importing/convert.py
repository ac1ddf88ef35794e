"""Conversion of a GGUF file into a Hugging Face directory: it appears whole, under its name, or not at all.

`ringserve import` and the fetch of the built-in model call it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from ringserve.cp_core.errors import ModelRefused
from ringserve.services.offline.importing.gguf_file import Array, GgufFile
from ringserve.services.offline.importing.tokenizer import write_tokenizer
from ringserve.workers.model.info import ELEMENT_BYTES, read_model_info

MAX_FILE_BYTES: Final = 2 << 30
"""Largest file of weights; one of them is in memory at a time."""
SUMS: Final = "SHA256SUMS"
"""File that `sha256sum -c` reads."""

Progress = Callable[[str, float | None], None]
"""Report of the current work and of its finished part (0 to 1; None if that is unknown)."""


def convert(source: Path, target: Path, progress: Progress, dtype: str = "float32") -> None:
    """Write the model of a GGUF file to `target`, a directory that is empty or does not exist.

    float32 is exact; the other types round the weights to half the size. Raises ModelRefused.
    """
    if dtype not in ELEMENT_BYTES:
        raise ModelRefused(f"dtype {dtype!r} is not supported; use one of {', '.join(ELEMENT_BYTES)}")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelRefused(f"{target} exists; give a directory that is empty or does not exist")
    progress(f"reading {source.name}", None)
    file = GgufFile(source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
            draft = Path(directory) / target.name
            draft.mkdir()
            write_tokenizer(file, draft)
            _write_weights(file, draft, dtype, progress)
            (draft / "config.json").write_text(json.dumps(file.config | {"dtype": dtype}, indent=2) + "\n")
            read_model_info(draft)  # refuses the models that ranks would refuse
            _write_sums(draft)
            draft.rename(target)
    except OSError as error:
        raise ModelRefused(f"{target} cannot be written: {error.strerror or error}") from error


def is_intact(directory: Path) -> bool:
    """Return whether the files of a converted model are as they were written.

    Checksums are written last, so a file that is older is not read: to read a whole model would add half a second or
    more to each start. Any other file is compared with its checksum.
    """
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
        summed_at = (directory / SUMS).stat().st_mtime_ns
        files = [(directory / name, digest) for digest, name in (line.split("  ", 1) for line in lines)]
        return bool(files) and all(
            path.stat().st_mtime_ns < summed_at or sha256_of(path) == digest for path, digest in files
        )
    except (OSError, ValueError):
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_sums(directory: Path) -> None:
    """Write the checksums of all files, and wait until the files are on the disk."""
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(directory.iterdir())]
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_weights(file: GgufFile, directory: Path, dtype: str, progress: Progress) -> None:
    """Write model.safetensors, or numbered files of at most 2 GiB with their index."""
    sizes = [int(np.prod(target.shape)) * ELEMENT_BYTES[dtype] for target in file.targets.values()]
    parts = _parts(sizes)
    total, done = sum(sizes), 0
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors" for index in range(len(parts))]
    tensors = file.tensors()
    places: dict[str, str] = {}
    for name, count in zip(names, parts, strict=True):
        held: dict[str, npt.NDArray[Any]] = {}
        for _ in range(count):
            target, values = next(tensors)
            held[target.name] = _in_dtype(values, dtype)
            places[target.name] = name
            done += held[target.name].nbytes
            progress("converting", done / total)
        _write_safetensors(held, directory / name, dtype)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _parts(sizes: list[int]) -> list[int]:
    """Return how many tensors in a row each file takes."""
    parts, held = [0], 0
    for size in sizes:
        if parts[-1] and held + size > MAX_FILE_BYTES:
            parts.append(0)
            held = 0
        parts[-1] += 1
        held += size
    return parts


def _in_dtype(values: Array, dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        # The upper half of a float32, rounded to nearest, ties to even. numpy has no such type: these are its bits.
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype, copy=False)


def _write_safetensors(tensors: dict[str, npt.NDArray[Any]], path: Path, dtype: str) -> None:
    specs = {
        name: TensorSpec(dtype=dtype, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes)
        for name, values in tensors.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})
