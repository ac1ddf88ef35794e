"""Conversations that leave a ring take along the KV that it retains, or compute it again: exact either way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import CapacityExceeded, TurnCancelled, Unavailable
from ringserve.orchestration.protocol.plans import CachedSource, PromptMode
from ringserve.orchestration.protocol.turns import Reserve
from ringserve.orchestration.protocol.views import MoveReason
from tests.orchestration.ring.test_kv_moves import HeldBack, kill_one
from tests.orchestration.service import Answer, Service, is_idle
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

KIND = "llama_gqa"
ANSWER = 9
SHAPES = (
    # (cp, tp) of the first rings and of those that the conversation goes to; prefill, then decode
    (((2, 1), (3, 1)), ((3, 1), (2, 1))),
    (((3, 1), (1, 2)), ((1, 2), (3, 1))),
    (((2, 2), (2, 1)), ((1, 1), (2, 2))),
)


class Talk:
    """Conversation, with its next expected answer."""

    def __init__(self, service: Service, oracle: Oracle) -> None:
        self._service = service
        self._oracle = oracle
        self.history: list[int] = []

    async def turn(self, new: list[int]) -> Answer:
        mode = PromptMode.APPEND if self.history else PromptMode.WHOLE_HISTORY
        request = self._service.request(new, conversation="c", mode=mode, max_tokens=ANSWER)
        answer = await self._service.answer(request)
        assert answer.token_ids == self._oracle.greedy([*self.history, *new], ANSWER)
        self.history += [*new, *answer.token_ids]
        return answer

    def kept(self) -> dict[str, int]:
        counts = {name: leader.ring.pool.num_retained("c") for name, leader in self._service.peers.leaders.items()}
        return {name: count for name, count in counts.items() if count}


async def refuse(request: Reserve) -> None:
    raise CapacityExceeded("the ring is full; retry later")


def refused(service: Service, answer: Answer, monkeypatch: pytest.MonkeyPatch, *roles: str) -> None:
    """Refuse further turns on the rings of these roles that served a turn."""
    names = {"prefill": answer.begun.plan.prefill_ring, "decode": answer.begun.plan.decode_ring}
    for role in roles:
        monkeypatch.setattr(service.peers.leaders[names[role]], "reserve", refuse)


def pulled(answer: Answer) -> CachedSource | None:
    found = [source for source in answer.begun.plan.cached_sources if source.source == "pulled_from_other"]
    return found[0] if found else None


@pytest.mark.parametrize("roles", [("decode",), ("prefill", "decode")], ids="+".join)
@pytest.mark.parametrize(("first", "others"), SHAPES, ids=str)
async def test_what_only_the_ring_that_is_left_keeps_is_fetched_and_not_computed_again(
    first: tuple[tuple[int, int], tuple[int, int]],
    others: tuple[tuple[int, int], tuple[int, int]],
    roles: tuple[str, ...],
    model_paths: Mapping[str, Path],
    oracles: Mapping[str, Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (prefill, prefill_tp), (decode, decode_tp) = first
    async with Service(
        model_paths[KIND],
        prefill,
        decode,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        other_prefill=[others[0]],
        other_decode=[others[1]],
    ) as service:
        free, talk = service.free_blocks(), Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))
        history, left = len(talk.history), before.begun.plan.decode_ring
        with monkeypatch.context() as patch:
            refused(service, before, patch, *roles)
            moved = await talk.turn([7, 8])
        plan = moved.begun.plan
        source = pulled(moved)
        assert source is not None
        assert (source.ring, source.tokens.stop) == (left, history - 1)
        assert source.tokens.start == (0 if "prefill" in roles else 47)
        assert plan.cached_tokens == history - 1
        assert moved.report.pulled_bytes == len(source.tokens) * service.model.kv_bytes_per_token
        assert set(talk.kept()) == {plan.prefill_ring, plan.decode_ring}
        (told,) = (await service.router.get_server_info()).kv_moves
        assert (told.role, told.reason, told.moved, told.failed) == ("decode", MoveReason.TURN, 1, 0)
        assert told.payload_bytes == moved.report.pulled_bytes
        for leader in service.peers.leaders.values():
            await leader.announce()
        last = await talk.turn([9])
        assert last.begun.plan.cached_tokens == len(talk.history) - ANSWER - 2
        await service.router.delete_conversation("c")
        await is_idle(service, free)


async def test_a_prefill_ring_that_is_left_is_asked_where_the_decode_ring_keeps_less(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_prefill=[3]) as service:
        talk = Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))
        await service.decode.settle("c", "", 10)
        refused(service, before, monkeypatch, "prefill")
        moved = await talk.turn([7, 8])
        source = pulled(moved)
        assert source is not None
        assert (source.ring, source.tokens.start, source.tokens.stop) == (before.begun.plan.prefill_ring, 0, 47)
        service.check_integrity()


async def test_what_was_evicted_or_is_configured_to_be_computed_is_not_asked_for(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_decode=[3]) as service:
        talk = Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))
        await service.peers.leaders[before.begun.plan.decode_ring].settle("c", "", 0)
        with monkeypatch.context() as patch:
            refused(service, before, patch, "decode")
            assert pulled(await talk.turn([7, 8])) is None
    async with Service(model_paths[KIND], 2, 2, other_decode=[3], missing_kv="recompute") as service:
        talk = Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))
        refused(service, before, monkeypatch, "decode")
        moved = await talk.turn([7, 8])
        assert pulled(moved) is None
        assert {"pull", "recompute"} <= dict(moved.begun.plan.alternatives).keys()


@pytest.mark.parametrize("how", ["dies", "evicts", "is rebuilt"])
async def test_what_the_ring_that_is_left_does_not_send_after_all_is_computed(
    how: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_decode=[3]) as service:
        talk = Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))
        left = service.peers.leaders[before.begun.plan.decode_ring]
        incarnation = left.ring.incarnation
        send = left.send_kv

        async def fails(request: object) -> object:
            if how == "evicts":
                await left.settle("c", "", 0)
            elif how == "is rebuilt":
                left.ring.report_lost(Unavailable("lost"), left.ring.incarnation)
                await eventually(lambda: left.ring.incarnation != incarnation and left.ring.state == "ready")
            else:
                held = HeldBack(left, monkeypatch)
                sending = asyncio.create_task(send(request))  # type: ignore[arg-type]
                await held.asked.wait()
                await kill_one(left)
                held.go_on.set()
                return await sending
            return await send(request)  # type: ignore[arg-type]

        monkeypatch.setattr(left, "send_kv", fails)
        refused(service, before, monkeypatch, "decode")
        moved = await talk.turn([7, 8])
        assert pulled(moved) is not None
        assert moved.report.lost_tokens == ANSWER - 1
        assert moved.report.pulled_bytes == 0
        computed = sum(len(chunk.tokens) for chunk in moved.report.chunks)
        assert computed == ANSWER - 1 + 1 + 2
        (told,) = (await service.router.get_server_info()).kv_moves
        assert (told.moved, told.failed) == (0, 1)
        service.check_integrity()


async def test_a_turn_that_is_aborted_while_it_fetches_leaves_both_rings_as_they_were(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Service(model_paths[KIND], 2, 2, other_decode=[3]) as service:
        talk = Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))
        left, kept, free = service.peers.leaders[before.begun.plan.decode_ring], talk.kept(), service.free_blocks()
        with monkeypatch.context() as patch:
            held = HeldBack(left, patch)
            refused(service, before, patch, "decode")
            request = service.request([7, 8], conversation="c", mode=PromptMode.APPEND)
            turn = asyncio.create_task(service.answer(request))
            await held.asked.wait()
            await service.router.abort_requests([request.request_id])
            with pytest.raises(TurnCancelled):
                await turn
            held.go_on.set()
            await left.kv_moves.until_free("c")
        await is_idle(service, free)
        assert talk.kept() == kept
        after = await talk.turn([7, 8])
        assert after.begun.plan.decode_ring == left.settings.name
        assert after.begun.plan.cached_tokens == 47 + ANSWER - 1


async def test_a_ring_that_does_not_say_what_it_retains_delays_no_turn(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringserve.orchestration.router.lifecycle.ASK_SECONDS", 0.05)
    async with Service(model_paths[KIND], 2, 2, other_decode=[3]) as service:
        talk = Talk(service, oracles[KIND])
        before = await talk.turn(random_tokens(47))

        async def silent(names: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(service.peers.leaders[before.begun.plan.decode_ring], "get_retained", silent)
        refused(service, before, monkeypatch, "decode")
        assert pulled(await talk.turn([7, 8])) is None
