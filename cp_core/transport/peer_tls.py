"""Mutual TLS between our own processes: who they are by, whom they take, and sockets that speak it.

A `PeerSocket` is used like a plain non-blocking socket: what would block raises BlockingIOError, whatever OpenSSL waits
for. Nothing is ever sent in the clear over it, not even after it was closed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cp_core.errors import ConfigError

# What one call moves at most: a sender that is told to wait must come back with the same bytes.
SLICE_BYTES: Final = 256 << 10


class PeerSocket(ssl.SSLSocket):
    """A TLS connection to a peer. One thread at a time: OpenSSL does not even let one read while another writes."""

    def send(self, data: Any, flags: int = 0) -> int:
        """Send some of it. Raises BlockingIOError; the next call must then begin with the same bytes."""
        self._check_open()
        try:
            return super().send(memoryview(data)[:SLICE_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive what there is, about a slice of it; 0 at the end of the stream. Raises BlockingIOError.

        A record is taken whole where the buffer has room for it, for a poll does not see what OpenSSL holds already.
        """
        self._check_open()
        view = memoryview(buffer)[:nbytes]
        filled = 0
        while filled < len(view) and (filled < SLICE_BYTES or self.pending()):
            try:
                count = super().recv_into(view[filled:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not filled:
                    raise BlockingIOError from None
                break
            if not count:
                break
            filled += count
        return filled

    def shutdown(self, how: int) -> None:
        """Of the connection beneath, from any thread: the TLS stays, so that nobody goes on without it."""
        socket.socket.shutdown(self, how)

    def _check_open(self) -> None:
        if self.version() is None:
            # SSLSocket itself would go on in the clear.
            raise ConnectionError("there is no TLS on this connection, or not any more")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTls:
    """PEM files by which our processes prove themselves to each other: each shows `cert`, takes only what `ca` signed.

    `server_name` is the name in everybody's certificate, where that is not the host that is called. Contexts are made
    anew for each connection, so that files that were replaced count for the next one. `accept` and `call` take a
    connection over; where they raise it is closed.
    """

    cert: str
    key: str
    ca: str
    server_name: str = ""

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """The connection of somebody who called, whose handshake is still to be done. Raises ConfigError, OSError."""
        with _closed_on_failure(connection):
            context = self._context(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_REQUIRED
            # Tickets would lie unread at a peer that only sends, and turn the end of its stream into a reset.
            context.num_tickets = 0
            return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def call(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """The connection after the handshake, which the socket's timeout bounds. Raises ConfigError, OSError."""
        with _closed_on_failure(connection):
            context = self._context(ssl.PROTOCOL_TLS_CLIENT)
            return context.wrap_socket(connection, server_hostname=self.server_name or host)

    def check(self) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.sslsocket_class = PeerSocket
        load_files("internal_tls", context, self.cert, self.key, ("ca", self.ca))
        return context


@contextmanager
def _closed_on_failure(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def load_files(section: str, context: ssl.SSLContext, cert: str, key: str, authority: tuple[str, str]) -> None:
    """Load PEM files as OpenSSL does; `authority` is its key in that section and its path, which may be empty.

    Raises ConfigError naming the key of the file that cannot be used.
    """
    for name, path in (("cert", cert), ("key", key)):
        read(f"{section}.{name}", path)
    try:
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{section}.cert: {cert} and {key} are no certificate and its key, in PEM") from None
    name, path = authority
    if path:
        read(f"{section}.{name}", path)
        try:
            context.load_verify_locations(path)
        except (ssl.SSLError, OSError):
            raise ConfigError(f"{section}.{name}: {path} holds no certificate, in PEM") from None


def read(name: str, path: str) -> bytes:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error


def reason_of(error: OSError) -> str:
    """Why a connection failed, without the line of the library that says so."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or 'unknown').replace('_', ' ').lower()}"
    return str(error)
