"""Metadata of calls between processes: a router's epoch, the secret that all processes of a cluster have, a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ringserve import __version__
from ringserve.cp_core.errors import ConfigError, StaleIncarnation, TurnCancelled, Unauthenticated
from ringserve.services.auth.tls import SECRET_VARIABLE
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import EPOCH_KEY, GrpcServer, make_peer_check
from ringserve.services.rpc.servicers import DecodeServicer


class Leader:
    """Leader that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        self.told.append(f"settle {kv_id}")

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        self.told.append(f"finish {turn_id}")

    async def abort_turn(self, turn_id: str, error: Exception) -> None:
        self.told.append(f"abort {turn_id}")


async def test_a_leader_refuses_the_calls_of_an_earlier_epoch_and_of_nobody_else() -> None:
    leader: Any = Leader()

    def admit(metadata: Mapping[str, str]) -> None:
        if 0 < int(metadata.get(EPOCH_KEY, 0)) < 2:
            raise StaleIncarnation("another router has taken over")

    server = GrpcServer(admit=admit)
    DecodeServicer(leader).register(server)
    address = await server.start("127.0.0.1:0")
    old, new, gateway = GrpcPeers(), GrpcPeers(), GrpcPeers()
    old.epoch, new.epoch = 1, 2
    with pytest.raises(StaleIncarnation, match="has taken over"):
        await old.leader("decode", address).settle("c", "", 0)
    with pytest.raises(StaleIncarnation):
        await old.leader("decode", address).abort_turn("t", TurnCancelled("x"))
    await new.leader("decode", address).settle("d", "", 0)
    await gateway.leader("decode", address).finish_turn("u", 1)
    assert leader.told == ["settle d", "finish u"]
    for peers in (old, new, gateway):
        await peers.close()
    await server.stop(0)


@pytest.mark.parametrize("secret", ["", "of another cluster"])
async def test_a_stranger_tells_a_leader_nothing(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call and a stream of a process without the secret are refused; processes of the environment have it."""
    leader: Any = Leader()
    monkeypatch.setenv(SECRET_VARIABLE, "of the cluster")
    server = GrpcServer(admit=make_peer_check())
    DecodeServicer(leader).register(server)
    address = await server.start("127.0.0.1:0")
    stranger, peer = GrpcPeers(secret=secret), GrpcPeers()
    with pytest.raises(Unauthenticated, match="RINGSERVE_PEER_SECRET"):
        await stranger.leader("decode", address).settle("c", "", 0)
    with pytest.raises(Unauthenticated):
        await anext(stranger.leader("decode", address).stream_turn("t"))
    await peer.leader("decode", address).settle("d", "", 0)
    assert leader.told == ["settle d"]
    for peers in (stranger, peer):
        await peers.close()
    await server.stop(0)


async def test_without_a_secret_every_process_is_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    leader: Any = Leader()
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    server = GrpcServer(admit=make_peer_check())
    DecodeServicer(leader).register(server)
    address = await server.start("127.0.0.1:0")
    peers = GrpcPeers(secret="of another cluster")
    await peers.leader("decode", address).settle("c", "", 0)
    assert leader.told == ["settle c"]
    await peers.close()
    await server.stop(0)


@pytest.mark.parametrize("version", ["0.0.1", "0.2.0", 1000 * "9"])
async def test_a_process_of_another_release_is_refused_with_a_sentence(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader: Any = Leader()
    server = GrpcServer(admit=make_peer_check())
    DecodeServicer(leader).register(server)
    address = await server.start("127.0.0.1:0")
    with monkeypatch.context() as other:
        other.setattr("ringserve.services.rpc.peers.__version__", version)
        skewed = GrpcPeers()
    peer = GrpcPeers()
    expected = rf"caller runs ringserve {version[:20]} and the called process {__version__}; run one release"
    with pytest.raises(ConfigError, match=expected):
        await skewed.leader("decode", address).settle("c", "", 0)
    with pytest.raises(ConfigError, match=expected):
        await anext(skewed.leader("decode", address).stream_turn("t"))
    with pytest.raises(ConfigError, match=expected):
        await skewed.router(address).find_fault()
    await peer.leader("decode", address).settle("d", "", 0)
    assert leader.told == ["settle d"]
    for peers in (skewed, peer):
        await peers.close()
    await server.stop(0)
