"""Places of ranks in a Ray cluster that several deployments share."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from orchestration.ring import actors
from orchestration.ring.actors import RayRanks


def test_places_of_a_dead_leader_are_freed_and_those_of_another_deployment_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {
        "1": {"name": "decode-0.of-another-namespace", "state": "CREATED"},
        "2": {"name": "decode-0.own", "state": "CREATED"},
        "3": {"name": "decode-0.removed", "state": "REMOVED"},
        "4": {"name": "decode-01.other-ring", "state": "CREATED"},
    }
    own = {"decode-0.own", "decode-0.removed", "decode-01.other-ring"}
    removed: list[str] = []

    def find(name: str) -> str:
        if name not in own:
            raise ValueError(f"Failed to look up placement group with name: {name}")
        return name

    monkeypatch.setattr(actors, "placement_group_table", lambda: table)
    monkeypatch.setattr(actors, "get_placement_group", find)
    monkeypatch.setattr(actors, "remove_placement_group", removed.append)
    RayRanks("decode-0", {"CPU": 1})._remove_leftovers()
    assert removed == ["decode-0.own"]


@pytest.mark.parametrize(("tp", "places"), [(1, 4), (2, 2), (4, 1)])
async def test_the_processes_that_share_heads_are_on_one_host(
    tp: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []
    taken: list[int] = []

    def make(bundles: list[dict[str, float]], strategy: str, name: str) -> Any:
        asked.extend(bundles)
        ready: Future[None] = Future()
        ready.set_result(None)
        return SimpleNamespace(ready=lambda: SimpleNamespace(future=lambda: ready))

    def place(placement_group: object, placement_group_bundle_index: int) -> None:
        taken.append(placement_group_bundle_index)

    actor = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(actors, "placement_group_table", dict)
    monkeypatch.setattr(actors, "placement_group", make)
    monkeypatch.setattr(actors, "PlacementGroupSchedulingStrategy", place)
    monkeypatch.setattr(actors, "_remote", lambda *_, **__: SimpleNamespace(options=lambda **_: actor))
    await RayRanks("decode-0", {"CPU": 1.0, "GPU": 0.5}, tp).create(4, 5.0)
    assert asked == [{"CPU": 1.0 * tp, "GPU": 0.5 * tp}] * places
    assert taken == [rank // tp for rank in range(4)]
