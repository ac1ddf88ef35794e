"""Tensor parallelism inside a rank's model: transformers' plan determines the cuts, a ring carries the sums.

transformers executes its plan only where the tensor parallel ranks are all of torch's default process tensor. Beside a
context parallel axis it refuses; with one axis of a device mesh it silently leaves every weight whole. So the plan is
the model's, and cutting and summing happen here. No default group is needed, and a broken tensor parallel ring ends
like any other broken ring.

Helix is the same over the ranks of a decode ring, which have all tokens of a step: attention and embedding stay whole,
and attention gives each rank its columns of the output projection's input.

T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter

from cp_core.errors import ModelRefused
from cp_core.layout.shards import even_share
from cp_core.transport.collectives import all_reduce, join_last_dim
from cp_core.transport.interface import RingTransport
from workers.model.hugging_face import PreTrainedModel


class TensorParallel:
    """Place of rank `rank` among the `size` ranks that share one model. `connect` precedes the first forward pass.

    With `shares_attention` the heads and the embedding are cut as well, without it (helix) everything else.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, shares_attention: bool = True) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self._shares_attention = shares_attention
        self._transport: RingTransport | None = None

    def connect(self, transport: RingTransport) -> None:
        """Use this ring of the tensor parallel ring from now on."""
        assert (transport.rank, transport.size) == (self.rank, self.size), "a place in another tensor parallel ring"
        self._transport = transport

    @property
    def transport(self) -> RingTransport:
        assert self._transport is not None, "the tensor parallel ring is not connected"
        return self._transport

    def share(self, total: int) -> tuple[int, int]:
        """Return [start, stop) of this rank in `total`."""
        return even_share(total, self.rank, self.size)

    def widths(self, total: int) -> tuple[int, ...]:
        """Return the size of each rank's share of `total`."""
        shares = (even_share(total, rank, self.size) for rank in range(self.size))
        return tuple(stop - start for start, stop in shares)

    def join(self, part: Tensor, total: int) -> Tensor:
        """Return every rank's columns [..., share of total] side by side: [..., total]. Raises Unavailable."""
        return part if self.size == 1 else join_last_dim(part, self.widths(total), self.transport)

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts. Raises Unavailable.

        While torch's compiler traces the model it leaves a mark: the graph is cut there (`workers/model/pieces.py`).
        """
        if torch.compiler.is_compiling():
            marked: Tensor = torch.ops.ringserve.total(part)
            return marked
        return all_reduce(part, self.transport)

    def cut(self, model: PreTrainedModel) -> None:
        """Reduce `model` to this rank's share, by the model's own plan. With one rank nothing changes.

        Shares have whole heads where `size` divides the KV heads; the caller checks that. Raises ModelRefused for a
        plan with an unknown style.
        """
        if self.size == 1:
            return
        plan = model.tp_plan or {}
        rules = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert isinstance(head, Linear) and isinstance(embedding, Embedding)
        are_tied = head.weight is embedding.weight
        num_cut = 0
        for name, module in model.named_modules():
            style = next((style for rule, style in rules if rule.fullmatch(name)), None)
            if style is None:
                continue
            cut = STYLES.get(self._style(model, name, style))
            if cut is None:
                raise ModelRefused(f"the tensor parallel plan of {model.config.model_type!r} cuts {name} by {style!r}")
            cut(self, module)
            num_cut += 1
        if not num_cut:
            raise ModelRefused(f"a {model.config.model_type!r} model has no tensor parallel plan; allowed is tp 1")
        if are_tied:
            self.tie(model)

    def tie(self, model: PreTrainedModel) -> None:
        """Let the head be the embedding where that is cut, and otherwise a view of this rank's rows of it."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert isinstance(head, Linear) and isinstance(embedding, Embedding)
        if head.weight.shape == embedding.weight.shape:
            head.weight = embedding.weight
        elif not self._shares_attention:
            start, stop = self.share(embedding.weight.shape[0])
            head.weight = Parameter(embedding.weight[start:stop], requires_grad=False)

    def _style(self, model: PreTrainedModel, name: str, style: str) -> str:
        """Return the style of a module: in helix the embedding and what comes before attention stay whole.

        The caller of a helix head joins its outputs: a greedy token needs none of the other ranks' logits.
        """
        if self._shares_attention:
            return style
        # Modules with a `layer_idx` call the attention hook.
        is_in_attention = hasattr(model.get_submodule(name.rpartition(".")[0]), "layer_idx")
        if style == "embedding_rowwise" or (style == "colwise" and is_in_attention):
            return WHOLE
        return "colwise" if style == "colwise_gather_output" else style


def _cut_columns(tensor: TensorParallel, module: Module) -> None:
    """Cut the output features; the input is whole: y_r = x W_r^T + b_r."""
    assert isinstance(module, Linear)
    start, stop = tensor.share(module.out_features)
    module.weight = _piece(module.weight[start:stop])
    if module.bias is not None:
        module.bias = _piece(module.bias[start:stop])
    module.out_features = stop - start


def _cut_columns_and_join(tensor: TensorParallel, module: Module) -> None:
    """Cut as `_cut_columns` does and join the ranks' outputs: y = [y_0, y_1, ...]."""
    assert isinstance(module, Linear)
    widths = tensor.widths(module.out_features)
    _cut_columns(tensor, module)
    module.register_forward_hook(lambda _module, _inputs, output: join_last_dim(output, widths, tensor.transport))


def _cut_rows(tensor: TensorParallel, module: Module) -> None:
    """Cut the input features, as the previous layer left them, and sum the outputs: y = sum_r x_r W_r^T + b."""
    assert isinstance(module, Linear)
    start, stop = tensor.share(module.in_features)
    module.weight = _piece(module.weight[:, start:stop])
    module.in_features = stop - start
    # Added once, to the sum. It stays a parameter, under another name, so that the model moves it to its device.
    module.register_parameter(WHOLE_BIAS, module.bias)
    module.register_parameter("bias", None)

    def summed(module: Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        total, bias = tensor.total(output), module._parameters[WHOLE_BIAS]
        return total if bias is None else total + bias

    module.register_forward_hook(summed)


def _cut_vocabulary(tensor: TensorParallel, module: Module) -> None:
    """Cut the rows of the embedding; one rank contributes a token's row, the other ranks contribute zeros."""
    assert isinstance(module, Embedding)
    start, stop = tensor.share(module.num_embeddings)
    module.weight = _piece(module.weight[start:stop])
    module.num_embeddings, module.padding_idx = stop - start, None

    def looked_up(input: Tensor) -> Tensor:
        outside = (input < start) | (input >= stop)
        rows = torch.nn.functional.embedding((input - start).masked_fill(outside, 0), module.weight)
        return tensor.total(rows.masked_fill(outside.unsqueeze(-1), 0.0))

    module.forward = looked_up  # type: ignore[method-assign]


def _leave_whole(tensor: TensorParallel, module: Module) -> None:
    """Leave a module whole: norms of single heads, as every rank needs them, and in helix all that makes heads."""


def _piece(part: Tensor) -> Parameter:
    """Copy a part, so that the rest can be freed."""
    return Parameter(part.detach().clone(), requires_grad=False)


WHOLE = "replicated_with_grad_allreduce"
WHOLE_BIAS = "whole_bias"
"""Name of the bias of a layer whose input features are cut."""
STYLES: dict[str, Callable[[TensorParallel, Module], None]] = {
    "colwise": _cut_columns,
    "colwise_gather_output": _cut_columns_and_join,
    "rowwise": _cut_rows,
    "embedding_rowwise": _cut_vocabulary,
    WHOLE: _leave_whole,
}
