"""Ranks that survive the loss of another one serve on in the rebuilt ring: nothing of the old incarnation is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.protocol.plans import PromptMode
from tests.orchestration.service import Service
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

KIND = "llama_gqa"


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("tp", [1, 2])
async def test_a_rebuilt_ring_loads_the_lost_rank_alone_and_answers_as_before(
    name: str, tp: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, prefill_tp=tp, decode_tp=tp) as service:
        free, prompt = service.free_blocks(), random_tokens(40)
        first = await service.answer(service.request(prompt, conversation="c"))
        history = [*prompt, *first.token_ids]
        turn = asyncio.create_task(service.answer(service.request(random_tokens(20), max_tokens=5000)))
        await eventually(lambda: service.decode.num_running == 1)
        ring = service.peers.leaders[name].ring
        ranks = service.decode_ranks if name == "decode-0" else service.prefill_ranks
        before, models = list(ranks.made), [rank.worker.parts.model for rank in ranks.made]
        await before[1].kill()
        await eventually(lambda: ring.rebuilds == 1, 60.0)
        if name == "decode-0":
            with pytest.raises(Unavailable, match="decode-0"):
                await turn
        else:
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
        kept = [number for number, rank in enumerate(ranks.made) if rank is before[number]]
        assert kept == [number for number in range(2 * tp) if number != 1]
        assert all(ranks.made[number].worker.parts.model is models[number] for number in kept)
        answer = await service.answer(service.request([7, 8], conversation="c", mode=PromptMode.APPEND))
        assert answer.token_ids == oracles[KIND].greedy([*history, 7, 8], 5)
        await service.router.delete_conversation("c")
        await eventually(lambda: service.free_blocks() == free)
        service.check_integrity()
