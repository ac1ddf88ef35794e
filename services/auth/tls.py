"""TLS from PEM files, for the gateway's public servers and for gRPC between ringserve processes."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import grpc

from ringserve.cp_core.transport.peer_tls import PeerTls, load_files, read

SECRET_VARIABLE = "RINGSERVE_PEER_SECRET"
"""Environment variable with the secret that a cluster's processes share. Children inherit it; if it is unset, internal
ports ask for no secret."""
MIN_TLS_VERSION = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, kw_only=True)
class ServerTls:
    """TLS of a public endpoint: certificate, key, and the client CA if clients must show certificates."""

    cert: str
    key: str
    client_ca: str = ""

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the gRPC server's credentials. Raises ConfigError for unusable files."""
        self.http_context()  # raises for unusable files: gRPC would accept them, and then answer no client
        return grpc.ssl_server_credentials(
            [(read("tls.key", self.key), read("tls.cert", self.cert))],
            read("tls.client_ca", self.client_ca) if self.client_ca else None,
            require_client_auth=bool(self.client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        """Return the HTTP server's TLS context. Raises ConfigError for unusable files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = MIN_TLS_VERSION
        context.set_alpn_protocols(["http/1.1"])
        load_files("tls", context, self.cert, self.key, ("client_ca", self.client_ca))
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def peer_server(tls: PeerTls | None) -> grpc.ServerCredentials | None:
    """Return the credentials of an internal server; None without TLS. Raises ConfigError."""
    if tls is None:
        return None
    key, cert, authority = _files(tls)
    return grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=True)


def peer_channel(tls: PeerTls | None) -> tuple[grpc.ChannelCredentials | None, tuple[tuple[str, str], ...]]:
    """Return an internal channel's credentials (None without TLS) and options. Raises ConfigError."""
    if tls is None:
        return None, ()
    key, cert, authority = _files(tls)
    options = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.ssl_channel_credentials(authority, key, cert), options


def _files(tls: PeerTls) -> tuple[bytes, bytes, bytes]:
    tls.check()
    names = (("key", tls.key), ("cert", tls.cert), ("ca", tls.ca))
    key, cert, authority = (read(f"internal_tls.{name}", path) for name, path in names)
    return key, cert, authority
