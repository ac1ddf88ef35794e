"""Tenants, and the file that lists their certificates and tokens. The authenticator reads it.

Tokens are hashed, so somebody who reads the file cannot call with it.

```yaml
tenants:
  - name: acme
    tokens:
      - {sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08, expires: 2027-06-30T00:00:00Z}
    max_concurrent_turns: 8     # 0 (the default): no limit
    max_turns_per_minute: 120   # 0 (the default): no limit
    max_kv_tokens: 2000000      # 0 (the default): no limit; counts each conversation and running turn once
    certificates:               # client certificates signed by tls.client_ca; one of these names is enough
      - {common_name: acme-batch}
      - {dns: batch.acme.example}
      - {uri: "spiffe://acme.example/batch"}
    max_priority: 10            # 0 (the default): its prompts cannot overtake those of other tenants; 100: the highest
    operator: false             # may ask for the state of the whole service
```
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.turns import MAX_PRIORITY

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Tenant names. At the router, an id's first slash ends the tenant name."""
SHA256 = re.compile(r"[0-9a-f]{64}")
TOKEN_PREFIX = "rs-"
LIMITS = {"max_concurrent_turns": 1_000_000, "max_turns_per_minute": 1_000_000, "max_kv_tokens": 10**15}
"""Tenant limits, with the highest value of each."""
PRIORITIES = {"min_priority": -MAX_PRIORITY, "max_priority": 0}
"""Range of a tenant's priorities, with the defaults: a tenant overtakes others only if that is granted."""
MAX_CERTIFICATE_NAME = 512


KINDS = ("common_name", "dns", "uri")
"""Certificate names that may identify a tenant: the subject's common name, and two kinds of alternative names."""
CertificateName = tuple[str, str]
"""Pair of one of KINDS and the name; DNS names are in lower case."""


def make_certificate_name(kind: str, name: str) -> CertificateName:
    return kind, name.lower() if kind == "dns" else name


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Caller of the service.

    A limit of 0 means no limit. Turn limits hold per gateway process, the KV limit for the whole service.
    """

    name: str
    max_concurrent_turns: int = 0
    max_turns_per_minute: int = 0
    max_kv_tokens: int = 0
    min_priority: int = -MAX_PRIORITY
    max_priority: int = 0
    is_operator: bool = False


ANYBODY = Tenant(name="", max_priority=MAX_PRIORITY, is_operator=True)
"""Tenant of every caller if no tokens are configured."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Token's tenant. `expires` is in seconds since the epoch, None for never."""

    tenant: Tenant
    expires: float | None


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """File content: grants by token hash, and tenants by certificate name."""

    grants: Mapping[str, Grant]
    certificates: Mapping[CertificateName, Tenant]


def new_token() -> str:
    """Return a new token of 256 random bits: enough that a plain hash is safe to store."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return a token's SHA-256 as the tenants file holds it, in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_tenants(path: Path, *, takes_certificates: bool) -> Tenants:
    """Read the tenants file. Raises ConfigError, which names the entry but quotes no token hash."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"auth.tokens: {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ConfigError(f"auth.tokens: {path} is not valid YAML") from None
    if not isinstance(content, dict) or set(content) != {"tenants"} or not isinstance(content["tenants"], list):
        raise ConfigError(f"auth.tokens: {path} must hold 'tenants:', a list, and nothing else")
    grants: dict[str, Grant] = {}
    certificates: dict[CertificateName, Tenant] = {}
    names: set[str] = set()
    for place, entry in enumerate(content["tenants"]):
        name = f"auth.tokens: tenants[{place}]"
        tenant = _tenant(name, entry)
        if tenant.name in names:
            raise ConfigError(f"{name}.name: {tenant.name!r} is given twice")
        names.add(tenant.name)
        if "certificates" in entry and not takes_certificates:
            raise ConfigError(
                f"{name}.certificates: clients are not asked for certificates; set tls.client_ca to the authority that "
                f"signed them"
            )
        for number, certificate in enumerate(_certificates(f"{name}.certificates", entry)):
            if certificate in certificates:
                raise ConfigError(f"{name}.certificates[{number}].{certificate[0]}: is given twice")
            certificates[certificate] = tenant
        tokens = entry.get("tokens", [] if "certificates" in entry else None)
        if not isinstance(tokens, list):
            raise ConfigError(f"{name}.tokens: must be a list of {{sha256: ..., expires: ...}}")
        for number, token in enumerate(tokens):
            digest, expires = _token(f"{name}.tokens[{number}]", token)
            if digest in grants:
                raise ConfigError(f"{name}.tokens[{number}].sha256: is given twice")
            grants[digest] = Grant(tenant=tenant, expires=expires)
    return Tenants(grants=grants, certificates=certificates)


def _tenant(name: str, entry: Any) -> Tenant:
    fields = ("name", "tokens", "certificates", *LIMITS, *PRIORITIES, "operator")
    _check_keys(name, entry, fields)
    if not isinstance(entry.get("name"), str) or not NAME.fullmatch(entry["name"]):
        raise ConfigError(f"{name}.name: use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit")
    limits = {}
    for key, most in LIMITS.items():
        value = limits[key] = entry.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ConfigError(f"{name}.{key}: {value!r} is out of range; allowed is 0 (no limit) to {most}")
    for key, usual in PRIORITIES.items():
        value = limits[key] = entry.get(key, usual)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
            raise ConfigError(f"{name}.{key}: {value!r} is out of range; allowed is -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if not limits["min_priority"] <= 0 <= limits["max_priority"]:
        raise ConfigError(
            f"{name}: min_priority to max_priority must include 0, the priority of requests that name none"
        )
    operator = entry.get("operator", False)
    if not isinstance(operator, bool):
        raise ConfigError(f"{name}.operator: {operator!r} is not allowed; use true or false")
    return Tenant(name=entry["name"], is_operator=operator, **limits)


def _certificates(name: str, entry: Mapping[str, Any]) -> list[CertificateName]:
    listed = entry.get("certificates", [])
    if not isinstance(listed, list):
        raise ConfigError(f"{name}: must be a list, e.g. [{{common_name: acme-batch}}]")
    found = []
    for number, each in enumerate(listed):
        _check_keys(f"{name}[{number}]", each, KINDS)
        if len(each) != 1:
            raise ConfigError(f"{name}[{number}]: must hold one of {', '.join(KINDS)}")
        ((kind, value),) = each.items()
        if not isinstance(value, str) or not 0 < len(value) <= MAX_CERTIFICATE_NAME:
            raise ConfigError(f"{name}[{number}].{kind}: must be a text of 1 to {MAX_CERTIFICATE_NAME} characters")
        found.append(make_certificate_name(kind, value))
    return found


def _token(name: str, entry: Any) -> tuple[str, float | None]:
    _check_keys(name, entry, ("sha256", "expires"))
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not SHA256.fullmatch(digest.lower()):
        raise ConfigError(f"{name}.sha256: must be 64 hexadecimal digits; 'ringserve token' makes a token and its hash")
    expires = entry.get("expires")
    if expires is None:
        return digest.lower(), None
    if isinstance(expires, date) and not isinstance(expires, datetime):
        expires = datetime(expires.year, expires.month, expires.day)
    if not isinstance(expires, datetime):
        raise ConfigError(f"{name}.expires: must be a time, e.g. 2027-06-30T00:00:00Z")
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return digest.lower(), expires.timestamp()


def _check_keys(name: str, entry: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise ConfigError(f"{name}: must hold {', '.join(allowed)}")
    for key in entry:
        if key not in allowed:
            raise ConfigError(f"{name}.{str(key)[:40]}: no such key; allowed are {', '.join(allowed)}")
