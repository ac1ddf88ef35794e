"""Where a gateway may listen: everybody on this machine's loopback, elsewhere only who is known, and in private."""

from __future__ import annotations

import ipaddress

from cp_core.errors import ConfigError


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is reached from this machine only. A name is not looked up: it may change."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(key: str, address: str, *, has_tls: bool, has_tokens: bool, is_insecure: bool) -> None:
    """Raises ConfigError for a door that strangers would reach."""
    if is_insecure or not address or is_loopback(address) or (has_tls and has_tokens):
        return
    lacking = " and ".join(
        name for name, is_there in (("TLS (tls.cert)", has_tls), ("tokens (auth.tokens)", has_tokens)) if not is_there
    )
    raise ConfigError(
        f"{key}: {address} is reached from other machines and lacks {lacking}; "
        f"give them, listen on 127.0.0.1, or say gateway.insecure: true"
    )
