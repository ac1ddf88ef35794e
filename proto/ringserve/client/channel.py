"""TLS files and bearer token of a client's channel to a gateway. Used by both Python clients and the commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from ringserve.channels import CHANNEL_OPTIONS, keepalive
from ringserve.errors import ConfigError

Metadata = tuple[tuple[str, str], ...]

CLIENT_OPTIONS = (*CHANNEL_OPTIONS, *keepalive(1.5, 3.0, is_always_on=False))
"""Options of a client's channel: if the gateway is gone or frozen, the client's streams fail within 4.5 s."""


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files. The server's certificate is checked against `ca`; `cert` and `key` prove this client, for mutual TLS.

    Without `ca` gRPC's default root certificates are used. `server_name` is the name in the server's certificate,
    needed if it differs from the called host.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises ConfigError for an unreadable file, or for one of cert and key without the other."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: cert and key belong together; give both or neither")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def options(self) -> list[tuple[str, str | int]]:
        """Return the options of a gRPC channel with this TLS."""
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*CLIENT_OPTIONS, *name]


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {path} cannot be read: {error.strerror}") from error


def make_metadata(token: str) -> Metadata:
    """Return the metadata of every call. Raises ConfigError for a token that no header can carry."""
    if not token:
        return ()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError("token: it may hold printable ASCII characters only, and no space")
    return (("authorization", f"Bearer {token}"),)
