"""Follow-ups through a gateway that the decode ring computes itself, with gRPC on every way to that ring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from ringserve.client import AsyncClient, Sampling
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.services.gateway.text import TextCodec
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import DecodeServicer
from tests.orchestration.service import Service
from tests.services.local_gateway import LocalGateway
from tests.workers.models import Oracle, random_tokens

FIVE = Sampling(max_tokens=5, temperature=0.0)


@pytest.fixture
async def gateway(model_path: Path, codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalGateway]:
    """Router, prefill leader and gateway reach the decode leader by its service only; the prefill ring is busy."""
    monkeypatch.setattr(RegisteredRing, "queue_seconds", lambda self, now: 60.0 if self.role == "prefill" else 0.0)
    service = Service(model_path, 2, 3, max_direct_tokens=32)
    async with LocalGateway(model_path, codec, service=service) as gateway:
        server, peers, leader = GrpcServer(), GrpcPeers(), gateway.service.decode
        DecodeServicer(leader).register(server)
        address = await server.start("127.0.0.1:0")
        direct = gateway.service.peers.leader
        monkeypatch.setattr(
            gateway.service.peers,
            "leader",
            lambda role, name: peers.leader(role, address) if role == "decode" else direct(role, name),
        )
        yield gateway
        await gateway.wait_idle()
        gateway.service.check_integrity()
        await peers.close()
        await server.stop(1.0)


async def test_a_follow_up_stays_on_the_decode_ring_and_says_so(gateway: LocalGateway, oracle: Oracle) -> None:
    """Chosen, not asked for."""
    async with AsyncClient(gateway.target) as client:
        history = random_tokens(50)
        history += (await client.ask(history, conversation_id="c", sampling=FIVE)).token_ids
        for number, size in enumerate((1, 6, 4)):
            prompt = [*history, *random_tokens(size, seed=number)]
            expected = oracle.greedy(prompt, 5)
            answer = await client.ask(prompt, conversation_id="c", mode="whole_history", sampling=FIVE)
            assert list(answer.token_ids) == expected
            assert answer.usage.cached_tokens == len(history) - 1
            plan = answer.plan
            assert (plan.algorithm, plan.prefill_ring, plan.decode_ring) == ("decode_ring", "decode-0", "decode-0")
            assert plan.reason.startswith("decode ring, predicted ")
            assert (plan.prefill_ranks, plan.migrated_bytes, plan.pulled_bytes) == (3, 0, 0)
            assert plan.prefill_seconds > 0
            assert plan.predicted_prefill_seconds > 0
            assert {item.algorithm for item in plan.alternatives} >= {"decode_ring", "pass_kv", "pass_q"}
            history = [*prompt, *answer.token_ids]
        long = await client.ask(
            [*history, *random_tokens(33)], conversation_id="c", mode="whole_history", sampling=FIVE
        )
        assert long.plan.algorithm in PREFILL_ALGORITHMS
        assert list(long.token_ids) == oracle.greedy([*history, *random_tokens(33)], 5)
        assert gateway.service.prefill.num_turns == 0
    shown = generate_latest(gateway.servicer._metrics.registry).decode()
    assert 'ringserve_plans_total{algorithm="decode_ring"} 3.0' in shown
    assert 'ringserve_prefill_predicted_ratio_count{algorithm="decode_ring"} 3.0' in shown
    assert 'ringserve_cached_prompt_tokens_total{source="kept_on_decode"}' in shown


async def test_a_stop_string_ends_a_follow_up_and_the_next_one_goes_on_from_there(
    gateway: LocalGateway, oracle: Oracle, codec: TextCodec
) -> None:
    async with AsyncClient(gateway.target) as client:
        history = random_tokens(40)
        history += (await client.ask(history, conversation_id="c", sampling=FIVE)).token_ids
        prompt = [*history, 5, 6]
        tokens = oracle.greedy(prompt, 12)
        stop = codec.decode(tokens[2:4])
        sampling = Sampling(max_tokens=12, temperature=0.0, stop=(stop,))
        answer = await client.ask(prompt, conversation_id="c", mode="whole_history", sampling=sampling)
        assert answer.plan.algorithm == "decode_ring"
        assert answer.matched_stop == stop
        assert list(answer.token_ids) == tokens[: len(answer.token_ids)]
        assert len(answer.token_ids) < 12
        history = [*prompt, *answer.token_ids]
        after = await client.ask([*history, 9], conversation_id="c", mode="whole_history", sampling=FIVE)
        assert list(after.token_ids) == oracle.greedy([*history, 9], 5)
        assert after.plan.algorithm == "decode_ring"
        assert after.usage.cached_tokens == len(history) - 1
