"""Loader of Hugging Face model directories with ring attention. Local files only: nothing is ever downloaded.

A rank loads its model, and perhaps a draft model, when it starts. Its steps run the `LoadedModel`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from ringserve.cp_core.errors import ModelRefused
from ringserve.cp_core.ring.helix import HelixColumns
from ringserve.workers.model.hugging_face import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    no_init_weights,
)
from ringserve.workers.model.info import read_model_info, tensor_share
from ringserve.workers.model.layers import (
    ATTENTION_LAYERS,
    MLP_LAYERS,
    Columns,
    FusedLayer,
    FusedNorm,
    GatedMlp,
    PackedLinear,
    join_layers,
    pack,
    packed_dtypes,
    quantize_mlps,
    rotating_forward,
)
from ringserve.workers.model.shared import shared_bytes
from ringserve.workers.model.support import SLIDING, WINDOWS
from ringserve.workers.model.tensor_parallel import TensorParallel
from ringserve.workers.model.tokenizer import load_tokenizer, tokenizer_json
from ringserve.workers.model.weights import Weights, is_mapped, release_pages, whole_shapes
from ringserve.workers.protocol.ranks import FP8_MLPS, NO_QUANTIZATION, ModelInfo
from ringserve.workers.sampling.grammar import Grammars

if TYPE_CHECKING:
    from ringserve.workers.model.pieces import Pieces

logger = logging.getLogger(__name__)

IMPLEMENTATION = "ringserve"


class AttentionStep(Protocol):
    """Forward pass with its layout, cache and ring, passed to the model as keyword `ring_step`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k and v[T,K,D], attend q[T,H,D] over all earlier tokens and its own -> [T,H,D]."""
        ...


def register_attention() -> None:
    """Make "ringserve" an attention implementation of transformers; calling it again changes nothing.

    No mask function is registered with it: without one transformers builds no mask and does not examine positions.
    """
    AttentionInterface.register(IMPLEMENTATION, attend_in_ring)


def attend_in_ring(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ring_step: AttentionStep,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend rotated query[1,H,T,D] to key and value[1,K,T,D] -> (out[1,T,H,D], None), as transformers calls it.

    The step stores and sends keys and values in their dtype, and merges partial results in fp32. On a CPU float16 is
    widened first. Raises ModelRefused if the layer wants another attention than causal softmax over all earlier tokens.
    """
    if unserved := [name for name in UNSERVED_ATTENTION if others.get(name) is not None]:
        raise ModelRefused(f"attention with {unserved[0]} cannot be served")
    _check_layer(module, others.get("sliding_window"), others.get("s_aux"))
    assert attention_mask is None, "the step's layout determines attention; no mask is ever built"
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    if query.device.type == "cpu" and query.dtype == torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    out = ring_step.attend(layer, q, k, v, scaling)
    return out.to(query.dtype).unsqueeze(0), None


UNSERVED_ATTENTION = ("softcap", "position_bias")
"""Keywords by which layers of transformers ask for soft caps and position biases."""


def _check_layer(module: Any, window: int | None, sinks: Tensor | None) -> None:
    """Raise ModelRefused if a layer asks for another window or other sinks than the steps serve it with."""
    served, max_positions, has_sinks = module.ring_attention
    if served != (window if window and window < max_positions else 0):
        raise ModelRefused(f"layer {module.layer_idx} has a window of {window} tokens, and config.json says {served}")
    if (sinks is not None) != has_sinks:
        raise ModelRefused(f"layer {module.layer_idx} has attention sinks of an unknown kind")


# transformers patches its own classes while it builds a model; two threads at once would leave a patch behind.
LOADING = threading.Lock()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model in eval mode on its device. `info` is the shape of the whole model, `share` of the part that is here.

    With tensor parallelism `hidden_states` and `logits` are collective over `tensor`, and their results are whole. With
    helix they are collective over the whole ring, `helix`, whose ranks compute the same rows. `pieces` are the compiled
    layers, if they are compiled. By layer, `scales` are the factors of attention's scores, `windows` the sliding
    windows (0: none) and `attention` the modules. `path` is the directory, and
    `files` says which files were in it before they were read.
    """

    model: PreTrainedModel
    body: Module
    head: Module
    info: ModelInfo
    share: ModelInfo
    tensor: TensorParallel
    helix: TensorParallel
    grammars: Grammars
    scales: tuple[float, ...]
    windows: tuple[int, ...]
    attention: tuple[Module, ...]
    path: Path
    files: str = ""
    pieces: Pieces | None = None

    @property
    def is_helix(self) -> bool:
        """True if the weights are cut over the ranks of the ring."""
        return self.helix.size > 1

    @property
    def samples(self) -> bool:
        """True unless another process that computes the same rows samples their tokens."""
        return self.tensor.rank == 0 and self.helix.rank == 0

    def cut_over_ring(self, rank: int, num_ranks: int) -> LoadedModel:
        """Reduce the model to a rank's share in helix. Nothing changes in a ring of one. Raises ModelRefused."""
        if num_ranks > 1 and self.info.has_sinks:
            raise ModelRefused("decode.variant: helix is not allowed for a model with attention sinks")
        helix = TensorParallel(rank, num_ranks, shares_attention=False)
        helix.cut(self.model)
        return replace(self, helix=helix)

    def columns(self, device: torch.device) -> HelixColumns | None:
        """Return the columns of attention's outputs that this rank has; None if it has all."""
        if not self.is_helix:
            return None
        return HelixColumns(self.share.num_heads, self.share.head_dim, self.helix.rank, self.helix.size, device)

    @property
    def sinks(self) -> tuple[Tensor | None, ...]:
        """Logits[H] of attention sinks, by layer."""
        return tuple(getattr(each, "sinks", None) for each in self.attention)

    @property
    def can_be_cut(self) -> bool:
        """True if the family's weights can be cut and are not packed or joined yet."""
        is_packed = any(isinstance(module, PackedLinear | Columns) for module in self.body.modules())
        return not is_packed and not self.info.has_sinks and TensorParallel.can_cut(self.model)

    @property
    def _key(self) -> str:
        """Name of the weights here: their files, and the share of them. Empty for drawn weights."""
        shares = [(each.rank, each.size) for each in (self.tensor, self.helix)]
        return f"{self.files} {self.info.dtype} {shares}" if self.files else ""

    def pack_weights(self, *, with_head: bool, quantization: str = NO_QUANTIZATION, is_shared: bool = False) -> None:
        """Bring the weights of all layers into the form that kernels read fastest. Idempotent.

        Projections with the same input become one layer. On a CPU layers are packed; MLPs are not joined there, but run
        in two kernel calls that also apply the activation, and RMS norms and rotary positions take one call each. If
        the head's weight is the embedding too, its packed copy takes extra memory. With `is_shared`, all ranks of a
        machine with the same weights share one copy of the embedding and of layers packed for this package's kernels;
        the weights must be as they were read. On a GPU, `quantization` "fp8" turns the MLPs' layers into layers of
        8-bit floats.
        """
        is_on_cpu = self.model.device.type == "cpu"
        # Weights that are not packed stay mapped from their files: a joined copy would take memory.
        if not is_on_cpu or self.body.dtype in packed_dtypes():
            join_layers(self.body, ATTENTION_LAYERS)
        if not is_on_cpu:
            join_layers(self.body, MLP_LAYERS)
        if quantization == FP8_MLPS:
            quantize_mlps(self.body)
        key = self._key if is_shared else ""
        pack(self.body, key)
        if with_head:
            pack(self.head, key)
        if key:
            self._share_embedding(key)
        for module in self.body.modules():
            if (forward := GatedMlp.try_of(module) or FusedNorm.try_of(module)) is not None:
                module.forward = forward
        for module in self.attention if is_on_cpu else ():
            if (rotating := rotating_forward(module)) is not None:
                module.forward = rotating
        for module in list(self.body.modules()) if is_on_cpu else ():
            is_fused = isinstance(getattr(module, "forward", None), FusedLayer)
            if not is_fused and (layer := FusedLayer.try_of(module)) is not None:
                module.forward = layer
        if is_on_cpu:
            release_pages(self.path)

    def _share_embedding(self, key: str) -> None:
        """Move the embedding to memory that processes with the same `key` share, unless it is mapped from its file."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        if weight.device.type != "cpu" or is_mapped(weight):
            return
        own = weight.detach().contiguous().view(torch.uint8).flatten()
        name = f"{key}, embedding {tuple(weight.shape)} {weight.dtype}"
        if (shared := shared_bytes(name, own.numel(), lambda memory: memory.copy_(own))) is not None:
            weight.data = shared.view(weight.dtype).view(weight.shape)

    def compiled(self, backend: str) -> LoadedModel:
        """Return the model with its layers compiled by a backend of torch; do not cut or pack its weights afterwards.

        If the compiler fails, the layers stay as they are, and the reason is logged.
        """
        if self.pieces is not None:
            return self
        # The compiler takes seconds to load: only a rank that needs it does so.
        compiler: Any = import_module("ringserve.workers.model.pieces")
        try:
            columns = self.columns(self.model.device)
            pieces = compiler.trace(self.body, self.model.device, backend, len(columns) if columns else 0)
        except RuntimeError as error:
            logger.warning("the layers are not compiled: %s", error)
            return self
        return replace(self, pieces=pieces)

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of parts over the ranks that share the weights. Raises Unavailable."""
        return (self.helix if self.is_helix else self.tensor).sum_parts(part)

    @property
    def head_start(self) -> int:
        """Index, in the model, of the first KV head that is here."""
        return self.tensor.rank * self.info.num_kv_heads // self.tensor.size

    def hidden_states(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Run all layers over packed tokens: token_ids and positions int64[T], T >= 1 -> [T, hidden_size], normed."""
        if self.pieces is not None:
            return self.pieces.run(token_ids, positions, step.attend, self.total)
        states = self.body(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, ring_step=step
        ).last_hidden_state
        assert isinstance(states, Tensor)
        return self.tensor.all_rows(states[0]) if self.tensor.scatters_rows else states[0]

    def attend_without_tokens(self, step: AttentionStep) -> Tensor:
        """Join every layer's ring attention without own tokens, which transformers cannot run -> [0, hidden_size].

        Other ranks' queries are attended here, with each layer's scale.
        """
        share, embeddings = self.share, self.model.get_input_embeddings().weight
        assert isinstance(embeddings, Tensor)
        q = embeddings.new_empty(0, share.num_heads, share.head_dim, dtype=DTYPES[share.kv_dtype])
        kv = q.new_empty(0, share.num_kv_heads, share.head_dim)
        for layer, scale in enumerate(self.scales):
            step.attend(layer, q, kv, kv, scale)
        return embeddings.new_empty(0, share.hidden_size)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [T, hidden_size] -> logits [T, vocab_size]."""
        logits = self._own_logits(hidden_states)
        return self.helix.join(logits, self.info.vocab_size) if self.is_helix else logits

    def _own_logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [T, hidden_size] to the logits of this part of the head, scaled as the family does."""
        logits: Tensor = self.head(hidden_states)
        config = self.model.config
        if factor := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * factor
        if factor := getattr(config, "logits_scaling", None):  # Granite divides, HyperCLOVA X multiplies
            logits = logits * factor if self.info.model_type == "hyperclovax" else logits / factor
        return logits

    def largest_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit [T] of each row and its token [T], the first of equals, without joining logits."""
        values, tokens = self._own_logits(hidden_states).max(dim=-1)
        if not self.is_helix:
            return values, tokens
        first, _ = self.helix.share(self.info.vocab_size)
        # Both are exact in fp64.
        own = torch.stack([values.double(), (tokens + first).double()])
        found = own.new_empty(self.helix.size, *own.shape)
        self.helix.transport.gather_all(own, list(found)).wait()
        largest, ranks = found[:, 0].max(dim=0)
        return largest, found[:, 1].gather(0, ranks[None])[0].long()


def grammars_of(path: Path, info: ModelInfo) -> Grammars:
    """Return the grammars of answers of the model in `path`."""
    return Grammars(lambda: tokenizer_json(load_tokenizer(path)), info.vocab_size, info.eos_token_ids)


def load_model(
    path: Path,
    dtype: str,
    device: str,
    name: str | None = None,
    *,
    tp_rank: int = 0,
    tp: int = 1,
    replicates_kv: bool = False,
    scatters_rows: bool = False,
    helix_rank: int = 0,
    helix: int = 1,
) -> LoadedModel:
    """Load the model in `path` in `dtype` onto `device`: the share of rank `tp_rank` of `tp`, or of a helix ring.

    With `replicates_kv` a KV head may be on several ranks, as `tensor_share` says; `scatters_rows` is TensorParallel's.

    Neither the device nor the host ever holds more than the share. Raises ModelRefused for anything missing,
    unreadable, unsupported or incomplete, ConfigError for a `tp` that does not divide the KV heads.
    """
    info = read_model_info(path, dtype, name, device)
    files = name_files(path)  # not later: other files may replace them meanwhile
    share = tensor_share(info, tp, replicates_kv=replicates_kv)
    model = _without_weights(path, info)
    with Weights.opened(path, model) as weights:
        weights.untie()
        whole = whole_shapes(model)
        replicas, kv_features = max(1, tp // info.num_kv_heads), info.num_kv_heads * info.head_dim
        tensor = TensorParallel(tp_rank, tp, replicas=replicas, kv_features=kv_features, scatters_rows=scatters_rows)
        tensor.cut(model)
        loaded = _loaded(path, model, info, share, tensor)
        if helix > 1:
            loaded = loaded.cut_over_ring(helix_rank, helix)
        weights.read_share(whole, loaded.helix if loaded.is_helix else tensor)
    model.to(device).eval().requires_grad_(False)
    return replace(loaded, files=files)


def name_files(path: Path) -> str:
    """Return a name for the files of a directory as they are now; no other files on this machine have it."""
    found = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    return str([(name, each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found])


def draw_model(path: Path, dtype: str, device: str) -> LoadedModel:
    """Return the model that config.json in `path` describes, with random weights: it runs as fast as a trained one.

    Raises ModelRefused.
    """
    info = read_model_info(path, dtype, device=device)
    model = _without_weights(path, info)
    model.to(device).eval().requires_grad_(False)
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.02)
        else:  # a norm, or a bias
            weight.fill_(1.0)
    return _loaded(path, model, info, info, TensorParallel())


def _without_weights(path: Path, info: ModelInfo) -> PreTrainedModel:
    """Return a model with unwritten weights: they take no memory before its share is read. Raises ModelRefused."""
    register_attention()
    try:
        with LOADING, no_init_weights():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[info.dtype], attn_implementation=IMPLEMENTATION
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelRefused(f"{path} cannot be loaded: {error}") from error
    model.tie_weights()
    assert isinstance(model, PreTrainedModel)
    _check_defaults(path, config, info)
    return model


def _check_defaults(path: Path, config: Any, info: ModelInfo) -> None:
    """Raise ModelRefused if a key that config.json omits has another default in transformers than in `info`."""
    for key, ours in (
        ("hidden_size", info.hidden_size),
        ("num_attention_heads", info.num_heads),
        ("num_hidden_layers", info.num_layers),
        ("num_key_value_heads", info.num_kv_heads),
        ("head_dim", info.head_dim),
        ("vocab_size", info.vocab_size),
    ):
        theirs = getattr(config, key, None)
        if theirs is not None and theirs != ours:
            raise ModelRefused(f"{path / 'config.json'} lacks {key}, and transformers assumes {theirs}; add it there")
    if info.model_type in WINDOWS:
        window, kinds = getattr(config, "sliding_window", None) or 0, getattr(config, "layer_types", None)
        slides = [kind == SLIDING for kind in kinds] if kinds else [True] * info.num_layers
        theirs = [window if each and window < info.max_positions else 0 for each in slides]
        if theirs != list(info.windows or (0,) * info.num_layers):
            raise ModelRefused(
                f"{path / 'config.json'} lacks layer_types, and transformers assumes {kinds}; add it there"
            )


def _loaded(
    path: Path, model: PreTrainedModel, info: ModelInfo, share: ModelInfo, tensor: TensorParallel
) -> LoadedModel:
    body, head = model.base_model, model.get_output_embeddings()
    assert isinstance(body, Module) and isinstance(head, Module)
    layers: list[Any] = [each for each in body.modules() if hasattr(each, "layer_idx") and "scaling" in vars(each)]
    scales = tuple(float(each.scaling) for each in layers)
    if len(scales) != info.num_layers:
        raise ModelRefused(f"a {info.model_type!r} model whose attention has no scale of its own cannot be served")
    if info.has_sinks != any(hasattr(each, "sinks") for each in layers):
        raise ModelRefused(f"a {info.model_type!r} model with attention sinks cannot be served")
    windows = info.windows or (0,) * info.num_layers
    for layer, window in zip(layers, windows, strict=True):
        layer.ring_attention = window, info.max_positions, info.has_sinks
    return LoadedModel(
        model,
        body,
        head,
        info,
        share,
        tensor,
        TensorParallel(),
        grammars_of(path, info),
        scales,
        windows,
        tuple(layers),
        path,
    )
