"""A decode ring on which many turns wait for their KV still sends what follow-ups pull."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.orchestration.protocol.turns import Reserve
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.orchestration.service import Service
from tests.workers.models import random_tokens
from tests.workers.thread_ranks import ThreadRank

NUM_RESERVED = 1000
"""Far more than a rank has threads for transfers, in Ray's actors (64) and in this test's."""


def reserve(service: Service, number: int) -> Reserve:
    name = f"reserved-{number}"
    return Reserve(
        turn_id=name,
        attempt=1,
        kv_id=name,
        match_tokens=0,
        num_tokens=1,
        deadline_seconds=3600.0,
        source_incarnation=service.prefill.ring.incarnation,
        sampling=SamplingParameters(max_tokens=1),
    )


async def test_turns_that_wait_for_their_kv_hold_no_thread_that_a_pull_needs(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(
        model_paths["llama_gqa"], 1, 1, num_blocks=4096, max_waiting=NUM_RESERVED + 8, headroom_tokens=0
    ) as service:
        prompt = random_tokens(20)
        first = await service.answer(service.request(prompt, conversation="c"))
        await asyncio.gather(*(service.decode.reserve(reserve(service, number)) for number in range(NUM_RESERVED)))
        assert service.decode.num_turns == NUM_RESERVED
        pulled: list[object] = []
        send = ThreadRank.send_kv

        async def noted(self: ThreadRank, *arguments: object) -> object:
            pulled.append(arguments)
            return await send(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ThreadRank, "send_kv", noted)
        follow_up = [*prompt, *first.token_ids, *random_tokens(3, seed=1)]
        second = await service.answer(service.request(follow_up, conversation="c", deadline=30.0))
        assert len(second.token_ids) == 5
        assert pulled, "the follow-up pulled the KV of the first answer"
        service.check_integrity()
