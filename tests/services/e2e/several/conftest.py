from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ringserve.client import Client
from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, idle_after, running_cluster


@pytest.fixture(scope="session")
def slow_hardware() -> HardwareProfile:
    """Return a hardware profile that makes the router's choices independent of this machine's noise.

    Attention, messages and moves of KV are slow in it. A short prompt is faster on one rank, a long one on two, and a
    long conversation stays on its ring.
    """
    profile = read_profile("gtt")
    prefill = replace(
        profile.prefill,
        attention_flops=1e9,
        link_latency_seconds=20e-3,
        layer_overhead_seconds=5e-3,
        rank_overhead_seconds=0.0,
    )
    return replace(profile, prefill=prefill, kv_link_bytes_per_second=1e6)


@pytest.fixture(scope="package")
def several(
    ringserve: Ringserve, model_path: Path, slow_hardware: HardwareProfile, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two rings of each role, one of them of one rank and one of two, and logs as JSON."""
    profile = tmp_path_factory.mktemp("profile") / "slow.json"
    profile.write_text(json.dumps(asdict(slow_hardware)))
    values = (
        *("prefill.cp=1", "prefill.pools.long.cp=2", "decode.cp=1", "decode.pools.wide.cp=2"),
        *("prefill.chunk_tokens=512", f"router.profile={profile}"),
        *("metrics.router=127.0.0.1:0", "logs.format=json"),
    )
    options = [word for value in values for word in ("--set", value)]
    with running_cluster(ringserve, "several", model_path, *options) as cluster:
        yield cluster


@pytest.fixture
def inference(several: Cluster) -> Iterator[Inference]:
    """Yield a client of the cluster; check afterwards that all rings are idle, and delete all conversations."""
    with idle_after(several.gateway) as inference:
        yield inference
    with Client(several.gateway) as client:
        for each in list(client.list_conversations()):
            client.delete_conversation(each.conversation_id)
