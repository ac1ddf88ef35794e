"""Commands of operators, against a router behind its own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from ringserve.cp_core.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from ringserve.orchestration.protocol.rings import AWAY
from ringserve.services.cluster import operator as rings
from ringserve.services.cluster.operator import (
    RouterAccess,
    drain_all,
    drain_node,
    drain_ring,
    restart_ring,
    undrain_ring,
)
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import RouterServicer
from ringserve.services.telemetry.metrics.router import RouterMetrics, RouterView
from ringserve.views import RingInfo, ServerInfo


def status(name: str, node: str, incarnation: str = "first") -> RingInfo:
    return RingInfo(
        role=name.partition("-")[0],
        name=name,
        endpoint="here:1",
        incarnation=incarnation,
        state="ready",
        num_ranks=1,
        num_requests_running=2,
        nodes=(node,),
    )


class FakeRouter:
    """Rings that take one look to drain and, where they are to come back, one more for that. `lost` cannot be told."""

    def __init__(self) -> None:
        self.rings = {
            "prefill-0": status("prefill-0", "10.0.0.1"),
            "prefill-1": status("prefill-1", "10.0.0.2"),
            "decode-0": status("decode-0", "10.0.0.1"),
        }
        self.asked: list[tuple[str, ...]] = []
        self.lost: set[str] = set()
        self.stuck: set[str] = set()
        self._next: list[tuple[str, RingInfo | None]] = []

    def _tell(self, verb: str, name: str, *more: str) -> RingInfo:
        if name in self.lost:
            raise Unavailable(f"the leader of {name} cannot be reached")
        if name not in self.rings:
            raise NotFound(f"ring: {name!r} is not known")
        self.asked.append((verb, name, *more))
        return self.rings[name]

    def _becomes(self, name: str, *later: RingInfo | None) -> None:
        if name not in self.stuck:
            self._next += [(name, each) for each in later]

    async def drain_ring(self, name: str, seconds: float, *, force: bool = False) -> None:
        if seconds < 0:
            raise InvalidRequest("seconds: not allowed")
        before = self._tell("drain", name, *["force"] * force)
        self.rings[name] = _with(before, draining=True)
        self._becomes(name, None)

    async def restart_ring(self, name: str, seconds: float, *, leaving_node: str = "") -> None:
        if seconds < 0:
            raise InvalidRequest("seconds: not allowed")
        before = self._tell("restart", name, leaving_node)
        self.rings[name] = _with(before, draining=True)
        self._becomes(name, _with(before, state=AWAY), _with(before, incarnation="second"))

    async def undrain_ring(self, name: str) -> None:
        before = self._tell("undrain", name)
        self._becomes(name, _with(before, draining=False, incarnation="second"))

    async def get_server_info(self) -> ServerInfo:
        view = ServerInfo(selector="auto", rings=tuple(self.rings.values()), conversations=0, running_turns=0)
        for name, becomes in self._next[:1]:
            if becomes is None:
                del self.rings[name]
            else:
                self.rings[name] = becomes
        del self._next[:1]
        return view


def _with(of: RingInfo, **changes: object) -> RingInfo:
    return replace(of, **changes)  # type: ignore[arg-type]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    monkeypatch.setattr(rings, "POLL_SECONDS", 0.0)
    return FakeRouter()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
async def access(router: FakeRouter, told: list[str]) -> AsyncIterator[RouterAccess]:
    view = RouterView(conversations=0, running_turns=0)
    metrics = RouterMetrics("auto", lambda: view, asyncio.get_running_loop())
    servicer = RouterServicer(router, metrics)  # type: ignore[arg-type]
    server = GrpcServer()
    servicer.register(server)
    endpoint = await server.start("127.0.0.1:0")
    yield RouterAccess(endpoint=endpoint, tls=None, progress=told.append)
    await server.stop(0)


async def test_a_drain_ends_when_the_ring_has_left_and_tells_what_still_runs(
    access: RouterAccess, router: FakeRouter, told: list[str]
) -> None:
    await drain_ring(access, "prefill-1", seconds=5, force=True)
    assert router.asked == [("drain", "prefill-1", "force")]
    assert "prefill-1" not in router.rings
    assert told == ["ring prefill-1 drains, 2 turns are under way"]


async def test_a_restart_ends_when_another_incarnation_serves(access: RouterAccess, router: FakeRouter) -> None:
    await restart_ring(access, "decode-0", seconds=5, start_seconds=5)
    assert router.asked == [("restart", "decode-0", "")]
    assert router.rings["decode-0"].incarnation == "second"


async def test_what_does_not_come_back_in_time_is_said(
    access: RouterAccess, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "LEAVE_SECONDS", 0.0)
    router.stuck.add("decode-0")
    with pytest.raises(DeadlineExceeded, match="ring decode-0 did not serve again within 0 s"):
        await restart_ring(access, "decode-0", seconds=0, start_seconds=0.01)
    with pytest.raises(DeadlineExceeded, match="ring decode-0 did not leave within 0 s"):
        await drain_ring(access, "decode-0", seconds=0.01, force=True)


async def test_of_a_node_all_rings_leave_and_no_other(access: RouterAccess, router: FakeRouter) -> None:
    assert await drain_node(access, "10.0.0.1", seconds=5) == ["prefill-0", "decode-0"]
    assert router.asked == [("restart", "prefill-0", "10.0.0.1"), ("restart", "decode-0", "10.0.0.1")]
    assert await drain_node(access, "10.0.0.9", seconds=5) == []


async def test_a_ring_that_cannot_be_told_keeps_no_other_from_leaving(
    access: RouterAccess, router: FakeRouter, told: list[str]
) -> None:
    router.lost.add("prefill-0")
    assert await drain_node(access, "10.0.0.1", seconds=5) == ["decode-0"]
    await drain_all(access, seconds=5)
    assert [asked[1] for asked in router.asked if asked[0] == "drain"] == ["prefill-1", "decode-0"]
    assert told[0] == "ring prefill-0 cannot be drained: the leader of prefill-0 cannot be reached"


async def test_what_is_wrong_is_not_taken_for_a_ring_that_is_lost(access: RouterAccess) -> None:
    with pytest.raises(InvalidRequest):
        await drain_node(access, "10.0.0.1", seconds=-1)
    with pytest.raises(NotFound, match="'decode-7' is not known"):
        await undrain_ring(access, "decode-7", seconds=5)


async def test_a_ring_that_is_called_back_serves(access: RouterAccess, router: FakeRouter) -> None:
    router.rings["decode-0"] = _with(router.rings["decode-0"], draining=True)
    await undrain_ring(access, "decode-0", seconds=5)
    assert router.rings["decode-0"].incarnation == "second"
