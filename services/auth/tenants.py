"""Tenants, and the file that says which tokens are whose. The file holds hashes: whoever reads it cannot call.

```yaml
tenants:
  - name: acme
    tokens:
      - {sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08, expires: 2027-06-30T00:00:00Z}
    max_concurrent_turns: 8     # 0 (the default): no limit
    max_turns_per_minute: 120   # 0 (the default): no limit
    operator: false             # may ask for the state of the whole service
```
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from cp_core.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""A tenant's name ends before the first slash of an id that the router knows."""
SHA256 = re.compile(r"[0-9a-f]{64}")
TOKEN_PREFIX = "rs-"
RELOAD_SECONDS = 1.0
"""How soon a changed file counts."""
MAX_LIMIT = 1_000_000
SCHEME = "bearer "


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Who calls. Limits hold in each gateway process by itself; 0 is none."""

    name: str
    max_concurrent_turns: int = 0
    max_turns_per_minute: int = 0
    is_operator: bool = False


ANYBODY = Tenant(name="", is_operator=True)
"""Everybody, where no tokens are configured."""


@dataclass(frozen=True, kw_only=True)
class _Grant:
    tenant: Tenant
    expires: float | None


def new_token() -> str:
    """256 random bits; so many that a plain hash is safe to store."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What the file of tokens holds."""
    return hashlib.sha256(token.encode()).hexdigest()


class TokenFile:
    """The file of tokens, read again when it changes. A changed file that is wrong is logged and changes nothing."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` tells seconds since the epoch. Raises ConfigError."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._grants = read_tokens(path)
        self._looked_at = clock()

    def tenant_of(self, authorization: str | None) -> Tenant:
        """By the value of an Authorization header. Raises Unauthenticated, which never quotes it."""
        self._look()
        if not authorization:
            raise Unauthenticated("authorization: none given; send 'Bearer TOKEN'")
        if not authorization.lower().startswith(SCHEME):
            raise Unauthenticated("authorization: only 'Bearer TOKEN' is allowed")
        token = authorization[len(SCHEME) :].strip()
        grant = self._grants.get(hashlib.sha256(token.encode(errors="replace")).hexdigest())
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
            self._grants = read_tokens(self._path)
            log.info("the tokens were read again: %d", len(self._grants))
        except ConfigError as error:
            log.error("the tokens are as before: %s", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"auth.tokens: {path} cannot be read: {error.strerror}") from error
    return state.st_mtime_ns, state.st_size, state.st_ino


def read_tokens(path: Path) -> Mapping[str, _Grant]:
    """Grants by hash. Raises ConfigError naming the entry; nothing of a token's hash is shown."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"auth.tokens: {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ConfigError(f"auth.tokens: {path} is not valid YAML") from None
    if not isinstance(content, dict) or set(content) != {"tenants"} or not isinstance(content["tenants"], list):
        raise ConfigError(f"auth.tokens: {path} must hold 'tenants:', a list, and nothing else")
    grants: dict[str, _Grant] = {}
    names: set[str] = set()
    for place, entry in enumerate(content["tenants"]):
        name = f"auth.tokens: tenants[{place}]"
        tenant = _tenant(name, entry)
        if tenant.name in names:
            raise ConfigError(f"{name}.name: {tenant.name!r} is there twice")
        names.add(tenant.name)
        tokens = entry.get("tokens")
        if not isinstance(tokens, list):
            raise ConfigError(f"{name}.tokens: must be a list of {{sha256: ..., expires: ...}}")
        for number, token in enumerate(tokens):
            digest, expires = _token(f"{name}.tokens[{number}]", token)
            if digest in grants:
                raise ConfigError(f"{name}.tokens[{number}].sha256: is there twice")
            grants[digest] = _Grant(tenant=tenant, expires=expires)
    return grants


def _tenant(name: str, entry: Any) -> Tenant:
    fields = ("name", "tokens", "max_concurrent_turns", "max_turns_per_minute", "operator")
    _check_keys(name, entry, fields)
    if not isinstance(entry.get("name"), str) or not NAME.fullmatch(entry["name"]):
        raise ConfigError(f"{name}.name: use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit")
    limits = {}
    for key in ("max_concurrent_turns", "max_turns_per_minute"):
        value = limits[key] = entry.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
            raise ConfigError(f"{name}.{key}: {value!r} is out of range; allowed is 0 (no limit) to {MAX_LIMIT}")
    operator = entry.get("operator", False)
    if not isinstance(operator, bool):
        raise ConfigError(f"{name}.operator: {operator!r} is not allowed; use true or false")
    return Tenant(name=entry["name"], is_operator=operator, **limits)


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
