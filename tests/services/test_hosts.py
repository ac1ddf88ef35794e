"""What a leader is given of the cluster it runs in."""

from __future__ import annotations

from typing import Any

import pytest

from services.config import config_from
from services.hosts import LeaderHost, reachable


def host(role: str, index: int = 0, **sections: dict[str, Any]) -> LeaderHost:
    return LeaderHost(config=config_from(sections), model_path="", role=role, index=index, router_endpoint="")


@pytest.mark.parametrize(("index", "address"), [(0, "0.0.0.0:9500"), (3, "0.0.0.0:9503")])
def test_rings_of_a_pool_take_metrics_ports_in_a_row(index: int, address: str) -> None:
    metrics = {"prefill": "0.0.0.0:9500", "decode": "127.0.0.1:0"}
    assert host("prefill", index, metrics=metrics).metrics_address() == address
    assert host("decode", index, metrics=metrics).metrics_address() == "127.0.0.1:0", "0 is any port for each"


def test_a_pool_without_metrics_serves_none() -> None:
    assert host("decode", metrics={"decode": ""}).metrics_address() == ""


def test_a_rank_takes_its_processors_its_gpu_and_a_place_of_its_pool() -> None:
    ray = {"prefill_resource": "ringserve-prefill"}
    model = {"device": "cuda"}
    taken = host("prefill", ray=ray, model=model, prefill={"threads_per_rank": 3}).resources()
    assert taken == {"CPU": 3.0, "GPU": 1.0, "ringserve-prefill": 1.0}
    assert host("decode", ray=ray).resources() == {"CPU": 1.0}


def test_an_address_on_one_interface_is_told_as_it_is() -> None:
    assert reachable("127.0.0.1:50050") == "127.0.0.1:50050"
    assert reachable("10.1.2.3:1") == "10.1.2.3:1"
