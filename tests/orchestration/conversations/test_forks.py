"""Forks of one history: the tokens are those of conversations that never shared anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import Busy, InvalidRequest, NotFound
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import ForkedKv, ForkKv
from ringserve.views import ConversationInfo
from tests.orchestration.service import BLOCK_TOKENS, Answer, Service, read_tokens
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.models import Oracle, random_tokens


async def go_on(service: Service, name: str, new: list[int], **options: int) -> Answer:
    return await service.answer(service.request(new, conversation=name, mode=PromptMode.APPEND, **options))  # type: ignore[arg-type]


async def begin(service: Service, name: str, prompt: list[int]) -> list[int]:
    """Run one turn and return the history."""
    answer = await service.answer(service.request(prompt, conversation=name))
    return [*prompt, *answer.token_ids]


async def delete_all(service: Service, free: list[int]) -> None:
    for item in (await service.router.list_conversations("", "", 1000)).conversations:
        await service.router.delete_conversation(item.conversation_id)
    assert service.free_blocks() == free
    service.check_integrity()


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (2, 2), (3, 2)])
async def test_forks_and_their_source_go_on_as_if_they_were_alone(
    num_prefill: int, num_decode: int, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], num_prefill, num_decode) as service:
        free = service.free_blocks()
        history = await begin(service, "c", random_tokens(65))
        cuts = {"whole": None, "within a block": 37, "one token": 1, "without the answer": 65}
        for name, at_token in cuts.items():
            view = await service.router.fork_conversation("c", name, at_token)
            assert view.num_tokens == (at_token or len(history))
            service.check_integrity()
        histories = {"c": history} | {name: history[:at_token] for name, at_token in cuts.items()}
        for turn in range(2):
            for number, (name, known) in enumerate(histories.items()):
                new = random_tokens(7 + number, seed=50 * turn + number)
                answer = await go_on(service, name, new)
                assert answer.token_ids == oracle.greedy([*known, *new], 5), f"turn {turn} of {name}"
                shared = cuts.get(name) if turn == 0 else None
                assert answer.begun.plan.cached_tokens == (shared or len(known) - 1), f"turn {turn} of {name}"
                histories[name] = [*known, *new, *answer.token_ids]
                service.check_integrity()
        await delete_all(service, free)


async def test_forks_on_rings_that_share_heads_copy_every_share(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 1, prefill_tp=2, decode_tp=2) as service:
        history = await begin(service, "c", random_tokens(65))
        await service.router.fork_conversation("c", "f", 43)
        for name, known in (("c", history), ("f", history[:43])):
            answer = await go_on(service, name, [3, 1, 4])
            assert answer.token_ids == oracles["llama_gqa"].greedy([*known, 3, 1, 4], 5), name
        service.check_integrity()


async def test_a_fork_takes_no_more_room_than_the_blocks_it_fills_in_part(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        await begin(service, "c", random_tokens(200))
        before = service.free_blocks()
        for number in range(10):
            await service.router.fork_conversation("c", f"f{number}", None)
        taken = [was - now for was, now in zip(before, service.free_blocks(), strict=True)]
        assert all(0 <= blocks <= 10 for blocks in taken), f"at most one block of {BLOCK_TOKENS} tokens a fork and rank"


async def test_deleting_the_source_leaves_its_forks_their_kv(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        free = service.free_blocks()
        history = await begin(service, "c", random_tokens(90))
        await service.router.fork_conversation("c", "f", None)
        await service.router.delete_conversation("c")
        # Others write where the source lay.
        await begin(service, "other", random_tokens(150, seed=1))
        answer = await go_on(service, "f", [5, 6])
        assert answer.begun.plan.cached_tokens == len(history) - 1
        assert answer.token_ids == oracles["llama_gqa"].greedy([*history, 5, 6], 5)
        await delete_all(service, free)


async def test_an_edited_history_of_one_fork_changes_nothing_for_the_other(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 3, 2) as service:
        history = await begin(service, "c", random_tokens(101))
        await service.router.fork_conversation("c", "f", None)
        edited = [*history, 5, 6, 7]
        edited[58] = (edited[58] + 1) % 300
        answer = await service.answer(service.request(edited, conversation="f"))
        assert answer.begun.plan.cached_tokens == 58
        assert answer.token_ids == oracle.greedy(edited, 5)
        service.check_integrity()
        again = await go_on(service, "c", [9])
        assert again.begun.plan.cached_tokens == len(history) - 1
        assert again.token_ids == oracle.greedy([*history, 9], 5)


async def test_a_fork_made_while_a_turn_runs_is_of_the_finished_history(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        history = await begin(service, "c", random_tokens(61))
        edited = [*history[:40], 1, 2, 3]  # the running turn goes another way from token 40 on
        running = asyncio.create_task(
            service.answer(service.request(edited, conversation="c", max_tokens=300, mode=PromptMode.WHOLE_HISTORY))
        )
        await eventually(lambda: service.decode.num_running == 1)
        view = await service.router.fork_conversation("c", "f", None)
        assert view.num_tokens == len(history)
        assert {place.num_tokens for place in view.placements} == {40}, "what both agree on"
        answer = await go_on(service, "f", [8])
        assert not running.done()
        assert answer.begun.plan.cached_tokens == 40
        assert answer.token_ids == oracle.greedy([*history, 8], 5)
        service.check_integrity()
        assert (await running).token_ids == oracle.greedy(edited, 300)


async def test_turns_that_come_while_a_fork_is_made_wait_or_are_refused(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths["llama_gqa"], 1, 2) as service:
        await begin(service, "c", random_tokens(30))
        has_begun, may_fork, fork_kv = asyncio.Event(), asyncio.Event(), service.decode.fork_kv

        async def slow(request: ForkKv) -> ForkedKv:
            has_begun.set()
            await may_fork.wait()
            return await fork_kv(request)

        monkeypatch.setattr(service.decode, "fork_kv", slow)
        forking = asyncio.create_task(service.router.fork_conversation("c", "f", None))
        async with asyncio.timeout(WAIT_SECONDS):
            await has_begun.wait()
        for name in ("c", "f"):
            with pytest.raises(Busy, match="busy with a fork of it"):
                await go_on(service, name, [1])
        waiting = asyncio.create_task(
            service.answer(service.request([1], conversation="c", mode=PromptMode.APPEND, wait=True))
        )
        may_fork.set()
        assert isinstance(await forking, ConversationInfo)
        assert len((await waiting).token_ids) == 5
        service.check_integrity()


async def test_retained_forks_are_evicted_one_by_one(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 2, num_blocks=40) as service:
        history = await begin(service, "c", random_tokens(100))
        await service.router.fork_conversation("c", "f", None)
        histories = {"c": history, "f": history}
        for number in range(3):
            histories[f"o{number}"] = await begin(service, f"o{number}", random_tokens(110, seed=number))
        for name, known in histories.items():
            answer = await go_on(service, name, [9])
            assert answer.token_ids == oracle.greedy([*known, 9], 5), name
            service.check_integrity()


async def test_a_fork_asked_for_twice_is_answered_twice_and_then_is_taken(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        await begin(service, "c", random_tokens(30))
        first = await service.router.fork_conversation("c", "f", 20)
        again = await service.router.fork_conversation("c", "f", 20)
        assert (again.num_tokens, again.placements) == (first.num_tokens, first.placements)
        with pytest.raises(InvalidRequest, match="new_id: conversation 'f' exists already"):
            await service.router.fork_conversation("c", "f", 21)
        await go_on(service, "f", [1])
        with pytest.raises(InvalidRequest, match="new_id: conversation 'f' exists already"):
            await service.router.fork_conversation("c", "f", 20)


async def test_a_fork_of_a_lost_ring_is_computed_again(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        history = await begin(service, "c", random_tokens(50))
        for ranks, leader in ((service.prefill_ranks, service.prefill), (service.decode_ranks, service.decode)):
            await ranks.made[0].kill()
            await eventually(lambda leader=leader: leader.ring.rebuilds == 1 and leader.ring.state == "ready")  # type: ignore[misc]
        view = await service.router.fork_conversation("c", "f", None)
        assert view.placements == ()
        answer = await go_on(service, "f", [4])
        assert answer.begun.plan.cached_tokens == 0
        assert answer.token_ids == oracles["llama_gqa"].greedy([*history, 4], 5)


@pytest.mark.parametrize(
    ("source", "at_token", "error", "says"),
    [
        ("none", None, NotFound, "there is no conversation 'none'"),
        ("first", None, NotFound, "'first' has finished no turn yet"),
        ("c", 0, InvalidRequest, "at_token: 0 is out of range; allowed are 1 to 35"),
        ("c", 36, InvalidRequest, "at_token: 36 is out of range; allowed are 1 to 35"),
    ],
)
async def test_what_cannot_be_forked_is_refused_in_a_sentence(
    source: str, at_token: int | None, error: type[Exception], says: str, model_paths: Mapping[str, Path]
) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        await begin(service, "c", random_tokens(30))
        running = asyncio.create_task(
            read_tokens(service, service.request([1, 2], conversation="first", max_tokens=2000), 1000)
        )
        await eventually(lambda: service.decode.num_running == 1)
        with pytest.raises(error, match=says):
            await service.router.fork_conversation(source, "new", at_token)
        with pytest.raises(NotFound):
            await service.router.get_conversation("new")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
