"""Models to plan for: a shipped shape by its name, or any directory with a config.json.

Planning, simulation and benchmarks use them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ringserve.cp_core.cost.memory import WeightBytes, weight_bytes
from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.errors import ConfigError, ModelRefused
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_json, read_model_info
from ringserve.workers.protocol.ranks import ModelInfo

BFLOAT16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """Shape and weights of a model; contexts beyond `max_positions` are planned too, with a note."""

    name: str
    shape: ModelShape
    weights: WeightBytes
    max_positions: int


def shipped_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the sizes of the shipped models, by name."""
    content = json.loads(
        files("ringserve.services.offline.planning").joinpath("models.json").read_text(encoding="utf-8")
    )
    models: Mapping[str, Mapping[str, Any]] = content["models"]
    return models


def planned_model(name: str, device: str = "cuda") -> PlannedModel:
    """Return a shipped model, the model in a directory, or `builtin:tiny`. Raises ConfigError or ModelRefused.

    For a model in a directory, KV has the model's own dtype, or float32 for a float16 model if `device` is `cpu`.
    """
    if (sizes := shipped_models().get(name)) is not None:
        return _from_sizes(name, sizes)
    try:
        path = resolve_model_path(name)
    except ModelRefused as error:
        known = ", ".join(shipped_models())
        raise ConfigError(f"--model: {name!r} is unknown; allowed are {known}, or a model directory") from error
    info = read_model_info(path, device=device)
    is_tied = bool(read_json(path / "config.json").get("tie_word_embeddings", False))
    return PlannedModel(
        name=info.name,
        shape=info.shape,
        weights=weight_bytes(info.shape, has_tied_embedding=is_tied),
        max_positions=info.max_positions,
    )


def to_model_info(model: PlannedModel) -> ModelInfo:
    """Return the ModelInfo that a router's Planner takes. Fields that it does not read are left empty."""
    shape = model.shape
    return ModelInfo(
        name=model.name,
        model_type="",
        dtype="",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_positions=model.max_positions,
        num_parameters=0,
        element_bytes=shape.element_bytes,
        kv_dtype="",
        kv_element_bytes=shape.attention_bytes,
        eos_token_ids=(),
    )


def _from_sizes(name: str, sizes: Mapping[str, Any]) -> PlannedModel:
    shape_keys = ModelShape.__dataclass_fields__.keys() & sizes.keys()
    shape = ModelShape(element_bytes=BFLOAT16_BYTES, **{key: sizes[key] for key in shape_keys})
    weights = weight_bytes(shape, mlp_element_bytes=sizes.get("mlp_element_bytes"))
    return PlannedModel(name=name, shape=shape, weights=weights, max_positions=sizes["max_positions"])
