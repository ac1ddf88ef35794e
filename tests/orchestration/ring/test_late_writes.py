"""Blocks change owner only when no frame of their last owner can arrive; a frame that does is refused.

Senders of the prefill ring are tapped: frames of one turn are held back, as a network might do, and delivered when
their blocks belong to another turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.errors import TurnCancelled, Unavailable
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import LayerFrame, OutgoingPart, checksum_of
from ringserve.workers.kv.sender import KvSender, Lane, OutgoingTransfer, WrittenLayer
from tests.orchestration.service import Service, is_idle
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.kv.kv_peers import hand_source
from tests.workers.models import Oracle, random_tokens

PROMPT_TOKENS = 101


class Tap:
    """Tap on lanes: all frames wait for `gate`.

    Of transfers whose id is `late` only the first layer leaves; the other frames wait in `held`.
    """

    def __init__(self) -> None:
        self.late: set[str] = set()
        self.held: list[tuple[str, LayerFrame, bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.num_at_gate = 0

    def on(self, service: Service) -> None:
        """Tap every sender of the prefill ring."""
        for rank in service.prefill_ranks.made:
            cache = rank.worker.parts.cache

            def open_lane(endpoint: str, cache: KvCache = cache) -> TappedLane:
                return TappedLane(self, endpoint, cache)

            rank.worker.parts.sender.close()
            sender = KvSender(cache, service.prefill.ring.incarnation, open_lane=open_lane)
            rank.worker._started = replace(rank.worker.parts, sender=sender)

    @staticmethod
    def deliver(frames: Sequence[tuple[str, LayerFrame, bytes]]) -> list[str]:
        """Send frames that were held, each over a connection of its own; return the refusals."""
        reasons = []
        for endpoint, frame, payload in frames:
            with hand_source(endpoint) as source:
                source.send(frame, payload)
                reasons.append(source.refusal().reason)
        return reasons


class TappedLane(Lane):
    def __init__(self, tap: Tap, endpoint: str, cache: KvCache) -> None:
        super().__init__(endpoint, cache, connect_seconds=WAIT_SECONDS, stall_seconds=WAIT_SECONDS)
        self._tap = tap

    def _send_layers(self, transfer: OutgoingTransfer, part: OutgoingPart, layers: Sequence[WrittenLayer]) -> None:
        self._tap.num_at_gate += 1
        self._tap.gate.wait(WAIT_SECONDS)
        if transfer.key.transfer_id not in self._tap.late:
            super()._send_layers(transfer, part, layers)
            return
        super()._send_layers(transfer, part, [each for each in layers if each[0] == 0])
        for layer in (layer for layer, _ in layers if layer):
            for layout in part.frames():
                payload = b"".join(layout.payload(range(layer, layer + 1), self._cache))
                checksum = checksum_of([memoryview(payload)])
                frame = layout.of_layers(transfer.key, range(layer, layer + 1), self._cache, checksum)
                self._tap.held.append((self.endpoint, frame, payload))


def blocks_of(service: Service, turn_id: str) -> list[set[int]]:
    """Return the blocks that a turn holds, by decode rank."""
    turn = service.decode._turns.get(turn_id)
    assert turn is not None
    return [set(table) for table in turn.sequence.blocks]


def memory_of(service: Service, blocks: Sequence[set[int]]) -> list[torch.Tensor]:
    """Return every byte of these blocks, rank by rank and layer by layer."""
    found = []
    for rank, own in zip(service.decode_ranks.made, blocks, strict=True):
        cache = rank.worker.parts.cache
        size = cache.block_tokens
        slots = torch.tensor([block * size + offset for block in sorted(own) for offset in range(size)])
        found += [tensor[slots].view(torch.uint8).clone() for tensor in (*cache.k_layers, *cache.v_layers)]
    return found


async def test_what_arrives_after_an_abort_is_refused_and_never_reaches_the_next_owner_of_the_blocks(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 3, 2, num_blocks=20) as service:
        tap = Tap()
        tap.on(service)
        free = service.free_blocks()

        # The first turn is aborted in the middle of its migration: only its first layer has arrived.
        first = service.request(random_tokens(PROMPT_TOKENS, seed=1), max_tokens=20)
        tap.gate.clear()
        begun = await service.router.begin_turn(first)
        tap.late.add(begun.turn_id)
        first_blocks = blocks_of(service, begun.turn_id)
        tap.gate.set()
        stream = service.decode.stream_turn(begun.turn_id)
        await anext(stream)
        await eventually(lambda: sum(frame.num_tokens for _, frame, _ in tap.held if frame.layer == 1) == PROMPT_TOKENS)
        assert any(rank.worker.status().open_transfers for rank in service.decode_ranks.made)
        await service.router.abort_requests([first.request_id])
        with pytest.raises(TurnCancelled):
            async for _ in stream:
                pass
        await is_idle(service, free)
        assert not any(rank.worker.status().open_transfers for rank in service.decode_ranks.made)

        # The second turn gets its blocks, and waits at the gate with nothing written.
        prompt = random_tokens(PROMPT_TOKENS, seed=2)
        tap.num_at_gate = 0
        tap.gate.clear()
        second = await service.router.begin_turn(service.request(prompt, conversation="c", max_tokens=20))
        await eventually(lambda: tap.num_at_gate > 0)
        second_blocks = blocks_of(service, second.turn_id)
        assert all(old & new for old, new in zip(first_blocks, second_blocks, strict=True)), "they share no block"
        before = memory_of(service, second_blocks)
        reasons = await asyncio.to_thread(tap.deliver, list(tap.held))
        assert len(reasons) == len(tap.held) > 0
        assert all(f"transfer '{begun.turn_id}' attempt 1 is not expected here" in reason for reason in reasons)
        assert all(map(torch.equal, before, memory_of(service, second_blocks))), "not a byte has changed"

        # It continues undisturbed; frames that come again after its end are refused as well.
        tap.gate.set()
        tokens: list[int] = []
        async for event in service.decode.stream_turn(second.turn_id):
            tokens += getattr(event, "token_ids", ())
        assert tokens == oracle.greedy(prompt, 20)
        assert len(await asyncio.to_thread(tap.deliver, list(tap.held))) == len(tap.held)
        again = await service.answer(service.request([3, 4], conversation="c", mode=PromptMode.APPEND))
        assert again.token_ids == oracle.greedy([*prompt, *tokens, 3, 4], 5)
        service.check_integrity()


async def test_the_kv_of_one_turn_under_the_name_of_another_fails_that_turn_and_harms_no_other(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        tap = Tap()
        tap.on(service)
        free = service.free_blocks()
        other = random_tokens(60, seed=5)
        bystander = asyncio.create_task(service.answer(service.request(other, max_tokens=150)))
        await eventually(lambda: service.decode.num_running == 1)
        tap.gate.clear()
        begun = await service.router.begin_turn(service.request(random_tokens(PROMPT_TOKENS), max_tokens=20))
        tap.late.add(begun.turn_id)
        tap.gate.set()
        stream = service.decode.stream_turn(begun.turn_id)
        await anext(stream)
        await eventually(lambda: len(tap.held) > 0)
        # The frames carry other bytes than their checksums were made of.
        (endpoint, frame, payload) = tap.held[0]  # others may still come
        reasons = await asyncio.to_thread(tap.deliver, [(endpoint, frame, bytes(len(payload)))])
        assert all("checksum is wrong" in reason for reason in reasons)
        with pytest.raises(Unavailable, match="checksum is wrong"):
            async for _ in stream:
                pass
        assert (await bystander).token_ids == oracle.greedy(other, 150)
        await is_idle(service, free)


async def test_frames_of_another_life_of_a_ring_are_refused(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 1, 2) as service:
        tap = Tap()
        tap.on(service)
        tap.gate.clear()
        begun = await service.router.begin_turn(service.request(random_tokens(PROMPT_TOKENS), max_tokens=20))
        tap.late.add(begun.turn_id)
        tap.gate.set()
        await eventually(lambda: len(tap.held) > 0)
        await service.decode_ranks.made[0].kill()
        await eventually(lambda: service.decode.ring.rebuilds == 1 and service.decode.ring.state == "ready")
        _, frame, payload = tap.held[0]
        for rank in service.decode_ranks.made:
            tap.held = [(rank.worker.parts.receiver.endpoint, frame, payload)]
            (reason,) = await asyncio.to_thread(tap.deliver, list(tap.held))
            assert f"is meant for {frame.key.destination!r}, which is not here" in reason
            tap.held = [
                (rank.worker.parts.receiver.endpoint, replace(frame, key=replace(frame.key, attempt=2)), payload)
            ]
            assert "is meant for" in (await asyncio.to_thread(tap.deliver, list(tap.held)))[0]
        await eventually(lambda: service.router.num_running == 0)
