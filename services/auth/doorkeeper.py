"""Asked at every door for every call: who is this?"""

from __future__ import annotations

from cp_core.errors import Forbidden
from services.auth.certificates import Certificate
from services.auth.limits import TenantLimits
from services.auth.tenants import ANYBODY, Tenant
from services.auth.token_file import TokenFile


class Doorkeeper:
    """Without a file of tokens everybody is the one tenant without a name. `limits` are those of this process."""

    def __init__(self, tokens: TokenFile | None = None) -> None:
        self._tokens = tokens
        self.limits = TenantLimits()

    def tenant_of(self, authorization: str | None, certificate: Certificate | None = None) -> Tenant:
        """By the value of an Authorization header, or of the gRPC metadata of that name, or by what TLS has verified.

        Raises Unauthenticated.
        """
        return ANYBODY if self._tokens is None else self._tokens.tenant_of(authorization, certificate)

    def check_operator(self, tenant: Tenant) -> None:
        """Raises Forbidden: the state of the whole service tells of other tenants."""
        if not tenant.is_operator:
            raise Forbidden(f"tenant {tenant.name!r} is no operator and may not ask for the state of the service")
