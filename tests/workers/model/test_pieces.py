"""Pieces of a forward pass: traced whole, cut at attention, with the bits of the stock modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ringserve.workers.model.loading import load_model
from ringserve.workers.model.pieces import Attention, Item, Piece, trace
from tests.workers.models import SHAPE


class Mixing:
    """Step whose attention depends on all its arguments, and on no other row."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        group = q.shape[1] // k.shape[1]
        return q * scale + (k - v).repeat_interleave(group, dim=1) * (layer + 1)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_pieces_compute_what_the_stock_modules_do_for_any_number_of_rows(
    kind: str, model_paths: Mapping[str, Path]
) -> None:
    model = load_model(model_paths[kind], "float32", "cpu")
    pieces = trace(model.body, torch.device("cpu"), "eager")
    attentions = [stage for stage in pieces.stages if isinstance(stage, Attention)]
    assert [each.layer for each in attentions] == [0, 1], "one graph without a break"
    for rows in (1, 5, 33):
        ids, positions = torch.arange(rows) * 7 % 300, torch.arange(rows).flip(0) * 11
        stock, cut = Mixing(), Mixing()
        with torch.inference_mode():
            expected = model.hidden_states(ids, positions, stock)
            assert torch.equal(pieces.run(ids, positions, cut.attend, model.total), expected)
        assert cut.layers == stock.layers == [0, 1]


def test_layers_of_one_shape_share_their_code_and_the_weights_are_the_models(edited: Path) -> None:
    model = load_model(edited, "float32", "cpu")
    pieces = trace(model.body, torch.device("cpu"), "aot_eager")
    computed = [stage.compute for stage in pieces.stages if isinstance(stage, Piece)]
    assert len(computed) == 4
    assert len(set(computed)) == 3, "what comes before the first attention, between two, and after the last"
    assert all(isinstance(stage, Piece | Item | Attention) for stage in pieces.stages)
    held = {each.data_ptr() for each in pieces._weights.values() if isinstance(each, Tensor)}
    assert {each.data_ptr() for each in model.body.parameters()} <= held
    ids, positions, steps = torch.tensor([3, 1, 2]), torch.tensor([0, 5, 9]), (Mixing(), Mixing())
    with torch.inference_mode():
        expected = model.hidden_states(ids, positions, steps[0])
        torch.testing.assert_close(pieces.run(ids, positions, steps[1].attend, model.total), expected)


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """Write a model of three layers."""
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 3})).save_pretrained(tmp_path)
    return tmp_path
