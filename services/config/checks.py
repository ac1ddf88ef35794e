"""Checks of a configuration. An error is one sentence with the key, its value and what is allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ringserve.cp_core.cost.decode import HELIX, VARIANT_POLICIES
from ringserve.cp_core.cost.selector import POLICIES
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.ring_backend import select_ring_backend
from ringserve.orchestration.placement.planner import MISSING_KV
from ringserve.services.auth.sections import check_carrier, check_public_endpoints, check_ring, check_sections
from ringserve.services.auth.tenants import NAME as TENANT_NAME
from ringserve.services.config.rings import check_names
from ringserve.services.config.service import UNKNOWN_FIELDS
from ringserve.services.telemetry.logs import LOG_FORMATS, LOG_LEVELS, levels_by_module
from ringserve.services.telemetry.tracing.tracer import check_tracing
from ringserve.workers.protocol.ranks import COMPILE_POLICIES, FP8_MLPS, QUANTIZATIONS

if TYPE_CHECKING:
    from ringserve.services.config.tree import Config

MAX_PORT = 65_535
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
METRIC_NAMES = ("", "vllm")
CARRIERS = ("auto", "nixl", "sockets")


def check(config: Config) -> None:
    """Check a configuration. Raises ConfigError."""
    if not config.model.path:
        raise ConfigError("model.path: '' is not allowed; give a model directory, builtin:smollm2 or builtin:tiny")
    _among("model.dtype", config.model.dtype, DTYPES)
    _among("logs.level", config.logs.level, LOG_LEVELS)
    try:
        levels_by_module(config.logs.levels)
    except ConfigError as error:
        raise ConfigError(f"logs.levels: {error}") from None
    _among("logs.format", config.logs.format, LOG_FORMATS)
    _among("model.device", config.model.device, DEVICES)
    _within("model.gpus_per_rank", config.model.gpus_per_rank, 0.01, 1.0)
    _among("model.compile", config.model.compile, COMPILE_POLICIES)
    _quantization(config)
    _ring_transport(config)
    _variant(config)
    _among("router.selector", config.router.selector, POLICIES)
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        check_names(role, section.pools)
        _within(f"{role}.max_waiting", section.max_waiting, 1, 1_000_000)
    for pool in config.pools:
        _within(f"{pool.key}.rings", pool.rings, 1, 1024)
        _within(f"{pool.key}.cp", pool.cp, 1, 64)
        _within(f"{pool.key}.tp", pool.tp, 1, 64)
        _within(f"{pool.key}.threads_per_rank", pool.threads_per_rank, 1, 1024)
    _within("prefill.chunk_tokens", config.prefill.chunk_tokens, 1, 1 << 24)
    _within("prefill.step_budget", config.prefill.step_budget, 0, 1e15)
    _within("prefill.step_seconds", config.prefill.step_seconds, 0, 3600)
    _within("prefill.min_chunk_tokens", config.prefill.min_chunk_tokens, 1, 1 << 24)
    _within("prefill.whole_tokens", config.prefill.whole_tokens, 0, 1 << 24)
    _within("prefill.ageing_seconds", config.prefill.ageing_seconds, 0.001, 86_400)
    _within("prefill.max_queue_work", config.prefill.max_queue_work, 1, 1e15)
    _within("decode.max_batch", config.decode.max_batch, 1, 4096)
    _within("decode.headroom_tokens", config.decode.headroom_tokens, 1, 1 << 20)
    _within("decode.max_direct_tokens", config.decode.max_direct_tokens, 0, 4096)
    _within("decode.max_direct_seconds", config.decode.max_direct_seconds, 0, 60)
    _within("kv_cache.block_tokens", config.kv_cache.block_tokens, 1, 4096)
    _within("kv_cache.tokens_per_rank", config.kv_cache.tokens_per_rank, config.kv_cache.block_tokens, 1 << 30)
    _within("kv_cache.memory_fraction", config.kv_cache.memory_fraction, 0.0, 0.95)
    _memory_fraction(config)
    _within("kv_cache.kept_fraction", config.kv_cache.kept_fraction, 0.0, 1.0)
    _among("kv_transfer.carrier", config.kv_transfer.carrier, CARRIERS)
    _within("kv_transfer.slot_bytes", config.kv_transfer.slot_bytes, 1 << 20, 16 << 20)
    check_carrier(config.kv_transfer.carrier, config.internal_tls)
    _among("router.missing_kv", config.router.missing_kv, MISSING_KV)
    _within("router.conversation_ttl_seconds", config.router.conversation_ttl_seconds, 0.0, 1e9)
    _within("router.max_waiting_turns", config.router.max_waiting_turns, 1, 100_000)
    _within("router.max_conversations", config.router.max_conversations, 1, 1 << 24)
    router = config.router
    _within("router.max_loss", router.max_loss, 0.0, 1e6)
    _within("router.max_ttft", router.max_ttft, 0.0, 86_400)
    if router.max_loss and router.max_ttft:
        raise ConfigError(f"router.max_loss: {router.max_loss:g} is set beside router.max_ttft; allowed is one of them")
    if router.bound is not None and not router.sparse_losses:
        raise ConfigError(
            f"router.{router.bound.name}: {router.bound.limit:g} needs router.sparse_losses, the file that ringserve "
            f"calibrate --sparse writes; allowed without it is 0"
        )
    for item in fields(config.timeouts):
        _within(f"timeouts.{item.name}", getattr(config.timeouts, item.name), 0.1, 86_400)
    if config.timeouts.lost < 2 * config.timeouts.heartbeat:
        raise ConfigError(
            f"timeouts.lost: {config.timeouts.lost:g} s is too short for a heartbeat every "
            f"{config.timeouts.heartbeat:g} s; allowed is twice that or more"
        )
    _within("gateway.max_seconds", config.gateway.max_seconds, 0.1, 86_400)
    _within("gateway.max_calls", config.gateway.max_calls, 1, 1_000_000)
    _address("gateway.listen", config.gateway.listen)
    _address("router.listen", config.router.listen)
    _communities(config.router.communities)
    for key in ("http", "metrics"):
        if address := getattr(config.gateway, key):
            _address(f"gateway.{key}", address)
    _among("http.unknown_fields", config.http.unknown_fields, UNKNOWN_FIELDS)
    _origins(config.http.origins)
    _among("metrics.also_as", config.metrics.also_as, METRIC_NAMES)
    _within("metrics.tenants", config.metrics.tenants, 0, 1000)
    for key in ("router", "prefill", "decode"):
        if getattr(config.metrics, key):
            _address(f"metrics.{key}", getattr(config.metrics, key))
    _metrics_ports(config)
    check_sections(config.tls, config.internal_tls, config.router.listen, config.ray.address)
    check_tracing(config.tracing)
    endpoints = {f"gateway.{key}": getattr(config.gateway, key) for key in ("listen", "http")}
    check_public_endpoints(endpoints, config.tls, config.auth, is_insecure=config.gateway.insecure)


def _communities(communities: Sequence[Sequence[str]]) -> None:
    """Check the tenants that share prompts."""
    tenants = Counter(tenant for members in communities for tenant in members)
    for tenant, count in tenants.items():
        if not TENANT_NAME.fullmatch(tenant):
            raise ConfigError(f"router.share_prompts: {tenant!r} is no tenant's name; allowed is such as 'acme,beta'")
        if count > 1:
            raise ConfigError(f"router.share_prompts: {tenant!r} stands {count} times; allowed is once")


def _metrics_ports(config: Config) -> None:
    """Check the ports of metrics, which rings of a role take in a row.

    They must exist, and differ from those of the other role on the same host.
    """
    taken: list[tuple[str, str, int, int]] = []
    for role in ("prefill", "decode"):
        host, _, text = getattr(config.metrics, role).rpartition(":")
        first, num_rings = int(text or 0), sum(pool.rings for pool in config.pools_of(role))
        if not first:
            continue
        last = first + num_rings - 1
        if last > MAX_PORT:
            raise ConfigError(
                f"metrics.{role}: {num_rings} rings take the ports from {first} to {last}, and {MAX_PORT} is the last"
            )
        for other, other_host, low, high in taken:
            if other_host == host and low <= last and first <= high:
                raise ConfigError(
                    f"metrics.{role}: its {num_rings} rings take the ports from {first} to {last}, and those of "
                    f"metrics.{other} the ports from {low} to {high}; let them lie apart"
                )
        taken.append((role, host, first, last))


def _memory_fraction(config: Config) -> None:
    """Check that memory decides the size of a rank's KV where it can, and nothing else decides it too."""
    cache, model = config.kv_cache, config.model
    if not cache.memory_fraction:
        return
    key = f"kv_cache.memory_fraction: {cache.memory_fraction:g}"
    if model.device != "cuda" or model.gpus_per_rank < 1:
        raise ConfigError(f"{key} is for ranks with a whole GPU each; allowed is kv_cache.tokens_per_rank instead")
    if cache.tokens_per_rank != type(cache)().tokens_per_rank:
        raise ConfigError(
            f"{key} is set beside kv_cache.tokens_per_rank {cache.tokens_per_rank}; allowed is one of them"
        )


def _variant(config: Config) -> None:
    variant = config.decode.variant
    _among("decode.variant", variant, VARIANT_POLICIES)
    for pool in config.pools_of("decode"):
        if variant == HELIX and pool.tp > 1:
            raise ConfigError(f"decode.variant: 'helix' is not allowed with {pool.key}.tp {pool.tp}; allowed is tp 1")


def _quantization(config: Config) -> None:
    """Check that quantised weights have the device and the dtype that they need."""
    model = config.model
    _among("model.quantization", model.quantization, QUANTIZATIONS)
    if model.quantization == FP8_MLPS and (model.device, model.dtype) != ("cuda", "bfloat16"):
        raise ConfigError(
            f"model.quantization: 'fp8' needs model.device cuda and model.dtype bfloat16; allowed with {model.device} "
            f"and {model.dtype} is none"
        )


def _ring_transport(config: Config) -> None:
    try:
        backend = select_ring_backend(config.model.ring_transport, config.model.device, config.model.gpus_per_rank)
    except ConfigError as error:
        raise ConfigError(f"model.ring_transport: {error}") from error
    check_ring(backend, config.internal_tls, max(pool.cp * pool.tp for pool in config.pools))


def _among(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not allowed; use one of {', '.join(allowed)}")


def _within(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is out of range; allowed is {low} to {high}")


def _origins(origins: str) -> None:
    for origin in origins.split():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#]+", origin):
            raise ConfigError(
                f"http.origins: {origin!r} is no origin; write SCHEME://HOST[:PORT], e.g. https://example.org, or *"
            )


def _address(key: str, value: str) -> None:
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise ConfigError(f"{key}: {value!r} is no address; write HOST:PORT, e.g. 127.0.0.1:50051")
