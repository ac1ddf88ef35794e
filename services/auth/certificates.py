"""What a client's certificate says of who it is, at either door. TLS has verified it against `tls.client_ca` before."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("common_name", "dns", "uri")
"""Names that may stand for a tenant: the subject's common name, and subject alternative names of two types."""

CertificateName = tuple[str, str]
"""(one of KINDS, the name); DNS names in lower case."""

_GRPC_KEYS = {"x509_common_name": "common_name", "peer_dns": "dns", "peer_uri": "uri"}
_ALTERNATIVE_TYPES = {"DNS": "dns", "URI": "uri"}


@dataclass(frozen=True, slots=True)
class Certificate:
    """The names that a certificate proves. Types are kept apart: a DNS name is never taken for a common name."""

    names: frozenset[CertificateName]

    @classmethod
    def of(cls, names: Iterable[CertificateName]) -> Certificate:
        return cls(frozenset(certificate_name(kind, name) for kind, name in names))


def certificate_name(kind: str, name: str) -> CertificateName:
    return kind, name.lower() if kind == "dns" else name


def of_grpc(auth_context: Mapping[str, Iterable[bytes]]) -> Certificate | None:
    """Of a call's `auth_context`; None where the client showed no certificate."""
    if "x509_pem_cert" not in auth_context:
        return None
    return Certificate.of(
        (kind, value.decode(errors="replace"))
        for key, kind in _GRPC_KEYS.items()
        for value in auth_context.get(key, ())
    )


def of_ssl(connection: ssl.SSLObject | None) -> Certificate | None:
    """Of a TLS connection; None where there is none, or the client showed no certificate."""
    shown = connection.getpeercert() if connection is not None else None
    if not shown:
        return None
    subject: Any = shown.get("subject", ())  # typed as if each of its parts might be a text
    alternatives: Any = shown.get("subjectAltName", ())
    common = [value for part in subject for key, value in part if key == "commonName"]
    found = [(_ALTERNATIVE_TYPES[kind], value) for kind, value in alternatives if kind in _ALTERNATIVE_TYPES]
    # gRPC tells the first common name only: a certificate must not say more at one door than at the other.
    return Certificate.of([*(("common_name", value) for value in common[:1]), *found])
