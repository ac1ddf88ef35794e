"""Parts of a rank: made when it starts, and the most of them anew with each incarnation of its ring."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cp_core.attention.backends import select_backend
from cp_core.attention.partial import AttentionBackend
from workers.decode.loop import DecodeChoice
from workers.decode.messages import DecodeMailbox
from workers.kv.cache import KvCache
from workers.kv.receiver import KvReceiver
from workers.kv.sender import KvSender
from workers.model.builtin import resolve_model_path
from workers.model.loading import DTYPES, LoadedModel, load_model
from workers.protocol.ranks import RankInfo, RankSpec
from workers.rank.joining import RingJoining


@dataclass(frozen=True, slots=True)
class RankParts:
    """Parts of a started rank."""

    spec: RankSpec
    joining: RingJoining
    model: LoadedModel
    backend: AttentionBackend
    choose_variant: DecodeChoice
    cache: KvCache
    receiver: KvReceiver
    sender: KvSender
    mailbox: DecodeMailbox

    @property
    def info(self) -> RankInfo:
        return RankInfo(
            rank=self.spec.rank,
            kv_endpoint=self.receiver.endpoint,
            attention_backend=self.backend.name,
            ring_transport=self.joining.backend,
            pid=os.getpid(),
            model=self.model.info,
            is_helix=self.model.is_helix,
        )


def load_parts(spec: RankSpec, *, poisoned: bool) -> RankParts:
    """Load the model and open the KV receiver; see `RankWorker.start`."""
    settings = replace(spec.settings, device=_indexed(spec.settings.device))
    spec = replace(spec, settings=settings)
    torch.set_num_threads(settings.num_threads)
    joining = RingJoining(spec)
    path = resolve_model_path(settings.model_path)
    model = load_model(
        path,
        settings.dtype,
        settings.device,
        Path(settings.model_path).name,
        tp_rank=spec.tp_rank,
        tp=spec.tp,
        replicates_kv=settings.replicates_kv,
        scatters_rows=settings.scatters_rows,
        helix_rank=spec.cp_rank,
        helix=spec.helix,
    )
    dtype = DTYPES[model.info.kv_dtype]
    backend = select_backend(settings.attention_backend, settings.device, dtype)
    cache = KvCache(
        num_layers=model.info.num_layers,
        num_blocks=settings.num_blocks,
        block_tokens=settings.block_tokens,
        num_kv_heads=model.share.num_kv_heads,
        head_dim=model.info.head_dim,
        dtype=dtype,
        device=settings.device,
        head_start=model.head_start,
        poisoned=poisoned,
    )
    return parts_of(spec, joining, model, backend, cache)


def _indexed(device: str) -> str:
    """Return the device with its index: NCCL and torch's streams would each choose one for a bare "cuda"."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def parts_of(
    spec: RankSpec, joining: RingJoining, model: LoadedModel, backend: AttentionBackend, cache: KvCache
) -> RankParts:
    """Return the parts of an incarnation, whose KV receiver is open."""
    settings = spec.settings
    return RankParts(
        spec=spec,
        joining=joining,
        model=model,
        backend=backend,
        choose_variant=DecodeChoice(settings.decode_variant, model.share.shape, spec.cp),
        cache=cache,
        receiver=KvReceiver(cache, spec.incarnation, listen_host=settings.listen_host, tls=settings.tls),
        sender=KvSender(cache, spec.incarnation, checksums=settings.kv_checksums, tls=settings.tls),
        mailbox=DecodeMailbox(settings.max_batch),
    )
