"""Places of ranks in a Ray cluster that several deployments share."""

from __future__ import annotations

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
