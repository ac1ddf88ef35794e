"""The encrypted carrier of bench/kv_carrier.py, and what all its carriers share."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from cp_core.peer_tls import PeerTls
from workers.kv_transfer.sockets import KvStream, call

HOST = "127.0.0.1"
WAIT_SECONDS = 120.0
CERTIFICATES = "BENCH_CERTIFICATES"
"""The environment variable by which a run's processes find its certificate."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """`count` messages of `message_bytes`, sent `repeats` times after one time for practice."""

    message_bytes: int
    count: int
    repeats: int

    @property
    def total_bytes(self) -> int:
        return self.message_bytes * self.count


Runs = Iterator[Callable[[], None]]


def receive_sockets_tls(load: Load, pipe: Connection) -> None:
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        stream = KvStream(bench_tls().accept(listener.accept()[0]), WAIT_SECONDS)
    stream.shake_hands()
    buffer = memoryview(bytearray(load.message_bytes))
    for _ in range(load.repeats + 1):
        for _ in range(load.count):
            stream.receive_into(buffer)
        stream.send([memoryview(b"k")])
    stream.close()


def send_sockets_tls(load: Load, pipe: Connection) -> Runs:
    message = memoryview(bytearray(os.urandom(load.message_bytes)))
    stream = call(f"{HOST}:{pipe.recv()}", WAIT_SECONDS, WAIT_SECONDS, bench_tls())
    answer = bytearray(1)

    def run() -> None:
        for _ in range(load.count):
            stream.send([message])
        stream.receive_into(memoryview(answer))
        assert answer == b"k"

    yield run
    stream.close()


def bench_tls() -> PeerTls:
    """The certificate that `main` has made for this run."""
    directory = Path(os.environ[CERTIFICATES])
    cert = str(directory / "cert.pem")
    return PeerTls(cert=cert, key=str(directory / "key.pem"), ca=cert)


@contextmanager
def certificates() -> Iterator[None]:
    """One that signs itself, by the program openssl, for as long as this lasts."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", "/CN=bench", "-addext", f"subjectAltName=IP:{HOST}", "-days", "2"]
        command += ["-keyout", f"{directory}/key.pem", "-out", f"{directory}/cert.pem"]
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_SECONDS)
        os.environ[CERTIFICATES] = directory
        yield
