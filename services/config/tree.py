"""Configuration: one frozen tree, checked when it is made, with every default in its sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringserve.services.auth.sections import AuthConfig, InternalTlsConfig, TlsConfig
from ringserve.services.config.checks import check
from ringserve.services.config.rings import (
    DecodeConfig,
    KvCacheConfig,
    KvTransferConfig,
    Pool,
    PoolConfig,
    PrefillConfig,
    pools_of,
)
from ringserve.services.config.service import (
    GatewayConfig,
    HttpConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    RayConfig,
    RouterConfig,
    TimeoutConfig,
)
from ringserve.services.telemetry.tracing.tracer import TracingConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of everything that `ringserve up` starts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    kv_transfer: KvTransferConfig = field(default_factory=KvTransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    internal_tls: InternalTlsConfig = field(default_factory=InternalTlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    logs: LogConfig = field(default_factory=LogConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        check(self)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Pools of both roles, those of prefill first."""
        return (*self.pools_of("prefill"), *self.pools_of("decode"))

    @property
    def kv_carrier(self) -> str:
        """Carrier of KV between rings: `auto` is sockets where KV has to be encrypted, which NIXL cannot."""
        carrier, internal = self.kv_transfer.carrier, self.internal_tls
        return "sockets" if carrier == "auto" and internal.cert and not internal.allow_plain_kv else carrier

    def pools_of(self, role: str) -> tuple[Pool, ...]:
        """Return the pools of "prefill" or of "decode"."""
        is_prefill = role == "prefill"
        section = self.prefill if is_prefill else self.decode
        first = PoolConfig(
            rings=section.rings,
            cp=section.cp,
            tp=section.tp,
            threads_per_rank=section.threads_per_rank,
            resource=self.ray.prefill_resource if is_prefill else self.ray.decode_resource,
        )
        return pools_of(role, first, section.pools, max_waiting=section.max_waiting)
