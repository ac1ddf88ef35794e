"""Who may listen where: everybody on this machine's loopback, elsewhere only who is known, and in private."""

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


def check_inside(router: str, ray_address: str, *, has_tls: bool, is_insecure: bool) -> None:
    """The doors between our own processes: the router's, and on a Ray cluster those of leaders and ranks.

    Raises ConfigError where strangers would reach them.
    """
    if has_tls or is_insecure:
        return
    remedy = "give it, or say internal_tls.insecure: true"
    if not is_loopback(router):
        raise ConfigError(
            f"router.listen: {router} is reached from other machines and lacks TLS (internal_tls.cert); {remedy}"
        )
    if ray_address:
        raise ConfigError(
            f"ray.address: on the Ray cluster at {ray_address} leaders and ranks listen at the addresses of their "
            f"nodes, and lack TLS (internal_tls.cert); {remedy}"
        )
