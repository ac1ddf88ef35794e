"""Who calls, by the file of tenants."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from cp_core.errors import ConfigError, Unauthenticated
from services.auth.certificates import Certificate
from services.auth.tenants import Tenant, read_tenants

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""How soon a changed file counts."""
SCHEME = "bearer "


class TokenFile:
    """The file of tenants, read again when it changes. A changed file that is wrong is logged and changes nothing."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, takes_certificates: bool = True) -> None:
        """`clock` tells seconds since the epoch. Raises ConfigError.

        `takes_certificates`: whether the doors ask for certificates. A file that names some is refused where not.
        """
        self._path = path
        self._clock = clock
        self._takes_certificates = takes_certificates
        self._stamp = _stamp(path)
        self._tenants = read_tenants(path, takes_certificates=takes_certificates)
        self._looked_at = clock()

    def tenant_of(self, authorization: str | None, certificate: Certificate | None = None) -> Tenant:
        """By the value of an Authorization header, by the client's certificate, or by both, which must agree.

        Raises Unauthenticated, which never quotes a token and never tells whose a certificate is.
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
        """None for a certificate that names no tenant: it lets in, and a token says who it is."""
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
            self._tenants = read_tenants(self._path, takes_certificates=self._takes_certificates)
            log.info("the tokens were read again: %d", len(self._tenants.grants))
        except ConfigError as error:
            log.error("the tokens are as before: %s", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"auth.tokens: {path} cannot be read: {error.strerror}") from error
    return state.st_mtime_ns, state.st_size, state.st_ino
