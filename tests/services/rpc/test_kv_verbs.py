"""Retained KV is moved by leaders that reach each other over gRPC, as they do in a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import InvalidRequest, NotFound
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.protocol.turns import Admit, PrefillReport
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import DecodeServicer, PrefillServicer
from tests.orchestration.conversations.moving import Leader, kv_of, take
from tests.orchestration.service import Service
from tests.workers.models import random_tokens, save_model


async def serve(leader: Leader, peers: GrpcPeers) -> GrpcServer:
    """Put a leader behind a server of its own, and let it reach others through theirs."""
    server = GrpcServer(None)
    servicer = DecodeServicer(leader) if isinstance(leader, DecodeLeader) else PrefillServicer(leader)
    servicer.register(server)
    leader.endpoint = await server.start("127.0.0.1:0")
    leader.kv_moves._peers = peers
    return server


@pytest.fixture
async def behind_servers(tmp_path: Path) -> AsyncIterator[tuple[Service, GrpcPeers]]:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            Service(save_model("llama_gqa", tmp_path), 2, 3, other_prefill=[3], other_decode=[2])
        )
        await service.answer(service.request(random_tokens(30), conversation="c"))
        peers = GrpcPeers()
        stack.push_async_callback(peers.close)
        for leader in service.peers.leaders.values():
            server = await serve(leader, peers)
            stack.push_async_callback(server.stop, 0)
        yield service, peers


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_ring_takes_over_what_another_keeps(behind_servers: tuple[Service, GrpcPeers], role: str) -> None:
    service, peers = behind_servers
    giver, taker = service.peers.leaders[f"{role}-0"], service.peers.leaders[f"{role}-1"]
    port = peers.leader(role, taker.endpoint)
    taken = await port.take_kv(take(giver, "c"))
    assert torch.equal(kv_of(taker, "c"), kv_of(giver, "c"))
    assert taken.incarnation == taker.ring.incarnation
    assert taken.shards.num_tokens == giver.ring.pool.num_retained("c")
    assert taken.payload_bytes == taken.shards.num_tokens * service.model.kv_bytes_per_token


async def test_a_prefill_ring_refuses_what_only_decode_rings_do(behind_servers: tuple[Service, GrpcPeers]) -> None:
    service, peers = behind_servers
    port = peers.leader("decode", service.prefill.endpoint)
    admit = Admit(turn_id="t", attempt=1, first_token=1, report=PrefillReport())
    for call in (port.admit(admit), anext(port.stream_turn("t")), port.finish_turn("t", 1)):
        with pytest.raises(InvalidRequest, match="the leader of a prefill ring"):
            await call


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_the_other_ring_says_comes_back_as_it_was_said(
    behind_servers: tuple[Service, GrpcPeers], role: str
) -> None:
    service, peers = behind_servers
    giver, taker = service.peers.leaders[f"{role}-0"], service.peers.leaders[f"{role}-1"]
    request = take(giver, "c")
    await giver.settle("c", "", 0)
    port = peers.leader(role, taker.endpoint)
    with pytest.raises(NotFound, match=f"{request.num_tokens} tokens are asked for, 0 are cached"):
        await port.take_kv(request)
    service.check_integrity()
