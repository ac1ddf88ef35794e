"""Weights of a model directory. A rank reads its own share of each tensor straight into the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from ringserve.cp_core.errors import ModelRefused
from ringserve.workers.model.hugging_face import PreTrainedModel
from ringserve.workers.model.tensor_parallel import WHOLE_BIAS, TensorParallel

Shape = tuple[int, ...]


def whole_shapes(model: Module) -> dict[str, Shape]:
    """Return the shape of every parameter before cutting. Tied parameters have one name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class Weights:
    """Tensors of all `*.safetensors` files in a directory, by name. Files are memory-mapped and read on use.

    Files of a model without its head omit `prefix` from names.
    """

    def __init__(self, files: Mapping[str, Any], prefix: str) -> None:
        self._files = files
        self._prefix = prefix

    @classmethod
    @contextmanager
    def opened(cls, path: Path, prefix: str) -> Iterator[Weights]:
        """Open a directory's files. Raises ModelRefused if one is unreadable, then or later."""
        try:
            with ExitStack() as stack:
                opened = [
                    stack.enter_context(safe_open(file, framework="pt")) for file in sorted(path.glob("*.safetensors"))
                ]
                yield cls({name: file for file in opened for name in file.keys()}, prefix)  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"{path} cannot be loaded: {error}") from error

    def find(self, name: str) -> Tensor | None:
        """Return a parameter's stored tensor, mapped from its file, or None if there is none."""
        for stored in (name, name.removeprefix(self._prefix)):
            if stored in self._files:
                tensor = self._files[stored].get_tensor(stored)
                assert isinstance(tensor, Tensor)
                return tensor
        return None


def read_share(path: Path, model: PreTrainedModel, whole: Mapping[str, Shape], tensor: TensorParallel) -> None:
    """Fill the parameters of a model that `tensor` has cut, from the files in `path`. `whole` has the uncut shapes.

    A parameter is cut in the dimension in which its shape differs from the whole shape. An uncut parameter stays a
    mapping of the file, which all ranks of a machine share; a cut parameter takes memory for its share only. Raises
    ModelRefused if a tensor is missing or has another shape.
    """
    # A name that the whole model lacks is a view of a tied parameter, which is filled under its own name.
    sources = {name.replace(f".{WHOLE_BIAS}", ".bias"): part for name, part in model.named_parameters()}
    parts = {name: part for name, part in sorted(sources.items()) if name in whole}
    with Weights.opened(path, f"{model.base_model_prefix}.") as weights:
        stored = {name: weights.find(name) for name in parts}
        if missing := [name for name, found in stored.items() if found is None]:
            raise ModelRefused(f"{path} lacks weights for {len(missing)} tensors, the first is {missing[0]}")
        for name, found in stored.items():
            assert found is not None
            if (shape := tuple(found.shape)) != whole[name]:
                raise ModelRefused(f"{path} has {name} of shape {shape}, but config.json needs {whole[name]}")
            parts[name].data = _share_of(found, parts[name], tensor)
    if len(parts) < len(sources):
        tensor.tie(model)


def _share_of(stored: Tensor, part: Tensor, tensor: TensorParallel) -> Tensor:
    """Return a parameter's share of a stored tensor, contiguous and in the parameter's dtype."""
    share = stored
    for dim, (size, own) in enumerate(zip(stored.shape, part.shape, strict=True)):
        if size != own:
            start, stop = tensor.share_of(size, own)
            share = share.narrow(dim, start, stop - start)
    assert share.shape == part.shape, f"{share.shape} read for {part.shape}"
    return share.to(part.dtype).contiguous()
