"""Weights of a model directory. A rank reads its own share of each tensor straight into the model's parameters.

Model loading calls it. It writes to the parameters that it is given, and gives up pages of mapped files.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module, Parameter

from ringserve.cp_core.errors import ModelRefused
from ringserve.workers.model.hugging_face import PreTrainedModel, WeightConverter, conversion_mapping, rename_source_key
from ringserve.workers.model.info import WeightFiles
from ringserve.workers.model.quantized import WeightFile, check_plain, read_plain
from ringserve.workers.model.tensor_parallel import WHOLE_BIAS, TensorParallel

Shape = tuple[int, ...]


def whole_shapes(model: Module) -> dict[str, Shape]:
    """Return the shape of every parameter before cutting. Tied parameters have one name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class _TorchFile(dict[str, Tensor]):
    """File of `torch.save`, read without running anything that is pickled in it."""

    def __init__(self, path: Path) -> None:
        try:
            try:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError:  # the format before torch 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # which one depends on the place of the damage
            raise ModelRefused(f"{path} cannot be read as weights: {str(error).splitlines()[0]}") from error
        super().__init__({name: part for name, part in content.items() if isinstance(part, Tensor)})

    def get_tensor(self, name: str) -> Tensor:
        return self[name]


def release_pages(path: Path) -> None:
    """Give up memory of weights that were packed: the allocator's, and the mapped pages of a directory's files.

    Packed weights are copies, and the pages they were read from would count as this process's for good. The kernel
    keeps them as a cache of the files, whose contents stay readable. Mappings with pages that were written to are left
    alone. Weights that were converted while they were read lay in the allocator's memory, which it keeps after they are
    freed: three quarters of a gigabyte for SmolLM2 in fp32 from a file of bfloat16.
    """
    files = {str(file.resolve()) for file in path.iterdir()}
    if (trim := find_trim()) is not None:
        trim(0)
    madvise, at = getattr(ctypes.CDLL(None), "madvise", None), None
    if madvise is None or not MAPPINGS.is_file():
        return
    for line in MAPPINGS.read_text().splitlines():
        if (found := MAPPING.fullmatch(line)) is not None:
            start, stop = int(found["start"], 16), int(found["stop"], 16)
            at = (start, stop - start) if found["path"] in files else None
        elif at is not None and line.split() == ["Anonymous:", "0", "kB"]:
            madvise(ctypes.c_void_p(at[0]), ctypes.c_size_t(at[1]), mmap.MADV_DONTNEED)


def is_mapped(tensor: Tensor) -> bool:
    """Return True if a tensor is mapped from a file, or from memory that processes share; False if unknown."""
    if not MAPPINGS.is_file():
        return False
    found = (MAPPING.fullmatch(line) for line in MAPPINGS.with_name("maps").read_text().splitlines())
    at = tensor.data_ptr()
    return any(
        each["path"].startswith("/") for each in found if each and int(each["start"], 16) <= at < int(each["stop"], 16)
    )


def find_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None if the C library has none."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


MAPPINGS = Path("/proc/self/smaps")
MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) \S+ \S+ \S+ \d+ *(?P<path>.*)")


def _open_files(path: Path, stack: ExitStack) -> Mapping[str, WeightFile]:
    """Open the weight files of a directory -> the file of every stored tensor.

    Without an index, no tensor may be in two of them. Raises ModelRefused.
    """
    chosen = WeightFiles.find(path)
    opened: dict[str, WeightFile] = {
        file.name: stack.enter_context(safe_open(file, framework="pt")) if chosen.is_safetensors else _TorchFile(file)
        for file in chosen.paths
    }
    if chosen.assigned is not None:
        for name, file in chosen.assigned.items():
            if name not in opened[file].keys():  # noqa: SIM118
                raise ModelRefused(f"{path / file} lacks {name}, which {chosen.single}.index.json assigns to it")
        return {name: opened[file] for name, file in chosen.assigned.items()}
    found: dict[str, WeightFile] = {}
    for file, content in opened.items():
        for name in content.keys():  # noqa: SIM118
            if name in found:
                raise ModelRefused(
                    f"{path} has {name} in {file} and in another file, and no {chosen.single} or "
                    f"{chosen.single}.index.json says which one counts"
                )
            found[name] = content
    return found


class Weights:
    """Stored tensors of a directory under the names of a model's parameters.

    Names and forms are changed as transformers does: files of a model without its head lack a prefix, and published
    experts, one tensor each, are merged.
    """

    def __init__(self, path: Path, files: Mapping[str, WeightFile], model: PreTrainedModel) -> None:
        self._path = path
        self._files = files
        self._model = model
        self._tied = dict(model.all_tied_weights_keys)
        renamings, converters = conversion_mapping(model)
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        parameters = model.state_dict()
        for name in sorted(files, key=_natural_order):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
            self._sources.setdefault(target, []).append((name, pattern))

    @classmethod
    @contextmanager
    def opened(cls, path: Path, model: PreTrainedModel) -> Iterator[Weights]:
        """Open a directory's files for a model. Raises ModelRefused if one is unreadable, then or later."""
        try:
            with ExitStack() as stack:
                files = _open_files(path, stack)
                if quantization := getattr(model.config, "quantization_config", None):
                    files = read_plain(files, quantization, model.dtype)
                yield cls(path, files, model)
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"{path} cannot be loaded: {error}") from error

    def find(self, name: str) -> Tensor | None:
        """Return a parameter's stored tensor, mapped from its file if possible, or None if there is none."""
        sources = self._sources.get(name)
        if sources is None:
            return None
        first, pattern = sources[0]
        if pattern is None:
            if len(sources) > 1:
                raise ModelRefused(f"{self._path} has {name} twice: as {first} and as {sources[1][0]}")
            return self._files[first].get_tensor(first)
        converter: WeightConverter = deepcopy(self._converters[pattern])
        for source, of_pattern in sources:
            converter.add_tensor(name, source, of_pattern, partial(self._files[source].get_tensor, source))
        converted = converter.convert(name, model=self._model, config=self._model.config).get(name)
        if isinstance(converted, list):
            (converted,) = converted
        assert isinstance(converted, Tensor), f"{name} is converted from {len(sources)} tensors"
        return converted

    def untie(self) -> None:
        """Give tied parameters memory of their own if the files have a different tensor for each, whatever config says.

        transformers does the same. Example: a fine-tune that trained `lm_head` but kept `tie_word_embeddings: true`.
        """
        for target, source in self._tied.items():
            first, second = self.find(target), self.find(source)
            if first is None or second is None or torch.equal(first, second):
                continue
            module, _, name = target.rpartition(".")
            tied = self._model.get_parameter(source)
            # Not `empty_like`, which imports sympy for a tensor without memory.
            own = Parameter(torch.empty(tied.shape, dtype=tied.dtype, device=tied.device))
            setattr(self._model.get_submodule(module), name, own)
            self._model.all_tied_weights_keys.pop(target)
            self._model.config.tie_word_embeddings = False

    def read_share(self, whole: Mapping[str, Shape], tensor: TensorParallel) -> None:
        """Fill the model's parameters, which `tensor` has cut. `whole` has the uncut shapes.

        A parameter is cut in the dimension in which its shape differs from the whole shape. An uncut parameter stays a
        mapping of the file, which all ranks of a machine share; a cut parameter takes memory for its share only. Raises
        ModelRefused if a tensor is missing or has another shape.
        """
        # A name that the whole model lacks is a view of a tied parameter, which is filled under its own name.
        sources = {name.replace(f".{WHOLE_BIAS}", ".bias"): part for name, part in self._model.named_parameters()}
        parts = {name: part for name, part in sorted(sources.items()) if name in whole}
        # Of tied parameters the files may have either.
        others = {source: target for target, source in self._tied.items()}
        missing = [name for name in parts if name not in self._sources and others.get(name) not in self._sources]
        if missing:
            raise ModelRefused(f"{self._path} lacks weights for {len(missing)} tensors, the first is {missing[0]}")
        for name, part in parts.items():
            found = self.find(name if name in self._sources else others[name])
            assert found is not None
            if (shape := tuple(found.shape)) != whole[name]:
                raise ModelRefused(f"{self._path} has {name} of shape {shape}, but config.json needs {whole[name]}")
            check_plain(self._path, name, found)
            part.data = _share_of(found, part, tensor)
        for name, buffer in self._model.named_buffers():
            if name in self._sources and (found := self.find(name)) is not None:
                buffer.data = found.to(buffer.dtype)
        if len(parts) < len(sources):
            tensor.tie(self._model)


def _natural_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Order expert 10 after expert 9."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split("."))


def _share_of(stored: Tensor, part: Tensor, tensor: TensorParallel) -> Tensor:
    """Return a parameter's share of a stored tensor, contiguous and in the parameter's dtype."""
    share = stored
    for dim, (size, own) in enumerate(zip(stored.shape, part.shape, strict=True)):
        if size != own:
            start, stop = tensor.share_of(size, own)
            share = share.narrow(dim, start, stop - start)
    assert share.shape == part.shape, f"{share.shape} read for {part.shape}"
    return share.to(part.dtype).contiguous()
