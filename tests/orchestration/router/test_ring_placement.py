"""Conversations over several rings of different sizes: exact wherever their turns go, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import CapacityExceeded, Unavailable
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import Reserve
from tests.orchestration.service import Answer, Service, is_idle, read_tokens
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

KIND = "llama_gqa"


async def append(service: Service, tokens: list[int], **settings: object) -> Answer:
    request = service.request(tokens, conversation="c", mode=PromptMode.APPEND, **settings)  # type: ignore[arg-type]
    return await service.answer(request)


def kept(service: Service) -> dict[str, int]:
    """Return the tokens of the conversation by the rings that retain any."""
    counts = {name: leader.ring.pool.num_retained("c") for name, leader in service.peers.leaders.items()}
    return {name: count for name, count in counts.items() if count}


async def refuse(request: Reserve) -> None:
    raise CapacityExceeded("the ring is full; retry later")


async def lose(request: Reserve) -> None:
    raise Unavailable("the ring does not answer")


async def test_a_quiet_cluster_spreads_its_turns_and_each_conversation_stays_where_its_kv_is(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[2], other_decode=[2]) as service:
        rings: dict[str, tuple[str, str]] = {}
        histories: dict[str, list[int]] = {}
        for name in ("a", "b"):
            prompt = random_tokens(60, seed=ord(name))
            answer = await service.answer(service.request(prompt, conversation=name))
            rings[name] = answer.begun.plan.prefill_ring, answer.begun.plan.decode_ring
            histories[name] = [*prompt, *answer.token_ids]
        assert sorted(rings.values()) == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
        for name in ("b", "b", "a"):
            request = service.request([5, 6], conversation=name, mode=PromptMode.APPEND)
            answer = await service.answer(request)
            plan = answer.begun.plan
            assert (plan.prefill_ring, plan.decode_ring) == rings[name]
            assert plan.cached_tokens == len(histories[name]) - 1
            assert answer.token_ids == oracles[KIND].greedy([*histories[name], 5, 6], 5)
            histories[name] += [5, 6, *answer.token_ids]
        service.check_integrity()


@pytest.mark.parametrize("failure", [refuse, lose])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_conversation_whose_ring_refuses_goes_to_another_and_frees_the_one_it_left(
    role: str,
    failure: object,
    model_paths: Mapping[str, Path],
    oracles: Mapping[str, Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Go from rings of 3 and 2 ranks to others of 1 and 3, and back again."""
    async with Service(model_paths[KIND], 3, 2, other_prefill=[1], other_decode=[3]) as service:
        free = service.free_blocks()
        history = random_tokens(71)
        first = await service.answer(service.request(history, conversation="c"))
        history = [*history, *first.token_ids]
        for new in ([7], [8, 9, 10]):
            left = {name for name in kept(service) if name.startswith(role)}
            with monkeypatch.context() as patch:
                (name,) = left
                patch.setattr(service.peers.leaders[name], "reserve", failure)
                answer = await append(service, new)
            assert answer.token_ids == oracles[KIND].greedy([*history, *new], 5)
            history += [*new, *answer.token_ids]
            plan = answer.begun.plan
            assert f"ring {name} had no room, or was gone" in plan.remarks
            assert name not in (plan.prefill_ring, plan.decode_ring)
            assert set(kept(service)) == {plan.prefill_ring, plan.decode_ring}, "the ring that was left keeps nothing"
            view = await service.router.get_conversation("c")
            assert {place.ring for place in view.placements} == set(kept(service))
            for leader in service.peers.leaders.values():
                await leader.announce()  # a ring that was taken for lost serves again
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_a_ring_that_is_really_full_is_passed_over_before_the_client_hears_of_it(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, num_blocks=32, other_prefill=[2], other_decode=[2]) as service:
        free = service.free_blocks()
        requests = [service.request(random_tokens(50, seed), max_tokens=160) for seed in range(2)]
        turns = [asyncio.create_task(service.answer(request)) for request in requests]
        await eventually(lambda: service.router.num_running == 2)
        answers = [await turn for turn in turns]
        assert {answer.begun.plan.decode_ring for answer in answers} == {"decode-0", "decode-1"}
        for seed, answer in enumerate(answers):
            assert answer.token_ids == oracles[KIND].greedy(random_tokens(50, seed), 160)
        await is_idle(service, free)


async def test_a_refused_turn_without_a_conversation_leaves_nothing_on_its_first_rings(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, oracles: Mapping[str, Oracle]
) -> None:
    """The ring holds KV of such a turn under the turn's id, which changes where the turn goes to other rings."""
    async with Service(model_paths[KIND], 2, 2, other_prefill=[2], other_decode=[2]) as service:
        free = service.free_blocks()
        for name in ("decode-0", "decode-1"):
            with monkeypatch.context() as patch:
                patch.setattr(service.peers.leaders[name], "reserve", refuse)
                answer = await service.answer(service.request(random_tokens(50), max_tokens=5))
            assert answer.token_ids == oracles[KIND].greedy(random_tokens(50), 5)
            assert answer.begun.plan.decode_ring != name
        await is_idle(service, free)


async def test_where_all_rings_are_full_the_first_refusal_stands_and_nothing_is_left_behind(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[1], other_decode=[3]) as service:
        free = service.free_blocks()
        history = random_tokens(40)
        first = await service.answer(service.request(history, conversation="c"))
        history = [*history, *first.token_ids]
        before = kept(service)
        with monkeypatch.context() as patch:
            for name in ("decode-0", "decode-1"):
                patch.setattr(service.peers.leaders[name], "reserve", refuse)
            with pytest.raises(CapacityExceeded, match="the ring is full"):
                await append(service, [4])
        latest = (await service.router.get_server_info()).events[-1]
        assert (latest.kind, latest.count) == ("refusal", 1)
        assert latest.text.startswith("a turn was refused: the ring is full")
        await eventually(lambda: service.router.num_running == 0)
        assert kept(service) == before
        answer = await append(service, [4])
        assert answer.token_ids == oracles[KIND].greedy([*history, 4], 5)
        assert answer.begun.plan.cached_tokens == len(history) - 1, "the failed turn cost the conversation nothing"
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_a_conversation_leaves_a_ring_with_a_long_queue_and_pulls_its_kv_to_another(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[3]) as service:
        history = random_tokens(200)
        first = await service.answer(service.request(history, conversation="c"))
        history = [*history, *first.token_ids]
        busy = next(ring for ring in service.router.rings if ring.name == first.begun.plan.prefill_ring)
        busy.busy_until += 1000.0
        busy.num_prefilling += 1  # another turn
        answer = await append(service, [4, 5])
        plan = answer.begun.plan
        assert answer.token_ids == oracles[KIND].greedy([*history, 4, 5], 5)
        assert plan.prefill_ring != busy.name
        assert f"the conversation leaves prefill ring {busy.name}" in plan.remarks
        assert {each.ring for each in plan.ring_alternatives} == {"prefill-0", "prefill-1"}
        there = next(each for each in plan.ring_alternatives if each.ring == busy.name)
        assert there.queue_seconds > 900.0
        if plan.cached_tokens:
            assert {source.source for source in plan.cached_sources} == {"pulled_from_decode"}
        assert busy.name not in kept(service)


async def test_a_turn_that_fails_on_a_new_ring_leaves_the_conversation_on_its_old_one(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[3], other_decode=[1]) as service:
        history = random_tokens(90)
        first = await service.answer(service.request(history, conversation="c"))
        history = [*history, *first.token_ids]
        before = kept(service)
        old = [ring for ring in service.router.rings if ring.name in before]
        for ring in old:
            ring.is_ready = False
        cut = service.request([1, 2, 3], conversation="c", mode=PromptMode.APPEND, max_tokens=500)
        await read_tokens(service, cut, 3)
        await eventually(lambda: service.router.num_running == 0)
        await eventually(lambda: kept(service) == before)  # rings hear what to keep when the turn has ended
        for ring in old:
            ring.is_ready = True
        for ring in service.router.rings:
            ring.is_ready = ring in old
        answer = await append(service, [4])
        assert answer.token_ids == oracles[KIND].greedy([*history, 4], 5)
        assert answer.begun.plan.cached_tokens == len(history) - 1


async def test_kv_that_a_ring_could_not_be_told_to_free_is_never_taken_for_the_conversations(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Go to another ring, rewrite the history there, and return."""
    async with Service(model_paths[KIND], 2, 2, other_prefill=[1], other_decode=[3]) as service:
        history = random_tokens(64)
        await service.answer(service.request(history, conversation="c"))
        old = set(kept(service))

        async def unreachable(*_: object, **__: object) -> None:
            raise Unavailable("the ring does not answer")

        rings = {ring.name: ring for ring in service.router.rings}
        for name in old:
            rings[name].is_ready = False
        rewritten = [*history[:20], *random_tokens(50, seed=9)]
        with monkeypatch.context() as patch:
            for name in old:
                patch.setattr(service.peers.leaders[name], "settle", unreachable)
            second = await service.answer(service.request(rewritten, conversation="c"))
        assert old < set(kept(service)), "what could not be told to go is still there"
        for name, ring in rings.items():
            ring.is_ready = name in old
        answer = await append(service, [6])
        assert answer.token_ids == oracles[KIND].greedy([*rewritten, *second.token_ids, 6], 5)
        assert answer.begun.plan.cached_tokens == 0
        service.check_integrity()


async def test_many_turns_at_once_on_many_rings_are_exact_and_leave_nothing(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[2, 2], other_decode=[1], max_batch=3) as service:
        free = service.free_blocks()
        prompts = [random_tokens(20 + 7 * number, number) for number in range(9)]
        answers = await asyncio.gather(*(service.answer(service.request(prompt)) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracles[KIND].greedy(prompt, 5)
        assert len({answer.begun.plan.prefill_ring for answer in answers}) == 3
        assert len({answer.begun.plan.decode_ring for answer in answers}) == 2
        await is_idle(service, free)
        await eventually(lambda: all(not ring.num_turns for ring in service.router.rings))
        assert not any(ring.num_prefilling for ring in service.router.rings)


async def test_prompts_of_a_key_go_to_its_rings_and_one_without_cache_goes_where_it_is_quiet(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[2], other_decode=[2]) as service:
        went = []
        for number, no_cache in enumerate([False, False, False, True]):
            prompt = random_tokens(40, seed=number)
            answer = await service.answer(replace(service.request(prompt), cache_key="ada", no_cache=no_cache))
            assert answer.token_ids == oracles[KIND].greedy(prompt, 5)
            await eventually(lambda: service.router.num_running == 0)
            went.append(answer.begun.plan.decode_ring)
        assert len(set(went[:3])) == 1
        assert went[3] != went[0], "it has no key, and the other ring had no turn for longer"
        service.check_integrity()
