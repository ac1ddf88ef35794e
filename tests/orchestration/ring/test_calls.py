"""A leader calls its ranks by connections. Calls arrive whole, strangers are cut off, and Ray stands in."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import msgpack
import numpy as np
import pytest
import ray

from ringserve.cp_core.errors import Busy, RingserveError, StaleIncarnation, TransferError, Unavailable
from ringserve.cp_core.layout.reshard import KvPiece
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, balanced_layout
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.cp_core.transport.socket_mesh import Rendezvous
from ringserve.orchestration.protocol.ports import RankPort
from ringserve.orchestration.ring import calls
from ringserve.orchestration.ring.actors import RayRank
from ringserve.orchestration.ring.calls import (
    KINDS,
    LANES,
    Calls,
    Lanes,
    RankFailed,
    calls_of,
    dump,
    listen_for_calls,
    load,
)
from ringserve.views import RingRates
from ringserve.workers.kv.arrivals import EndedTransfers
from ringserve.workers.protocol.ranks import RankSettings, RankSpec
from ringserve.workers.protocol.steps import (
    AdmitSequence,
    Algorithm,
    DecodeEvent,
    DecodeEvents,
    FinishReason,
    PrefillOutput,
    PrefillStep,
    PromptScore,
    SequencePrefill,
)
from ringserve.workers.protocol.transfers import KvEnd, KvEnds, KvExpect, KvPart, KvSend, TransferKey, TransferReport
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS

SECRET = "of this connection"
KEY = TransferKey("turn-1", 2, "prefill@1", "decode@3")
LOGPROBS = TokenLogprobs(token_id=0, logprob=-0.5, rank=2, top_ids=(4, 0), top_logprobs=(-0.1, -1.0))
MESSAGES = (
    PrefillStep(
        algorithm=Algorithm.CHAIN,
        sequences=(
            SequencePrefill(
                sequence_id="turn-1",
                token_ids=np.arange(7),
                layout=balanced_layout(3, 7, (2, 1)),
                cached=(2, 1),
                blocks=(4, 0),
                sample=SamplingParameters(temperature=0.5, seed=1 << 70),
                sends=(KvSend(KEY, (4, 0), (KvPart("127.0.0.1:1", (KvPiece(TokenRange(0, 3), 0, 0, 1),)),)),),
                score=PromptScore(num_top=1, following=None),
                tail=ShardMap.empty(2),
            ),
        ),
    ),
    PrefillOutput(tokens={"turn-1": None}, logprobs={"turn-1": LOGPROBS}, scores={"turn-1": {5: LOGPROBS}}),
    DecodeEvents(
        start=0,
        stop=1,
        events=(DecodeEvent(sequence_id="a", token_id=None, finish_reason=FinishReason.LENGTH, kv_tokens=9),),
    ),
    (AdmitSequence(sequence_id="a", token_id=1, position=2, held=(2,), blocks=((0,),), sampling=SamplingParameters()),),
    KvExpect(KEY, (TokenRange(0, 9),), 0, (1, 2)),
    KvEnds(stop=1, ends=(KvEnd(key=KEY, report=TransferReport(payload_bytes=8, seconds=0.5)),)),
    RingRates(gemm_flops=1.0, attention_flops=2.0, link_bytes_per_second=3.0, link_latency_seconds=4.0),
)


class OddError(RingserveError):
    """Error that the leader does not know."""


class Rank:
    """Rank that returns the arguments of its calls, and notes their methods. `wait` waits for `may_answer`."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.may_answer = threading.Event()
        self.threads: set[int] = set()

    def call(self, method: str, *arguments: Any) -> Any:
        self.asked.put(method)
        self.threads.add(threading.get_ident())
        match method:
            case "wait":
                assert self.may_answer.wait(WAIT_SECONDS)
            case "refuse":
                raise arguments[0]
            case "odd":
                raise OddError("the leader does not know it")
            case "unsayable":
                return Path()
        return arguments[0] if len(arguments) == 1 else arguments


def rendezvous(tls: PeerTls | None = None, secret: str = SECRET, timeout: float = WAIT_SECONDS) -> Rendezvous:
    return replace(calls_of("ring-1", secret, timeout), tls=tls)


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> PeerTls | None:
    return authority.peer() if request.param == "tls" else None


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.may_answer.set()


def connect(rank: Rank, tls: PeerTls | None = None) -> Calls:
    return Calls(listen_for_calls("127.0.0.1", rendezvous(tls), Lanes(), rank.call), rendezvous(tls))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
async def test_what_leaders_and_ranks_tell_each_other_arrives_as_it_was(rank: Rank, message: object) -> None:
    calls = connect(rank)
    # Arrays have no equality that is one truth value.
    assert repr(await calls.ask("control", "echo", message)) == repr(message)
    calls.close()
    calls.close()


def kinds_in(hint: Any) -> Iterator[type[Any]]:
    """Yield the dataclasses and enums in an annotation, and in the fields of those dataclasses."""
    for inner in get_args(hint):
        yield from kinds_in(inner)
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield hint
    elif isinstance(hint, type) and is_dataclass(hint):
        yield hint
        for each in get_type_hints(hint).values():
            yield from kinds_in(each)


def test_all_that_a_rank_takes_and_returns_can_be_told() -> None:
    by_ray = {"start", "renew", "remember", "recall", "status"}
    methods = [each for name, each in vars(RankPort).items() if not name.startswith("_") and name not in by_ray]
    found = {kind for method in methods for hint in get_type_hints(method).values() for kind in kinds_in(hint)}
    assert {PrefillStep, KvExpect, DecodeEvents, RingRates, Algorithm} <= found
    assert {kind.__name__ for kind in found if KINDS.get(kind.__name__) is not kind} == set()


async def test_many_large_calls_at_once_arrive_whole(rank: Rank, tls: PeerTls | None) -> None:
    calls = connect(rank, tls)
    sent = [np.random.default_rng(number).integers(1 << 40, size=200_000) for number in range(12)]
    back = await asyncio.gather(*(calls.ask("transfer", "echo", each) for each in sent))
    assert all(np.array_equal(one, other) for one, other in zip(sent, back, strict=True))
    calls.close()


async def test_a_call_that_waits_delays_none_of_another_lane_and_none_behind_it(
    rank: Rank, tls: PeerTls | None
) -> None:
    calls = connect(rank, tls)
    waiting = [asyncio.create_task(calls.ask("compute", "wait", number)) for number in range(3)]
    waiting += [asyncio.create_task(calls.ask("transfer", "wait", number)) for number in range(LANES["transfer"])]
    for number in range(5):
        assert await calls.ask("control", "echo", number) == number
    assert not any(task.done() for task in waiting)
    rank.may_answer.set()
    assert await asyncio.gather(*waiting) == [*range(3), *range(LANES["transfer"])]
    calls.close()


async def test_one_thread_computes_for_every_leader(rank: Rank) -> None:
    lanes = Lanes()
    for _ in range(2):
        calls = Calls(listen_for_calls("127.0.0.1", rendezvous(), lanes, rank.call), rendezvous())
        await asyncio.gather(*(calls.ask("compute", "echo", number) for number in range(4)))
        calls.close()
    assert len(rank.threads) == 1


@pytest.mark.parametrize("error", [Busy("full", 1.5), StaleIncarnation("gone"), TransferError("late")], ids=repr)
async def test_an_error_of_the_rank_is_raised_as_it_is(rank: Rank, error: RingserveError) -> None:
    calls = connect(rank)
    with pytest.raises(type(error)) as raised:
        await calls.ask("control", "refuse", error)
    assert (str(raised.value), vars(raised.value)) == (str(error), vars(error))
    assert await calls.ask("control", "echo", 1) == 1
    calls.close()


async def test_other_errors_are_told_by_kind_and_text(rank: Rank) -> None:
    calls = connect(rank)
    with pytest.raises(RankFailed, match="TypeError: exceptions must derive from BaseException"):
        await calls.ask("control", "refuse", "no error")
    with pytest.raises(RankFailed, match="OddError: the leader does not know it"):
        await calls.ask("control", "odd")
    with pytest.raises(RankFailed, match=r"TypeError: .*Path is not plain data"):
        await calls.ask("control", "unsayable")
    calls.close()


@pytest.mark.parametrize("value", [print, partial(print), Path(), threading.Thread, {1, 2}], ids=repr)
def test_other_values_are_no_message(value: object) -> None:
    with pytest.raises(TypeError, match="is not plain data"):
        dump((1, True, value))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        dump(KEY)[:-9],
        dump(KEY).replace(b"TransferKey", b"PrefillStep"),
        dump(KEY).replace(b"TransferKey", b"RankWorkers"),
        dump(Algorithm.CHAIN).replace(b"chain", b"chair"),
        msgpack.packb(msgpack.ExtType(9, b"")),
    ],
    ids=repr,
)
def test_a_message_that_is_cut_or_garbled_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="no plain data"):
        load(message)


async def test_who_lacks_the_secret_learns_nothing_and_the_leader_still_comes(rank: Rank, tls: PeerTls | None) -> None:
    endpoint = listen_for_calls("127.0.0.1", rendezvous(tls), Lanes(), rank.call)
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        with pytest.raises(Unavailable, match="refused rank 1"):
            Calls(endpoint, rendezvous(tls, secret="guessed"))
        calls = Calls(endpoint, rendezvous(tls))
        assert await calls.ask("control", "echo", 1) == 1
        silent.settimeout(WAIT_SECONDS)
        assert not silent.recv(1), "it is sent nothing, and cut off"
    calls.close()


async def test_a_leader_takes_no_other_process_for_the_rank(rank: Rank) -> None:
    with pytest.raises(Unavailable):
        Calls(listen_for_calls("127.0.0.1", rendezvous(secret="another"), Lanes(), rank.call), rendezvous())


def test_a_rank_to_which_no_leader_comes_listens_no_longer(rank: Rank) -> None:
    before = set(threading.enumerate())
    endpoint = listen_for_calls("127.0.0.1", rendezvous(timeout=0.01), Lanes(), rank.call)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_SECONDS)
    with pytest.raises(Unavailable, match="cannot reach"):
        Calls(endpoint, rendezvous())


class Actor:
    """Actor of a rank that lets a leader call at `endpoint`, or by Ray, and counts both."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.endpoint = ""
        self.by_ray = self.connections = 0
        self.ended = EndedTransfers()
        self.control = SimpleNamespace(remote=self._control)
        self.start = SimpleNamespace(remote=lambda spec: done(SimpleNamespace(rank=0)))
        self.home = SimpleNamespace(remote=lambda: done(("elsewhere", 0)))
        self.listen_for_calls = SimpleNamespace(remote=self._listen)

    def _listen(self, incarnation: str, secret: str, timeout: float) -> Any:
        self.connections += 1
        both = calls_of(incarnation, secret, timeout)
        return done(self.endpoint or listen_for_calls("127.0.0.1", both, Lanes(), self._poll))

    def _poll(self, method: str, *arguments: Any) -> Any:
        if method == "poll_kv":
            return self.ended.poll(*arguments)
        self.rank.call("wait" if method == "poll" else method, *arguments)
        return DecodeEvents(start=0, stop=7, events=())

    def _control(self, incarnation: str, method: str, *arguments: Any) -> Any:
        self.by_ray += 1
        return done(DecodeEvents(start=0, stop=3, events=()))


def done(value: object) -> Any:
    future: Future[object] = Future()
    future.set_result(value)
    return SimpleNamespace(future=lambda: future)


@pytest.fixture
def actor(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Actor:
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    return Actor(rank)


async def port_of(actor: Actor) -> RayRank:
    port = RayRank("rank 0", cast(Any, actor))
    await begin(port, "first")
    return port


async def begin(port: RayRank, incarnation: str) -> None:
    settings = RankSettings(model_path="model", num_blocks=4, listen_host="127.0.0.1")
    await port.start(RankSpec(ring="ring", rank=0, num_ranks=1, incarnation=incarnation, settings=settings), 5.0)


async def test_each_incarnation_is_called_by_a_connection_of_its_own(actor: Actor, rank: Rank) -> None:
    rank.may_answer.set()
    port = await port_of(actor)
    for incarnation in ("second", "third"):
        await begin(port, incarnation)
        for _ in range(2):
            assert (await port.poll(0, 0.0, WAIT_SECONDS)).stop == 7
    assert (actor.connections, actor.by_ray) == (3, 0)
    port.end_calls()


async def test_another_incarnation_counts_the_ends_of_transfers_anew(actor: Actor, rank: Rank) -> None:
    """Its first transfer may end before the leader asks for ends."""
    port = await port_of(actor)
    for incarnation in ("second", "third"):
        await begin(port, incarnation)
        actor.ended = EndedTransfers()
        key = replace(KEY, destination=incarnation)
        actor.ended.add(KvEnd(key=key, report=TransferReport(payload_bytes=8, seconds=0.5)))
        await port.expect_kv(KvExpect(key, (), 0, ()), WAIT_SECONDS)
        assert (await port.await_kv(key, WAIT_SECONDS)).payload_bytes == 8
    port.end_calls()


async def test_a_leader_that_takes_no_answers_is_left(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an answer may be on its way: the leader must not take the next one for its rest."""
    is_left = threading.Event()
    monkeypatch.setattr(calls.log, "info", lambda *_: is_left.set())
    monkeypatch.setattr(calls, "SILENCE_SECONDS", 0.05)
    connection, loop = connect(rank), asyncio.get_running_loop()
    large = np.zeros(1 << 22)  # more than the kernel keeps
    asking = asyncio.create_task(connection.ask("transfer", "wait", large))
    await asyncio.to_thread(rank.asked.get, timeout=WAIT_SECONDS)
    loop.remove_reader(connection._answers)
    rank.may_answer.set()
    assert await asyncio.to_thread(is_left.wait, WAIT_SECONDS)
    later = asyncio.create_task(connection.ask("control", "echo", 1))
    loop.add_reader(connection._answers, connection._read)
    for task in (asking, later):
        with pytest.raises(ConnectionError, match="closed"):
            await task
    assert connection.is_closed


async def test_a_question_that_is_half_sent_fails_with_the_connection(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come, may_read = threading.Event(), threading.Event()

    def receive(connection: socket.socket) -> None:
        has_come.set()
        assert may_read.wait(WAIT_SECONDS)

    monkeypatch.setattr(calls, "_receive", receive)
    connection = connect(rank)
    asking = asyncio.create_task(connection.ask("control", "echo", np.zeros(1 << 23)))  # more than the kernel takes
    behind = asyncio.create_task(connection.ask("control", "echo", 1))
    assert await asyncio.to_thread(has_come.wait, WAIT_SECONDS)  # both have begun meanwhile
    connection.close()
    for task in (asking, behind):
        with pytest.raises(OSError, match=r"closed|descriptor"):
            await task
    may_read.set()


async def test_a_rank_that_cannot_be_called_is_asked_by_ray(actor: Actor, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        actor.endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    port = await port_of(actor)
    for _ in range(2):
        assert (await port.poll(0, 0.0, WAIT_SECONDS)).stop == 3
    assert (actor.connections, actor.by_ray) == (1, 2)
    assert "rank 0 has no direct connection and is called through Ray" in caplog.text


async def test_a_call_has_a_deadline_and_its_late_answer_is_nobody_elses(actor: Actor, rank: Rank) -> None:
    port = await port_of(actor)
    with pytest.raises(Unavailable, match="rank 0 did not answer poll within"):
        await port.poll(0, 0.0, 0.05)
    polling = asyncio.create_task(port.poll(0, 0.0, WAIT_SECONDS))
    for _ in range(2):
        await asyncio.to_thread(rank.asked.get, timeout=WAIT_SECONDS)
    polling.cancel()
    await asyncio.wait([polling])
    rank.may_answer.set()
    assert (await port.poll(0, 0.0, WAIT_SECONDS)).stop == 7
    assert actor.by_ray == 0
    port.end_calls()


async def test_calls_that_wait_fail_when_the_rank_is_killed_and_ray_tells_later_ones(actor: Actor, rank: Rank) -> None:
    port = await port_of(actor)
    polling = asyncio.create_task(port.poll(0, 0.0, WAIT_SECONDS))
    await asyncio.to_thread(rank.asked.get, timeout=WAIT_SECONDS)
    await port.kill()
    with pytest.raises(Unavailable, match="rank 0 died"):
        await polling
    assert (await port.poll(0, 0.0, WAIT_SECONDS)).stop == 3
    await port.kill()
