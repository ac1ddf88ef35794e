"""What the router counts of its plans, and shows of what it knows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cp_core.errors import InvalidRequest
from services.metrics.router import RouterMetrics, RouterView
from tests.orchestration.service import Service
from tests.workers.models import save_model

VIEW = RouterView(
    conversations=4,
    running_turns=2,
    rings=(("prefill", "prefill-0", True), ("decode", "decode-0", False)),
    corrections=(("prefill-0", "pass_q", 64, 1.25),),
)

CORRECTION = {"group": "prefill-0", "algorithm": "pass_q", "min_work": "64"}


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
        assert value("ringserve_router_placements_total", {"role": role, "group": f"{role}-0"}) == 1
    assert value("ringserve_router_refusals_total") == 1
    assert value("ringserve_router_begin_turn_seconds_count") == 1


async def test_rings_and_conversations_are_shown_as_the_router_knows_them() -> None:
    registry = metrics_of().registry

    def ask() -> list[float | None]:
        return [
            registry.get_sample_value("ringserve_conversations"),
            registry.get_sample_value("ringserve_router_running_turns"),
            registry.get_sample_value("ringserve_router_ring_ready", {"role": "prefill", "group": "prefill-0"}),
            registry.get_sample_value("ringserve_router_ring_ready", {"role": "decode", "group": "decode-0"}),
            registry.get_sample_value(
                "ringserve_router_prediction_correction",
                {"group": "prefill-0", "algorithm": "pass_q", "min_work": "64"},
            ),
        ]

    assert await asyncio.to_thread(ask) == [4, 2, 1, 0, 1.25]
