"""Forward pass of a model cut at its attention: the code between two attentions is one compiled piece.

torch's compiler traces the stock modules once, for any number of rows. Attention and sums over ranks are opaque
operators in the trace, and the graph is cut there. A piece has tensors of fixed shapes for a given number of rows,
reads nothing on the host, and sends nothing, so a device can record it (`workers/decode/graphs.py`). Layers of one
shape share one compiled piece.

Shapes: T rows, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module
from torch.nn import Module

from ringserve.workers.model.builtin import cache_directory

# Rows of the traced call: any number but 0 and 1, which the compiler would take for constants.
TRACED_ROWS = 16
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

# Backend that leaves the pieces as they are traced.
EAGER = "eager"

Call = Callable[..., Any]
Total = Callable[[Tensor], Tensor]


@torch.library.custom_op(
    "ringserve::attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int layer, float scale, int columns) -> Tensor",
)
def _attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, columns: int) -> Tensor:
    raise AssertionError("the operator marks where a graph is cut; it is never computed")


@_attend.register_fake
def _attended(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, columns: int) -> Tensor:
    return q.new_empty(q.shape[0], columns) if columns else torch.empty_like(q)


@torch.library.custom_op("ringserve::total", mutates_args=(), schema="(Tensor part) -> Tensor")
def _total(part: Tensor) -> Tensor:
    raise AssertionError("the operator marks where a graph is cut; it is never computed")


@_total.register_fake
def _totalled(part: Tensor) -> Tensor:
    return torch.empty_like(part)


MARKS = (
    torch.ops.ringserve.attend,
    torch.ops.ringserve.attend.default,
    torch.ops.ringserve.total,
    torch.ops.ringserve.total.default,
)


class Attend(Protocol):
    """Attention of one layer: `AttentionStep.attend`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend q[T, H, D] over earlier tokens and k, v[T, K, D] -> [T, H, D]."""
        ...


class MarkedStep:
    """Step of the traced call: it leaves a mark in the graph where attention is.

    In helix attention gives each row `columns` numbers; otherwise it gives all heads, and `columns` is 0.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the mark's tensor [T, H, D], or [T, columns]."""
        marked: Tensor = torch.ops.ringserve.attend(q, k, v, layer, scale, self._columns)
        return marked


@dataclass(frozen=True, slots=True)
class Piece:
    """Computation between two attentions. Values are known by the names of their nodes in the graph."""

    compute: Call
    reads: tuple[str, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """Item of the tuple that a piece with several results returns."""

    reads: str
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of a layer, between two pieces. `reads` are its q, k and v."""

    reads: tuple[str, ...]
    layer: int
    scale: float
    name: str


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum over the ranks that share the weights, between two pieces."""

    reads: str
    name: str


Stage = Piece | Item | Attention | Sum


class Pieces:
    """Stages of a forward pass in their order, and the weights that they read."""

    def __init__(self, stages: Sequence[Stage], weights: dict[str, Any], inputs: Sequence[str], output: str) -> None:
        """Order the stages; `inputs` names token ids, positions, and the number of rows if the graph has it."""
        self.stages = tuple(stages)
        self._weights = weights
        self._inputs = tuple(inputs)
        self._output = output
        last_read = {name: number for number, stage in enumerate(stages) for name in _names(stage)}
        self._frees: list[list[str]] = [[] for _ in stages]
        for name, number in last_read.items():
            if name != output and name not in weights:
                self._frees[number].append(name)

    def run(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, total: Total, call: Call | None = None
    ) -> Tensor:
        """Return hidden states [T, hidden_size] of token_ids and positions int64[T].

        `total` sums over ranks. `call` computes a piece, given its function and arguments; if it is None, the function
        is called directly.
        """
        ids, places, *sizes = self._inputs
        values: dict[str, Any] = {**self._weights, ids: token_ids, places: positions}
        values |= dict.fromkeys(sizes, token_ids.shape[0])
        for stage, frees in zip(self.stages, self._frees, strict=True):
            if isinstance(stage, Piece):
                arguments = [values[name] for name in stage.reads]
                out = stage.compute(*arguments) if call is None else call(stage.compute, arguments)
            elif isinstance(stage, Item):
                out = values[stage.reads][stage.index]
            elif isinstance(stage, Sum):
                out = total(values[stage.reads])
            else:
                q, k, v = (values[name] for name in stage.reads)
                out = attend(stage.layer, q, k, v, stage.scale)
            values[stage.name] = out
            for name in frees:
                del values[name]
        states: Tensor = values[self._output]
        return states


def _names(stage: Stage) -> tuple[str, ...]:
    return (stage.reads,) if isinstance(stage, Item | Sum) else stage.reads


class _Traced(Exception):
    """End of the traced call: its graph is known, and nothing is to be computed."""


def trace(body: Module, device: torch.device, backend: str, columns: int = 0) -> Pieces:
    """Trace the layers of a model on its device and cut them into pieces, which `backend` compiles.

    The weights stay in the model's memory. `columns` is the number of attention columns in helix. Raises RuntimeError
    for what cannot be traced whole or compiled.
    """
    # Compiled code outlives the process, beside the models that it was made for.
    os.environ.setdefault(CACHE_VARIABLE, str(cache_directory(os.environ) / "inductor"))
    dynamo: Any = torch._dynamo
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Call:
        def run(*values: Any) -> None:
            found.append((graph, values))
            raise _Traced

        return run

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        states = body(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            ring_step=marked,
        ).last_hidden_state[0]
        assert isinstance(states, Tensor)
        return states

    marked = MarkedStep(columns)
    token_ids, positions = (torch.zeros(TRACED_ROWS, dtype=torch.int64, device=device) for _ in range(2))
    for each in (token_ids, positions):
        dynamo.mark_dynamic(each, 0)
    # Tracing another model in this process must not count as a recompilation, nor make variables of the numbers that
    # differ: they are constants of each.
    alone = dynamo.config.patch(recompile_limit=1 << 20, automatic_dynamic_shapes=False)
    with torch.inference_mode(), alone, suppress(_Traced):
        torch.compile(forward, backend=keep, fullgraph=True)(token_ids, positions)
    graph, values = found[0]
    with torch.inference_mode():
        pieces = _cut(graph, values, (token_ids, positions), backend)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return q.new_empty(q.shape[0], columns) if columns else torch.empty_like(q)

        # All code is compiled now, even the separate code for a single row. The results are not used.
        for rows in (TRACED_ROWS, 1):
            pieces.run(token_ids[:rows], positions[:rows], attend, total=torch.empty_like)
    return pieces


def _cut(graph: fx.GraphModule, values: Sequence[Any], inputs: tuple[Tensor, Tensor], backend: str) -> Pieces:
    """Cut a traced graph before and after each mark; `values` are the arguments that it was called with."""
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, values, strict=True))
    names = [next(name for name, value in given.items() if value is each) for each in inputs]
    # A number among the arguments is the number of rows: every other number is a constant of the graph.
    names += [name for name, value in given.items() if isinstance(value, int)]
    weights = {name: value for name, value in given.items() if name not in names}
    for weight in weights.values():
        torch._dynamo.mark_static(weight)
    parts = _partitions(graph.graph)
    whole = split_module(graph, graph, lambda node: parts[node], keep_original_order=True)
    stages: list[Stage] = []
    compiled: dict[str, Call] = {}
    output = ""
    for node in whole.graph.nodes:
        match node.op:
            case "placeholder":
                continue
            case "get_attr":
                weights[node.name] = operator.attrgetter(node.target)(whole)
            case "call_function":
                assert node.target is operator.getitem, f"a stage of {node.target}"
                stages.append(Item(node.args[0].name, node.args[1], node.name))
            case "call_module":
                part = whole.get_submodule(node.target)
                assert isinstance(part, fx.GraphModule)
                reads = tuple(each.name for each in node.args)
                if (mark := _mark(part.graph)) is not None:
                    stages.append(_marked_stage(part.graph, mark, reads, node.name))
                    continue
                key = _structure(part)
                if key not in compiled and backend == EAGER:
                    compiled[key] = part
                elif key not in compiled:
                    compiled[key] = torch.compile(part, backend=backend, fullgraph=True, dynamic=True)
                stages.append(Piece(compiled[key], reads, node.name))
            case "output":
                output = node.args[0][_place_of_states(graph.graph)].name
    return Pieces(stages, weights, names, output)


def _place_of_states(graph: fx.Graph) -> int:
    """Return the place of the only tensor among a traced graph's results: numbers of rows may be beside it."""
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    assert isinstance(results, tuple | list)
    (place,) = (
        place
        for place, each in enumerate(results)
        if isinstance(each, fx.Node) and isinstance(each.meta.get("example_value"), Tensor)
    )
    return place


def _partitions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the part of each node: even numbers are pieces, odd ones marks."""
    parts, part = {}, 0
    for node in graph.nodes:
        is_mark = _is_mark(node)
        parts[node] = part + is_mark
        part += 2 * is_mark
    return parts


def _is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in MARKS


def _mark(graph: fx.Graph) -> fx.Node | None:
    return next((node for node in graph.nodes if _is_mark(node)), None)


def _marked_stage(graph: fx.Graph, mark: fx.Node, reads: tuple[str, ...], name: str) -> Attention | Sum:
    """Return the stage that a mark stands for; `reads` are the names of the arguments of its part."""
    if len(mark.args) == 1:
        return Sum(reads[0], name)
    arguments = dict(zip((node for node in graph.nodes if node.op == "placeholder"), reads, strict=True))
    *tensors, layer, scale, _ = mark.args
    assert isinstance(layer, int)
    assert isinstance(scale, float)
    return Attention(tuple(arguments[each] for each in tensors), layer, scale, name)


def _structure(part: fx.GraphModule) -> str:
    """Return the key that two parts share if they compute the same from other arguments."""
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in part.graph.nodes:
        numbers[node] = len(numbers)
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        # Constants of a part are not arguments: parts with any are compiled one by one.
        target = f"{id(part)} {node.target}" if node.op in ("get_attr", "call_module") else str(node.target)
        lines.append(f"{node.op} {'' if node.op in ('placeholder', 'output') else target} {arguments}")
    return "\n".join(lines)
