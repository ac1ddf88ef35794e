"""Configuration of everything that `ringserve up` starts: one frozen tree, and the checks across its sections."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.ring_backend import select_ring_backend
from ringserve.services.auth.tenants import read_tenants
from ringserve.services.config.sections import (
    KNOWN_KEYS,
    AuthConfig,
    DecodeConfig,
    GatewayConfig,
    HttpConfig,
    InternalTlsConfig,
    KvCacheConfig,
    KvTransferConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    Pool,
    PoolConfig,
    PrefillConfig,
    RayConfig,
    RouterConfig,
    TimeoutConfig,
    TlsConfig,
    TracingConfig,
)

MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True, config=KNOWN_KEYS)
class Config:
    """All configuration sections. `Config()` has every default."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    prefill: PrefillConfig = Field(default_factory=PrefillConfig)
    decode: DecodeConfig = Field(default_factory=DecodeConfig)
    kv_cache: KvCacheConfig = Field(default_factory=KvCacheConfig)
    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    tls: TlsConfig = Field(default_factory=TlsConfig)
    internal_tls: InternalTlsConfig = Field(default_factory=InternalTlsConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    timeouts: TimeoutConfig = Field(default_factory=TimeoutConfig)
    logs: LogConfig = Field(default_factory=LogConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Pools of both roles, prefill first."""
        return (*self.pools_of("prefill"), *self.pools_of("decode"))

    def pools_of(self, role: str) -> tuple[Pool, ...]:
        """Return the pools of "prefill" or of "decode": the first one, then the others by name."""
        section = self.prefill if role == "prefill" else self.decode
        resource = self.ray.prefill_resource if role == "prefill" else self.ray.decode_resource
        first = PoolConfig(rings=section.rings, cp=section.cp, tp=section.tp, threads_per_rank=section.threads_per_rank)
        pools: list[Pool] = []
        for name, each in (("", first), *sorted(section.pools.items())):
            pools.append(
                Pool(
                    role=role,
                    name=name,
                    rings=each.rings,
                    cp=each.cp,
                    tp=each.tp,
                    threads_per_rank=each.threads_per_rank,
                    max_waiting=section.max_waiting,
                    resource=each.resource or resource,
                    num_before=sum(pool.rings for pool in pools),
                )
            )
        return tuple(pools)

    @property
    def kv_carrier(self) -> str:
        """Carrier of KV between rings: `auto` is sockets if KV has to be encrypted, which NIXL cannot."""
        carrier, internal = self.kv_transfer.carrier, self.internal_tls
        return "sockets" if carrier == "auto" and internal.cert and not internal.allow_plain_kv else carrier

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_cache.memory_fraction and (self.model.device != "cuda" or self.model.gpus_per_rank < 1):
            raise ConfigError(
                f"kv_cache.memory_fraction: {self.kv_cache.memory_fraction:g} needs ranks with a whole GPU each; give "
                f"kv_cache.tokens_per_rank instead"
            )
        for pool in self.pools_of("decode"):
            if self.decode.variant == "helix" and pool.tp > 1:
                raise ConfigError(f"decode.variant: 'helix' is not allowed with {pool.key}.tp {pool.tp}; give tp 1")
        for role, least in self.least_rings.items():
            if least > (most := sum(pool.rings for pool in self.pools_of(role))):
                raise ConfigError(
                    f"{role}.min_rings: {least} is not allowed with {most} {role} rings; give 0 to {most}"
                )
        self._check_metrics_ports()
        self._check_encryption()
        self._check_exposure()
        return self

    @property
    def least_rings(self) -> dict[str, int]:
        """Number of rings that always serve, by role; only roles whose other rings may leave are listed."""
        least = {"prefill": self.prefill.min_rings, "decode": self.decode.min_rings}
        return {role: number for role, number in least.items() if number}

    def _check_metrics_ports(self) -> None:
        """Rings of a role take ports in a row: they must exist, and differ from the other role's on the same host."""
        rows = []
        for role in ("prefill", "decode"):
            host, _, text = getattr(self.metrics, role).rpartition(":")
            first, num_rings = int(text or 0), sum(pool.rings for pool in self.pools_of(role))
            if first + num_rings - 1 > MAX_PORT:
                raise ConfigError(
                    f"metrics.{role}: {num_rings} rings take the ports from {first} on; the last port is {MAX_PORT}"
                )
            rows.append((host, range(first, first + num_rings) if first else range(0)))
        (host, prefill), (other_host, decode) = rows
        if host == other_host and max(prefill.start, decode.start) < min(prefill.stop, decode.stop):
            raise ConfigError(
                f"metrics.decode: decode rings take the ports from {decode.start} to {decode.stop - 1}, and prefill "
                f"rings take {prefill.start} to {prefill.stop - 1}; give ports that differ"
            )

    def _check_encryption(self) -> None:
        """Refuse a transport that does not encrypt while other connections inside are encrypted."""
        model, internal = self.model, self.internal_tls
        try:
            backend = select_ring_backend(model.ring_transport, model.device, model.gpus_per_rank)
        except ConfigError as error:
            raise ConfigError(f"model.ring_transport: {error}") from None
        is_alone = all(pool.cp * pool.tp == 1 for pool in self.pools)
        if internal.cert and backend != "sockets" and not is_alone and not internal.allow_plain_ring:
            raise ConfigError(
                f"model.ring_transport: {backend} does not encrypt the messages of a ring, and internal_tls is set; "
                f"give sockets, or internal_tls.allow_plain_ring: true"
            )
        if internal.cert and self.kv_transfer.carrier == "nixl" and not internal.allow_plain_kv:
            raise ConfigError(
                "kv_transfer.carrier: nixl does not encrypt KV between rings, and internal_tls is set; "
                "give sockets, or internal_tls.allow_plain_kv: true"
            )

    def _check_exposure(self) -> None:
        """Refuse endpoints that strangers would reach."""
        for key in ("listen", "http"):
            check_exposure(f"gateway.{key}", getattr(self.gateway, key), self)
        if self.internal_tls.cert or self.internal_tls.insecure:
            return
        remedy = "lacks TLS (internal_tls.cert); give it, or internal_tls.insecure: true"
        if not is_loopback(self.router.listen):
            raise ConfigError(f"router.listen: {self.router.listen} is reached from other machines and {remedy}")
        if self.ray.address:
            raise ConfigError(
                f"ray.address: the Ray cluster at {self.ray.address} reaches leaders and ranks at the addresses of "
                f"their nodes and {remedy}"
            )

    def check_files(self) -> None:
        """Check files of keys and tokens now instead of half a minute into the start. Raises ConfigError."""
        if self.tls.files is not None:
            self.tls.files.http_context()
        if self.internal_tls.files is not None:
            self.internal_tls.files.check()
        if self.auth.tokens:
            read_tenants(Path(self.auth.tokens), takes_certificates=bool(self.tls.client_ca))


def check_exposure(key: str, address: str, config: Config) -> None:
    """Refuse a gateway endpoint that strangers would reach, such as 0.0.0.0:8000 without TLS. Raises ConfigError."""
    has = {"TLS (tls.cert)": bool(config.tls.cert), "tokens (auth.tokens)": bool(config.auth.tokens)}
    if config.gateway.insecure or not address or is_loopback(address) or all(has.values()):
        return
    lacking = " and ".join(name for name, is_there in has.items() if not is_there)
    raise ConfigError(
        f"{key}: {address} is reached from other machines and lacks {lacking}; "
        f"give them, listen on 127.0.0.1, or say gateway.insecure: true"
    )


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is reached from this machine only. A name is not looked up: it may change."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
