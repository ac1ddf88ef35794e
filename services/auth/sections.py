"""Sections of the configuration about TLS and tokens, and the rule which addresses need them.

Paths of secrets, never secrets.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.services.auth.tenants import read_tenants
from ringserve.services.auth.tls import ServerTls

SECRET_VARIABLE = "RINGSERVE_PEER_SECRET"
"""Environment variable of the secret by which the processes of a cluster know each other. Children inherit it; without
it their ports ask for none."""
SECRET_FILES = {"tls": ("cert", "key", "client_ca"), "internal_tls": ("cert", "key", "ca"), "auth": ("tokens",)}


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """TLS of the gateway's endpoints, gRPC and HTTP, from PEM files.

    With `client_ca` clients must show a certificate that it signed.
    """

    cert: str = ""
    key: str = ""
    client_ca: str = ""

    @property
    def files(self) -> ServerTls | None:
        """Files of TLS, or None for plain endpoints."""
        return ServerTls(cert=self.cert, key=self.key, client_ca=self.client_ca) if self.cert else None


@dataclass(frozen=True, kw_only=True)
class InternalTlsConfig:
    """Mutual TLS between gateway, router, leaders and ranks.

    Each shows `cert` and accepts only certificates that `ca` signed. `server_name` is the name in that certificate,
    where it differs from the host that is called. `insecure` allows listening beyond loopback without TLS.
    `allow_plain_ring` allows NCCL, which does not encrypt, inside rings, and `allow_plain_kv` NIXL between rings.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""
    insecure: bool = False
    allow_plain_ring: bool = False
    allow_plain_kv: bool = False

    @property
    def files(self) -> PeerTls | None:
        """Files of mutual TLS, or None where our processes connect without TLS."""
        name = self.server_name
        return PeerTls(cert=self.cert, key=self.key, ca=self.ca, server_name=name) if self.cert else None


@dataclass(frozen=True, kw_only=True)
class AuthConfig:
    """Authentication of clients.

    `tokens` is the file of tenants with their tokens and certificates; empty admits every caller.
    """

    tokens: str = ""


def absolute_paths(section: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths of secrets in a section absolute: other processes, which may run elsewhere, read them."""
    paths = SECRET_FILES.get(section, ())
    return {
        key: str(Path(value).expanduser().absolute()) if key in paths and isinstance(value, str) and value else value
        for key, value in part.items()
    }


def check_sections(tls: TlsConfig, internal: InternalTlsConfig, router: str, ray_address: str) -> None:
    """Check that files which belong together are given together, and that strangers reach no process of ours.

    Raises ConfigError.
    """
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("tls.cert: belongs together with tls.key; give both or neither")
    if tls.client_ca and not tls.cert:
        raise ConfigError("tls.client_ca: clients can prove themselves only to a server with tls.cert and tls.key")
    if len({bool(internal.cert), bool(internal.key), bool(internal.ca)}) > 1:
        raise ConfigError("internal_tls.cert: belongs together with internal_tls.key and .ca; give all or none")
    check_inside(router, ray_address, has_tls=bool(internal.cert), is_insecure=internal.insecure)


def check_ring(backend: str, internal: InternalTlsConfig, num_ranks: int) -> None:
    """Refuse a plain transport between ranks while other connections inside are encrypted. Raises ConfigError."""
    if internal.cert and backend != "sockets" and num_ranks > 1 and not internal.allow_plain_ring:
        raise ConfigError(
            f"model.ring_transport: {backend} does not encrypt what the ranks of a ring send each other, and "
            f"internal_tls is set; use sockets, or say internal_tls.allow_plain_ring: true"
        )


def check_carrier(carrier: str, internal: InternalTlsConfig) -> None:
    """Refuse a plain carrier of KV by name while other connections inside are encrypted. Raises ConfigError."""
    if internal.cert and carrier == "nixl" and not internal.allow_plain_kv:
        raise ConfigError(
            "kv_transfer.carrier: nixl does not encrypt KV between rings, and internal_tls is set; use sockets, or say "
            "internal_tls.allow_plain_kv: true"
        )


def check_files(tls: TlsConfig, internal: InternalTlsConfig, auth: AuthConfig) -> None:
    """Check files of keys and tokens now instead of half a minute into the start. Raises ConfigError."""
    if tls.files is not None:
        tls.files.http_context()
    if internal.files is not None:
        internal.files.check()
    if auth.tokens:
        read_tenants(Path(auth.tokens), takes_certificates=bool(tls.client_ca))


def check_public_endpoints(
    endpoints: Mapping[str, str], tls: TlsConfig, auth: AuthConfig, *, is_insecure: bool
) -> None:
    """Refuse an endpoint that strangers would reach.

    `endpoints` maps configuration keys to HOST:PORT. Raises ConfigError.
    """
    for key, address in endpoints.items():
        check_exposure(key, address, has_tls=bool(tls.cert), has_tokens=bool(auth.tokens), is_insecure=is_insecure)


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is reached from this machine only. A name is not looked up: it may change."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(key: str, address: str, *, has_tls: bool, has_tokens: bool, is_insecure: bool) -> None:
    """Refuse an endpoint that strangers would reach. Raises ConfigError."""
    if is_insecure or not address or is_loopback(address) or (has_tls and has_tokens):
        return
    lacking = " and ".join(
        name for name, is_there in (("TLS (tls.cert)", has_tls), ("tokens (auth.tokens)", has_tokens)) if not is_there
    )
    raise ConfigError(
        f"{key}: {address} is reached from other machines and lacks {lacking}; "
        f"give them, listen on 127.0.0.1, or say gateway.insecure: true"
    )


def check_inside(router: str, ray_address: str, *, has_tls: bool, is_insecure: bool) -> None:
    """Refuse endpoints between our own processes that strangers would reach. Raises ConfigError.

    These are the router's, and on a Ray cluster those of leaders and ranks.
    """
    if has_tls or is_insecure:
        return
    remedy = "give it, or say internal_tls.insecure: true"
    if not is_loopback(router):
        raise ConfigError(
            f"router.listen: {router} is reached from other machines and lacks TLS (internal_tls.cert); {remedy}"
        )
    if ray_address:
        raise ConfigError(
            f"ray.address: on the Ray cluster at {ray_address} leaders and ranks listen at the addresses of their "
            f"nodes, and lack TLS (internal_tls.cert); {remedy}"
        )
