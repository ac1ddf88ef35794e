"""Counts of the router's plans, and its state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import InvalidRequest
from ringserve.orchestration.protocol.plans import TurnPlan
from ringserve.orchestration.protocol.rings import RingStanding
from ringserve.orchestration.protocol.turns import BegunTurn
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.services.telemetry.metrics.router import RouterMetrics, RouterView
from ringserve.views import KvMoves
from tests.orchestration.journal.records import PLAN, SPARSE
from tests.orchestration.service import Service
from tests.workers.models import save_model

VIEW = RouterView(
    conversations=4,
    running_turns=2,
    turns_waiting_for_rings=3,
    rings=(
        ("prefill", "prefill-0", RingStanding.READY),
        ("prefill", "prefill-1", RingStanding.DRAINING),
        ("decode", "decode-0", RingStanding.LOST),
        ("decode", "decode-1", RingStanding.AWAY),
    ),
    corrections=(("prefill-0", "pass_q", 64, 1.25),),
    moves=(KvMoves(role="decode", reason=MoveReason.DRAIN, moved=3, failed=1, payload_bytes=4096, seconds=0.5),),
)

CORRECTION = {"ring": "prefill-0", "algorithm": "pass_q", "min_work": "64"}


def metrics_of(selector: str = "auto") -> RouterMetrics:
    return RouterMetrics(selector, lambda: VIEW, asyncio.get_running_loop())


async def test_a_plan_is_counted_by_algorithm_and_policy_and_a_refusal_as_one(tmp_path: Path) -> None:
    metrics = metrics_of("pass_q")
    async with Service(save_model("llama_gqa", tmp_path), 2, 1, selector="pass_q") as service:
        request = service.request([1, 2, 3], max_tokens=1)
        begun = await metrics.planned(service.router.begin_turn(request))
        await service.router.abort_requests([request.request_id])
        with pytest.raises(InvalidRequest):
            await metrics.planned(service.router.begin_turn(service.request([1] * 9000)))
    value = metrics.registry.get_sample_value
    assert begun.plan.algorithm == "pass_q"
    assert value("ringserve_router_plans_total", {"algorithm": "pass_q", "selector": "pass_q"}) == 1
    assert value("ringserve_router_plans_total", {"algorithm": "pass_kv", "selector": "pass_q"}) == 0
    for role in ("prefill", "decode"):
        assert value("ringserve_router_placements_total", {"role": role, "ring": f"{role}-0"}) == 1
    assert value("ringserve_router_refusals_total") == 1
    assert value("ringserve_router_begin_turn_seconds_count") == 1


async def test_rings_and_conversations_are_shown_as_the_router_knows_them() -> None:
    registry = metrics_of().registry

    def ask() -> list[float | None]:
        return [
            registry.get_sample_value("ringserve_conversations"),
            registry.get_sample_value("ringserve_router_running_turns"),
            registry.get_sample_value("ringserve_router_turns_waiting_for_rings"),
            registry.get_sample_value("ringserve_router_ring_ready", {"role": "prefill", "ring": "prefill-0"}),
            registry.get_sample_value("ringserve_router_ring_ready", {"role": "decode", "ring": "decode-0"}),
            registry.get_sample_value(
                "ringserve_router_prediction_correction",
                {"ring": "prefill-0", "algorithm": "pass_q", "min_work": "64"},
            ),
        ]

    assert await asyncio.to_thread(ask) == [4, 2, 3, 1, 0, 1.25]


async def test_rings_are_counted_in_every_state_of_every_role() -> None:
    registry = metrics_of().registry

    def ask() -> dict[tuple[str, str], float]:
        families = [family for family in registry.collect() if family.name == "ringserve_rings"]
        return {(each.labels["role"], each.labels["state"]): each.value for each in families[0].samples}

    found = await asyncio.to_thread(ask)
    assert found.keys() == {(role, state) for role in ("prefill", "decode") for state in RingStanding}
    assert {labels for labels, value in found.items() if value} == {
        ("prefill", "ready"),
        ("prefill", "draining"),
        ("decode", "lost"),
        ("decode", "away"),
    }
    assert registry.get_sample_value("ringserve_router_ring_ready", {"role": "decode", "ring": "decode-1"}) is None


async def test_moves_of_kv_are_counted_by_role_reason_and_outcome_from_the_start() -> None:
    registry = metrics_of().registry

    def ask() -> dict[tuple[str, ...], float]:
        families = [family for family in registry.collect() if family.name.startswith("ringserve_router_kv_move")]
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }

    found = await asyncio.to_thread(ask)
    told = {name: value for name, value in found.items() if value}
    assert told == {
        ("ringserve_router_kv_moves_total", "decode", "drain", "moved"): 3,
        ("ringserve_router_kv_moves_total", "decode", "drain", "failed"): 1,
        ("ringserve_router_kv_moved_bytes_total", "decode", "drain"): 4096,
        ("ringserve_router_kv_move_seconds_total", "decode", "drain"): 0.5,
    }
    assert len(found) == 2 * len(MoveReason) * 4


async def test_approximate_plans_are_counted_by_their_bound() -> None:
    metrics = metrics_of()

    async def begun(plan: TurnPlan) -> BegunTurn:
        return BegunTurn(turn_id="t", decode_endpoint="d", prompt_tokens=1, plan=plan)

    await metrics.planned(begun(PLAN))
    await metrics.planned(begun(replace(PLAN, sparse=SPARSE)))
    value = metrics.registry.get_sample_value
    assert value("ringserve_router_sparse_plans_total", {"bound": "max_loss"}) == 1
    assert value("ringserve_router_sparse_plans_total", {"bound": "max_ttft"}) == 0
