"""A leader gets the same events by its connection to a rank as by Ray, and asks Ray if the connection fails."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.cp_core.transport.socket_mesh import Rendezvous
from ringserve.orchestration.ring.actors import RayRank
from ringserve.orchestration.ring.polls import Polls, listen_for_polls, polls_of
from ringserve.workers.protocol.ranks import RankSettings, RankSpec
from ringserve.workers.protocol.steps import DecodeEvent, DecodeEvents, FinishReason
from ringserve.workers.sampling.parameters import TokenLogprobs
from tests.services.auth.certificates import Authority
from tests.waiting import WAIT_SECONDS

SECRET = "of this connection"


def token(number: int, **more: Any) -> DecodeEvent:
    fields: dict[str, Any] = {"sequence_id": "a", "token_id": number, "finish_reason": None, "kv_tokens": 9 + number}
    return DecodeEvent(**fields | more)


EVENTS = (
    token(
        0, owner=1, logprobs=TokenLogprobs(token_id=0, logprob=-0.5, rank=2, top_ids=(4, 0), top_logprobs=(-0.1, -1))
    ),
    token(1, is_draft=True, prompt_seconds=0.25),
    token(2, token_id=None, finish_reason=FinishReason.LENGTH),
)


class Rank:
    """Rank with `events`, which notes what it is asked. `error` is raised instead, if it is set."""

    def __init__(self, events: Sequence[DecodeEvent] = EVENTS) -> None:
        self.events = tuple(events)
        self.error: Exception | None = None
        self.asked: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def poll(self, after: int, wait_seconds: float) -> DecodeEvents:
        self.asked.put((after, wait_seconds))
        assert self.may_answer.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        return DecodeEvents(start=after, stop=len(self.events), events=self.events[after:])


def polls(tls: PeerTls | None = None, secret: str = SECRET, timeout: float = WAIT_SECONDS) -> Rendezvous:
    return replace(polls_of("ring-1", secret, timeout), tls=tls)


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: Authority) -> PeerTls | None:
    return authority.peer() if request.param == "tls" else None


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.may_answer.set()


async def test_a_leader_gets_the_events_from_its_cursor_on(rank: Rank, tls: PeerTls | None) -> None:
    connection = Polls(listen_for_polls("127.0.0.1", polls(tls), rank.poll), polls(tls))
    for after in (0, 2, 3, 0):
        assert await connection.ask(after, 1.5) == DecodeEvents(start=after, stop=3, events=EVENTS[after:])
        assert rank.asked.get() == (after, 1.5)
    connection.end()
    connection.end()


async def test_events_of_many_sequences_arrive_whole(tls: PeerTls | None) -> None:
    many = [token(number, sequence_id=f"turn-{number}" * 20) for number in range(5000)]
    connection = Polls(listen_for_polls("127.0.0.1", polls(tls), Rank(many).poll), polls(tls))
    assert list((await connection.ask(0, 0.0)).events) == many
    connection.end()


async def test_who_lacks_the_secret_learns_nothing_and_the_leader_still_comes(rank: Rank, tls: PeerTls | None) -> None:
    endpoint = listen_for_polls("127.0.0.1", polls(tls), rank.poll)
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        with pytest.raises(Unavailable, match="refused rank 1"):
            Polls(endpoint, polls(tls, secret="guessed"))
        connection = Polls(endpoint, polls(tls))
        assert (await connection.ask(0, 0.0)).events == EVENTS
        silent.settimeout(WAIT_SECONDS)
        assert not silent.recv(1), "it is sent nothing, and cut off"
    connection.end()


async def test_a_leader_takes_no_other_process_for_the_rank(rank: Rank) -> None:
    with pytest.raises(Unavailable):
        Polls(listen_for_polls("127.0.0.1", polls(secret="another"), rank.poll), polls())


async def test_an_error_of_the_rank_ends_the_connection(rank: Rank, tls: PeerTls | None) -> None:
    connection = Polls(listen_for_polls("127.0.0.1", polls(tls), rank.poll), polls(tls))
    rank.error = Unavailable("the decode loop ended")
    with pytest.raises(OSError, match="closed"):
        await connection.ask(0, 0.0)
    connection.end()


def test_a_rank_to_which_no_leader_comes_listens_no_longer(rank: Rank) -> None:
    before = set(threading.enumerate())
    endpoint = listen_for_polls("127.0.0.1", polls(timeout=0.01), rank.poll)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_SECONDS)
    with pytest.raises(Unavailable, match="cannot reach"):
        Polls(endpoint, polls())


class Actor:
    """Actor of a rank that lets a leader poll at `endpoint`, or by Ray, and counts both."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.endpoint = ""
        self.by_ray = self.connections = 0
        self.control = SimpleNamespace(remote=self._poll)
        self.start = SimpleNamespace(remote=lambda spec: done(SimpleNamespace(rank=0)))
        self.home = SimpleNamespace(remote=lambda: done(("elsewhere", 0)))
        self.listen_for_polls = SimpleNamespace(remote=self._listen)

    def _listen(self, incarnation: str, secret: str, timeout: float) -> Any:
        self.connections += 1
        rendezvous = polls_of(incarnation, secret, timeout)
        return done(self.endpoint or listen_for_polls("127.0.0.1", rendezvous, self.rank.poll))

    def _poll(self, incarnation: str, method: str, after: int, wait_seconds: float) -> Any:
        assert method == "poll"
        self.by_ray += 1
        return done(DecodeEvents(start=after, stop=after, events=()))


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


async def test_each_incarnation_is_polled_by_one_connection(actor: Actor) -> None:
    port = await port_of(actor)
    for incarnation in ("second", "third"):
        await begin(port, incarnation)
        for after in (0, 1):
            assert (await port.poll(after, 0.0, WAIT_SECONDS)).events == EVENTS[after:]
    assert (actor.connections, actor.by_ray) == (2, 0)
    port._end_polls()


async def test_a_rank_whose_connection_breaks_is_asked_again_by_ray(actor: Actor, rank: Rank) -> None:
    port = await port_of(actor)
    await port.poll(0, 0.0, WAIT_SECONDS)
    rank.error = Unavailable("the decode loop ended")
    for _ in range(2):
        assert not (await port.poll(1, 0.0, WAIT_SECONDS)).events
    assert (actor.connections, actor.by_ray) == (1, 2)


async def test_a_rank_that_cannot_be_called_is_asked_by_ray(
    actor: Actor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        actor.endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    port = await port_of(actor)
    for _ in range(2):
        assert not (await port.poll(1, 0.0, WAIT_SECONDS)).events
    assert (actor.connections, actor.by_ray) == (1, 2)
    assert "rank 0 is polled by Ray, which takes more of the cores" in caplog.text


async def test_a_rank_that_stands_still_has_a_deadline_and_a_cancelled_poll_ends_the_connection(
    actor: Actor, rank: Rank
) -> None:
    port = await port_of(actor)
    rank.may_answer.clear()
    with pytest.raises(Unavailable, match="rank 0 did not answer poll within"):
        await port.poll(0, 0.0, 0.05)
    await begin(port, "second")
    polling = asyncio.create_task(port.poll(0, 0.0, WAIT_SECONDS))
    for _ in range(2):  # of both incarnations
        await asyncio.to_thread(rank.asked.get, timeout=WAIT_SECONDS)
    polling.cancel()
    await asyncio.wait([polling])
    rank.may_answer.set()
    assert not (await port.poll(0, 0.0, WAIT_SECONDS)).events, "Ray's answer, not that to the cancelled poll"


async def test_a_poll_that_waits_is_asked_by_ray_when_the_rank_is_killed(actor: Actor, rank: Rank) -> None:
    port = await port_of(actor)
    rank.may_answer.clear()
    polling = asyncio.create_task(port.poll(0, 0.0, WAIT_SECONDS))
    await asyncio.to_thread(rank.asked.get, timeout=WAIT_SECONDS)
    await port.kill()
    assert not (await polling).events
    assert actor.by_ray == 1
    await port.kill()
