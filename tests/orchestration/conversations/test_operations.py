"""Operations on conversations answer by what the rings hold, and forgotten KV is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import CapacityExceeded, DeadlineExceeded, InvalidRequest, NotFound, TurnCancelled
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.protocol.plans import CachedSource, PromptMode
from ringserve.orchestration.protocol.turns import Reservation, Reserve, TurnOutcome, TurnRequest
from tests.orchestration.conversations.test_store import Clock
from tests.orchestration.service import Service, is_idle
from tests.waiting import eventually, pass_time
from tests.workers.models import Oracle, random_tokens


def appended(
    service: Service, new: list[int], name: str = "c", *, deadline: float = 60.0, max_tokens: int = 5
) -> TurnRequest:
    """Run a turn that waits behind the running one."""
    return service.request(
        new, conversation=name, mode=PromptMode.APPEND, wait=True, deadline=deadline, max_tokens=max_tokens
    )


async def begin(service: Service, name: str, num_tokens: int, seed: int = 0) -> list[int]:
    prompt = random_tokens(num_tokens, seed=seed)
    answer = await service.answer(service.request(prompt, conversation=name))
    return [*prompt, *answer.token_ids]


# --- what is shown ---------------------------------------------------------------------------------------------------


async def test_a_placement_is_gone_when_its_ring_has_evicted_it(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 3, num_blocks=40) as service:
        history = await begin(service, "c", 100)
        view = await service.router.get_conversation("c")
        assert {place.role: place.num_tokens for place in view.placements} == {
            "prefill": 100,
            "decode": len(history) - 1,
        }
        for number in range(4):
            await begin(service, f"other-{number}", 110, seed=number)
        assert service.prefill.ring.pool.get("c") is None
        retained_on_decode = service.decode.ring.pool.num_retained("c")
        view = await service.router.get_conversation("c")
        assert view.num_tokens == len(history)
        assert (view.retained_on("prefill"), view.retained_on("decode")) == (0, retained_on_decode)


async def test_a_placement_on_a_ring_that_was_rebuilt_is_gone(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        history = await begin(service, "c", 50)
        await service.prefill_ranks.made[1].kill()
        await eventually(lambda: service.prefill.ring.rebuilds == 1 and service.prefill.ring.state == "ready")
        view = await service.router.get_conversation("c")
        assert [(place.role, place.num_tokens) for place in view.placements] == [("decode", len(history) - 1)]


async def test_while_a_turn_runs_only_what_it_agrees_with_counts_as_retained(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 2) as service:
        history = await begin(service, "c", 60)
        edited = [*history[:33], 7, 8, 9]
        running = asyncio.create_task(service.answer(service.request(edited, conversation="c", max_tokens=200)))
        await eventually(lambda: service.decode.num_running == 1)
        view = await service.router.get_conversation("c")
        assert (view.retained_on("prefill"), view.retained_on("decode")) == (33, 33)
        assert (view.num_tokens, view.idle_seconds) == (len(history), 0.0)
        await running


async def test_a_list_shows_each_conversation_with_what_each_side_retains(model_paths: Mapping[str, Path]) -> None:
    clock = Clock()
    async with Service(model_paths["llama_gqa"], 2, 3, clock=clock) as service:
        lengths = {name: len(await begin(service, name, 20 + place)) for place, name in enumerate(("b1", "a", "b2"))}
        clock.now += 5
        page = await service.router.list_conversations("b", "", 1)
        (first,) = page.conversations
        assert (first.conversation_id, first.num_tokens, first.num_turns, first.idle_seconds) == (
            "b1",
            lengths["b1"],
            1,
            5,
        )
        assert (first.kept_on_prefill, first.kept_on_decode) == (20, lengths["b1"] - 1)
        rest = await service.router.list_conversations("b", page.next_page_token, 1)
        assert [item.conversation_id for item in rest.conversations] == ["b2"]
        assert rest.next_page_token == ""
        for size in (0, 1001):
            with pytest.raises(InvalidRequest, match=f"page_size: {size} is out of range; allowed are 1 to 1000"):
                await service.router.list_conversations("", "", size)


# --- age -------------------------------------------------------------------------------------------------------------


async def test_what_has_expired_is_not_found_and_its_kv_is_free(model_paths: Mapping[str, Path]) -> None:
    clock = Clock()
    async with Service(model_paths["llama_gqa"], 2, 3, conversation_ttl=60.0, clock=clock) as service:
        free = service.free_blocks()
        await begin(service, "c", 50)
        short = service.request(random_tokens(30), conversation="short", ttl=5.0)
        await service.answer(short)
        await service.router.fork_conversation("c", "f", 20)
        assert (await service.router.get_conversation("f")).ttl_seconds == 60
        clock.now += 30
        with pytest.raises(NotFound, match="'short'"):
            await service.router.get_conversation("short")
        await service.answer(service.request([1], conversation="f", mode=PromptMode.APPEND))
        clock.now += 31
        names = [item.conversation_id for item in (await service.router.list_conversations("", "", 10)).conversations]
        assert names == ["f"]
        clock.now += 30
        service.router.expire_conversations()
        await is_idle(service, free)


async def test_the_router_looks_for_the_expired_by_itself(model_paths: Mapping[str, Path]) -> None:
    clock = Clock()
    async with Service(model_paths["llama_gqa"], 1, 1, conversation_ttl=60.0, clock=clock) as service:
        free = service.free_blocks()
        await begin(service, "c", 50)
        clock.now += 61
        await is_idle(service, free)


@pytest.mark.parametrize("how", ["deleted", "expired"])
async def test_what_is_forgotten_while_its_turn_settles_leaves_no_kv(
    how: str, model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delete when the router has entered the turn's end, before the decode ring hears how much to retain."""
    clock = Clock()
    async with Service(model_paths["llama_gqa"], 2, 3, conversation_ttl=60.0, clock=clock) as service:
        free, router = service.free_blocks(), service.router
        end_turn, forgetting = router.end_turn, list[asyncio.Task[None]]()

        async def end_and_forget(outcome: TurnOutcome) -> int:
            keep = await end_turn(outcome)
            if how == "deleted":
                forgetting.append(asyncio.create_task(router.delete_conversation("c")))
            else:
                clock.now += 61
                router.expire_conversations()
            await eventually(lambda: router.num_conversations == 0)
            assert keep > 0
            return keep

        monkeypatch.setattr(router, "end_turn", end_and_forget)
        await begin(service, "c", 50)
        await asyncio.gather(*forgetting)
        await is_idle(service, free)


# --- waiting ---------------------------------------------------------------------------------------------------------


async def test_turns_that_wait_follow_each_other_and_each_sees_the_one_before(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3) as service:
        prompt = random_tokens(40)
        turns = [asyncio.create_task(service.answer(service.request(prompt, conversation="c", max_tokens=30)))]
        await eventually(lambda: service.router.num_running == 1)
        for number in range(4):
            turns.append(asyncio.create_task(service.answer(appended(service, [10 + number, 20]))))
        history: list[int] = []
        for new, turn in zip([prompt, *([10 + number, 20] for number in range(4))], turns, strict=True):
            answer = await turn
            assert answer.token_ids == oracle.greedy([*history, *new], len(answer.token_ids))
            history += [*new, *answer.token_ids]
        view = await service.router.get_conversation("c")
        assert (view.num_tokens, view.num_turns, view.num_waiting) == (len(history), 5, 0)
        service.check_integrity()


async def test_a_waiting_turn_ends_at_its_deadline_by_an_abort_or_with_its_client(
    model_paths: Mapping[str, Path],
) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1, max_waiting_turns=2) as service:
        free = service.free_blocks()
        running = asyncio.create_task(
            service.answer(service.request(random_tokens(20), conversation="c", max_tokens=5000))
        )
        await eventually(lambda: service.decode.num_running == 1)
        late = appended(service, [1], deadline=20.0)
        waiting = asyncio.create_task(service.answer(late))
        await eventually(lambda: service.router._conversations.is_waiting(late.request_id))
        pass_time(20.0)
        with pytest.raises(DeadlineExceeded, match=r"waited for conversation 'c' until its deadline of 20\.0 s"):
            await waiting
        aborted, gone = appended(service, [1]), appended(service, [1])
        waits = [asyncio.create_task(service.answer(request)) for request in (aborted, gone)]
        await eventually(
            lambda: all(service.router._conversations.is_waiting(each.request_id) for each in (aborted, gone))
        )
        assert (await service.router.get_conversation("c")).num_waiting == 2
        with pytest.raises(CapacityExceeded, match="2 turns wait for 'c'"):
            await service.answer(appended(service, [1]))
        assert await service.router.abort_requests([aborted.request_id, "x"]) == ([aborted.request_id], ["x"])
        with pytest.raises(TurnCancelled, match="aborted"):
            await waits[0]
        waits[1].cancel()
        await asyncio.gather(waits[1], return_exceptions=True)
        assert (await service.router.get_conversation("c")).num_waiting == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await is_idle(service, free)


async def test_the_time_a_turn_has_waited_counts_towards_its_deadline(
    model_paths: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        reserve = service.decode.reserve

        async def noting(request: Reserve) -> Reservation:
            left.append(request.deadline_seconds)
            return await reserve(request)

        monkeypatch.setattr(service.decode, "reserve", noting)
        free = service.free_blocks()
        await begin(service, "c", 20)
        running = asyncio.create_task(service.answer(appended(service, [2], max_tokens=5000)))
        await eventually(lambda: service.decode.num_running == 1)
        request = appended(service, [1], deadline=50.0)
        waiting = asyncio.create_task(service.answer(request))
        await eventually(lambda: service.router._conversations.is_waiting(request.request_id))
        seen = asyncio.get_running_loop().time()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        ended = asyncio.get_running_loop().time()
        await waiting
        assert seen < ended
        assert left[-1] <= 50.0 - (ended - seen)
        await service.router.delete_conversation("c")
        await is_idle(service, free)


# --- retained and fetched KV -----------------------------------------------------------------------------------------


async def test_retained_kv_stays_within_its_bound_and_answers_stay_exact(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(model_paths["llama_gqa"], 2, 3, num_blocks=80, kept_fraction=0.3) as service:
        histories: dict[str, list[int]] = {}
        for turn in range(2):
            for number, name in enumerate("abcd"):
                new = random_tokens(70 if turn == 0 else 3, seed=10 * turn + number)
                history = [*histories.get(name, []), *new]
                answer = await service.answer(service.request(history, conversation=name))
                assert answer.token_ids == oracle.greedy(history, 5)
                histories[name] = [*history, *answer.token_ids]
                for leader in (service.prefill, service.decode):
                    assert all(rank.kept_blocks <= 24 for rank in leader.ring.pool.usage())
        assert service.prefill.ring.pool.num_retained("d") > 0
        assert service.prefill.ring.pool.num_retained("a") == 0
        service.check_integrity()


@pytest.mark.parametrize("policy", ["auto", "pull", "recompute"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 3), (3, 2)])
async def test_kv_that_is_pulled_or_computed_again_gives_the_same_tokens(
    policy: str,
    num_prefill: int,
    num_decode: int,
    model_paths: Mapping[str, Path],
    oracles: Mapping[str, Oracle],
) -> None:
    oracle = oracles["llama_gqa"]
    async with Service(
        model_paths["llama_gqa"], num_prefill, num_decode, missing_kv=policy, chunk_tokens=16
    ) as service:
        history = await begin(service, "c", 41)
        for turn in range(3):
            retained = service.prefill.ring.pool.num_retained("c")
            new = random_tokens(3 + turn, seed=turn)
            answer = await service.answer(service.request(new, conversation="c", mode=PromptMode.APPEND, max_tokens=25))
            assert answer.token_ids == oracle.greedy([*history, *new], 25)
            plan = answer.begun.plan
            pull, recompute = (dict(plan.alternatives)[name] for name in ("pull", "recompute"))
            is_pulled = policy == "pull" or (policy == "auto" and pull <= recompute)
            assert plan.cached_tokens == (len(history) - 1 if is_pulled else retained)
            sources = [
                CachedSource(source="kept_on_prefill", tokens=TokenRange(0, retained)),
                CachedSource(source="pulled_from_decode", tokens=TokenRange(retained, len(history) - 1)),
            ]
            assert list(plan.cached_sources) == sources[: 1 + is_pulled]
            assert (answer.report.pulled_bytes > 0) == is_pulled
            history += [*new, *answer.token_ids]
            service.check_integrity()
