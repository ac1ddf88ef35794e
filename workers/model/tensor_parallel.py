"""Tensor parallelism inside a rank's model: transformers' plan determines the cuts, a ring carries the sums.

transformers runs its plan only if the tensor-parallel ranks are torch's whole default process group. Beside a
context-parallel axis it refuses; with one axis of a device mesh it silently leaves every weight whole. So this module
reads the model's plan, but cuts weights and sums results itself. It needs no default process group, and a broken
tensor-parallel ring ends like any other ring.

If there are more processes than KV heads, several processes share each KV head (`replicas`). This is only for
comparisons with context parallelism (arXiv 2411.01783, 4.2.2). Each process has an equal part of the query heads, and
the KV head that these use.

Sequence parallelism of tensor-parallel ranks (SP-TP, CSPS, arXiv 2409.15104), also for comparisons, splits each sum
into a reduce-scatter and a gather: a rank sums an N-th of the rows, applies norms and residuals to them, and gathers
all rows before attention and before the MLP. Together these send as many bytes as the sum.

Helix applies tensor parallelism over the ranks of a decode ring, each of which has all tokens of a step: attention and
embedding stay whole, and attention gives each rank its input columns of the output projection.

A rank's model is cut when it is loaded; its forward passes run the sums.

Shapes: T tokens (rows), C features of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter

from ringserve.cp_core.errors import ModelRefused
from ringserve.cp_core.layout.shards import even_share
from ringserve.cp_core.transport.collectives import all_reduce, gather_rows, join_last_dim, reduce_scatter_rows
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.model.hugging_face import PreTrainedModel


class TensorParallel:
    """Rank `rank` of the `size` ranks that share one model. Call `connect` before the first forward pass.

    With `shares_attention`, heads and embedding are cut too; without it (helix), only the other weights are. With
    `replicas` above 1, the key and value matrices, with `kv_features` outputs each, are cut in fewer parts. With
    `scatters_rows`, a rank has an N-th of the rows between attention and MLP.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        shares_attention: bool = True,
        replicas: int = 1,
        kv_features: int = 0,
        scatters_rows: bool = False,
    ) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self._shares_attention = shares_attention
        self._replicas = replicas
        self._kv_features = kv_features
        self.scatters_rows = scatters_rows and size > 1
        self._num_rows = 0  # of the present forward pass, which begins with the embedding
        self._transport: RingTransport | None = None

    def connect(self, transport: RingTransport) -> None:
        """Attach the transport of this tensor-parallel group."""
        assert (transport.rank, transport.size) == (self.rank, self.size), "transport of another tensor-parallel group"
        self._transport = transport

    @property
    def transport(self) -> RingTransport:
        assert self._transport is not None, "the tensor-parallel group is not connected"
        return self._transport

    def share(self, total: int) -> tuple[int, int]:
        """Return this rank's [start, stop) of `total`."""
        return even_share(total, self.rank, self.size)

    def share_of(self, total: int, own: int) -> tuple[int, int]:
        """Return this rank's [start, stop) of `total` in parts of size `own`. Several ranks may share a part."""
        start, stop = self.share(total)
        if stop - start == own:
            return start, stop
        start = self.rank // self._replicas * own
        return start, start + own

    def widths(self, total: int) -> tuple[int, ...]:
        """Return the size of each rank's share of `total`."""
        shares = (even_share(total, rank, self.size) for rank in range(self.size))
        return tuple(stop - start for start, stop in shares)

    def begin_rows(self, num_rows: int) -> None:
        """Begin a forward pass over `num_rows` rows."""
        self._num_rows = num_rows

    def all_rows(self, own: Tensor) -> Tensor:
        """Gather all rows [..., T, C] if each rank has an N-th of them, else return `own`. Raises Unavailable."""
        return gather_rows(own, self._num_rows, self.transport) if self.scatters_rows else own

    def join(self, part: Tensor, total: int) -> Tensor:
        """Join every rank's columns [..., share of total] to [..., total]. Raises Unavailable."""
        return part if self.size == 1 else join_last_dim(part, self.widths(total), self.transport)

    def sum_parts(self, part: Tensor) -> Tensor:
        """Return the sum [..., T, C] of all ranks' parts, or this rank's rows of it. Raises Unavailable.

        While torch's compiler traces the model, this leaves a mark where the graph is cut (`workers/model/pieces.py`).
        """
        if torch.compiler.is_compiling():
            marked: Tensor = torch.ops.ringserve.total(part)
            return marked
        reduce = reduce_scatter_rows if self.scatters_rows else all_reduce
        return reduce(part, self.transport)

    def cut(self, model: PreTrainedModel) -> None:
        """Cut `model` to this rank's share by the model's own plan. A single rank changes nothing.

        The caller checks that `size` divides the KV heads, so shares have whole heads. Raises ModelRefused if the plan
        has an unknown style.
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
                raise ModelRefused(
                    f"the tensor-parallel plan of {model.config.model_type!r} cuts {name} by {style!r}, which is not "
                    "supported"
                )
            if self._replicas > 1 and style == "colwise" and self._is_kv(model, name, module):
                _cut_columns(self, module, self._kv_features * self._replicas // self.size)
            else:
                cut(self, module)
            if self.scatters_rows and style == "rowwise":
                block = model.get_submodule(name.rpartition(".")[0])
                block.register_forward_pre_hook(self._with_all_rows, with_kwargs=True)
            num_cut += 1
        if not num_cut:
            raise ModelRefused(f"a {model.config.model_type!r} model has no tensor-parallel plan; allowed is tp 1")
        if are_tied:
            self.tie(model)

    @staticmethod
    def can_cut(model: PreTrainedModel) -> bool:
        """Return True if `cut` knows every style in the model's plan."""
        return bool(model.tp_plan) and set(model.tp_plan.values()) <= STYLES.keys()

    def tie(self, model: PreTrainedModel) -> None:
        """Tie the output head to the embedding if both have the same shape.

        In helix, where the embedding is whole and the head is cut, tie it to a view of this rank's embedding rows.
        """
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert isinstance(head, Linear) and isinstance(embedding, Embedding)
        if head.weight.shape == embedding.weight.shape:
            head.weight = embedding.weight
        elif not self._shares_attention:
            start, stop = self.share(embedding.weight.shape[0])
            head.weight = Parameter(embedding.weight[start:stop], requires_grad=False)

    def _with_all_rows(self, _block: Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Gather all rows of the input of attention or MLP."""
        if inputs:
            return (self.all_rows(inputs[0]), *inputs[1:]), named
        return inputs, named | {HIDDEN_STATES: self.all_rows(named[HIDDEN_STATES])}

    def _is_kv(self, model: PreTrainedModel, name: str, module: Module) -> bool:
        """Return whether a module cut by columns makes keys or values.

        Its `kv_features` outputs tell: queries have more, since there are fewer KV heads than query heads.
        """
        return _is_in_attention(model, name) and getattr(module, "out_features", 0) == self._kv_features

    def _style(self, model: PreTrainedModel, name: str, style: str) -> str:
        """Return a module's style. In helix, the embedding and the modules before attention stay whole.

        In helix, the caller of the head joins its outputs, because a greedy token needs no other rank's logits.
        """
        if self._shares_attention:
            return style
        if style == "embedding_rowwise" or (style == "colwise" and _is_in_attention(model, name)):
            return WHOLE
        return "colwise" if style == "colwise_gather_output" else style


def _is_in_attention(model: PreTrainedModel, name: str) -> bool:
    # Modules with a `layer_idx` call the attention hook.
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "layer_idx")


def _cut_columns(group: TensorParallel, module: Module, own: int | None = None) -> None:
    """Cut the output features, `own` per rank or evenly. The input is whole: y_r = x W_r^T + b_r."""
    assert isinstance(module, Linear)
    total = module.out_features
    start, stop = group.share(total) if own is None else group.share_of(total, own)
    module.weight = _piece(module.weight[start:stop])
    if module.bias is not None:
        module.bias = _piece(module.bias[start:stop])
    module.out_features = stop - start


def _cut_columns_and_join(group: TensorParallel, module: Module) -> None:
    """Cut like `_cut_columns`, and join the ranks' outputs: y = [y_0, y_1, ...]."""
    assert isinstance(module, Linear)
    widths = group.widths(module.out_features)
    _cut_columns(group, module)
    module.register_forward_hook(lambda _module, _inputs, output: join_last_dim(output, widths, group.transport))


def _cut_rows(group: TensorParallel, module: Module) -> None:
    """Cut the input features like the previous layer's output, and sum the outputs: y = sum_r x_r W_r^T + b."""
    assert isinstance(module, Linear)
    start, stop = group.share(module.in_features)
    module.weight = _piece(module.weight[:, start:stop])
    module.in_features = stop - start
    # The bias is added once, to the sum. It stays a parameter, renamed, so that the model moves it to its device.
    module.register_parameter(WHOLE_BIAS, module.bias)
    module.register_parameter("bias", None)

    def summed(module: Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        total, bias = group.sum_parts(output), module._parameters[WHOLE_BIAS]
        return total if bias is None else total + bias

    module.register_forward_hook(summed)


def _cut_vocabulary(group: TensorParallel, module: Module) -> None:
    """Cut the embedding's rows. One rank contributes a token's row, the other ranks contribute zeros."""
    assert isinstance(module, Embedding)
    start, stop = group.share(module.num_embeddings)
    module.weight = _piece(module.weight[start:stop])
    module.num_embeddings, module.padding_idx = stop - start, None

    def looked_up(input: Tensor) -> Tensor:
        group.begin_rows(input.shape[-1])
        outside = (input < start) | (input >= stop)
        rows = torch.nn.functional.embedding((input - start).masked_fill(outside, 0), module.weight)
        return group.sum_parts(rows.masked_fill(outside.unsqueeze(-1), 0.0))

    module.forward = looked_up  # type: ignore[method-assign]


def _leave_whole(group: TensorParallel, module: Module) -> None:
    """Leave a module whole: norms of single heads, which every rank needs, and in helix all before attention."""


def _piece(part: Tensor) -> Parameter:
    """Copy a part, so that the rest can be freed."""
    return Parameter(part.detach().clone(), requires_grad=False)


HIDDEN_STATES = "hidden_states"
WHOLE = "replicated_with_grad_allreduce"
WHOLE_BIAS = "whole_bias"
"""Name of the bias in a layer with cut input features."""
STYLES: dict[str, Callable[[TensorParallel, Module], None]] = {
    "colwise": _cut_columns,
    "colwise_gather_output": _cut_columns_and_join,
    "rowwise": _cut_rows,
    "embedding_rowwise": _cut_vocabulary,
    WHOLE: _leave_whole,
}
