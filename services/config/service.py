"""Sections about the service as a whole: its model, its doors, what its processes tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`path` is a Hugging Face model directory, or "builtin:tiny". `ring_transport` joins the ranks of a ring."""

    path: str = "builtin:tiny"
    dtype: str = "float32"
    device: str = "cpu"
    attention_backend: str = "auto"
    ring_transport: str = "auto"


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

    Ring i of a role listens at the role's port + i, or at any free port where that is 0; i counts the first pool's
    rings, then those of the others, by the pools' names. `also_as` "vllm" shows what vLLM has too under its names as
    well.
    """

    router: str = "127.0.0.1:0"
    prefill: str = "127.0.0.1:0"
    decode: str = "127.0.0.1:0"
    also_as: str = ""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Where the rings run: a Ray of our own on this machine, or the cluster at `address` ("auto" or HOST:PORT).

    In a cluster every process listens at the address of its node. A rank takes one unit of its role's resource, or of
    its pool's own, which places it on the nodes that offer it; empty: on any node.
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
