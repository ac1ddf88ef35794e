"""`ringserve drain` tells what is left to do, and what became of the conversations that the ring retained."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ringserve.services.cli.main import main
from ringserve.views import RingDrain, RingInfo, ServerInfo

RING = RingInfo(
    role="decode",
    name="decode-0",
    endpoint="",
    incarnation="first",
    state="ready",
    num_ranks=1,
    num_requests_running=2,
    draining=True,
)
DRAIN = RingDrain(
    role="decode",
    ring="decode-0",
    has_left=False,
    running_turns=2,
    moved=0,
    left=9,
    no_room=0,
    failed=0,
    moved_bytes=0,
)
EMPTY = ServerInfo(selector="auto", rings=(), conversations=9, running_turns=2)


class FakePeers:
    """A router, and the way to it, that is seen as `views` say, one after the other."""

    def __init__(self, *views: ServerInfo) -> None:
        self._views = list(views)
        self.asked: list[tuple[str, float, bool]] = []

    def __call__(self, tls: object, *, secret: str | None = None) -> FakePeers:
        return self

    def router(self, endpoint: str) -> FakePeers:
        assert endpoint == "here:1"
        return self

    async def close(self) -> None:
        return

    async def drain_ring(self, name: str, seconds: float, *, force: bool) -> None:
        self.asked.append((name, seconds, force))

    async def get_server_info(self) -> ServerInfo:
        return self._views.pop(0)


def drain(peers: FakePeers, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("ringserve.services.cluster.operator.GrpcPeers", peers)
    monkeypatch.setattr("ringserve.services.cluster.operator.POLL_SECONDS", 0.0)
    assert main(["drain", "decode-0", "--target", "here:1", *options]) == 0


def test_progress_and_outcome_are_told_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = replace(DRAIN, moved=3, left=5, no_room=1)
    end = replace(DRAIN, has_left=True, moved=6, left=0, no_room=1, failed=2)
    peers = FakePeers(
        replace(EMPTY, rings=(RING,), drains=(DRAIN,)),
        replace(EMPTY, rings=(RING,), drains=(DRAIN,)),
        replace(EMPTY, rings=(replace(RING, num_requests_running=0),), drains=(some,)),
        replace(EMPTY, drains=(end,)),
    )
    drain(peers, monkeypatch, "--seconds", "60", "--force")
    assert peers.asked == [("decode-0", 60.0, True)]
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "ringserve: ring decode-0 drains, 2 turns are under way, 0 conversations have been moved, 9 not yet",
        "ringserve: ring decode-0 drains, 0 turns are under way, 3 conversations have been moved, 5 not yet",
    ]
    assert told.out == (
        "ringserve: decode-0 has left; 'ringserve undrain decode-0' brings it back; 6 conversations were moved, "
        "1 found no room elsewhere, 2 could not be moved\n"
    )


def test_a_script_reads_the_outcome_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = replace(DRAIN, has_left=True, moved=8, left=1, moved_bytes=4096)
    drain(FakePeers(replace(EMPTY, rings=(RING,)), replace(EMPTY, drains=(end,))), monkeypatch, "--json")
    outcome = {"moved": 8, "left": 1, "no_room": 0, "failed": 0, "moved_bytes": 4096}
    assert json.loads(capsys.readouterr().out) == {"ring": "decode-0", "drained": True, **outcome}


def test_a_router_that_knows_nothing_of_the_drain_any_more_is_believed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drain(FakePeers(EMPTY), monkeypatch)
    assert capsys.readouterr().out == "ringserve: decode-0 has left; 'ringserve undrain decode-0' brings it back\n"
