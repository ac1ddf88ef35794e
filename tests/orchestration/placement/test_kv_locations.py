"""Maps of a conversation's KV: every change is a new map with the next epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringserve.cp_core.layout.shards import spread
from ringserve.orchestration.placement.kv_locations import KvLocation, KvLocations
from ringserve.orchestration.protocol.plans import PromptMode
from tests.orchestration.service import Service, read_tokens
from tests.waiting import eventually
from tests.workers.models import random_tokens

ROLES = ("prefill", "decode")


def at(ring: str, num_tokens: int = 10) -> KvLocation:
    return KvLocation(ring=ring, incarnation="first", shards=spread(0, num_tokens, (0, 0)))


places = st.none() | st.builds(at, st.sampled_from("abc"), st.integers(1, 3))


@given(st.lists(st.tuples(st.sampled_from(ROLES), places), max_size=12))
def test_each_placement_tells_the_epoch_since_which_it_is_there(changes: list[tuple[str, KvLocation | None]]) -> None:
    maps = [KvLocations()]
    for role, place in changes:
        maps.append(maps[-1].put(role, place))
    assert [each.epoch for each in maps] == list(range(len(maps)))
    for role, place in maps[-1].items():
        before, since = maps[place.epoch - 1].at(role), maps[place.epoch].at(role)
        assert since == place
        assert before != place
        assert all(each.at(role) == place for each in maps[place.epoch :])
    assert dict(maps[-1].items()) == {role: maps[-1].at(role) for role in ROLES if maps[-1].at(role) is not None}


def test_a_change_of_both_is_one_epoch_and_leaves_earlier_maps_as_they_were() -> None:
    first = KvLocations().changed(prefill=at("p"), decode=at("d"))
    second = first.changed(prefill=first.prefill, decode=at("e"))
    assert (first.epoch, second.epoch) == (1, 2)
    assert (second.prefill, second.decode) == (first.prefill, dataclasses.replace(at("e"), epoch=2))
    assert first.decode is not None
    assert (first.decode.ring, first.decode.epoch) == ("d", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.epoch = 5  # type: ignore[misc]


def test_a_cut_never_makes_a_placement_longer() -> None:
    place = at("p", 10)
    assert place.cut(10) is place
    assert place.cut(11) is place
    assert (place.cut(4).num_tokens, place.cut(4).ring) == (4, "p")


async def test_turns_failures_and_forks_make_epochs_that_conversations_show(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 3) as service:

        async def epochs(name: str = "c") -> tuple[int, dict[str, tuple[int, int]]]:
            view = await service.router.get_conversation(name)
            return view.epoch, {place.role: (place.num_tokens, place.epoch) for place in view.placements}

        await service.answer(service.request(random_tokens(40), conversation="c"))
        assert await epochs() == (1, {"prefill": (40, 1), "decode": (44, 1)})
        await service.answer(service.request([1, 2], conversation="c", mode=PromptMode.APPEND))
        assert await epochs() == (2, {"prefill": (47, 2), "decode": (51, 2)})
        # A turn whose prompt differs from token 30 on, and that is cut off: what it overwrote is gone on both rings.
        cut = service.request(random_tokens(40)[:30] + [7] * 20, conversation="c", max_tokens=400)
        await read_tokens(service, cut, 3)
        await eventually(lambda: service.router.num_running == 0)
        assert await epochs() == (3, {"prefill": (30, 3), "decode": (30, 3)})
        # A cut-off turn whose prompt agrees with all KV that the decode ring retains leaves that KV unchanged.
        cut = service.request([3], conversation="c", mode=PromptMode.APPEND, max_tokens=400)
        await read_tokens(service, cut, 3)
        await eventually(lambda: service.router.num_running == 0)
        assert await epochs() == (4, {"prefill": (30, 3), "decode": (30, 3)})
        await service.router.fork_conversation("c", "fork", 20)
        assert await epochs("fork") == (1, {"prefill": (20, 1), "decode": (20, 1)})
        assert (await epochs())[0] == 4
