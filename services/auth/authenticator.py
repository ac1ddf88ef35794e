"""Authentication of every call, and what a tenant may do.

A tenant has turn limits in this process, and access to its own conversations and requests at the router. Both
endpoints of a gateway use it. At either, TLS has verified a client's certificate against `tls.client_ca` before its
names are read.

Router ids are `tenant/id`. Tenant names contain no slash, so a tenant cannot name another tenant's ids. Without tenants
the router uses the clients' ids.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ringserve.cp_core.errors import (
    CapacityExceeded,
    ConfigError,
    Forbidden,
    InvalidRequest,
    RingserveError,
    Unauthenticated,
)
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.orchestration.protocol.turns import KvQuota
from ringserve.services.auth.tenants import ANYBODY, CertificateName, Tenant, make_certificate_name, read_tenants
from ringserve.views import ConversationInfo, ConversationPage, ConversationSummary

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""Seconds between two checks whether the file has changed."""
SCHEME = "bearer "
_GRPC_KEYS = {"x509_common_name": "common_name", "peer_dns": "dns", "peer_uri": "uri"}
_ALTERNATIVE_TYPES = {"DNS": "dns", "URI": "uri"}
BUSY_RETRY_SECONDS = 1.0
"""Seconds until one of a tenant's turns may have ended: a guess, since the gateway cannot predict it."""
T = TypeVar("T")
TView = TypeVar("TView", ConversationInfo, ConversationSummary)
TError = TypeVar("TError", bound=RingserveError)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Names that a certificate proves. Kinds are separate: a DNS name never counts as a common name."""

    names: frozenset[CertificateName]

    @classmethod
    def of(cls, names: Iterable[CertificateName]) -> Certificate:
        return cls(frozenset(make_certificate_name(kind, name) for kind, name in names))


def read_grpc_certificate(auth_context: Mapping[str, Iterable[bytes]]) -> Certificate | None:
    """Return the client certificate in a call's `auth_context`; None if the client showed none."""
    if "x509_pem_cert" not in auth_context:
        return None
    return Certificate.of(
        (kind, value.decode(errors="replace"))
        for key, kind in _GRPC_KEYS.items()
        for value in auth_context.get(key, ())
    )


def read_ssl_certificate(connection: ssl.SSLObject | None) -> Certificate | None:
    """Return a TLS connection's client certificate; None without TLS or certificate."""
    shown = connection.getpeercert() if connection is not None else None
    if not shown:
        return None
    subject: Any = shown.get("subject", ())  # its declared type is too wide to iterate over
    alternatives: Any = shown.get("subjectAltName", ())
    common = [value for part in subject for key, value in part if key == "commonName"]
    found = [(_ALTERNATIVE_TYPES[kind], value) for kind, value in alternatives if kind in _ALTERNATIVE_TYPES]
    # gRPC reports only the first common name; use the same here, so that both endpoints see the same names.
    return Certificate.of([*(("common_name", value) for value in common[:1]), *found])


class TokenFile:
    """Tenants file, read again when it changes. An error in the changed file is logged, and the old content stays."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, takes_certificates: bool = True) -> None:
        """Read the file. `clock` returns seconds since the epoch. Raises ConfigError.

        `takes_certificates` means that the endpoints ask for certificates; otherwise a file that names any is refused.
        """
        self._path = path
        self._clock = clock
        self.takes_certificates = takes_certificates
        self._stamp = _stamp(path)
        self._tenants = read_tenants(path, takes_certificates=takes_certificates)
        self._looked_at = clock()

    @property
    def names(self) -> Sequence[str]:
        """Tenant names, tenants with tokens first."""
        tenants = [grant.tenant for grant in self._tenants.grants.values()] + [*self._tenants.certificates.values()]
        return tuple(dict.fromkeys(tenant.name for tenant in tenants))

    def find_tenant(self, authorization: str | None, certificate: Certificate | None = None) -> Tenant:
        """Return the tenant of an Authorization header, of a client certificate, or of both, which must agree.

        Raises Unauthenticated, which never quotes a token nor names a certificate's tenant.
        """
        self._look()
        shown = None if certificate is None else self._tenant_shown(certificate)
        if not authorization and shown is not None:
            return shown
        tenant = self._tenant_of_token(authorization)
        if shown is not None and shown != tenant:
            raise Unauthenticated("authorization: the token and the client's certificate belong to different tenants")
        return tenant

    def _tenant_shown(self, certificate: Certificate) -> Tenant | None:
        """Return the tenant that a certificate names. If it names none (None), a token must name the tenant."""
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
            log.info("read the changed tenants file: %d tokens", len(self._tenants.grants))
        except ConfigError as error:
            log.error("the changed tenants file has an error, keeping the old tokens: %s", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"auth.tokens: {path} cannot be read: {error.strerror}") from error
    return state.st_mtime_ns, state.st_size, state.st_ino


class Authenticator:
    """Authentication at both endpoints of a gateway.

    Without a tenants file, every caller is one tenant without a name. `limits` counts this process's turns.
    """

    def __init__(self, tokens: TokenFile | None = None) -> None:
        self._tokens = tokens
        self.limits = TenantLimits()

    def find_tenant(self, authorization: str | None, certificate: Certificate | None = None) -> Tenant:
        """Return the tenant of an Authorization header (or gRPC metadata) or of a client certificate.

        TLS has verified the certificate. Raises Unauthenticated.
        """
        return ANYBODY if self._tokens is None else self._tokens.find_tenant(authorization, certificate)

    @property
    def is_open(self) -> bool:
        """True if every caller is served, without a token."""
        return self._tokens is None

    @property
    def tenants(self) -> Sequence[str]:
        """Tenant names in file order, tenants without a token last; empty without a file."""
        return () if self._tokens is None else self._tokens.names

    def admit(self, metadata: Mapping[str, str]) -> None:
        """Refuse a gRPC call with a bad token, or without one. Raises Unauthenticated.

        If clients may show certificates instead, a call without a token passes.
        """
        authorization = metadata.get("authorization")
        if self._tokens is not None and (authorization or not self._tokens.takes_certificates):
            self._tokens.find_tenant(authorization)

    def check_operator(self, tenant: Tenant) -> None:
        """Refuse a tenant that is not an operator. Raises Forbidden: the service's state shows other tenants."""
        if not tenant.is_operator:
            raise Forbidden(f"tenant {tenant.name!r} is no operator and may not ask for the state of the service")


class TenantLimits:
    """Running and recently begun turns, by tenant. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._allowance: dict[str, tuple[float, float]] = {}

    @contextmanager
    def turns(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Count `count` turns as running, as a context.

        Raises CapacityExceeded, or InvalidRequest if the tenant's limits can never allow so many turns.
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
        """Take from a token bucket that fills evenly and holds one minute's turns."""
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
    """Refuse a count that waiting cannot make possible. Raises InvalidRequest."""
    if count > limit:
        raise InvalidRequest(
            f"sampling_params.n: {count} answers are too many, tenant {tenant.name!r} may have {limit} {when}"
        )


class ScopedRouter:
    """One tenant's router, for the servers that clients call. Errors and views show ids as the client gave them."""

    def __init__(self, router: RouterPort, tenant: Tenant) -> None:
        self._router = router
        self.tenant = tenant
        self._prefix = f"{tenant.name}/" if tenant.name else ""
        limit = tenant.max_kv_tokens
        self.kv_quota = KvQuota(tenant=tenant.name, max_tokens=limit) if limit else None

    def scope(self, name: str) -> str:
        """Return a client's id as the router knows it; an empty id stays empty. Example: "c" becomes "acme/c"."""
        return f"{self._prefix}{name}" if name else ""

    def unscope_error(self, error: TError) -> TError:
        """Return an error with its ids as the client gave them."""
        if self._prefix and error.args:
            message = str(error.args[0])
            for quote in ("'", '"'):
                message = message.replace(f"{quote}{self._prefix}", quote)
            error.args = (message, *error.args[1:])
        return error

    def unscope(self, name: str) -> str:
        """Return a router id as the client gave it."""
        return name.removeprefix(self._prefix)

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Abort requests and return (aborted, unknown) ids; another tenant's requests are unknown."""
        # '' names no request: it is passed on unchanged and stays unknown.
        answer = await self._translate_errors(self._router.abort_requests([self.scope(name) for name in request_ids]))
        aborted, unknown = ([self.unscope(name) for name in names] for names in answer)
        return aborted, unknown

    async def get_conversation(self, conversation_id: str) -> ConversationInfo:
        return self._unscope_view(
            await self._translate_errors(self._router.get_conversation(self.scope(conversation_id)))
        )

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationPage:
        """List the tenant's own conversations: ids that begin with its name."""
        listing = self._router.list_conversations(f"{self._prefix}{prefix}", self.scope(after), limit)
        page = await self._translate_errors(listing)
        return replace(
            page,
            conversations=tuple(map(self._unscope_view, page.conversations)),
            next_page_token=self.unscope(page.next_page_token),
        )

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationInfo:
        fork = self._router.fork_conversation(self.scope(source_id), self.scope(new_id), at_token, self.kv_quota)
        return self._unscope_view(await self._translate_errors(fork))

    async def delete_conversation(self, conversation_id: str) -> None:
        await self._translate_errors(self._router.delete_conversation(self.scope(conversation_id)))

    def _unscope_view(self, view: TView) -> TView:
        """Return a view with its ids as the client gave them."""
        return replace(
            view,
            conversation_id=self.unscope(view.conversation_id),
            running_request_id=self.unscope(view.running_request_id),
        )

    async def _translate_errors(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RingserveError as error:
            raise self.unscope_error(error) from None
