"""TLS of servers and between our own processes, from PEM files, and the names in a client's certificate.

TLS has verified a client's certificate against `tls.client_ca` before its names are read, at either endpoint.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from cp_core.transport.peer_tls import PeerTls, load_files, read

CIPHERS_SINCE = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, kw_only=True)
class ServerTls:
    """TLS of a public endpoint: certificate, key, and the authority of clients' certificates if it asks for them."""

    cert: str
    key: str
    client_ca: str = ""

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Load the files. Raises ConfigError for files that cannot be used."""
        self.http_context()  # gRPC accepts any files, and then answers no client
        return grpc.ssl_server_credentials(
            [(read("tls.key", self.key), read("tls.cert", self.cert))],
            read("tls.client_ca", self.client_ca) if self.client_ca else None,
            require_client_auth=bool(self.client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        """Load the files. Raises ConfigError for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = CIPHERS_SINCE
        context.set_alpn_protocols(["http/1.1"])
        load_files("tls", context, self.cert, self.key, ("client_ca", self.client_ca))
        if self.client_ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def peer_server(tls: PeerTls | None) -> grpc.ServerCredentials | None:
    """Return the credentials of a server for our own processes, or None without TLS. Raises ConfigError."""
    if tls is None:
        return None
    key, cert, authority = _files(tls)
    return grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=True)


def peer_channel(tls: PeerTls | None) -> tuple[grpc.ChannelCredentials | None, tuple[tuple[str, str], ...]]:
    """Return credentials and options of a channel between our own processes; None without TLS.

    Raises ConfigError.
    """
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


KINDS = ("common_name", "dns", "uri")
"""Kinds of names that may stand for a tenant: the subject's common name, and two of its alternative names."""

CertificateName = tuple[str, str]
"""Pair of one of KINDS and the name; DNS names are in lower case."""

_GRPC_KEYS = {"x509_common_name": "common_name", "peer_dns": "dns", "peer_uri": "uri"}
_ALTERNATIVE_TYPES = {"DNS": "dns", "URI": "uri"}


@dataclass(frozen=True, slots=True)
class Certificate:
    """Names that a certificate proves. Kinds are separate: a DNS name never counts as a common name."""

    names: frozenset[CertificateName]

    @classmethod
    def of(cls, names: Iterable[CertificateName]) -> Certificate:
        return cls(frozenset(certificate_name(kind, name) for kind, name in names))


def certificate_name(kind: str, name: str) -> CertificateName:
    return kind, name.lower() if kind == "dns" else name


def of_grpc(auth_context: Mapping[str, Iterable[bytes]]) -> Certificate | None:
    """Return the certificate of a call's `auth_context`, or None where the client showed none."""
    if "x509_pem_cert" not in auth_context:
        return None
    return Certificate.of(
        (kind, value.decode(errors="replace"))
        for key, kind in _GRPC_KEYS.items()
        for value in auth_context.get(key, ())
    )


def of_ssl(connection: ssl.SSLObject | None) -> Certificate | None:
    """Return the certificate of a TLS connection, or None without TLS or certificate."""
    shown = connection.getpeercert() if connection is not None else None
    if not shown:
        return None
    subject: Any = shown.get("subject", ())  # typed as if each of its parts might be a text
    alternatives: Any = shown.get("subjectAltName", ())
    common = [value for part in subject for key, value in part if key == "commonName"]
    found = [(_ALTERNATIVE_TYPES[kind], value) for kind, value in alternatives if kind in _ALTERNATIVE_TYPES]
    # gRPC tells the first common name only: a certificate proves the same at both endpoints.
    return Certificate.of([*(("common_name", value) for value in common[:1]), *found])
