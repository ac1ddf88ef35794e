"""Metrics of a ring and its ranks, read when Prometheus asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.services.telemetry.metrics.registry import RING_NAMES, WithVllmNames
from ringserve.services.telemetry.metrics.ring import RingCollector, RingView
from ringserve.views import RankKvUsage, RingInfo
from ringserve.workers.protocol.ranks import STEP_BOUNDS, GpuMemory, RankStatus


def status(state: str = "ready", role: str = "decode") -> RingInfo:
    return RingInfo(
        role=role,
        name=f"{role}-1",
        endpoint="",
        incarnation="",
        state=state,
        num_ranks=2,
        num_requests_running=3,
        num_requests_waiting=4,
        kv_usage=(
            RankKvUsage(total_blocks=10, free_blocks=1, active_blocks=6, kept_blocks=3),
            RankKvUsage(total_blocks=10, free_blocks=10, active_blocks=0, kept_blocks=0),
        ),
        rebuilds=5,
        decode_variant="pass_q",
        num_preemptions=11,
        waiting_work=12.5,
        max_waiting_work=100.0,
    )


def view(state: str = "ready", role: str = "decode") -> RingView:
    counts = [0] * (len(STEP_BOUNDS) + 1)
    counts[0], counts[3], counts[-1] = 5, 2, 1
    busy = RankStatus(
        steps=8,
        seconds_since_step=0.5,
        running=1,
        open_transfers=2,
        step_seconds=4.0,
        wait_seconds=1.0,
        communication_seconds=2.5,
        kv_nixl_bytes=70,
        kv_socket_bytes=30,
        kv_fallbacks=2,
        step_counts=tuple(counts),
        eager_steps=(("recording", 3),),
        waited_steps=(("sampled_on_host", 4),),
        checked_drafts=(6,),
        accepted_drafts=(4,),
    )
    other = RankStatus(
        steps=8, seconds_since_step=0.25, running=1, open_transfers=0, bytes_sent=99, step_counts=tuple(counts)
    )
    return RingView(
        status=status(state, role),
        rank_statuses=(busy, other),
        kv_evictions={"end": 7},
        layout_fallbacks={"level_cuts": 3},
        kv_shared_tokens=3,
        kv_bytes_per_token=5,
        kv_block_tokens=16,
    )


async def samples(collector: RingCollector | WithVllmNames) -> Mapping[str, float]:
    """Collect from another thread, as Prometheus does, while the leader's event loop goes on."""
    families = await asyncio.to_thread(lambda: list(collector.collect()))
    return {
        f"{sample.name}{{{','.join(f'{key}={sample.labels[key]}' for key in sorted(sample.labels))}}}": sample.value
        for family in families
        for sample in family.samples
    }


async def test_a_ring_tells_of_itself_and_of_every_rank() -> None:
    async def get_view() -> RingView:
        return view()

    found = await samples(RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop()))
    ring, rank = "{ring=decode-1,role=decode}", "{rank=0,ring=decode-1,role=decode}"
    assert found[f"ringserve_ring_ready{ring}"] == 1
    assert found[f"ringserve_num_requests_running{ring}"] == 3
    assert found[f"ringserve_num_requests_waiting{ring}"] == 4
    assert found[f"ringserve_kv_cache_usage_perc{ring}"] == 0.3, "retained blocks do not count"
    config = "{block_size=16,num_gpu_blocks=20,ring=decode-1,role=decode}"
    assert found[f"ringserve_cache_config_info{config}"] == 1
    assert found[f"ringserve_ring_rebuilds_total{ring}"] == 5
    evictions = {
        part: found[f"ringserve_kv_evictions_total{{part={part},ring=decode-1,role=decode}}"]
        for part in ("end", "whole")
    }
    assert evictions == {"end": 7, "whole": 0}
    assert found[f"ringserve_kv_shared_bytes{ring}"] == 15
    assert found[f"ringserve_num_preemptions_total{ring}"] == 11
    variants = {
        name: found[f"ringserve_ring_decode_variant{{ring=decode-1,role=decode,variant={name}}}"]
        for name in ("gather", "pass_q")
    }
    assert variants == {"gather": 0, "pass_q": 1}
    assert found["ringserve_kv_blocks{rank=0,ring=decode-1,role=decode,state=kept}"] == 3
    assert found["ringserve_kv_blocks{rank=1,ring=decode-1,role=decode,state=free}"] == 10
    assert found[f"ringserve_rank_steps_total{rank}"] == 8
    assert found[f"ringserve_rank_step_seconds_total{rank}"] == 4
    assert found[f"ringserve_rank_exposed_communication_seconds_total{rank}"] == 1
    assert found["ringserve_rank_bytes_sent_total{rank=1,ring=decode-1,role=decode}"] == 99
    for carrier, count in (("nixl", 70), ("sockets", 30)):
        carried = f"{{carrier={carrier},rank=0,ring=decode-1,role=decode}}"
        assert found[f"ringserve_rank_kv_bytes_sent_total{carried}"] == count
    assert found[f"ringserve_rank_kv_fallbacks_total{rank}"] == 2
    eager = {key: value for key, value in found.items() if key.startswith("ringserve_rank_eager_steps_total")}
    assert eager == {"ringserve_rank_eager_steps_total{rank=0,reason=recording,ring=decode-1,role=decode}": 3}
    waited = "ringserve_rank_waited_steps_total{rank=0,reason=sampled_on_host,ring=decode-1,role=decode}"
    assert found[waited] == 4


async def test_steps_of_all_ranks_are_one_histogram_and_only_those_that_can_tell_count_communication() -> None:
    async def get_view() -> RingView:
        return view()

    found = await samples(RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop()))
    name = "ringserve_step_time_seconds"
    buckets = {
        bound: found[f"{name}_bucket{{le={bound},ring=decode-1,role=decode}}"] for bound in (*STEP_BOUNDS, "+Inf")
    }
    assert list(buckets.values()) == [10.0] * 3 + [14.0] * (len(STEP_BOUNDS) - 3) + [16.0]
    assert found[f"{name}_count{{ring=decode-1,role=decode}}"] == 16
    assert found[f"{name}_sum{{ring=decode-1,role=decode}}"] == 4
    told = {key: value for key, value in found.items() if "communication_seconds" in key and "exposed" not in key}
    assert told == {"ringserve_rank_communication_seconds_total{rank=0,ring=decode-1,role=decode}": 2.5}


async def test_a_ring_whose_ranks_have_said_nothing_yet_has_no_steps() -> None:
    async def get_view() -> RingView:
        return RingView(
            status=status(),
            rank_statuses=(),
            kv_evictions={},
            layout_fallbacks={},
            kv_shared_tokens=0,
            kv_bytes_per_token=5,
            kv_block_tokens=16,
        )

    found = await samples(RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop()))
    assert not [key for key in found if "step_time" in key]
    assert found["ringserve_ring_ready{ring=decode-1,role=decode}"] == 1


async def test_a_prefill_ring_tells_how_much_work_waits_and_how_much_may() -> None:
    async def get_view() -> RingView:
        return view(role="prefill")

    found = await samples(RingCollector("prefill", "prefill-1", get_view, asyncio.get_running_loop()))
    ring = "{ring=prefill-1,role=prefill}"
    assert found[f"ringserve_prefill_waiting_work{ring}"] == 12.5
    assert found[f"ringserve_prefill_max_waiting_work{ring}"] == 100
    fallbacks = {
        reason: found[f"ringserve_prefill_layout_fallbacks_total{{reason={reason},ring=prefill-1,role=prefill}}"]
        for reason in ("level_cuts", "spread")
    }
    assert fallbacks == {"level_cuts": 3, "spread": 0}
    assert not [name for name in found if "preemptions" in name or "decode_variant" in name]


@pytest.mark.parametrize("state", ["starting", "rebuilding", "closed"])
async def test_a_ring_that_does_not_serve_is_not_ready(state: str) -> None:
    async def get_view() -> RingView:
        return view(state)

    found = await samples(RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop()))
    assert found["ringserve_ring_ready{ring=decode-1,role=decode}"] == 0


async def test_a_leader_that_cannot_tell_is_not_ready_and_the_scrape_is_answered() -> None:
    async def get_view() -> RingView:
        raise Unavailable("lost")

    found = await samples(RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop()))
    assert found == {"ringserve_ring_ready{ring=decode-1,role=decode}": 0}


async def test_the_names_of_vllm_stand_beside_ours_with_the_same_values() -> None:
    async def get_view() -> RingView:
        return view()

    collector = RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop())
    found = await samples(WithVllmNames(collector.collect, RING_NAMES, "llama"))
    assert found["vllm:num_requests_waiting{model_name=llama,ring=decode-1,role=decode}"] == 4
    assert found["ringserve_num_requests_waiting{ring=decode-1,role=decode}"] == 4
    rank = "{model_name=llama,rank=0,ring=decode-1,role=decode}"
    assert found[f"vllm:spec_decode_num_draft_tokens_total{rank}"] == 6
    assert found[f"vllm:spec_decode_num_accepted_tokens_total{rank}"] == 4
    assert len([name for name in found if name.startswith("vllm:")]) == len(RING_NAMES)


async def test_ranks_on_gpus_tell_of_their_memory() -> None:
    async def get_view() -> RingView:
        first, second = view().rank_statuses
        gpu = GpuMemory(total=80, reserved=60, allocated=50)
        return replace(view(), rank_statuses=(replace(first, gpu=gpu), second))

    found = await samples(RingCollector("decode", "decode-1", get_view, asyncio.get_running_loop()))
    told = {name: value for name, value in found.items() if "gpu_memory" in name}
    assert told == {
        f"ringserve_rank_gpu_memory_bytes{{kind={kind},rank=0,ring=decode-1,role=decode}}": value
        for kind, value in (("total", 80), ("reserved", 60), ("allocated", 50))
    }
