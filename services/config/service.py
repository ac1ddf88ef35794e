"""Sections about the service as a whole: its model, its endpoints, its metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.orchestration.protocol.plans import MAX_LOSS, MAX_TTFT, Bound
from ringserve.orchestration.protocol.rings import HEARTBEAT_SECONDS, LOST_SECONDS
from ringserve.workers.protocol.ranks import NO_QUANTIZATION


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model of the service. `path` is a Hugging Face model directory, "builtin:smollm2" or "builtin:tiny".

    `ring_transport` joins the ranks of a ring. On "cuda" each process takes `gpus_per_rank` of a GPU: with 0.25 four
    share one, and their rings go through host memory. `compile: auto` compiles the layers on GPUs and replays decode
    steps from recordings; `off` never does. `quantization: fp8` computes MLPs with 8-bit floats on GPUs that have them.
    """

    path: str = "builtin:tiny"
    dtype: str = "float32"
    device: str = "cpu"
    gpus_per_rank: float = 1.0
    attention_backend: str = "auto"
    ring_transport: str = "auto"
    compile: str = "auto"
    quantization: str = NO_QUANTIZATION


AUTO_JOURNAL = "auto"
"""Value of `router.journal` that lets `ringserve up` choose the directory."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Router: selection of a turn's algorithm, and conversations.

    `profile` is the file that `ringserve calibrate` wrote: it predicts times instead of each ring's own measurements.

    KV that only the decode ring retains is pulled, computed again, or treated in the way predicted to be faster
    (`missing_kv`: pull, recompute, auto). A conversation that names no time to live is deleted
    `conversation_ttl_seconds` after its last use (0: never); at most `max_waiting_turns` wait for one.
    `retain_prompts`: prompts share the KV of earlier ones that begin alike, also of those without a conversation. Those
    of different tenants do so only where `share_prompts` names the tenants together: "acme,beta gamma,delta" are two
    pairs. Each can tell then by the time of an answer what text the others have sent.

    A turn may be approximate where it names a bound; where it names none, within `max_loss` (nats a token) or
    `max_ttft` (seconds), unless both are 0. `sparse_losses` is the file that `ringserve calibrate --sparse` wrote.

    `journal` is the directory of what survives the router's death: conversations and running turns. "auto" takes one
    for the cluster's name and model beside its state file; with "" a router that dies forgets everything.
    """

    selector: str = "auto"
    profile: str = ""
    missing_kv: str = "auto"
    max_conversations: int = 10_000
    conversation_ttl_seconds: float = 0.0
    max_waiting_turns: int = 64
    retain_prompts: bool = True
    share_prompts: str = ""
    max_loss: float = 0.0
    max_ttft: float = 0.0
    sparse_losses: str = ""
    journal: str = AUTO_JOURNAL
    listen: str = "127.0.0.1:0"

    @property
    def bound(self) -> Bound | None:
        """Bound of turns that name none; None: they are exact."""
        if self.max_loss:
            return Bound(name=MAX_LOSS, limit=self.max_loss)
        return Bound(name=MAX_TTFT, limit=self.max_ttft) if self.max_ttft else None

    @property
    def communities(self) -> tuple[tuple[str, ...], ...]:
        """Tenants that share prompts, each community by itself."""
        return tuple(tuple(words.split(",")) for words in self.share_prompts.split())


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Gateway: gRPC at `listen`, OpenAI's HTTP at `http`, Prometheus at `metrics`. Empty switches off the last two.

    `model_name` is the model's name over HTTP; empty takes "builtin:tiny" or the name of the model's directory.
    `max_seconds` bounds a turn, `max_calls` the gRPC calls at a time. `page` serves a page at `/` of `http`. `insecure`
    allows listening beyond loopback without TLS or tokens.
    """

    listen: str = "127.0.0.1:50051"
    http: str = "127.0.0.1:8000"
    model_name: str = ""
    metrics: str = "127.0.0.1:9464"
    max_seconds: float = 600.0
    max_calls: int = 4096
    page: bool = True
    insecure: bool = False


UNKNOWN_FIELDS = ("refuse", "ignore")


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """OpenAI's HTTP at `gateway.http`.

    `unknown_fields` says what becomes of a request with fields that are not served: "refuse" it, or "ignore" them and
    log their names. `origins` are those whose pages in a browser may call, separated by spaces, or "*"; empty: none.
    """

    unknown_fields: str = "refuse"
    origins: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Metrics endpoints of router and ring leaders; the gateway has `gateway.metrics`. Empty switches one off.

    Ring i of a role listens at the role's port + i, or at any free port where that is 0; i counts the first pool's
    rings, then those of the others, by the pools' names. `also_as` "vllm" shows series that vLLM has too under its
    names as well.

    At most `tenants` tenants, those that the file of tenants names first, have series of their own at the gateways; the
    rest is shown together. 0: none has.
    """

    router: str = "127.0.0.1:0"
    prefill: str = "127.0.0.1:0"
    decode: str = "127.0.0.1:0"
    also_as: str = ""
    tenants: int = 20


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Ray: one of our own on this machine, or the cluster at `address` ("auto" or HOST:PORT).

    In a cluster every process listens at the address of its node. A rank takes one unit of its role's resource, or of
    its pool's own, which places it on the nodes that offer it; empty: on any node.
    """

    address: str = ""
    prefill_resource: str = ""
    decode_resource: str = ""


@dataclass(frozen=True, kw_only=True)
class TimeoutConfig:
    """Deadlines between our own processes, in seconds.

    Leaders, ranks and streams of tokens give a sign of life every `heartbeat`. One that gives none for `lost` counts as
    lost: its turns end, and its process is replaced.
    """

    start: float = 120.0
    step: float = 300.0
    control: float = 20.0
    transfer: float = 60.0
    stuck: float = 60.0
    heartbeat: float = HEARTBEAT_SECONDS
    lost: float = LOST_SECONDS


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs on standard error: nothing below `level`, as lines for people (`human`) or `json`.

    `levels` are those of some modules and of all below them, separated by spaces, such as
    "ringserve.orchestration.router=debug ringserve.services.gateway.openai=warning". Every line names its module.
    """

    level: str = "info"
    levels: str = ""
    format: str = "human"
