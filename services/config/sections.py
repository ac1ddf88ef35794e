"""Configuration sections. Each key has its range or its allowed words, one example and its meaning.

The reference pages are made from these. A section is made from keywords and never changes. A value that is not allowed
raises `ValidationError`, which `services.config.sources` turns into a sentence; checks across keys raise ConfigError
with their own sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictFloat, StrictInt, model_validator
from pydantic.dataclasses import dataclass

from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.orchestration.protocol.plans import MAX_LOSS, MAX_TTFT, Bound
from ringserve.orchestration.protocol.rings import HEARTBEAT_SECONDS, LOST_SECONDS, PrefillScheduling
from ringserve.services.auth.tenants import NAME as TENANT_NAME
from ringserve.services.auth.tls import ServerTls
from ringserve.services.telemetry.logs import levels_by_module

KNOWN_KEYS: Final = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Pydantic settings of a section: unknown keys, NaN and infinities are refused."""
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
DEVICES: Final = get_args(Device)
MetricNames = Literal["", "vllm"]
METRIC_NAMES: Final = get_args(MetricNames)
AUTO_JOURNAL = "auto"
"""Value of `router.journal` that lets `ringserve up` choose the directory."""


def _whole(value: object) -> object:
    """Take 2.0 for 2: Helm writes large numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[StrictInt, BeforeValidator(_whole)]
PORT = r"([0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
ORIGIN = r"(\*|[a-z][a-z0-9+.-]*://[^\s/?#]+)"
Address = Annotated[str, Field(pattern=rf"^.+:{PORT}$", title="HOST:PORT")]
OptionalAddress = Annotated[str, Field(pattern=rf"^(.+:{PORT})?$", title="HOST:PORT, or '' for none")]
Origins = Annotated[
    str, Field(pattern=rf"^\s*({ORIGIN}(\s+|$))*$", title="SCHEME://HOST[:PORT] with spaces between, or *")
]
Hosts = Annotated[
    str, Field(pattern=r"^\s*((\*|[A-Za-z0-9_.-]+)(\s+|$))*$", title="names with spaces between, without ports, or *")
]
PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]{0,15}$", title="up to 16 of a-z and 0-9, a letter first")]


def _absolute(path: str) -> str:
    """Make the path of a secret absolute: other processes, which may run elsewhere, read the file."""
    return str(Path(path).expanduser().absolute()) if path else path


SecretFile = Annotated[str, AfterValidator(_absolute), Field(title="the path of a file, or '' for none")]

Rings = Annotated[Whole, Field(ge=1, le=1024, description="Number of rings.", examples=[4])]
LeastRings = Annotated[
    Whole,
    Field(
        ge=0,
        le=1024,
        description="Least number of the role's rings that serve. The other rings are taken out of service while "
        "fewer are enough. 0: all always serve.",
        examples=[1],
    ),
]
Ranks = Annotated[
    Whole, Field(ge=1, le=64, description="Ranks in a ring; they share the tokens of a prompt.", examples=[8])
]
TensorRanks = Annotated[
    Whole, Field(ge=1, le=64, description="Processes of a rank; they share the attention heads.", examples=[2])
]
Threads = Annotated[Whole, Field(ge=1, le=1024, description="CPU threads of a process.", examples=[8])]
MaxWaiting = Annotated[
    Whole,
    Field(ge=1, le=1_000_000, description="Turns that may wait for a ring before it refuses more.", examples=[64]),
]
Seconds = Annotated[StrictFloat, Field(ge=0.1, le=86_400)]


def default_dtype(device: str) -> str:
    """Return the type that `model.dtype: auto` stands for: attention on GPUs has no fast kernel for float32."""
    return "bfloat16" if device == "cuda" else "float32"


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class ModelConfig:
    """Model of the service, and how ranks run it."""

    path: str = Field(
        default="builtin:tiny",
        min_length=1,
        title="a Hugging Face model directory, builtin:smollm2, builtin:tiny or builtin:needle",
        description="Model of all processes.",
        examples=["/models/llama3-8b"],
    )
    dtype: Dtype = Field(
        default="auto",
        description="Type of weights and activations; auto is float32 on CPUs and bfloat16 on GPUs.",
        examples=["bfloat16"],
    )
    device: Device = Field(default="cpu", description="Device of the ranks.", examples=["cuda"])
    gpus_per_rank: StrictFloat = Field(
        default=1.0,
        ge=0.01,
        le=1.0,
        description="Share of a GPU that a process takes. Ranks that share one send messages through host memory.",
        examples=[0.25],
    )
    attention_backend: Literal[
        "auto",
        "native_cpu",
        "torch_cpu_flash",
        "flash_attn_3",
        "triton_decode",
        "torch_cuda_flash",
        "flash_attn",
        "reference",
    ] = Field(
        default="auto", description="Attention kernels; auto takes the fastest for the device.", examples=["flash_attn"]
    )
    ring_transport: Literal["auto", "nccl", "sockets"] = Field(
        default="auto", description="Transport between the ranks of a ring.", examples=["sockets"]
    )
    compile: Literal["auto", "off"] = Field(
        default="auto",
        description="auto compiles layers on GPUs and replays decode steps from recordings.",
        examples=["off"],
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="fp8 computes MLPs with 8-bit floats on GPUs that have them; it needs dtype bfloat16.",
        examples=["fp8"],
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype == "auto":  # so that code that reads the configuration never sees 'auto'
            object.__setattr__(self, "dtype", default_dtype(self.device))
        if (self.device, self.dtype, self.attention_backend) == ("cuda", "float32", "auto"):
            raise ConfigError(
                "model.dtype: 'float32' has no fast attention kernel on GPUs; allowed with model.device cuda are "
                "bfloat16 and float16, or model.attention_backend reference"
            )
        if self.quantization == "fp8" and (self.device, self.dtype) != ("cuda", "bfloat16"):
            raise ConfigError(
                f"model.quantization: 'fp8' is not allowed with {self.device} and {self.dtype}; "
                f"give model.device cuda and model.dtype bfloat16"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class PoolConfig:
    """Further rings of a role, of another size; their other settings are the role's."""

    rings: Rings = 1
    cp: Ranks = 1
    tp: TensorRanks = 1
    threads_per_rank: Threads = 1
    resource: str = Field(
        default="",
        description="Ray resource of which a process takes one unit; '' takes the role's.",
        examples=["short-nodes"],
    )


PoolsByName = Annotated[
    Mapping[PoolName, PoolConfig],
    Field(
        max_length=16,
        title="up to 16 names, each with rings, cp, tp, threads_per_rank or resource",
        description="Further rings of other sizes, by the name of their pool.",
        examples=[{"short": {"rings": 4, "cp": 1}}],
    ),
]
"""At most 16: the name of a pool is part of the names of its rings, and so of metrics' labels."""


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class PrefillConfig:
    """Prefill rings, and how prompts are cut into steps.

    One work unit is the cost of a token's matrix products. Attention is counted in the same unit.
    """

    rings: Rings = 1
    cp: Ranks = 2
    tp: TensorRanks = 1
    min_rings: LeastRings = 0
    chunk_tokens: Whole = Field(
        default=4096, ge=1, le=1 << 24, description="New tokens that a step computes at most.", examples=[8192]
    )
    step_budget: StrictFloat = Field(
        default=0.0,
        ge=0,
        le=1e15,
        description="Work units of a step at most; 0 is the work of chunk_tokens tokens without a prefix.",
        examples=[20_000.0],
    )
    step_seconds: StrictFloat = Field(
        default=0.5,
        ge=0,
        le=3600,
        description="Target for the duration of a step, in seconds, predicted from measured rates. A short prompt "
        "waits about that long. 0: no target.",
        examples=[0.25],
    )
    min_chunk_tokens: Whole = Field(
        default=256, ge=1, le=1 << 24, description="Least tokens of a long prompt in a step.", examples=[1024]
    )
    whole_tokens: Whole = Field(
        default=512,
        ge=0,
        le=1 << 24,
        description="Most tokens of a new prompt that may be computed whole on one rank, if several such prompts load "
        "the ranks evenly; 0: every prompt is cut over all ranks.",
        examples=[0],
    )
    ageing_seconds: StrictFloat = Field(
        default=10.0, ge=0.001, le=86_400, description="Wait that makes up for one step of priority.", examples=[2.0]
    )
    max_queue_work: StrictFloat = Field(
        default=50e6, ge=1, le=1e15, description="Work units in a ring's queue before it refuses more.", examples=[1e6]
    )
    max_waiting: MaxWaiting = 256
    threads_per_rank: Threads = 1
    pools: PoolsByName = Field(default_factory=dict)

    @property
    def scheduling(self) -> PrefillScheduling:
        return PrefillScheduling(**{each.name: getattr(self, each.name) for each in fields(PrefillScheduling)})


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class DecodeConfig:
    """Decode rings, their batches, and the prompts that they compute themselves."""

    rings: Rings = 1
    cp: Ranks = 2
    tp: TensorRanks = 1
    min_rings: LeastRings = 0
    max_batch: Whole = Field(
        default=32, ge=1, le=4096, description="Turns that a ring decodes at a time.", examples=[128]
    )
    max_waiting: MaxWaiting = 256
    threads_per_rank: Threads = 1
    pools: PoolsByName = Field(default_factory=dict)
    variant: Literal["auto", "gather", "pass_q", "helix"] = Field(
        default="auto",
        description="How a step is computed: every rank all rows (gather), each a part (pass_q), or ranks share the "
        "weights behind attention (helix, with tp 1); auto takes the one predicted fastest.",
        examples=["gather"],
    )
    drafts: Literal["on", "off"] = Field(
        default="on",
        description="Decode steps also check guesses of the next tokens, taken from the sequence's text, as long as "
        "they pay. So a step may give several tokens, which are the same as without guesses.",
        examples=["off"],
    )
    draft_model: str = Field(
        default="",
        description="A small model with the same tokenizer, a directory, that guesses where the text gives none. "
        "The first rank of a ring computes it beside its own work. Empty: none.",
        examples=["/models/SmolLM2-135M-Instruct"],
    )
    draft_context: Whole = Field(
        default=2048,
        ge=64,
        le=1 << 20,
        description="Newest tokens of a turn that the draft model sees at most, and has KV for.",
        examples=[8192],
    )
    headroom_tokens: Whole = Field(
        default=128,
        ge=1,
        le=1 << 20,
        description="KV room, in tokens, that a turn gets for its answer at its start, and again each time it needs "
        "more. If none is left, the youngest turn is preempted and resumed later.",
        examples=[512],
    )
    max_direct_tokens: Whole = Field(
        default=128,
        ge=0,
        le=4096,
        description="New tokens that a decode ring computes itself at most if it retains the rest; 0 is never.",
        examples=[0],
    )
    max_direct_seconds: StrictFloat = Field(
        default=0.15,
        ge=0,
        le=60,
        description="Longest predicted delay of the running batch, in seconds, for which a decode ring computes a "
        "prompt itself (see max_direct_tokens); four times as long if no turn runs on the ring.",
        examples=[0.5],
    )
    least_share: StrictFloat = Field(
        default=0.25,
        ge=0.05,
        le=1,
        description="On one machine with fewer cores than threads of ranks: share of the time that decode steps get "
        "while a prompt is computed. For the rest of the time they pause, but the next step begins at most 0.15 s "
        "after the one before. 1 means no pauses: answers come faster then, and prompts later.",
        examples=[0.5],
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class KvCacheConfig:
    """KV cache of every rank. If `tp` is more than 1, each process of a rank holds only the KV of its own heads."""

    block_tokens: Whole = Field(
        default=16,
        ge=1,
        le=4096,
        description="Tokens of a block. Kernels that follow block tables need a multiple of their page (256 on GPUs).",
        examples=[256],
    )
    tokens_per_rank: Whole = Field(
        default=65_536, ge=1, le=1 << 30, description="Tokens whose KV a rank holds.", examples=[1_048_576]
    )
    memory_fraction: StrictFloat = Field(
        default=0.0,
        ge=0.0,
        le=0.95,
        description="Share that KV takes of the GPU memory that is free after the weights are loaded. It replaces "
        "tokens_per_rank; 0 means that tokens_per_rank holds.",
        examples=[0.9],
    )
    kept_fraction: StrictFloat = Field(
        default=1.0, ge=0.0, le=1.0, description="Share of the KV that may be retained between turns.", examples=[0.5]
    )

    @property
    def num_blocks(self) -> int:
        return self.tokens_per_rank // self.block_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokens_per_rank < self.block_tokens:
            raise ConfigError(
                f"kv_cache.tokens_per_rank: {self.tokens_per_rank} is not allowed; give at least one block, which is "
                f"{self.block_tokens} tokens"
            )
        if self.memory_fraction and self.tokens_per_rank != type(self).tokens_per_rank:
            raise ConfigError(
                f"kv_cache.memory_fraction: {self.memory_fraction:g} is not allowed beside kv_cache.tokens_per_rank "
                f"{self.tokens_per_rank}; give one of them"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class KvTransferConfig:
    """KV on its way between rings."""

    carrier: Literal["auto", "nixl", "sockets"] = Field(
        default="auto",
        description="auto is NIXL between GPUs that it reaches, and sockets otherwise. With nixl, transfers to a rank "
        "that NIXL does not reach fail.",
        examples=["sockets"],
    )
    slot_bytes: Whole = Field(
        default=16 << 20,
        ge=1 << 20,
        le=16 << 20,
        description="Bytes of each of the 8 + 8 slots that a rank has on its device for NIXL.",
        examples=[4 << 20],
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class RouterConfig:
    """Router: selection of a turn's algorithm, conversations, and approximate turns."""

    selector: Literal["auto", "pass_kv", "pass_q", "gather_kv", "chain", "sp_ntp"] = Field(
        default="auto", description="Algorithm of prefills; auto takes the fastest.", examples=["pass_kv"]
    )
    profile: str = Field(
        default="",
        title="the path of a file, the name of a shipped profile, or '' for none",
        description="File that ringserve calibrate wrote; it predicts times instead of each ring's own measurements.",
        examples=["/etc/ringserve/profile.json"],
    )
    missing_kv: Literal["auto", "pull", "recompute"] = Field(
        default="auto", description="What to do with KV that only the decode ring retains.", examples=["pull"]
    )
    max_conversations: Whole = Field(
        default=10_000, ge=1, le=1 << 24, description="Conversations that are remembered.", examples=[100_000]
    )
    conversation_ttl_seconds: StrictFloat = Field(
        default=0.0,
        ge=0.0,
        le=1e9,
        description="Seconds after its last use until a conversation is deleted, unless its requests name another "
        "time; 0 is never.",
        examples=[3600.0],
    )
    max_waiting_turns: Whole = Field(
        default=64, ge=1, le=100_000, description="Turns that may wait for one conversation.", examples=[8]
    )
    spare: bool = Field(
        default=True,
        description="Keep a second router loaded, which serves at once if the first ends (80 MB of memory). Not needed "
        "where routers are forked, on one machine without GPUs.",
        examples=[False],
    )
    scale_busy_share: StrictFloat = Field(
        default=0.6,
        ge=0.01,
        le=1.0,
        description="Target load if min_rings lets rings leave: the share of its time that a prefill ring computes, "
        "and the share of a decode ring's places and KV that turns take.",
        examples=[0.4],
    )
    scale_wait_seconds: StrictFloat = Field(
        default=2.0,
        ge=0.01,
        le=3600,
        description="If min_rings lets rings leave: when a new prompt would wait longer than this, in seconds, another "
        "ring is brought back.",
        examples=[0.5],
    )
    scale_down_seconds: StrictFloat = Field(
        default=300.0,
        ge=1,
        le=86_400,
        description="Seconds for which fewer rings must have been enough before one leaves.",
        examples=[900.0],
    )
    retain_prompts: bool = Field(
        default=True,
        description="Share the KV of earlier prompts that begin alike, also without a conversation.",
        examples=[False],
    )
    share_prompts: str = Field(
        default="",
        description="Tenants that share prompts: names joined by commas, communities separated by spaces. Each can "
        "tell by the time of an answer what text the others have sent.",
        examples=["acme,beta gamma,delta"],
    )
    max_loss: StrictFloat = Field(
        default=0.0,
        ge=0.0,
        le=1e6,
        description="Loss, in nats a token, within which turns that name no bound may be approximate; 0 is exact.",
        examples=[0.01],
    )
    max_ttft: StrictFloat = Field(
        default=0.0,
        ge=0.0,
        le=86_400,
        description="Target of seconds to the first token. Turns that name no bound may be approximate to reach it; "
        "0 is exact.",
        examples=[2.0],
    )
    sparse_losses: str = Field(
        default="",
        description="File that ringserve calibrate --sparse wrote for the model; '' is exact.",
        examples=["/etc/ringserve/losses.json"],
    )
    journal: str = Field(
        default=AUTO_JOURNAL,
        description="Directory of what survives the router's death: conversations and running turns. auto takes one "
        "beside the state file; with '' a router that dies forgets everything.",
        examples=["/var/lib/ringserve/journal"],
    )
    listen: Address = Field(default="127.0.0.1:0", description="Address of the router.", examples=["0.0.0.0:50050"])

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_loss and self.max_ttft:
            raise ConfigError(
                f"router.max_loss: {self.max_loss:g} is not allowed beside router.max_ttft; give one of them"
            )
        if self.bound is not None and not self.sparse_losses:
            raise ConfigError(
                f"router.{self.bound.name}: {self.bound.limit:g} is not allowed without router.sparse_losses; give the "
                f"file that ringserve calibrate --sparse writes"
            )
        for tenant, count in Counter(tenant for members in self.communities for tenant in members).items():
            if not TENANT_NAME.fullmatch(tenant) or count > 1:
                why = "is named twice" if count > 1 else "is no tenant's name"
                raise ConfigError(f"router.share_prompts: {tenant!r} {why}; give each name once, e.g. acme,beta")
        return self


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class GatewayConfig:
    """Gateway: the endpoints of clients and their limits."""

    listen: Address = Field(default="127.0.0.1:50051", description="Address of gRPC.", examples=["0.0.0.0:50051"])
    http: OptionalAddress = Field(
        default="127.0.0.1:8000",
        description="Address of the HTTP endpoint with OpenAI's API.",
        examples=["0.0.0.0:8000"],
    )
    model_name: str = Field(
        default="",
        description="Model name over HTTP; '' is builtin:tiny or the name of the model's directory.",
        examples=["llama3-8b"],
    )
    metrics: OptionalAddress = Field(
        default="127.0.0.1:9464", description="Address of the gateway's Prometheus metrics.", examples=["0.0.0.0:9464"]
    )
    max_seconds: Seconds = Field(default=600.0, description="Longest time of a turn, in seconds.", examples=[60.0])
    max_calls: Whole = Field(default=4096, ge=1, le=1_000_000, description="gRPC calls at a time.", examples=[512])
    page: bool = Field(default=True, description="Serve a page at / of gateway.http.", examples=[False])
    spare: bool = Field(
        default=True,
        description=(
            "Keep a second gateway loaded, which serves at once if the first ends (ringserve up; 80 MB of memory)."
        ),
        examples=[False],
    )
    insecure: bool = Field(
        default=False, description="Allow listening beyond loopback without TLS or tokens.", examples=[True]
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class HttpConfig:
    """The HTTP endpoint with OpenAI's API, at `gateway.http`."""

    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="ignore",
        description="Ignore fields of requests that are not served and log their names once, or refuse such requests.",
        examples=["refuse"],
    )
    origins: Origins = Field(
        default="",
        description="Origins whose pages may call from a browser, separated by spaces, or * for all.",
        examples=["https://chat.example.org http://localhost:3000"],
    )
    hosts: Hosts = Field(
        default="",
        description=(
            "Names in the Host header that a gateway without tokens serves, beside addresses and names that nobody can "
            "register, such as localhost; separated by spaces, or * for all."
        ),
        examples=["chat.example.org"],
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class TlsConfig:
    """TLS of the gateway's endpoints, gRPC and HTTP, from PEM files."""

    cert: SecretFile = Field(default="", description="Certificate of the gateway.", examples=["/etc/tls/tls.crt"])
    key: SecretFile = Field(default="", description="Key of the certificate.", examples=["/etc/tls/tls.key"])
    client_ca: SecretFile = Field(
        default="", description="Authority that must have signed client certificates.", examples=["/etc/tls/ca.crt"]
    )

    @property
    def files(self) -> ServerTls | None:
        """Files of TLS, or None for plain endpoints."""
        return ServerTls(cert=self.cert, key=self.key, client_ca=self.client_ca) if self.cert else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("tls.cert: belongs together with tls.key; give both or neither")
        if self.client_ca and not self.cert:
            raise ConfigError("tls.client_ca: client certificates need a server with TLS; give tls.cert and tls.key")
        return self


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class InternalTlsConfig:
    """Mutual TLS between gateway, router, leaders and ranks, from PEM files."""

    cert: SecretFile = Field(
        default="", description="Certificate that each process shows.", examples=["/etc/ringserve-internal/tls.crt"]
    )
    key: SecretFile = Field(
        default="", description="Key of the certificate.", examples=["/etc/ringserve-internal/tls.key"]
    )
    ca: SecretFile = Field(
        default="",
        description="Authority that must have signed the peers' certificates.",
        examples=["/etc/ringserve-internal/ca.crt"],
    )
    server_name: str = Field(
        default="",
        description="Name in the certificate, if it differs from the host that is called.",
        examples=["ringserve.internal"],
    )
    insecure: bool = Field(default=False, description="Allow listening beyond loopback without TLS.", examples=[True])
    allow_plain_ring: bool = Field(
        default=False, description="Allow NCCL, which does not encrypt, inside rings.", examples=[True]
    )
    allow_plain_kv: bool = Field(
        default=False, description="Allow NIXL, which does not encrypt, between rings.", examples=[True]
    )

    @property
    def files(self) -> PeerTls | None:
        """Files of mutual TLS, or None if our processes connect without TLS."""
        name = self.server_name
        return PeerTls(cert=self.cert, key=self.key, ca=self.ca, server_name=name) if self.cert else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({bool(self.cert), bool(self.key), bool(self.ca)}) > 1:
            raise ConfigError("internal_tls.cert: belongs together with internal_tls.key and .ca; give all or none")
        return self


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class AuthConfig:
    """Client authentication."""

    tokens: SecretFile = Field(
        default="",
        description="File of tenants with their tokens and certificates; '' admits every caller.",
        examples=["/etc/ringserve/tenants.yaml"],
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class MetricsConfig:
    """Metrics endpoints of router and ring leaders; the gateway has `gateway.metrics`.

    Ring i of a role listens at the role's port + i, or at any free port if that is 0. i counts the first pool's rings,
    then the other pools' rings, by name.
    """

    router: OptionalAddress = Field(
        default="127.0.0.1:0", description="Address of the router's metrics.", examples=["0.0.0.0:9465"]
    )
    prefill: OptionalAddress = Field(
        default="127.0.0.1:0", description="First address of the prefill rings.", examples=["0.0.0.0:9500"]
    )
    decode: OptionalAddress = Field(
        default="127.0.0.1:0", description="First address of the decode rings.", examples=["0.0.0.0:9600"]
    )
    also_as: MetricNames = Field(
        default="",
        description="vllm: series that vLLM also has are shown a second time, under vLLM's names.",
        examples=["vllm"],
    )
    tenants: Whole = Field(
        default=20,
        ge=0,
        le=1000,
        description="Tenants, in the order of the tenants file, with series of their own; the rest is shown together.",
        examples=[100],
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class RayConfig:
    """Ray. In a cluster every process listens at the address of its node."""

    address: str = Field(
        default="",
        description="Ray cluster, auto or HOST:PORT; '' starts one on this machine.",
        examples=["10.0.0.1:6379"],
    )
    prefill_resource: str = Field(
        default="",
        description="Resource of which each prefill process takes one unit; '' runs it on any node.",
        examples=["prefill-nodes"],
    )
    decode_resource: str = Field(
        default="",
        description="Resource of which each decode process takes one unit; '' runs it on any node.",
        examples=["decode-nodes"],
    )


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class TimeoutConfig:
    """Deadlines between our own processes, in seconds."""

    start: Seconds = Field(default=120.0, description="Start of a process.", examples=[600.0])
    step: Seconds = Field(default=300.0, description="One step of a ring.", examples=[900.0])
    control: Seconds = Field(default=20.0, description="A call between router, leaders and ranks.", examples=[60.0])
    transfer: Seconds = Field(default=60.0, description="KV between two rings.", examples=[300.0])
    stuck: Seconds = Field(
        default=60.0, description="Time without progress after which a ring is unhealthy.", examples=[120.0]
    )
    heartbeat: Seconds = Field(
        default=HEARTBEAT_SECONDS,
        description="Interval of the heartbeats of leaders, ranks and token streams.",
        examples=[0.5],
    )
    lost: Seconds = Field(
        default=LOST_SECONDS,
        description="Time without a heartbeat after which a process is lost, its turns end and it is replaced.",
        examples=[10.0],
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lost < 2 * self.heartbeat:
            raise ConfigError(
                f"timeouts.lost: {self.lost:g} is not allowed with timeouts.heartbeat {self.heartbeat:g}; give twice "
                f"that or more"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class LogConfig:
    """Logs on standard error. Every line names its module."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged.", examples=["debug"]
    )
    levels: str = Field(
        default="",
        description="Levels of some modules and all below them, separated by spaces.",
        examples=["ringserve.orchestration.router=debug ringserve.services.gateway.openai=warning"],
    )
    format: Literal["human", "json"] = Field(
        default="human", description="Lines for people, or JSON for machines.", examples=["json"]
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            levels_by_module(self.levels)
        except ConfigError as error:
            raise ConfigError(f"logs.levels: {error}") from None
        return self


@plain_dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Pool with all settings of its rings. `name` is empty for a role's first pool.

    `num_before` is the number of the role's rings in earlier pools, which take the lower metrics ports.
    """

    role: str
    name: str
    rings: int
    cp: int
    tp: int
    threads_per_rank: int
    max_waiting: int
    resource: str
    num_before: int

    @property
    def key(self) -> str:
        """Key of the pool in the configuration."""
        return f"{self.role}.pools.{self.name}" if self.name else self.role

    @property
    def num_threads(self) -> int:
        """Threads of all its rings together."""
        return self.rings * self.cp * self.tp * self.threads_per_rank

    def ring_name(self, number: int) -> str:
        """Return the name of a ring, unique as names of pools begin with a letter."""
        return "-".join((self.role, *([self.name] if self.name else []), str(number)))


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class TracingConfig:
    """Turn traces, sent to a collector."""

    endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^/\s]+:([0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])/?)?$",
        title="http://HOST:PORT, https://HOST:PORT for TLS, or '' for no traces",
        description="Collector that takes OTLP over gRPC.",
        examples=["http://collector:4317"],
    )
    sample_ratio: StrictFloat = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of the turns that are traced if the client does not decide (traceparent).",
        examples=[0.1],
    )
