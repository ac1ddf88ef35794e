"""Parts of a rank, made when it starts; most of them are made again for each ring incarnation.

A rank's worker and the benches make them. The holder of the parts closes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.workers.decode.graphs import Compilation, CudaRecorder
from ringserve.workers.decode.loop import DecodeMailbox
from ringserve.workers.decode.messages import LEADER
from ringserve.workers.decode.step import DecodeChoice
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.nixl_agent import has_nixl
from ringserve.workers.kv.pulls import NUM_SLOTS, PullAgent
from ringserve.workers.kv.receiver import KvReceiver
from ringserve.workers.kv.sender import HELD_BYTES, KvSender
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import check_fingerprint
from ringserve.workers.model.layers import FP8_MULTIPLE
from ringserve.workers.model.loading import DTYPES, LoadedModel, load_model
from ringserve.workers.model.shared import SharedCores
from ringserve.workers.protocol.ranks import FP8_MLPS, ModelInfo, RankInfo, RankSettings, RankSpec
from ringserve.workers.rank.joining import RingJoining

if TYPE_CHECKING:
    from ringserve.workers.decode.draft_model import DraftModel


def compilation_of(settings: RankSettings) -> Compilation | None:
    """Return how ranks compile their model; None if they do not."""
    return Compilation("inductor", CudaRecorder(torch.device(settings.device))) if settings.compiles else None


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
    cores: SharedCores | None
    agent: PullAgent | None
    compilation: Compilation | None
    draft_model: DraftModel | None

    def close(self) -> None:
        """End all transfers of this incarnation, and leave shared cores to others. Idempotent."""
        if self.cores is not None:
            self.cores.close()
        self.sender.close()
        self.receiver.close()
        if self.agent is not None:
            self.agent.close()

    @property
    def info(self) -> RankInfo:
        return RankInfo(
            rank=self.spec.rank,
            kv_endpoint=self.receiver.endpoint,
            attention_backend=self.backend.name,
            ring_transport=self.joining.backend,
            pid=os.getpid(),
            model=self.model.info,
            num_blocks=self.cache.num_blocks,
            is_helix=self.model.is_helix,
        )


def load_parts(spec: RankSpec, *, poisoned: bool) -> RankParts:
    """Load the model and open the KV receiver. `RankWorker.start` says what is raised."""
    settings = replace(spec.settings, device=_indexed(spec.settings.device))
    spec = replace(spec, settings=settings)
    torch.set_num_threads(settings.num_threads)
    joining = RingJoining(spec)
    path = resolve_model_path(settings.model_path)
    check_fingerprint(path, settings.fingerprint)
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
    check_fingerprint(path, settings.fingerprint)  # the files may have been replaced meanwhile
    check_quantization(settings, model.share)
    dtype = DTYPES[model.info.kv_dtype]
    backend = select_backend(settings.attention_backend, settings.device, dtype)
    # Loaded before the cache, which may take the rest of the memory.
    draft_model = load_draft_model(model.info, backend, settings, poisoned=poisoned) if spec.rank == LEADER else None
    cache = KvCache(
        num_layers=model.info.num_layers,
        num_blocks=num_blocks_of(settings, model.share) if settings.kv_memory_fraction else settings.num_blocks,
        block_tokens=settings.block_tokens,
        num_kv_heads=model.share.num_kv_heads,
        head_dim=model.info.head_dim,
        dtype=dtype,
        device=settings.device,
        head_start=model.head_start,
        poisoned=poisoned,
    )
    return parts_of(spec, joining, model, backend, cache, compilation_of(settings), draft_model)


def load_draft_model(
    info: ModelInfo, backend: AttentionBackend, settings: RankSettings, *, poisoned: bool
) -> DraftModel | None:
    """Load the draft model of a ring; None if it has none. Raises ModelRefused, ConfigError (dtype)."""
    if not settings.drafts or not settings.draft_model:
        return None
    # Few rings have a draft model: the others do not load the module.
    drafting: Any = import_module("ringserve.workers.decode.draft_model")
    draft_path = resolve_model_path(settings.draft_model)
    draft = load_model(draft_path, settings.dtype, settings.device, Path(settings.draft_model).name)
    if DTYPES[draft.info.kv_dtype] != DTYPES[info.kv_dtype]:
        raise ConfigError(
            f"decode.draft_model: its KV is in {draft.info.kv_dtype}, and that of {info.name} in {info.kv_dtype}; "
            "both must have the same dtype"
        )
    made: DraftModel = drafting.DraftModel(
        draft,
        backend,
        vocab_size=info.vocab_size,
        max_batch=settings.max_batch,
        context=settings.draft_context,
        block_tokens=settings.block_tokens,
        compilation=compilation_of(settings),
        poisoned=poisoned,
    )
    return made


def check_quantization(settings: RankSettings, share: ModelInfo) -> None:
    """Check that the device and the model's sizes allow the wanted quantization. Raises ConfigError."""
    if settings.quantization != FP8_MLPS:
        return
    device = torch.device(settings.device)
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if found < FP8_CAPABILITY:
        raise ConfigError(
            f"model.quantization: 'fp8' needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or "
            f"more, and {settings.device} has {found[0]}.{found[1]}; only 'none' is allowed there"
        )
    if share.hidden_size % FP8_MULTIPLE or share.intermediate_size % FP8_MULTIPLE:
        raise ConfigError(
            f"model.quantization: 'fp8' needs sizes that are multiples of {FP8_MULTIPLE}, and MLPs of a rank have "
            f"{share.hidden_size} x {share.intermediate_size}; only 'none' is allowed for them"
        )


FP8_CAPABILITY = (8, 9)
"""Least compute capability of a GPU that multiplies 8-bit floats."""


def num_blocks_of(settings: RankSettings, share: ModelInfo) -> int:
    """Return how many blocks of KV fit in the fraction `kv_memory_fraction` of the GPU's free memory.

    `share` is this rank's share of the model. The memory of NIXL's staging slots is subtracted. Raises ConfigError if
    none fits.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(settings.device)
    staging = 2 * NUM_SLOTS * settings.kv_slot_bytes if _uses_nixl(settings) else 0
    block_bytes = settings.block_tokens * share.kv_bytes_per_token
    num_blocks = int(free * settings.kv_memory_fraction - staging) // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache.memory_fraction: {settings.kv_memory_fraction:g} of the {free / 1e9:.1f} GB that the weights "
            f"leave on {settings.device} holds no block of {block_bytes / 1e6:.1f} MB beside {staging / 1e9:.1f} GB of "
            f"staging slots; choose a larger fraction, or fewer weights per rank"
        )
    return num_blocks


def _indexed(device: str) -> str:
    """Return the device with its index. For a bare "cuda", NCCL and torch's streams would each choose an index."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def parts_of(
    spec: RankSpec,
    joining: RingJoining,
    model: LoadedModel,
    backend: AttentionBackend,
    cache: KvCache,
    compilation: Compilation | None,
    draft_model: DraftModel | None = None,
) -> RankParts:
    """Return the parts of an incarnation, with an open KV receiver."""
    settings = spec.settings
    agent = open_agent(spec, cache.device)
    try:
        receiver = KvReceiver(cache, spec.incarnation, listen_host=settings.listen_host, tls=settings.tls, agent=agent)
    except Unavailable:
        if agent is not None:
            agent.close()
        raise
    return RankParts(
        spec=spec,
        joining=joining,
        model=model,
        backend=backend,
        choose_variant=DecodeChoice(settings.decode_variant, model.share.shape, spec.cp),
        cache=cache,
        receiver=receiver,
        sender=KvSender(cache, spec.incarnation, tls=settings.tls, agent=agent, held_bytes=HELD_BYTES),
        mailbox=DecodeMailbox(settings.max_batch),
        cores=SharedCores(settings.cores) if settings.cores else None,
        agent=agent,
        compilation=compilation,
        draft_model=draft_model,
    )


def open_agent(spec: RankSpec, device: torch.device) -> PullAgent | None:
    """Open the NIXL agent of a rank; None if KV goes by sockets. Raises ConfigError, Unavailable."""
    settings = spec.settings
    if not _uses_nixl(settings):
        return None
    name, is_required = f"{spec.incarnation}:{spec.rank}", settings.kv_carrier == "nixl"
    return PullAgent(name, device, slot_bytes=settings.kv_slot_bytes, is_required=is_required)


def _uses_nixl(settings: RankSettings) -> bool:
    is_gpu = settings.device.startswith("cuda")
    return settings.kv_carrier == "nixl" or (settings.kv_carrier == "auto" and is_gpu and has_nixl())
