"""Mutual TLS between the processes of one cluster: certificates, peer checks and encrypted sockets.

Ring connections and KV transfers use it, and the services for their settings. A caller of `accept` and `call` owns the
returned socket. A `PeerSocket` works like a plain non-blocking socket: a call that would block raises BlockingIOError,
whether OpenSSL waits to read or to write. It never sends plaintext, not even after `close`.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringserve.cp_core.errors import ConfigError

# Limit of one call. A `send` that would block must be retried with the same bytes.
SLICE_BYTES: Final = 256 << 10


class PeerSocket(ssl.SSLSocket):
    """TLS connection to a peer, for one thread at a time: OpenSSL does not allow a read during a write."""

    def send(self, data: Any, flags: int = 0) -> int:
        """Send a part of `data`. After BlockingIOError, the next call must begin with the same bytes."""
        self._check_open()
        try:
            return super().send(memoryview(data)[:SLICE_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive about one slice of the available bytes; 0 at the end of the stream. Raises BlockingIOError.

        A TLS record is read whole if the buffer has room, because a poll does not see the bytes that OpenSSL holds.
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
            except OSError:
                if not filled:
                    raise
                break  # the next call raises it: what came before it counts
            if not count:
                break
            filled += count
        return filled

    def shutdown(self, how: int) -> None:
        """Shut down the underlying connection, from any thread.

        The TLS state stays, so later calls never send plaintext.
        """
        socket.socket.shutdown(self, how)

    def _check_open(self) -> None:
        if self.version() is None:
            # SSLSocket itself would continue in plaintext.
            raise ConnectionError("there is no TLS on this connection")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTls:
    """PEM files for mutual TLS in a cluster: each process shows `cert` and accepts peers that `ca` signed.

    `server_name` is the name in every certificate if it differs from the called host. Each connection loads the files
    again, so replaced files apply to the next connection. `accept` and `call` own the connection and close it if they
    raise.
    """

    cert: str
    key: str
    ca: str
    server_name: str = ""

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return a caller's TLS connection before its handshake. Raises ConfigError, OSError."""
        with _closed_on_failure(connection):
            context = self._context(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_REQUIRED
            # A peer that only sends would leave tickets unread, so the end of its stream would become a reset.
            context.num_tickets = 0
            return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def call(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Return the connection after its handshake, within the socket's timeout. Raises ConfigError, OSError."""
        with _closed_on_failure(connection):
            context = self._context(ssl.PROTOCOL_TLS_CLIENT)
            return context.wrap_socket(connection, server_hostname=self.server_name or host)

    def check(self) -> None:
        """Raise ConfigError if a file cannot be used."""
        self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.sslsocket_class = PeerSocket
        load_files("internal_tls", context, self.cert, self.key, ("ca", self.ca))
        return context


def handshake_events(connection: socket.socket) -> int:
    """Continue the handshake of a non-blocking TLS connection.

    Returns the poll events to wait for before the next call, or 0 when the handshake is done. Raises OSError.
    """
    assert isinstance(connection, ssl.SSLSocket), "a handshake of a plain connection"
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    return 0


@contextmanager
def _closed_on_failure(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def load_files(section: str, context: ssl.SSLContext, cert: str, key: str, authority: tuple[str, str]) -> None:
    """Load PEM files into `context`. `authority` is (key in the section, path); the path may be empty.

    Raises ConfigError with the configuration key of a file that cannot be used.
    """
    for name, path in (("cert", cert), ("key", key)):
        read(f"{section}.{name}", path)
    try:
        context.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{section}.cert: {cert} and {key} are not a certificate and its key in PEM") from None
    name, path = authority
    if path:
        read(f"{section}.{name}", path)
        try:
            context.load_verify_locations(path)
        except (ssl.SSLError, OSError):
            raise ConfigError(f"{section}.{name}: {path} holds no certificate in PEM") from None


def read(name: str, path: str) -> bytes:
    """Read the file at `path`. Raises ConfigError with the configuration key `name`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from error


def reason_of(error: OSError) -> str:
    """Return why a connection failed, without OpenSSL's source line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or 'unknown').replace('_', ' ').lower()}"
    return str(error)
