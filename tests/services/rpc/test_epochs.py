"""Calls of a router carry its epoch, by which leaders refuse one that has been replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cp_core.errors import StaleIncarnation, TurnCancelled
from services.rpc.peers import GrpcPeers
from services.rpc.server import EPOCH_KEY, GrpcServer
from services.rpc.servicers import RingServicer


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
    RingServicer(leader).register(server)
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
