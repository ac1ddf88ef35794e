"""The part of transformers that a rank needs, imported without training, compilation and other model families.

transformers decorates functions for torch's compiler, which loads the compiler and sympy. It loads torch's sharded
tensors because torch has them, and it reads the sources of all its models twice. A rank compiles nothing here, has its
own rings and serves one model, so it starts in half the time without these parts. Later users of transformers in this
process find it complete, except that it believes torch has no `torch.distributed`. Another installed package may import
the compiler meanwhile, as torchvision does: from there on transformers is imported as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType, SimpleNamespace

import torch

__all__ = [
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "PreTrainedModel",
    "SiLUActivation",
    "WeightConverter",
    "WeightRenaming",
    "conversion_mapping",
    "no_init_weights",
    "rename_source_key",
]

INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"


def _undecorated(function: Callable[..., object] | None = None, *_: object, **__: object) -> object:
    """Stand in for a decorator of torch's compiler that compiles nothing."""
    return function if function is not None else _undecorated


@contextmanager
def _transformed_getitem() -> Iterator[None]:
    """Load, when masks are built, the one part of the compiler that transformers needs without compiling."""
    with import_module(INDEXING).TransformGetItemToIndex():
        yield


@contextmanager
def _replaced(owner: object, **values: object) -> Iterator[None]:
    """Replace attributes of a module or class inside the `with` block."""
    missing = [name for name in values if name not in vars(owner)]
    before = {name: vars(owner)[name] for name in values if name not in missing}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
        for name in missing:
            if vars(owner)[name] is values[name]:
                delattr(owner, name)


class _CompilerFinder(MetaPathFinder):
    """Put everything back as soon as the real compiler is imported, which must not meet a stand-in of itself."""

    def __init__(self, replaced: ExitStack) -> None:
        self._replaced = replaced

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch._dynamo":
            self._replaced.close()


@contextmanager
def _without_compiler_and_sharding() -> Iterator[None]:
    """Hide torch's compiler and sharding inside the `with` block; what transformers decides there stays."""
    import transformers
    from transformers.utils import import_utils

    decorators = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _undecorated)
    indexing, models = ModuleType(INDEXING), ModuleType("transformers.models")
    vars(indexing)["TransformGetItemToIndex"] = _transformed_getitem
    # Stand-in for `transformers.models`: models are found by path, without reading their sources; every other name is
    # looked up in `transformers`.
    models.__path__ = [f"{path}/models" for path in transformers.__path__]
    vars(models)["__getattr__"] = partial(getattr, transformers)
    sys.modules.setdefault(models.__name__, models)
    sys.modules[INDEXING] = indexing
    with ExitStack() as replaced:
        replaced.callback(sys.modules.pop, INDEXING)
        replaced.enter_context(_replaced(torch, _dynamo=SimpleNamespace(**decorators)))
        replaced.enter_context(_replaced(torch.compiler, **decorators))
        replaced.enter_context(_replaced(torch.distributed, is_available=lambda: False))
        replaced.enter_context(_replaced(import_utils, is_torch_flex_attn_available=lambda: False))
        assert not import_utils.is_torch_distributed_available()
        finder = _CompilerFinder(replaced)
        sys.meta_path.insert(0, finder)
        replaced.callback(sys.meta_path.remove, finder)
        yield


if "transformers.modeling_utils" not in sys.modules and "torch._dynamo" not in sys.modules:
    with _without_compiler_and_sharding():
        import transformers.generation.utils
        import transformers.modeling_layers
        import transformers.modeling_utils  # noqa: F401

from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.activations import SiLUActivation  # noqa: E402
from transformers.conversion_mapping import (  # noqa: E402
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402


def prepare_conversions() -> None:
    """Build transformers' table of the tensor names of all families, for which the first model waits half a second."""
    get_checkpoint_conversion_mapping("")


def conversion_mapping(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return how transformers renames and converts the stored tensors of a model's family."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    return renamings, [each for each in mapping if isinstance(each, WeightConverter)]
