"""Connections by which a leader calls a rank, so that neither steps nor KV nor tokens need a call of Ray.

Such a call takes each end a millisecond or more of a core, just when ranks compute. The rank listens until its leader
comes; each proves to the other that it knows the secret of these connections, which Ray has carried. One connection
carries questions, the other answers, since TLS allows no write during a read. A message is a length and the pickle of
plain data: `load` refuses everything else, so a message cannot run code.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import io
import itertools
import logging
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from ringserve.cp_core.errors import ConfigError, RingserveError, Unavailable
from ringserve.cp_core.transport.socket_mesh import Rendezvous, RingListener, call_rank, connect_mesh

log = logging.getLogger(__name__)

RANK, QUESTIONS, ANSWERS = 0, 1, 2
"""Places at the ends of the connections: the rank's, and the leader's for what it asks and for what it is told."""
LANES = {"compute": 1, "transfer": 64, "control": 16}
"""Threads for the calls of each kind. One computes; the others wait for transfers, or answer at once."""
SILENCE_SECONDS = 30.0
"""Seconds after which a leader counts as gone that takes no byte of an answer."""
LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 30
"""Length of a message at most. Ten million token ids have 80 MB."""
PARTS_OF_ARRAYS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}
Call = Callable[..., Any]
"""`call(method, *arguments)` of the rank."""


def calls_of(incarnation: str, secret: str, timeout_seconds: float) -> Rendezvous:
    """Return the parameters of the connections that both ends know before the rank listens."""
    endpoints = ("", "", "")
    return Rendezvous(
        name=f"calls of {incarnation}",
        rank=RANK,
        endpoints=endpoints,
        secret=secret,
        timeout_seconds=timeout_seconds,
    )


@functools.cache  # of what it returns: nobody can fill it with names
def _plain(module: str, name: str) -> Any:
    is_ours = module.startswith("ringserve.") and "." not in name
    if is_ours or (module, name) in PARTS_OF_ARRAYS or (module, name) == ("builtins", "range"):
        found = getattr(importlib.import_module(module), name)
        if not is_ours or (
            isinstance(found, type) and (is_dataclass(found) or issubclass(found, (Enum, RingserveError)))
        ):
            return found
    raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _plain(module, name)


def dump(value: object) -> bytes:
    """Return the message of a value that `load` accepts, without its length."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def load(message: bytes | bytearray) -> Any:
    """Return the value: dataclasses, enums and errors of ringserve, arrays, and what Python has literals for.

    Raises UnpicklingError for anything else.
    """
    try:
        return _PlainData(io.BytesIO(message)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # of any kind: a pickle is a program
        raise pickle.UnpicklingError(f"not a pickle: {type(error).__name__}: {error}") from error


class Lanes:
    """Threads of a rank for its leader's calls, made as they are needed. They end with the process."""

    def __init__(self) -> None:
        self._lanes: Mapping[str, _Lane] = {name: _Lane(name, most) for name, most in LANES.items()}

    def run(self, lane: str, job: Callable[[], None]) -> None:
        """Run a job when a thread of its lane is free. Raises KeyError for a lane that LANES lacks."""
        self._lanes[lane].run(job)


class _Lane:
    # A pool of `concurrent.futures` would be waited for when the process exits, by its decode loop for ever.
    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._left = most
        self._idle = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            is_new = self._idle <= 0 and self._left > 0
            self._idle -= not is_new  # below 0, jobs wait for a thread
            self._left -= is_new
        self._jobs.put(job)
        if is_new:
            threading.Thread(target=self._serve, name=f"ringserve-{self._name}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


def listen_for_calls(host: str, rendezvous: Rendezvous, lanes: Lanes, call: Call) -> str:
    """Answer the calls of one leader, and return the endpoint to call. Raises Unavailable.

    A thread waits for the leader and reads what it asks, until the leader has gone.
    """
    listener = RingListener(host)
    server = _Server(listener, rendezvous, lanes, call)
    threading.Thread(target=server.serve, name="ringserve-calls", daemon=True).start()
    return listener.endpoint


class _Server:
    def __init__(self, listener: RingListener, rendezvous: Rendezvous, lanes: Lanes, call: Call) -> None:
        self._listener = listener
        self._rendezvous = rendezvous
        self._lanes = lanes
        self._call = call
        self._answering = threading.Lock()

    def serve(self) -> None:
        try:
            connections = connect_mesh(self._listener, self._rendezvous)
        except (ConfigError, Unavailable) as error:
            log.info("no leader calls by a connection: %s", error)
            return
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for a leader whose host has gone
        questions, answers = connections[QUESTIONS], connections[ANSWERS]
        questions.settimeout(None)
        answers.settimeout(SILENCE_SECONDS)
        with questions, answers:
            try:
                while (message := _receive(questions)) is not None:
                    number, lane, method, arguments = load(message)
                    self._lanes.run(lane, partial(self._answer, answers, number, method, arguments))
            except (OSError, pickle.UnpicklingError) as error:
                log.info("a leader's calls have ended: %s", error)

    def _answer(self, answers: socket.socket, number: int, method: str, arguments: tuple[object, ...]) -> None:
        try:
            message = dump((number, True, self._call(method, *arguments)))
        except RingserveError as error:
            message = dump((number, False, error))
        except Exception as error:  # the leader tells it, and takes the rank for lost
            log.exception("%s failed", method)
            message = dump((number, False, f"{type(error).__name__}: {error}"))
        with self._answering, suppress(OSError):  # the leader has gone, or will notice that the connection has
            answers.sendall(LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytearray | None:
    """Return the next message, or None if the peer has closed the connection. Raises OSError."""
    length = _fill(bytearray(LENGTH.size), connection)
    return None if length is None else _fill(bytearray(_checked(length)), connection)


def _fill(buffer: bytearray, connection: socket.socket) -> bytearray | None:
    left = memoryview(buffer)
    while left:
        received = connection.recv_into(left)
        if not received:
            return None
        left = left[received:]
    return buffer


def _checked(length: bytes | bytearray) -> int:
    (count,) = LENGTH.unpack(length)
    if count > MAX_BYTES:
        raise ConnectionError(f"a message of {count} bytes; at most {MAX_BYTES} are allowed")
    return int(count)


class RankFailed(Exception):
    """Error of a call, by a rank that answers: its kind and text."""


class Calls:
    """Leader's end of the connections, from construction to `close`. For one event loop, which constructs none.

    A question that is cancelled while it is sent closes the connections: half of it may be on its way.
    """

    def __init__(self, endpoint: str, rendezvous: Rendezvous) -> None:
        """Connect, which may take the rendezvous's timeout twice. Raises Unavailable, ConfigError."""
        called = replace(rendezvous, endpoints=(endpoint, "", ""))
        self._questions = call_rank(replace(called, rank=QUESTIONS), RANK)
        try:
            self._answers = call_rank(replace(called, rank=ANSWERS), RANK)
        except BaseException:
            self._questions.close()
            raise
        for connection in (self._questions, self._answers):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._asking = asyncio.Lock()
        self._received = bytearray()
        self._buffer = memoryview(bytearray(1 << 16))
        self._loop: asyncio.AbstractEventLoop | None = None  # once it reads answers

    @property
    def is_closed(self) -> bool:
        return self._answers.fileno() < 0

    async def ask(self, lane: str, method: str, *arguments: object) -> Any:
        """Return what the rank's method returns. Raises its RingserveError, RankFailed, or OSError if none answers."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._answers, self._read)
        number = next(self._numbers)
        message = dump((number, lane, method, arguments))
        answer = self._asked[number] = self._loop.create_future()
        try:
            await self._send(LENGTH.pack(len(message)) + message)
            return await answer
        finally:
            self._asked.pop(number, None)

    async def _send(self, message: bytes) -> None:
        left = memoryview(message)
        async with self._asking:
            try:
                while left:
                    try:
                        left = left[self._questions.send(left) :]
                    except BlockingIOError:
                        await self._writable()
            except BaseException as error:
                self.close(error if isinstance(error, OSError) else None)
                raise

    async def _writable(self) -> None:
        assert self._loop is not None, "a question is sent after the loop is known"
        is_writable = asyncio.Event()
        self._loop.add_writer(self._questions, is_writable.set)
        try:
            await is_writable.wait()
        finally:
            self._loop.remove_writer(self._questions)

    def _read(self) -> None:
        ended: OSError = ConnectionError("the rank closed the connection")
        try:
            while count := self._answers.recv_into(self._buffer):
                self._received += self._buffer[:count]
        except BlockingIOError:
            self._take()
            return
        except OSError as error:
            ended = error
        self._take()
        self.close(ended)

    def _take(self) -> None:
        """Hand on the answers that have arrived whole."""
        begin = 0
        while len(self._received) - begin >= LENGTH.size:
            first = begin + LENGTH.size
            try:
                count = _checked(self._received[begin:first])
                if len(self._received) < first + count:
                    break
                number, is_right, value = load(self._received[first : first + count])
            except (OSError, pickle.UnpicklingError) as error:
                self.close(ConnectionError(f"the rank sent no answer: {error}"))
                return
            begin = first + count
            answer = self._asked.get(number)
            if answer is None or answer.done():
                continue  # nobody waits for it any more
            if is_right:
                answer.set_result(value)
            else:
                answer.set_exception(value if isinstance(value, RingserveError) else RankFailed(value))
        del self._received[:begin]

    def close(self, error: OSError | None = None) -> None:
        """Close the connections; calls that wait fail with `error`. Idempotent."""
        if self.is_closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._answers)
        for connection in (self._questions, self._answers):
            connection.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error or ConnectionError("the connection was closed"))
