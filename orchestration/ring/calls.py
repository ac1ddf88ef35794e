"""Connections by which a leader calls a rank, so that neither steps nor KV nor tokens need a call of Ray.

A call of Ray costs each end a millisecond or more of a core, just when ranks compute. The rank listens until its leader
comes; each proves to the other that it knows the secret of these connections, which Ray has carried. One connection
carries questions, the other answers, because one TLS connection cannot be written by one thread while another reads it.
A message is a length and plain data in msgpack, with the dataclasses, enums and errors that leaders and ranks know.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import msgpack
import numpy as np

from ringserve.cp_core import errors
from ringserve.cp_core.errors import ConfigError, RingserveError, Unavailable
from ringserve.cp_core.layout import reshard, shards, sparsity
from ringserve.cp_core.transport.socket_mesh import Rendezvous, RingListener, call_rank, connect_mesh
from ringserve.views import RingRates
from ringserve.workers.protocol import ranks, steps, transfers
from ringserve.workers.sampling import parameters

log = logging.getLogger(__name__)

RANK, QUESTIONS, ANSWERS = 0, 1, 2
"""Numbers at the rendezvous: of the rank, and of the leader's two connections."""
LANES = {"compute": 1, "transfer": 64, "control": 16}
"""Most threads for each kind of calls: one computes, 64 may wait for transfers, 16 answer at once."""
SILENCE_SECONDS = 30.0
"""Seconds that a leader has to take an answer. A leader that does not take it counts as gone."""
LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 30
"""Most bytes of a message. Ten million token ids take 80 MB."""
Call = Callable[..., Any]
"""`call(method, *arguments)` of the rank."""


def calls_of(incarnation: str, secret: str, timeout_seconds: float) -> Rendezvous:
    """Return what both ends know of the connections before the rank listens; the leader adds the endpoint."""
    endpoints = ("", "", "")
    return Rendezvous(
        name=f"calls of {incarnation}",
        rank=RANK,
        endpoints=endpoints,
        secret=secret,
        timeout_seconds=timeout_seconds,
    )


def _kinds() -> dict[str, type[Any]]:
    modules = (errors, ranks, steps, transfers, parameters, reshard, shards, sparsity)
    found: dict[str, type[Any]] = {RingRates.__name__: RingRates}
    for each in (each for module in modules for each in vars(module).values() if isinstance(each, type)):
        if is_dataclass(each) or issubclass(each, (Enum, RingserveError)):
            assert found.setdefault(each.__name__, each) is each, f"two classes are called {each.__name__}"
    return found


KINDS = _kinds()
"""Classes whose values may be in messages, by name."""
FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in KINDS.items() if is_dataclass(kind)}


class _Code(IntEnum):
    """Kinds of values that msgpack lacks."""

    DATACLASS = 1
    ENUM = 2
    ERROR = 3
    ARRAY = 4
    LARGE = 5


def dump(value: object) -> bytes:
    """Return a value as a message for `load`, without its length. Raises TypeError if it is not plain data."""
    return bytes(msgpack.packb(value, default=_written, strict_types=True))


def _written(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_Code.ARRAY, dump([value.dtype.str, value.shape, value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    if kind is int:
        return msgpack.ExtType(_Code.LARGE, str(value).encode())
    if KINDS.get(kind.__name__) is not kind:
        raise TypeError(f"{kind.__name__} is not plain data")
    if isinstance(value, Enum):
        return msgpack.ExtType(_Code.ENUM, dump([kind.__name__, value.value]))
    if isinstance(value, RingserveError):
        return msgpack.ExtType(_Code.ERROR, dump([kind.__name__, value.args, vars(value)]))
    values = (getattr(value, name) for name in FIELDS[kind.__name__])
    return msgpack.ExtType(_Code.DATACLASS, dump([kind.__name__, *values]))


def load(message: bytes | bytearray) -> Any:
    """Return the value of a message: values of KINDS, arrays, and what Python has literals for. Lists become tuples.

    Raises ValueError for anything else.
    """
    try:
        return msgpack.unpackb(message, use_list=False, strict_map_key=False, ext_hook=_read)
    except Exception as error:  # of any kind: a constructor may refuse what it is given
        raise ValueError(f"no plain data: {type(error).__name__}: {error}") from error


def _read(code: int, data: bytes) -> Any:
    if code == _Code.LARGE:
        return int(data)
    name, *values = load(data)
    if code == _Code.ARRAY:
        shape, numbers = values
        return np.frombuffer(numbers, dtype=np.dtype(name)).reshape(shape)
    kind = KINDS[name]
    if code == _Code.ENUM:
        return kind(*values)
    if code == _Code.DATACLASS:
        return kind(**dict(zip(FIELDS[name], values, strict=True)))
    assert code == _Code.ERROR, f"no value has code {code}"
    arguments, more = values
    error = kind(*arguments)
    vars(error).update(more)
    return error


class Lanes:
    """Threads of a rank for its leader's calls, made as they are needed. They end with the process."""

    def __init__(self) -> None:
        self._lanes: Mapping[str, _Lane] = {name: _Lane(name, most) for name, most in LANES.items()}

    def run(self, lane: str, job: Callable[[], None]) -> None:
        """Run a job when a thread of its lane is free. Raises KeyError for a lane that LANES lacks."""
        self._lanes[lane].run(job)


class _Lane:
    # Not a pool of `concurrent.futures`: a process that exits waits for its threads, and the decode loop never ends.
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
            except (OSError, ValueError) as error:
                log.info("a leader's calls have ended: %s", error)

    def _answer(self, answers: socket.socket, number: int, method: str, arguments: tuple[object, ...]) -> None:
        try:
            message = dump((number, True, self._call(method, *arguments)))
        except Exception as error:  # of any kind: without an answer the caller would wait for its deadline
            kind = type(error)
            is_sendable = isinstance(error, RingserveError) and KINDS.get(kind.__name__) is kind
            if not is_sendable:
                log.exception("%s failed", method)
            message = dump((number, False, error if is_sendable else f"{kind.__name__}: {error}"))
        with self._answering:
            try:
                answers.sendall(LENGTH.pack(len(message)) + message)
            except OSError as error:  # a part may have been sent, so the connection is useless
                log.info("a leader did not take an answer: %s", error)
                with suppress(OSError):  # the leader has closed it
                    answers.shutdown(socket.SHUT_RDWR)


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
    """Error of a rank's method that is not a RingserveError: its class and text."""


class Calls:
    """Leader's end of the connections, from construction to `close`.

    One event loop uses it. The constructor blocks, so it runs in another thread.

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
        self._may_write = asyncio.Event()
        self._received = bytearray()
        self._buffer = memoryview(bytearray(1 << 16))
        self._loop: asyncio.AbstractEventLoop | None = None  # once it reads answers

    @property
    def is_closed(self) -> bool:
        return self._answers.fileno() < 0

    async def ask(self, lane: str, method: str, *arguments: object) -> Any:
        """Return what the rank's method returns.

        Raises its RingserveError, RankFailed for its other errors, or OSError if the connection ends first.
        """
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
        self._may_write.clear()
        self._loop.add_writer(self._questions, self._may_write.set)
        try:
            await self._may_write.wait()
        finally:
            if not self.is_closed:
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
            except (OSError, ValueError) as error:
                self.close(ConnectionError(f"the rank sent no valid answer: {error}"))
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
            self._loop.remove_writer(self._questions)
        self._may_write.set()  # a `_send` that waits then finds the connection closed
        for connection in (self._questions, self._answers):
            connection.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error or ConnectionError("the connection was closed"))
