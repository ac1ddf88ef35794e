"""Ends that the router hears after it has given their turns up: the answers that clients have are not lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.router import recovery, registry
from tests.orchestration.router.failures.test_router_restart import announce, begin
from tests.orchestration.service import QUIET, Service, is_idle
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

MODEL = "llama_gqa"
Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_turn_goes_on_whose_ring_tells_of_it_after_a_restarted_router_has_given_it_up(
    has_ended: bool, model_paths: Models, oracles: Oracles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_SECONDS", 0.1)
    num_tokens = 40 if has_ended else 400
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path, heartbeat=QUIET) as service:
        prompt = random_tokens(30)
        first = await service.answer(service.request(prompt, conversation="c"))
        turn = service.request([1, 2], max_tokens=num_tokens, conversation="c", mode=PromptMode.APPEND)
        reader = await begin(service, turn)
        await service.crash_router()
        if has_ended:
            await eventually(lambda: len(reader.tokens) == num_tokens)
        service.start_router()
        await eventually(lambda: not service.router._recovery.pending)
        assert (await service.router.get_conversation("c")).num_turns == 1
        await announce(service)
        await reader.task
        assert reader.is_finished, reader.error
        history = [*prompt, *first.token_ids, 1, 2]
        assert reader.tokens == oracles[MODEL].greedy(history, num_tokens)
        await eventually(lambda: service.router.num_running == 0)
        assert (await service.router.get_conversation("c")).num_tokens == len(history) + num_tokens
        await service.crash_router()  # the journal has the answer too
        service.start_router()
        await announce(service)
        assert (await service.router.get_conversation("c")).num_tokens == len(history) + num_tokens


async def test_a_late_turn_ends_where_its_conversation_has_taken_another(
    model_paths: Models, oracles: Oracles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_SECONDS", 0.1)
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path, other_decode=[2], heartbeat=QUIET) as service:
        free, prompt = service.free_blocks(), random_tokens(30)
        first = await service.answer(service.request(prompt, conversation="c"))
        turn = service.request([1, 2], max_tokens=400, conversation="c", mode=PromptMode.APPEND)
        reader = await begin(service, turn)
        late = service.peers.leaders.pop(reader.begun.decode_endpoint)
        await service.crash_router()
        service.start_router()
        await eventually(lambda: not service.router._recovery.pending)
        await announce(service)
        await eventually(lambda: not service.prefill.turns_here())
        again = await service.answer(service.request([7], conversation="c", mode=PromptMode.APPEND))
        assert again.token_ids == oracles[MODEL].greedy([*prompt, *first.token_ids, 7], 5)
        service.peers.leaders[reader.begun.decode_endpoint] = late
        await late.announce()
        await reader.task
        assert "the router was started again" in str(reader.error)
        view = await service.router.get_conversation("c")
        assert (view.num_turns, view.num_tokens) == (2, 30 + 5 + 1 + 5)
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_an_answer_counts_whose_ring_could_not_be_reached_until_its_turn_was_given_up(
    model_paths: Models, oracles: Oracles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FAILOVER_SECONDS", 0.05)
    async with Service(model_paths[MODEL], 2, 2, journal=tmp_path, heartbeat=QUIET) as service:
        free, prompt = service.free_blocks(), random_tokens(30)
        reader = await begin(service, service.request(prompt, max_tokens=60, conversation="c"))
        router, running = service.router, service.router._turns.of_turn(reader.begun.turn_id)
        assert running is not None
        # The link between router and ring is cut: the ring's lease ends, while the client goes on reading.
        leader = service.peers.leaders.pop("decode-0")
        router._turns.interrupt(running, "decode")
        await eventually(lambda: router.num_running == 0)
        assert router.num_conversations == 0
        service.peers.leaders["decode-0"] = leader
        await reader.task
        assert reader.is_finished
        await eventually(lambda: router.num_running == 0)
        history = prompt + reader.tokens
        assert (await router.get_conversation("c")).num_tokens == len(history) == 90
        answer = await service.answer(service.request([7], conversation="c", mode=PromptMode.APPEND))
        assert answer.begun.plan.cached_tokens == len(history) - 1
        assert answer.token_ids == oracles[MODEL].greedy([*history, 7], 5)
        await router.delete_conversation("c")
        await is_idle(service, free)
