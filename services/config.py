"""The configuration: one YAML file, one frozen tree, every default here. The environment is read here and nowhere else.

Order of precedence, highest first: `--set section.key=value`, environment `RINGSERVE_SECTION__KEY`, file, default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from cp_core.decode_variant import VARIANT_POLICIES
from cp_core.errors import ConfigError
from cp_core.ring_backend import select_ring_backend
from cp_core.selector import POLICIES
from orchestration.cached_kv import MISSING_KV
from orchestration.prefill_scheduler import PrefillScheduling
from services.auth.sections import AuthConfig, InternalTlsConfig, TlsConfig, absolute_paths, check_doors, check_sections
from services.config_checks import address, among, within
from services.logs import LOG_FORMATS

ENV_PREFIX = "RINGSERVE_"
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
METRIC_NAMES = ("", "vllm")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`path` is a Hugging Face model directory, or "builtin:tiny". `ring_transport` joins the ranks of a ring."""

    path: str = "builtin:tiny"
    dtype: str = "float32"
    device: str = "cpu"
    attention_backend: str = "auto"
    ring_transport: str = "auto"


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """The prefill pool: `groups` rings of `cp` ranks, which share the tokens; each is `tp` processes, which share the
    heads.

    A step computes at most `chunk_tokens` new tokens and `step_budget` work units: one is what the matrix products of a
    token cost, attention counts by what it costs beside them; 0 is the work of `chunk_tokens` tokens with nothing
    before them. Nor should it take longer than `step_seconds`, by what the ring measured of itself when it started:
    about so long a short prompt may have to wait for a step of others; 0 sets no such limit. Long prompts are cut
    accordingly, into chunks of at least `min_chunk_tokens`. `fuse` lets a step hold tokens of several turns,
    `interleave` lets other turns in between the chunks of a long one. `ageing_seconds` of waiting make up for one step
    of priority. A ring whose queue holds `max_queue_work` work units refuses more.
    """

    groups: int = 1
    cp: int = 2
    tp: int = 1
    chunk_tokens: int = 4096
    step_budget: float = 0.0
    step_seconds: float = 0.15
    min_chunk_tokens: int = 256
    fuse: bool = True
    interleave: bool = True
    ageing_seconds: float = 10.0
    max_queue_work: float = 50e6
    max_waiting: int = 256
    threads_per_rank: int = 1

    @property
    def scheduling(self) -> PrefillScheduling:
        return PrefillScheduling(
            step_budget=self.step_budget,
            step_seconds=self.step_seconds,
            min_chunk_tokens=self.min_chunk_tokens,
            fuse=self.fuse,
            interleave=self.interleave,
            ageing_seconds=self.ageing_seconds,
            max_queue_work=self.max_queue_work,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """The decode pool: `groups` rings of `cp` ranks of `tp` processes, each ring decoding up to `max_batch` turns.

    `variant` is how a ring decodes its batch: every rank all of it (`gather`), each rank a part (`pass_q`), or
    whichever is predicted to be faster (`auto`). `preemption`: a turn begins with KV room for `headroom_tokens` of its
    answer and grows; where no room is left the youngest turn gives way and is resumed later. Without, room for the
    whole answer is set aside at once. `continuous`: turns join the batch at every step; without, when it is empty.

    A ring computes up to `max_direct_tokens` new tokens of a turn whose other KV it keeps itself (0: none), where that
    is predicted to be sooner than by a prefill ring and to hold up its batch no longer than `max_direct_seconds`.
    """

    groups: int = 1
    cp: int = 2
    tp: int = 1
    max_batch: int = 32
    max_waiting: int = 256
    threads_per_rank: int = 1
    variant: str = "auto"
    continuous: bool = True
    preemption: bool = True
    headroom_tokens: int = 128
    max_direct_tokens: int = 128
    max_direct_seconds: float = 0.15


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """KV of every rank: `tokens_per_rank` tokens in blocks of `block_tokens`, of its own heads where `tp` is not 1.

    At most `kept_fraction` of it is kept between turns. `checksums` guard KV on its way between rings.

    Kernels that follow block tables do so where `block_tokens` is a multiple of their page (256 on GPUs); elsewhere
    runs of adjacent blocks are attended one by one.
    """

    block_tokens: int = 16
    tokens_per_rank: int = 65536
    kept_fraction: float = 1.0
    checksums: bool = True

    @property
    def num_blocks(self) -> int:
        return self.tokens_per_rank // self.block_tokens


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a turn's algorithm is selected.

    `profile` is the file that `ringserve calibrate` wrote: times are predicted by it instead of what each ring measured
    when it started. `compute_flops` (C, FLOP/s per rank) and `link_bytes_per_second` (BW) feed Algorithms 1 and 5; 0
    takes those of the profile or the ring. alpha, beta and gamma are the constants of the empirical selector (natural
    logarithm); they are fitted on one cluster, so there are no defaults that work; where all are 0 they are the
    profile's.

    KV that only the decode ring keeps is pulled, computed again, or whichever is predicted to be faster (`missing_kv`:
    pull, recompute, auto). A conversation that names no time to live is forgotten `conversation_ttl_seconds` after its
    last use (0: never); at most `max_waiting_turns` wait for one.
    """

    selector: str = "auto"
    compute_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    profile: str = ""
    missing_kv: str = "auto"
    max_conversations: int = 10_000
    conversation_ttl_seconds: float = 0.0
    max_waiting_turns: int = 64
    listen: str = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Where clients call: gRPC at `listen`, OpenAI's HTTP at `http`; `metrics` serves Prometheus. Empty switches off
    `http` and `metrics`.

    `model_name` is what HTTP clients call the model; empty takes "builtin:tiny" or the name of the model's directory.
    `max_seconds` bounds a turn. `insecure` allows to listen beyond loopback without TLS or tokens.
    """

    listen: str = "127.0.0.1:50051"
    http: str = "127.0.0.1:8000"
    model_name: str = ""
    metrics: str = "127.0.0.1:9464"
    max_seconds: float = 600.0
    insecure: bool = False


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where router and ring leaders serve Prometheus; the gateway has `gateway.metrics`. Empty switches one off.

    Ring i of a pool listens at the pool's port + i, or at any free port where that is 0. `also_as` "vllm" shows what
    vLLM has too under its names as well.
    """

    router: str = "127.0.0.1:0"
    prefill: str = "127.0.0.1:0"
    decode: str = "127.0.0.1:0"
    also_as: str = ""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Where the rings run: a Ray of our own on this machine, or the cluster at `address` ("auto" or HOST:PORT).

    In a cluster every process listens at the address of its node. A rank takes one unit of its pool's resource, which
    places it on the nodes that offer it; empty: on any node.
    """

    address: str = ""
    prefill_resource: str = ""
    decode_resource: str = ""


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Deadlines between our own processes, seconds."""

    start: float = 120.0
    step: float = 300.0
    control: float = 20.0
    transfer: float = 60.0
    stuck: float = 60.0


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What every process writes to standard error: nothing below `level`, as lines for people (`human`) or `json`."""

    level: str = "info"
    format: str = "human"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything `ringserve up` needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    internal_tls: InternalTlsConfig = field(default_factory=InternalTlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    logs: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _check(self)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_config(
    path: Path | None = None, overrides: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Read, merge and check. Raises ConfigError naming the key, its value and what is allowed."""
    values: dict[str, dict[str, Any]] = {}
    if path is not None:
        values = _read_file(path)
    environment = os.environ if environment is None else environment
    for name, text in environment.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            section, _, key = name[len(ENV_PREFIX) :].lower().partition("__")
            values.setdefault(section, {})[key] = _from_text(section, key, text)
    for name, text in (overrides or {}).items():
        section, dot, key = name.partition(".")
        if not dot:
            raise ConfigError(f"{name}: overrides are written section.key=value, e.g. prefill.cp=2")
        values.setdefault(section, {})[key] = _from_text(section, key, text)
    return config_from(values)


def _from_text(section: str, key: str, text: str) -> Any:
    """A value of the environment or the command line: as it stands where a text is wanted, else read as YAML."""
    kind = get_type_hints(Config).get(section)
    if kind is None or get_type_hints(kind).get(key) is str:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{section}.{key}: {text!r} is not a valid value") from error


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not valid YAML: {_yaml_fault(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        raise ConfigError(f"config: {path} must hold sections of keys, e.g. prefill: {{cp: 2}}")
    return {str(section): dict(part) for section, part in content.items()}


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0]


def config_from(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """A checked configuration from plain sections."""
    sections = get_type_hints(Config)
    unknown = sorted(set(values) - set(sections))
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such section; allowed are {', '.join(sections)}")
    return Config(**{name: _section(name, sections[name], absolute_paths(name, part)) for name, part in values.items()})


def _section(name: str, kind: type[Any], values: Mapping[str, Any]) -> Any:
    types = get_type_hints(kind)
    allowed = [item.name for item in fields(kind)]
    for key in values:
        if key not in allowed:
            raise ConfigError(f"{name}.{key}: no such key; allowed are {', '.join(allowed)}")
    return kind(**{key: _typed(f"{name}.{key}", value, types[key]) for key, value in values.items()})


def _typed(name: str, value: Any, wanted: type[Any]) -> Any:
    if wanted is float and not isinstance(value, bool):
        try:
            return float(value)  # also of a text: YAML 1.1 takes 5e14 for one
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool):
        return value
    raise ConfigError(f"{name}: {value!r} is not of type {wanted.__name__}")


def _check(config: Config) -> None:
    if not config.model.path:
        raise ConfigError("model.path: '' is not allowed; give a model directory or builtin:tiny")
    among("model.dtype", config.model.dtype, DTYPES)
    among("logs.level", config.logs.level, LOG_LEVELS)
    among("logs.format", config.logs.format, LOG_FORMATS)
    among("model.device", config.model.device, DEVICES)
    _ring_transport(config.model)
    among("decode.variant", config.decode.variant, VARIANT_POLICIES)
    among("router.selector", config.router.selector, POLICIES)
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        within(f"{name}.groups", pool.groups, 1, 1024)
        within(f"{name}.cp", pool.cp, 1, 64)
        within(f"{name}.tp", pool.tp, 1, 64)
        within(f"{name}.max_waiting", pool.max_waiting, 1, 1_000_000)
        within(f"{name}.threads_per_rank", pool.threads_per_rank, 1, 1024)
    within("prefill.chunk_tokens", config.prefill.chunk_tokens, 1, 1 << 24)
    within("prefill.step_budget", config.prefill.step_budget, 0, 1e15)
    within("prefill.step_seconds", config.prefill.step_seconds, 0, 3600)
    within("prefill.min_chunk_tokens", config.prefill.min_chunk_tokens, 1, 1 << 24)
    within("prefill.ageing_seconds", config.prefill.ageing_seconds, 0.001, 86_400)
    within("prefill.max_queue_work", config.prefill.max_queue_work, 1, 1e15)
    within("decode.max_batch", config.decode.max_batch, 1, 4096)
    within("decode.headroom_tokens", config.decode.headroom_tokens, 1, 1 << 20)
    within("decode.max_direct_tokens", config.decode.max_direct_tokens, 0, 4096)
    within("decode.max_direct_seconds", config.decode.max_direct_seconds, 0, 60)
    within("kv_cache.block_tokens", config.kv_cache.block_tokens, 1, 4096)
    within("kv_cache.tokens_per_rank", config.kv_cache.tokens_per_rank, config.kv_cache.block_tokens, 1 << 30)
    within("kv_cache.kept_fraction", config.kv_cache.kept_fraction, 0.0, 1.0)
    among("router.missing_kv", config.router.missing_kv, MISSING_KV)
    within("router.conversation_ttl_seconds", config.router.conversation_ttl_seconds, 0.0, 1e9)
    within("router.max_waiting_turns", config.router.max_waiting_turns, 1, 100_000)
    within("router.max_conversations", config.router.max_conversations, 1, 1 << 24)
    router = config.router
    if router.selector == "empirical" and router.alpha == router.beta == router.gamma == 0 and not router.profile:
        raise ConfigError(
            "router.selector: 'empirical' needs router.alpha, beta and gamma, fitted on this cluster, or its profile"
        )
    for key in ("compute_flops", "link_bytes_per_second"):
        within(f"router.{key}", getattr(config.router, key), 0, 1e30)
    for key in ("alpha", "beta", "gamma"):
        within(f"router.{key}", getattr(config.router, key), -1e6, 1e6)
    for item in fields(config.timeouts):
        within(f"timeouts.{item.name}", getattr(config.timeouts, item.name), 0.1, 86_400)
    within("gateway.max_seconds", config.gateway.max_seconds, 0.1, 86_400)
    address("gateway.listen", config.gateway.listen)
    address("router.listen", config.router.listen)
    for key in ("http", "metrics"):
        if getattr(config.gateway, key):
            address(f"gateway.{key}", getattr(config.gateway, key))
    among("metrics.also_as", config.metrics.also_as, METRIC_NAMES)
    for key in ("router", "prefill", "decode"):
        if getattr(config.metrics, key):
            address(f"metrics.{key}", getattr(config.metrics, key))
    check_sections(config.tls, config.internal_tls)
    doors = {f"gateway.{key}": getattr(config.gateway, key) for key in ("listen", "http")}
    check_doors(doors, config.tls, config.auth, is_insecure=config.gateway.insecure)


def _ring_transport(model: ModelConfig) -> None:
    try:
        select_ring_backend(model.ring_transport, model.device)
    except ConfigError as error:
        raise ConfigError(f"model.ring_transport: {error}") from error
