"""Turn on two rings: prefill on one, KV streamed by layers, decode on the other, and its KV sent back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.cost.decode import HELIX, STEP_VARIANTS
from ringserve.cp_core.errors import ConfigError, TransferError, Unavailable
from ringserve.cp_core.layout.reshard import plan_reshard
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, balanced_layout, spread
from ringserve.workers.model.loading import load_model
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm
from ringserve.workers.protocol.transfers import KvExpect, KvPart, KvSend, TransferKey
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.gloo import gloo_as_nccl
from tests.waiting import WAIT_SECONDS
from tests.workers.models import Oracle, random_tokens
from tests.workers.rings import Conversation, LocalRing, Turn

NUM_KV_HEADS = 2

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


def expect(ring: LocalRing, key: TransferKey, conversation: Conversation, coming: ShardMap) -> None:
    """Open a conversation's blocks on every rank of the destination."""
    held = conversation.held
    for rank, worker in enumerate(ring.workers):
        worker.expect_kv(KvExpect(key, tuple(coming.ranks[rank]), held[rank], conversation.blocks[rank]))


def sends(
    key: TransferKey, source: Conversation, held: ShardMap, destination: LocalRing, coming: ShardMap, tokens: TokenRange
) -> tuple[tuple[KvSend, ...], ...]:
    """Plan the sends of each source rank for `tokens`, of which it holds `held`."""
    plan = plan_reshard(held, coming.within(tokens), tokens, num_kv_heads=NUM_KV_HEADS)
    parts: list[list[KvPart]] = [[] for _ in source.blocks]
    for route in plan.routes:
        parts[route.source].append(KvPart(destination.infos[route.destination].kv_endpoint, route.pieces))
    return tuple((KvSend(key, blocks, tuple(mine)),) for blocks, mine in zip(source.blocks, parts, strict=True))


def arrived(source: LocalRing, destination: LocalRing, key: TransferKey) -> int:
    """Wait for both sides -> the bytes that moved."""
    sent = source.together(lambda worker, _: worker.finish_sends(key, WAIT_SECONDS).payload_bytes)
    received = destination.together(
        lambda worker, _: worker.parts.receiver.wait_sealed(key, WAIT_SECONDS).payload_bytes
    )
    assert sum(sent) == sum(received)
    return sum(received)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "carrier", "packs_weights"),
    [
        (1, 1, "auto", False),
        (1, 1, "auto", True),  # whose layers are one call each
        (2, 1, "auto", False),
        (1, 2, "auto", True),
        (2, 3, "nixl", False),
        (3, 2, "sockets", False),
    ],
)
def test_two_turns_over_two_rings_have_the_tokens_of_one_process(
    num_prefill: int,
    num_decode: int,
    carrier: str,
    packs_weights: bool,
    model_paths: Models,
    oracles: Oracles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_parts, "load_model", load_model)  # packing would change models that tests share
    prompt, question = random_tokens(37), random_tokens(6, seed=3)
    sampling = SamplingParameters(max_tokens=11)
    path = model_paths["llama_gqa"]
    with (
        LocalRing(path, num_prefill, kv_carrier=carrier, packs_weights=packs_weights) as prefill,
        LocalRing(path, num_decode, kv_carrier=carrier, packs_weights=packs_weights) as decode,
    ):
        here, there = prefill.open("a", 128), decode.open("a", 128)
        coming = spread(0, len(prompt), there.held)
        key = TransferKey("turn-1", 1, prefill.incarnation, decode.incarnation)
        expect(decode, key, there, coming)
        # In two chunks under one key; the first token comes with the second.
        first = None
        for start, stop in ((0, 20), (20, 37)):
            layout = balanced_layout(start, stop - start, here.held).shard_map()
            chunk = sends(key, here, here.shards.extend(layout), decode, coming, TokenRange(start, stop))
            sample = sampling if stop == len(prompt) else None
            first = prefill.prefill([Turn(here, prompt[start:stop], sample, chunk)], Algorithm.PASS_KV).get("a")
        assert first is not None
        assert arrived(prefill, decode, key) == len(prompt) * prefill.infos[0].model.kv_bytes_per_token
        there.shards, there.tokens = coming, list(prompt)

        decode.start_decode()
        answer = [first, *decode.decode(there, first, sampling)]
        assert answer == oracles["llama_gqa"].greedy(prompt, 11)

        # The KV of decoded tokens goes back, and the prefill ring continues with it.
        made = TokenRange(len(prompt), sum(there.held))
        back = spread(made.start, len(made), here.held)
        key = TransferKey("turn-2", 1, decode.incarnation, prefill.incarnation)
        expect(prefill, key, here, back)
        returning = sends(key, there, there.shards, prefill, back, made)
        decode.beside(lambda worker, rank: worker.send_kv(returning[rank][0], WAIT_SECONDS))
        prefill.beside(lambda worker, _: worker.parts.receiver.wait_sealed(key, WAIT_SECONDS))
        here.shards = here.shards.extend(back)
        second = prefill.prefill([Turn(here, [answer[-1], *question], sampling)], Algorithm.PASS_Q)["a"]
        told = [worker.status() for ring in (prefill, decode) for worker in ring.workers]
        assert (sum(each.kv_nixl_bytes for each in told) > 0) == (carrier == "nixl")
        assert (sum(each.kv_socket_bytes for each in told) > 0) == (carrier != "nixl")
    assert second == oracles["llama_gqa"].greedy([*prompt, *answer, *question], 1)[0]


def test_a_rank_without_a_safe_landing_slot_reports_itself_lost_until_it_is_made_anew(model_paths: Models) -> None:
    with LocalRing(model_paths["llama_gqa"], 1, kv_carrier="nixl") as ring:
        agent = ring.workers[0].parts.agent
        assert agent is not None
        ring.workers[0].status()
        for _ in range(agent.landings.num_free):
            agent.landings.lose(agent.landings.take(ring, 0.0))
        with pytest.raises(Unavailable, match="has no safe landing slot left"):
            ring.workers[0].status()


def test_a_hand_off_that_was_dropped_fails_its_sender_and_not_the_step(model_paths: Models) -> None:
    prompt = random_tokens(20)
    path = model_paths["llama_gqa"]
    with LocalRing(path, 1) as prefill, LocalRing(path, 1) as decode:
        here, there = prefill.open("a", 32), decode.open("a", 32)
        key = TransferKey("t", 1, prefill.incarnation, decode.incarnation)
        coming = spread(0, 20, (0,))
        expect(decode, key, there, coming)
        decode.workers[0].drop_kv(key)
        held = balanced_layout(0, 20, (0,)).shard_map()
        turn = Turn(here, prompt, SamplingParameters(), sends(key, here, held, decode, coming, TokenRange(0, 20)))
        assert "a" in prefill.prefill([turn])
        with pytest.raises(TransferError):
            prefill.workers[0].finish_sends(key, WAIT_SECONDS)
        assert decode.workers[0].status().open_transfers == 0


@pytest.mark.parametrize(("ring_transport", "used"), [("auto", "sockets"), ("sockets", "sockets"), ("nccl", "nccl")])
def test_ranks_meet_over_a_real_ring_and_compute_the_same(
    ring_transport: str, used: str, model_paths: Models, oracles: Oracles
) -> None:
    """Join two ranks through a store, prefill and decode."""
    prompt, sampling = random_tokens(19), SamplingParameters(max_tokens=8)
    with gloo_as_nccl(), LocalRing(model_paths["llama_gqa"], 2, ring_transport=ring_transport) as ring:
        assert [info.ring_transport for info in ring.infos] == [used, used]
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        answer = [first, *ring.decode(conversation, first, sampling)]
    assert answer == oracles["llama_gqa"].greedy(prompt, 8)
    assert ring.decode_ended() == [None, None]


def test_a_ring_transport_that_does_not_serve_the_device_is_refused(model_paths: Models) -> None:
    with pytest.raises(ConfigError, match="'nccl' does not support device 'cpu'"):
        LocalRing(model_paths["llama_gqa"], 2, ring_transport="nccl")


@pytest.mark.parametrize("variant", [*STEP_VARIANTS, HELIX])
def test_rings_whose_messages_go_through_host_memory_give_the_tokens_of_one_process(
    variant: str, model_paths: Models, oracles: Oracles
) -> None:
    """All prefill algorithms in turn, with shards of uneven lengths and a turn of one token."""
    sampling = SamplingParameters(max_tokens=6)
    with LocalRing(model_paths["llama_gqa"], 3, decode_variant=variant, is_staged=True) as ring:
        conversation = ring.open("a", 160)
        for number, algorithm in enumerate(RING_ALGORITHMS):
            new = random_tokens((37, 1, 6, 17, 5)[number], seed=number)
            first = ring.prefill([Turn(conversation, new, sampling)], algorithm)["a"]
            assert oracles["llama_gqa"].greedy(list(conversation.tokens), 1) == [first]
        prompt = list(conversation.tokens)
        ring.start_decode()
        answer = [first, *ring.decode(conversation, first, sampling)]
    assert answer == oracles["llama_gqa"].greedy(prompt, 6)
