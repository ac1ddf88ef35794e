"""Authentication of every call by token or certificate, and the limits on a tenant's turns in this process.

TLS has verified a client's certificate against `tls.client_ca` before its names are read, at either endpoint.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringserve.cp_core.errors import CapacityExceeded, ConfigError, Forbidden, InvalidRequest, Unauthenticated
from ringserve.services.auth.tenants import ANYBODY, CertificateName, Tenant, certificate_name, read_tenants

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""Seconds after which a changed file is read."""
SCHEME = "bearer "
_GRPC_KEYS = {"x509_common_name": "common_name", "peer_dns": "dns", "peer_uri": "uri"}
_ALTERNATIVE_TYPES = {"DNS": "dns", "URI": "uri"}


@dataclass(frozen=True, slots=True)
class Certificate:
    """Names that a certificate proves. Kinds are separate: a DNS name never counts as a common name."""

    names: frozenset[CertificateName]

    @classmethod
    def of(cls, names: Iterable[CertificateName]) -> Certificate:
        return cls(frozenset(certificate_name(kind, name) for kind, name in names))


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


class TokenFile:
    """File of tenants, read again when it changes. A changed file with an error is logged and changes nothing."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, takes_certificates: bool = True) -> None:
        """Read the file. `clock` tells seconds since the epoch. Raises ConfigError.

        `takes_certificates` tells that the endpoints ask for certificates; without it a file that names some is
        refused.
        """
        self._path = path
        self._clock = clock
        self.takes_certificates = takes_certificates
        self._stamp = _stamp(path)
        self._tenants = read_tenants(path, takes_certificates=takes_certificates)
        self._looked_at = clock()

    @property
    def names(self) -> Sequence[str]:
        """Names of the tenants, those with tokens first."""
        tenants = [grant.tenant for grant in self._tenants.grants.values()] + [*self._tenants.certificates.values()]
        return tuple(dict.fromkeys(tenant.name for tenant in tenants))

    def tenant_of(self, authorization: str | None, certificate: Certificate | None = None) -> Tenant:
        """Return the tenant of an Authorization header, of a client's certificate, or of both, which must agree.

        Raises Unauthenticated, which never quotes a token and never tells which tenant a certificate belongs to.
        """
        self._look()
        shown = None if certificate is None else self._tenant_shown(certificate)
        if not authorization and shown is not None:
            return shown
        tenant = self._tenant_of_token(authorization)
        if shown is not None and shown != tenant:
            raise Unauthenticated("authorization: the token is another tenant's than the client's certificate")
        return tenant

    def _tenant_shown(self, certificate: Certificate) -> Tenant | None:
        """Return the tenant that a certificate names, or None: the certificate admits, and a token names the tenant."""
        known = self._tenants.certificates
        found = {tenant.name: tenant for name in certificate.names if (tenant := known.get(name)) is not None}
        if len(found) > 1:
            raise Unauthenticated("authorization: the client's certificate names more than one tenant")
        return next(iter(found.values()), None)

    def _tenant_of_token(self, authorization: str | None) -> Tenant:
        if not authorization:
            raise Unauthenticated("authorization: none given; send 'Bearer TOKEN'")
        if not authorization.lower().startswith(SCHEME):
            raise Unauthenticated("authorization: only 'Bearer TOKEN' is allowed")
        token = authorization[len(SCHEME) :].strip()
        grant = self._tenants.grants.get(hashlib.sha256(token.encode(errors="replace")).hexdigest())
        if grant is None:
            raise Unauthenticated("authorization: the token is not known")
        if grant.expires is not None and grant.expires <= self._clock():
            raise Unauthenticated("authorization: the token has expired")
        return grant.tenant

    def _look(self) -> None:
        now = self._clock()
        if 0 <= now - self._looked_at < RELOAD_SECONDS:
            return
        self._looked_at = now
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._tenants = read_tenants(self._path, takes_certificates=self.takes_certificates)
            log.info("the tokens were read again: %d", len(self._tenants.grants))
        except ConfigError as error:
            log.error("the tokens are as before: %s", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"auth.tokens: {path} cannot be read: {error.strerror}") from error
    return state.st_mtime_ns, state.st_size, state.st_ino


class Authenticator:
    """Authentication at both endpoints of a gateway.

    Without a file of tokens every caller is one tenant without a name.

    `limits` are those of this process.
    """

    def __init__(self, tokens: TokenFile | None = None) -> None:
        self._tokens = tokens
        self.limits = TenantLimits()

    def tenant_of(self, authorization: str | None, certificate: Certificate | None = None) -> Tenant:
        """Return the tenant of an Authorization header or gRPC metadata of that name, or of the client's certificate.

        TLS has verified the certificate. Raises Unauthenticated.
        """
        return ANYBODY if self._tokens is None else self._tokens.tenant_of(authorization, certificate)

    @property
    def tenants(self) -> Sequence[str]:
        """Names of the tenants in the order of their file, those without a token last; none without a file."""
        return () if self._tokens is None else self._tokens.names

    def admit(self, metadata: Mapping[str, str]) -> None:
        """Refuse a gRPC call by its `authorization` alone, unless a certificate may do. Raises Unauthenticated."""
        authorization = metadata.get("authorization")
        if self._tokens is not None and (authorization or not self._tokens.takes_certificates):
            self._tokens.tenant_of(authorization)

    def check_operator(self, tenant: Tenant) -> None:
        """Refuse a tenant that is no operator. Raises Forbidden: the state of the whole service shows other tenants."""
        if not tenant.is_operator:
            raise Forbidden(f"tenant {tenant.name!r} is no operator and may not ask for the state of the service")


BUSY_RETRY_SECONDS = 1.0
"""Seconds until a tenant's turn may have ended: a guess, as the gateway cannot predict it."""


class TenantLimits:
    """Running turns and turns begun lately, by tenant. `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._allowance: dict[str, tuple[float, float]] = {}

    @contextmanager
    def turns(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Count turns that run together, as a context.

        Raises CapacityExceeded, and InvalidRequest for what can never be.
        """
        limit, running = tenant.max_concurrent_turns, self._running[tenant.name]
        if limit and running + count > limit:
            _check_possible(tenant, count, limit, "at a time")
            raise CapacityExceeded(
                f"tenant {tenant.name!r} runs {running} turns, asks for {count} and may run {limit} at a time",
                BUSY_RETRY_SECONDS,
            )
        self._take_allowance(tenant, count)
        self._running[tenant.name] += count
        try:
            yield
        finally:
            self._running[tenant.name] -= count
            if not self._running[tenant.name]:
                del self._running[tenant.name]

    def _take_allowance(self, tenant: Tenant, count: int) -> None:
        """Take from a bucket that fills evenly and holds the turns of one minute."""
        limit = tenant.max_turns_per_minute
        if not limit:
            return
        now = self._clock()
        left, then = self._allowance.get(tenant.name, (float(limit), now))
        left = min(float(limit), left + (now - then) * limit / 60)
        if left < count:
            _check_possible(tenant, count, limit, "a minute")
            self._allowance[tenant.name] = (left, now)
            wait = (count - left) * 60 / limit
            raise CapacityExceeded(f"tenant {tenant.name!r} may begin {limit} turns a minute", wait)
        self._allowance[tenant.name] = (left - count, now)


def _check_possible(tenant: Tenant, count: int, limit: int, when: str) -> None:
    """Refuse a count that no waiting makes possible. Raises InvalidRequest."""
    if count > limit:
        raise InvalidRequest(
            f"sampling_params.n: {count} answers are too many, tenant {tenant.name!r} may have {limit} {when}"
        )
