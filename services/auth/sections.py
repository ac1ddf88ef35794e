"""The sections of the configuration that guard doors. Paths of secrets, never secrets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """TLS of the gateway's doors, gRPC and HTTP: PEM files. With `client_ca` clients must show a certificate of its."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""


@dataclass(frozen=True, kw_only=True)
class InternalTlsConfig:
    """Mutual TLS between gateway, router and leaders: each shows `cert` and takes only what `ca` signed.

    `server_name` is the name in that certificate, where it is not the host that is called.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""


@dataclass(frozen=True, kw_only=True)
class AuthConfig:
    """`tokens` is the file that says which bearer tokens are whose; empty: everybody may call."""

    tokens: str = ""
