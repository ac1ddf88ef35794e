"""TLS of our doors and between our own processes, from PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from cp_core.errors import ConfigError

CIPHERS_SINCE = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, kw_only=True)
class DoorTls:
    """A public door's: its certificate and key, and the authority of clients' certificates where they must have one."""

    cert: str
    key: str
    client_ca: str = ""

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Raises ConfigError for files that cannot be used."""
        self.http_context()  # gRPC takes whatever it is given, and then answers nobody
        return grpc.ssl_server_credentials(
            [(read("tls.key", self.key), read("tls.cert", self.cert))],
            read("tls.client_ca", self.client_ca) if self.client_ca else None,
            require_client_auth=bool(self.client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        """Raises ConfigError for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = CIPHERS_SINCE
        context.set_alpn_protocols(["http/1.1"])
        _load("tls", context, self.cert, self.key, self.client_ca)
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(frozen=True, kw_only=True)
class PeerTls:
    """Between our own processes, always mutual: each shows `cert`, and takes only what `ca` has signed.

    `server_name` is the name in everybody's certificate, where that is not the host that is called.
    """

    cert: str
    key: str
    ca: str
    server_name: str = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Raises ConfigError for files that cannot be used."""
        key, cert, authority = self._files()
        return grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError for files that cannot be used."""
        key, cert, authority = self._files()
        return grpc.ssl_channel_credentials(authority, key, cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()

    def _files(self) -> tuple[bytes, bytes, bytes]:
        _load("internal_tls", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.cert, self.key, self.ca)
        names = (("key", self.key), ("cert", self.cert), ("ca", self.ca))
        key, cert, authority = (read(f"internal_tls.{name}", path) for name, path in names)
        return key, cert, authority


def read(name: str, path: str) -> bytes:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error


def _load(section: str, context: ssl.SSLContext, cert: str, key: str, authority: str) -> None:
    """Prove the files by loading them as OpenSSL does."""
    for name, path in (("cert", cert), ("key", key)):
        read(f"{section}.{name}", path)
    try:
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{section}.cert: {cert} and {key} are no certificate and its key, in PEM") from None
    if authority:
        name = "client_ca" if section == "tls" else "ca"
        read(f"{section}.{name}", authority)
        try:
            context.load_verify_locations(authority)
        except (ssl.SSLError, OSError):
            raise ConfigError(f"{section}.{name}: {authority} holds no certificate, in PEM") from None
