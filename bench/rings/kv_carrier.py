"""Rate of each candidate that moves KV between two processes over loopback (decision 0003), beside gloo's send.

    python -m bench kv-carrier --megabytes 64 --messages 262144,1048576,4194304 --json

The two processes have one thread of computation each. A run lasts from the first byte offered until the receiver
confirms the last one. All bytes end up in preallocated memory: a message buffer, or for `kv_transfer` (this project's
own sender and receiver, with their checks and the copy from staging) the cache itself. Candidates that are not
installed are skipped and named. `--tls` measures the cost of encryption, `--carrier nixl` KV by NIXL.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from bench.options import Subcommands
from bench.report import Row, table
from ringserve.cp_core.errors import Unavailable
from ringserve.services.offline.reports import Summary
from ringserve.services.offline.terminal import console, print_table

HOST = "127.0.0.1"
WAIT_SECONDS = 120.0
CERTIFICATE = "BENCH_CERTIFICATE"
SLOT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of `count` messages of `message_bytes`, sent `repeats` times after a warm-up; KV is on `device`."""

    message_bytes: int
    count: int
    repeats: int
    device: str = "cpu"

    @property
    def total_bytes(self) -> int:
        return self.message_bytes * self.count


Runs = Iterator[Callable[[], None]]


# --- plain sockets ---------------------------------------------------------------------------------------------------


def receive_sockets(load: Load, pipe: Connection) -> None:
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    buffer = memoryview(bytearray(load.message_bytes))
    with connection:
        for _ in range(load.repeats + 1):
            for _ in range(load.count):
                unfilled = buffer
                while unfilled.nbytes:
                    unfilled = unfilled[connection.recv_into(unfilled) :]
            connection.sendall(b"k")


def send_sockets(load: Load, pipe: Connection) -> Runs:
    message = memoryview(bytearray(os.urandom(load.message_bytes)))
    with socket.create_connection((HOST, pipe.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def run() -> None:
            for _ in range(load.count):
                connection.sendall(message)
            assert connection.recv(1) == b"k"

        yield run


# --- ZeroMQ ----------------------------------------------------------------------------------------------------------


def receive_zeromq(load: Load, pipe: Connection) -> None:
    zmq: Any = importlib.import_module("zmq")
    with zmq.Context() as context, context.socket(zmq.PAIR) as channel:
        pipe.send(channel.bind_to_random_port(f"tcp://{HOST}"))
        buffer = memoryview(bytearray(load.message_bytes))
        for _ in range(load.repeats + 1):
            for _ in range(load.count):
                buffer[:] = channel.recv(copy=False).buffer
            channel.send(b"k")


def send_zeromq(load: Load, pipe: Connection) -> Runs:
    zmq: Any = importlib.import_module("zmq")
    message = bytearray(os.urandom(load.message_bytes))
    with zmq.Context() as context, context.socket(zmq.PAIR) as channel:
        channel.connect(f"tcp://{HOST}:{pipe.recv()}")

        def run() -> None:
            for _ in range(load.count):
                channel.send(message, copy=False)
            assert channel.recv() == b"k"

        yield run


# --- gRPC ------------------------------------------------------------------------------------------------------------


def receive_grpc(load: Load, pipe: Connection) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    buffer = memoryview(bytearray(load.message_bytes))

    def move(messages: Iterator[bytes], _: object) -> bytes:
        for message in messages:
            buffer[:] = message
        return b"k"

    options = [("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(2), options=options)
    handler: Any = grpc.stream_unary_rpc_method_handler(move)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Kv", {"Move": handler}),))
    pipe.send(server.add_insecure_port(f"{HOST}:0"))
    server.start()
    pipe.poll(WAIT_SECONDS)
    server.stop(None)


def send_grpc(load: Load, pipe: Connection) -> Runs:
    import grpc

    message = os.urandom(load.message_bytes)
    with grpc.insecure_channel(f"{HOST}:{pipe.recv()}", options=[("grpc.max_send_message_length", -1)]) as channel:
        move: Any = channel.stream_unary("/bench.Kv/Move")

        def run() -> None:
            assert move((message for _ in range(load.count)), timeout=WAIT_SECONDS) == b"k"

        yield run


# --- gloo ------------------------------------------------------------------------------------------------------------


def join_gloo(rank: int, store: str) -> Any:
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return torch


def receive_gloo(load: Load, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipe.send(store)
        torch = join_gloo(1, store)
        buffer = torch.empty(load.message_bytes, dtype=torch.uint8)
        for _ in range(load.repeats + 1):
            for _ in range(load.count):
                torch.distributed.recv(buffer, 0)
            torch.distributed.send(buffer[:1], 0)
        pipe.poll(WAIT_SECONDS)
        torch.distributed.destroy_process_group()


def send_gloo(load: Load, pipe: Connection) -> Runs:
    torch = join_gloo(0, pipe.recv())
    message = torch.ones(load.message_bytes, dtype=torch.uint8)

    def run() -> None:
        for _ in range(load.count):
            torch.distributed.send(message, 1)
        torch.distributed.recv(message[:1], 1)

    yield run
    pipe.send("done")
    torch.distributed.destroy_process_group()


# --- this project's transfer -----------------------------------------------------------------------------------------


def kv_cache(load: Load) -> Any:
    """Make a cache whose layer is one message: K and V of 8 heads of 64 in float32, 4 KiB a token."""
    import torch

    from ringserve.workers.kv.cache import KvCache

    torch.set_num_threads(1)
    num_blocks = load.message_bytes // 4096 // 16
    shape = {"num_blocks": num_blocks, "block_tokens": 16, "num_kv_heads": 8, "head_dim": 64}
    cache = KvCache(num_layers=load.count, device=load.device, **shape)  # type: ignore[arg-type]
    for tensor in (*cache.k_layers, *cache.v_layers):
        tensor.fill_(1.0)
    return cache


def way_of(carrier: str, name: str, device: str) -> dict[str, Any]:
    """Return the arguments with which an end of a transfer uses TLS, with this run's certificate, or NIXL."""
    import torch

    from ringserve.cp_core.transport.peer_tls import PeerTls
    from ringserve.workers.kv.pulls import PullAgent

    if carrier == "nixl":
        return {"agent": PullAgent(name, torch.device(device), slot_bytes=SLOT_BYTES, is_required=True)}
    files = os.environ.get(CERTIFICATE, "")
    tls = PeerTls(cert=f"{files}/cert.pem", key=f"{files}/key.pem", ca=f"{files}/cert.pem")
    return {"tls": tls} if carrier == "tls" else {}


def receive_kv_transfer(load: Load, pipe: Connection, carrier: str = "sockets") -> None:
    from ringserve.cp_core.layout.shards import TokenRange
    from ringserve.workers.kv.receiver import KvReceiver
    from ringserve.workers.protocol.transfers import KvExpect, TransferKey

    cache = kv_cache(load)
    receiver = KvReceiver(cache, "destination", **way_of(carrier, "destination", load.device))
    blocks, tokens = tuple(range(cache.num_blocks)), TokenRange(0, cache.num_blocks * 16)
    for attempt in range(load.repeats + 1):
        receiver.expect(KvExpect(TransferKey("bench", attempt, "source", "destination"), (tokens,), 0, blocks))
    pipe.send(receiver.endpoint)
    pipe.poll(WAIT_SECONDS)
    receiver.close()


def send_kv_transfer(load: Load, pipe: Connection, carrier: str = "sockets") -> Runs:
    from ringserve.cp_core.layout.reshard import KvPiece
    from ringserve.cp_core.layout.shards import TokenRange
    from ringserve.workers.kv.sender import KvSender
    from ringserve.workers.protocol.transfers import KvPart, KvSend, TransferKey

    cache = kv_cache(load)
    endpoint = pipe.recv()
    sender = KvSender(cache, "source", **way_of(carrier, "source", load.device))
    attempts = iter(range(load.repeats + 1))
    piece = KvPiece(TokenRange(0, cache.num_blocks * 16), 0, 0, cache.num_kv_heads)

    def run() -> None:
        key = TransferKey("bench", next(attempts), "source", "destination")
        sender.send_all(KvSend(key, tuple(range(cache.num_blocks)), (KvPart(endpoint, (piece,)),)), WAIT_SECONDS)

    yield run
    sender.close()
    pipe.send("done")


@dataclass(frozen=True)
class Candidate:
    """Carrier with the work of its two processes, and the package that it needs."""

    name: str
    package: str
    receive: Callable[[Load, Connection], None]
    send: Callable[[Load, Connection], Runs]


def kv_candidate(name: str, carrier: str = "sockets") -> Candidate:
    receive, send = partial(receive_kv_transfer, carrier=carrier), partial(send_kv_transfer, carrier=carrier)
    return Candidate(name, "nixl_cu12" if carrier == "nixl" else "torch", receive, send)


KV_TRANSFER, KV_BY_NIXL = kv_candidate("kv_transfer"), kv_candidate("kv nixl", "nixl")
CANDIDATES = (
    Candidate("gloo", "torch", receive_gloo, send_gloo),
    Candidate("sockets", "socket", receive_sockets, send_sockets),
    Candidate("zeromq", "zmq", receive_zeromq, send_zeromq),
    Candidate("grpc", "grpc", receive_grpc, send_grpc),
    KV_TRANSFER,
)
TLS_CANDIDATES = (KV_TRANSFER, kv_candidate("kv tls", "tls"))
CARRIERS = {"sockets": (KV_TRANSFER,), "nixl": (KV_BY_NIXL,)}


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of all threads of these processes until now."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(item.user + item.system for item in times))


def measure_here(candidate: Candidate, load: Load, peer: Connection, peer_pid: int, result: Connection) -> None:
    """Time every run in the sending process, and send the results."""
    seconds: list[float] = []
    for run in candidate.send(load, peer):
        run()
        pids = (os.getpid(), peer_pid)
        spent = cpu_seconds(pids)
        for _ in range(load.repeats):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        result.send((seconds, cpu_seconds(pids) - spent))
    if candidate.name == "grpc":
        peer.send("done")


def measure(candidate: Candidate, load: Load) -> Row:
    """Measure one candidate in new processes, so that it inherits no threads. Raises Unavailable."""
    spawn = multiprocessing.get_context("spawn")
    sender_end, receiver_end = spawn.Pipe()
    result, result_end = spawn.Pipe(duplex=False)
    receiver = spawn.Process(target=candidate.receive, args=(load, receiver_end), daemon=True)
    receiver.start()
    arguments = (candidate, load, sender_end, receiver.pid, result_end)
    sender = spawn.Process(target=measure_here, args=arguments, daemon=True)
    sender.start()
    result_end.close()
    try:
        if not result.poll(WAIT_SECONDS):
            raise Unavailable(f"{candidate.name} did not end within {WAIT_SECONDS:g} s")
        seconds, cpu = result.recv()
    except EOFError:
        raise Unavailable(f"the sender of {candidate.name} has ended") from None
    finally:
        for process in (sender, receiver):
            process.join(10.0)
            process.kill()
    rates = [load.total_bytes / each / 1e9 for each in seconds]
    return Row(
        keys={"carrier": candidate.name, "message_bytes": load.message_bytes},
        figures={
            "gigabytes_per_second": Summary.of(rates),
            # Of both processes: it distinguishes candidates even if other programs use the cores.
            "cpu_seconds_per_gigabyte": cpu / (load.total_bytes * load.repeats / 1e9),
        },
    )


def make_certificate() -> None:
    """Make a certificate in a directory that is removed at exit."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    words = f"openssl req -x509 -newkey ed25519 -nodes -days 2 -subj /CN=bench -addext subjectAltName=IP:{HOST}".split()
    files = ["-keyout", f"{directory}/key.pem", "-out", f"{directory}/cert.pem"]
    subprocess.run([*words, *files], check=True, capture_output=True, timeout=WAIT_SECONDS)
    os.environ[CERTIFICATE] = directory


def add(commands: Subcommands) -> None:
    parser = commands.add_parser("kv-carrier", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="payload of one run (64)")
    parser.add_argument("--messages", default="262144,1048576,4194304", help="message sizes in bytes, with commas")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each candidate (7)")
    parser.add_argument("--tls", action="store_true", help="only kv_transfer, with and without TLS")
    parser.add_argument("--carrier", choices=CARRIERS, help="only kv_transfer, by this carrier")
    parser.add_argument("--device", default="cpu", help="memory of the KV of kv_transfer: cpu (default), cuda:0")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    candidates = TLS_CANDIDATES if arguments.tls else CARRIERS.get(arguments.carrier, CANDIDATES)
    present = [item for item in candidates if importlib.util.find_spec(item.package) is not None]
    skipped = [item.name for item in candidates if item not in present]
    if arguments.tls:
        make_certificate()
    rows: list[Row] = []
    for message_bytes in map(int, arguments.messages.split(",")):
        count = max(1, (arguments.megabytes << 20) // message_bytes)
        load = Load(message_bytes=message_bytes, count=count, repeats=arguments.repeats, device=arguments.device)
        rows += [measure(candidate, load) for candidate in present]
    if arguments.json:
        found = {"cores": len(os.sched_getaffinity(0)), "rows": [row.as_dict() for row in rows]}
        print(json.dumps(found | {"not_installed": skipped}))
        return 0
    print_table(console(), table([row.cells() for row in rows]), num_keys=2)
    if skipped:
        print(f"not installed, so not measured: {', '.join(skipped)}")
    return 0
