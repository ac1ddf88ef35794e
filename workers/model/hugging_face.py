"""The part of transformers that a rank needs, imported without what only training, compilation and other families need.

transformers decorates functions for torch's compiler, which loads the compiler and sympy; it loads torch's sharded
tensors because torch has them; and it reads the sources of all its models twice. A rank compiles nothing, has its own
rings, and serves one model: without these parts it starts in half the time. Whatever uses transformers in the same
process later finds it complete, but believes that torch has no `torch.distributed`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch

__all__ = [
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "PreTrainedModel",
    "SiLUActivation",
    "no_init_weights",
]

INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"


def _undecorated(function: Callable[..., object] | None = None, *_: object, **__: object) -> object:
    """Return what a decorator of torch's compiler returns where nothing is ever compiled."""
    return function if function is not None else _undecorated


@contextmanager
def _transformed_getitem() -> Iterator[None]:
    """Load the one part of the compiler that transformers uses without compiling, where it is used: in masks."""
    with import_module(INDEXING).TransformGetItemToIndex():
        yield


@contextmanager
def _replaced(owner: object, **values: object) -> Iterator[None]:
    """Give attributes of a module or class other values for a while."""
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


@contextmanager
def _without_compiler_and_sharding() -> Iterator[None]:
    """Let transformers be imported as if torch had neither; nothing of it lasts but what transformers decides."""
    import transformers
    from transformers.utils import import_utils

    decorators = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _undecorated)
    indexing, models = ModuleType(INDEXING), ModuleType("transformers.models")
    vars(indexing)["TransformGetItemToIndex"] = _transformed_getitem
    # A model is found by its path; other names of this package are those of transformers.
    models.__path__ = [f"{path}/models" for path in transformers.__path__]
    vars(models)["__getattr__"] = partial(getattr, transformers)
    sys.modules.setdefault(models.__name__, models)
    sys.modules[INDEXING] = indexing
    with (
        # An attribute alone: an import of the compiler loads it.
        _replaced(torch, _dynamo=SimpleNamespace(**decorators)),
        _replaced(torch.compiler, **decorators),
        _replaced(torch.distributed, is_available=lambda: False),
        _replaced(import_utils, is_torch_flex_attn_available=lambda: False),
    ):
        assert not import_utils.is_torch_distributed_available()
        yield
    del sys.modules[INDEXING]


if "transformers.modeling_utils" not in sys.modules and "torch._dynamo" not in sys.modules:
    with _without_compiler_and_sharding():
        import transformers.generation.utils
        import transformers.modeling_layers
        import transformers.modeling_utils  # noqa: F401

from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.activations import SiLUActivation  # noqa: E402
from transformers.initialization import no_init_weights  # noqa: E402
