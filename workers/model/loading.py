"""Loader of Hugging Face model directories with ring attention. Local files only: nothing is ever downloaded."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Linear, Module, SiLU

from cp_core.errors import ModelRefused
from cp_core.ring.helix import HelixColumns
from workers.model.hugging_face import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    SiLUActivation,
    no_init_weights,
)
from workers.model.info import multiplies_bfloat16, read_model_info, tensor_share
from workers.model.tensor_parallel import TensorParallel
from workers.model.tokenizer import load_tokenizer, tokenizer_json
from workers.model.weights import read_share, whole_shapes
from workers.protocol.ranks import ModelInfo
from workers.sampling.grammar import Grammars

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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend rotated query[1,H,T,D] to key and value[1,K,T,D] -> (out[1,T,H,D], None), as transformers calls it.

    On a CPU all three are widened to fp32, once; the step stores, sends and merges fp32, and `out` is narrowed.
    """
    assert attention_mask is None, "the step's layout determines attention; no mask is ever built"
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    if query.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()
    out = ring_step.attend(layer, q, k, v, scaling)
    return out.to(query.dtype).unsqueeze(0), None


class PackedLinear(Linear):
    """Linear layer on a CPU whose weight lies in the order in which oneDNN's kernels read it.

    A plain weight is brought into an order of that kind in every call, which costs the more the fewer rows a call has:
    one row of a plain weight takes 1.2 times as long in fp32 and 1.4 times in bf16, 8 rows twice as long.
    """

    packed: Tensor

    @staticmethod
    def pack(linear: Linear) -> None:
        """Make `linear` a packed layer, in place: forward hooks stay, its plain weight does not."""
        weight = linear.weight.detach()
        num_rows = PACKED_ROWS if weight.dtype == torch.float32 else None
        del linear.weight
        linear.__class__ = PackedLinear
        linear.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), num_rows)

    def forward(self, input: Tensor) -> Tensor:
        """Map input[..., in_features] -> [..., out_features]."""
        rows = with_least_rows(input, self.packed)
        out = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        assert isinstance(out, Tensor)
        return out if rows is input else out[..., : input.shape[-2], :]


def with_least_rows(input: Tensor, packed: Tensor) -> Tensor:
    """Return input[..., T, C] itself, or with rows of zeros after its own where more rows take less time.

    oneDNN multiplies four rows by an fp32 weight in 0.7 to 0.9 of the time that it takes for one, two or three.
    """
    missing = LEAST_ROWS - input.shape[-2]
    if missing <= 0 or packed.dtype != torch.float32:
        return input
    return torch.nn.functional.pad(input, (0, 0, 0, missing))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Forward pass of the MLP that all served families have: down(silu(gate(x)) * up(x)).

    The kernels apply silu and the product where their results are still in the processor's cache: two passes over the
    widest tensors of a layer less.
    """

    gate: PackedLinear
    up: PackedLinear
    down: Module

    @classmethod
    def try_of(cls, mlp: Module) -> GatedMlp | None:
        """Return the forward pass of an fp32 `mlp`; None for another module, and where its first two layers have hooks.

        In bf16 it would round less often than transformers does.
        """
        gate, up, down = (getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
        if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, Module)):
            return None
        is_silu = isinstance(getattr(mlp, "act_fn", None), SiLU | SiLUActivation)
        is_plain = is_silu and gate.packed.dtype == torch.float32
        return cls(gate, up, down) if is_plain and not (gate._forward_hooks or up._forward_hooks) else None

    def __call__(self, input: Tensor) -> Tensor:
        """Map input[..., hidden_size] -> [..., hidden_size]."""
        gate, up = self.gate, self.up
        rows = with_least_rows(input, gate.packed)
        activated = torch.ops.mkldnn._linear_pointwise(rows, gate.packed, gate.bias, "swish", [], "")
        product = torch.ops.mkldnn._linear_pointwise.binary(rows, activated, up.packed, up.bias, "mul")
        out = self.down(product if rows is input else product[..., : input.shape[-2], :])
        assert isinstance(out, Tensor)
        return out


# Rows for which fp32 weights are packed: oneDNN takes the same order for any number from a few up.
PACKED_ROWS = 256
LEAST_ROWS = 4


def pack(module: Module) -> None:
    """Pack the linear layers in `module` that are on a CPU: fp32 ones, and bf16 ones where the CPU multiplies bf16."""
    if not torch.backends.mkldnn.is_available():
        return
    dtypes = {torch.float32, torch.bfloat16} if multiplies_bfloat16() else {torch.float32}
    for linear in list(module.modules()):
        if type(linear) is Linear and linear.weight.dtype in dtypes and linear.weight.device.type == "cpu":
            PackedLinear.pack(linear)


# transformers patches its own classes while it builds a model; two threads at once would leave a patch behind.
LOADING = threading.Lock()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model in eval mode on its device. `info` is the shape of the whole model, `share` of the part that is here.

    With tensor parallelism `hidden_states` and `logits` are collective over `tensor`, and their results are whole. With
    helix they are collective over the whole ring, `helix`, whose ranks compute the same rows.
    """

    model: PreTrainedModel
    body: Module
    head: Module
    info: ModelInfo
    share: ModelInfo
    tensor: TensorParallel
    helix: TensorParallel
    grammars: Grammars

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
        helix = TensorParallel(rank, num_ranks, shares_attention=False)
        helix.cut(self.model)
        return replace(self, helix=helix)

    def columns(self, device: torch.device) -> HelixColumns | None:
        """Return the columns of attention's outputs that this rank has; None where it has all."""
        if not self.is_helix:
            return None
        return HelixColumns(self.share.num_heads, self.share.head_dim, self.helix.rank, self.helix.size, device)

    @property
    def is_packed(self) -> bool:
        """True if weights are packed: they can no longer be cut."""
        return any(isinstance(module, PackedLinear) for module in self.body.modules())

    def pack_weights(self, *, with_head: bool) -> None:
        """Pack the weights of all layers on a CPU, and fuse MLPs. Idempotent.

        The packed copy of a head that is the embedding, too, takes memory of its own.
        """
        pack(self.body)
        if with_head:
            pack(self.head)
        for module in self.body.modules():
            if (mlp := GatedMlp.try_of(module)) is not None:
                module.forward = mlp

    @property
    def head_start(self) -> int:
        """Index, in the model, of the first KV head that is here."""
        return self.tensor.rank * self.info.num_kv_heads // self.tensor.size

    def hidden_states(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Run all layers over packed tokens: token_ids and positions int64[T], T >= 1 -> [T, hidden_size], normed."""
        states = self.body(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, ring_step=step
        ).last_hidden_state
        assert isinstance(states, Tensor)
        return self.tensor.all_rows(states[0])

    def attend_without_tokens(self, step: AttentionStep) -> Tensor:
        """Join every layer's ring attention without own tokens, which transformers cannot run -> [0, hidden_size].

        Other ranks' queries are attended here, with the scale that all served models have.
        """
        share, embeddings = self.share, self.model.get_input_embeddings().weight
        assert isinstance(embeddings, Tensor)
        q = embeddings.new_empty(0, share.num_heads, share.head_dim, dtype=DTYPES[share.kv_dtype])
        kv = q.new_empty(0, share.num_kv_heads, share.head_dim)
        for layer in range(share.num_layers):
            step.attend(layer, q, kv, kv, share.head_dim**-0.5)
        return embeddings.new_empty(0, share.hidden_size)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states [T, hidden_size] -> logits [T, vocab_size]."""
        logits = self.head(hidden_states)
        assert isinstance(logits, Tensor)
        return self.helix.join(logits, self.info.vocab_size) if self.is_helix else logits

    def largest_logits(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit [T] of each row and its token [T], the first of equals, without joining logits."""
        values, tokens = self.head(hidden_states).max(dim=-1)
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
    share = tensor_share(info, tp, replicates_kv=replicates_kv)
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(f"{path} has no *.safetensors weights")
    register_attention()
    try:
        with LOADING, no_init_weights():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            # Of memory that is never written before the share is read: it takes none.
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[info.dtype], attn_implementation=IMPLEMENTATION
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelRefused(f"{path} cannot be loaded: {error}") from error
    model.tie_weights()
    whole = whole_shapes(model)
    replicas, kv_features = max(1, tp // info.num_kv_heads), info.num_kv_heads * info.head_dim
    tensor = TensorParallel(tp_rank, tp, replicas=replicas, kv_features=kv_features, scatters_rows=scatters_rows)
    tensor.cut(model)
    head, grammars = model.get_output_embeddings(), grammars_of(path, info)
    loaded = LoadedModel(model, model.base_model, head, info, share, tensor, TensorParallel(), grammars)
    if helix > 1:
        loaded = loaded.cut_over_ring(helix_rank, helix)
    read_share(path, model, whole, loaded.helix if loaded.is_helix else tensor)
    model.to(device).eval().requires_grad_(False)
    return loaded
