"""Settings that a leader is given, and its wait for turns to end."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.services.cluster import running
from ringserve.services.cluster.hosts import LeaderHost
from ringserve.services.cluster.running import quiet_moments, reachable, until_quiet
from ringserve.services.config import config_from
from ringserve.views import ServerInfo


def host(role: str, index: int = 0, pool: str = "", **sections: dict[str, Any]) -> LeaderHost:
    config = config_from(sections)
    (found,) = (each for each in config.pools_of(role) if each.name == pool)
    return LeaderHost(config=config, model_path="", fingerprint="", pool=found, number=index, router_endpoint="")


@pytest.mark.parametrize(("index", "address"), [(0, "0.0.0.0:9500"), (3, "0.0.0.0:9503")])
def test_rings_of_a_pool_take_metrics_ports_in_a_row(index: int, address: str) -> None:
    metrics = {"prefill": "0.0.0.0:9500", "decode": "127.0.0.1:0"}
    assert host("prefill", index, metrics=metrics).metrics_address() == address
    assert host("decode", index, metrics=metrics).metrics_address() == "127.0.0.1:0", "0 is any port for each"


def test_rings_of_further_pools_take_the_ports_behind_those_of_the_first_and_have_its_settings() -> None:
    prefill = {"rings": 2, "cp": 4, "chunk_tokens": 99, "pools": {"b": {"tp": 2}, "a": {"rings": 2, "cp": 3}}}
    sections: dict[str, dict[str, Any]] = {"prefill": prefill, "metrics": {"prefill": "127.0.0.1:9500"}}
    rings = [("", 0), ("", 1), ("a", 0), ("a", 1), ("b", 0)]
    hosts = [host("prefill", number, pool, **sections) for pool, number in rings]
    assert [each.metrics_address().rpartition(":")[2] for each in hosts] == ["9500", "9501", "9502", "9503", "9504"]
    settings = [each.settings() for each in hosts]
    assert [each.name for each in settings] == ["prefill-0", "prefill-1", "prefill-a-0", "prefill-a-1", "prefill-b-0"]
    assert [(each.num_ranks, each.ranks.tp) for each in settings] == [(4, 1), (4, 1), (3, 1), (3, 1), (1, 2)]
    assert {(each.role, each.chunk_tokens, each.max_waiting) for each in settings} == {("prefill", 99, 256)}


def test_a_pool_without_metrics_serves_none() -> None:
    assert host("decode", metrics={"decode": ""}).metrics_address() == ""


def test_a_rank_takes_its_processors_its_gpu_and_a_place_of_its_pool() -> None:
    ray = {"prefill_resource": "ringserve-prefill"}
    model = {"device": "cuda"}
    taken = host("prefill", ray=ray, model=model, prefill={"threads_per_rank": 3}).resources()
    assert taken == {"CPU": 3.0, "GPU": 1.0, "ringserve-prefill": 1.0}
    assert host("decode", ray=ray).resources() == {"CPU": 1.0}
    small = {"pools": {"small": {"threads_per_rank": 2, "resource": "little"}}}
    assert host("decode", pool="small", decode=small).resources() == {"CPU": 2.0, "little": 1.0}


def test_an_address_on_one_interface_is_told_as_it_is() -> None:
    assert reachable("127.0.0.1:50050") == "127.0.0.1:50050"
    assert reachable("10.1.2.3:1") == "10.1.2.3:1"


def test_decode_rings_alone_have_the_draft_model() -> None:
    decode = {"draft_model": "/models/small", "draft_context": 512}
    ranks = {role: host(role, decode=decode).settings().ranks for role in ("prefill", "decode")}
    assert (ranks["decode"].draft_model, ranks["decode"].draft_context) == ("/models/small", 512)
    assert not ranks["prefill"].draft_model


@pytest.mark.parametrize(
    ("sections", "packs"),
    [
        ({"decode": {"cp": 1}}, True),
        ({"decode": {"cp": 2}}, False),
        ({"decode": {"cp": 1, "tp": 2}}, False),
        ({"decode": {"cp": 2, "pools": {"lone": {"cp": 1}}}}, True),
        ({"decode": {"cp": 1}, "ray": {"address": "auto"}, "internal_tls": {"insecure": True}}, False),
    ],
)
def test_prefill_ranks_pack_the_head_if_a_decode_rank_has_the_same_memory(
    sections: dict[str, Any], packs: bool
) -> None:
    assert host("prefill", **sections).settings().ranks.packs_head == packs
    assert host("decode", **sections).settings().ranks.packs_head


def test_rings_of_one_machine_share_its_cores_if_they_have_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    few, many = {"cp": 1, "threads_per_rank": 2}, {"cp": 1, "threads_per_rank": 3}

    def cores(prefill: dict[str, Any], **sections: Any) -> str:
        hosts = (host(role, prefill=prefill, decode=few, **sections) for role in ("prefill", "decode"))
        one, other = (each.settings().ranks.cores for each in hosts)
        assert one == other
        return one

    assert cores(many)
    assert not cores(few), "each thread has a core"
    spread = {"ray": {"address": "auto"}, "internal_tls": {"insecure": True}}
    assert not cores(many, **spread), "ranks may be on any machine"
    assert not cores(many, model={"device": "cuda"})
    assert host("decode", decode={"least_share": 0.5}).settings().ranks.least_share == 0.5


class Router:
    """Router with so many turns at each look; at last it is gone."""

    def __init__(self, *running_turns: int) -> None:
        self.left = list(running_turns)

    async def get_server_info(self) -> ServerInfo:
        if not self.left:
            raise Unavailable("the router died")
        return ServerInfo(running_turns=self.left.pop(0))


@pytest.mark.parametrize(
    ("turns", "left"), [((0, 7), [7]), ((2, 1, 0, 0, 7), [7]), ((1, 0, 1, 0, 0, 7), [7]), ((2, 1), [])]
)
async def test_a_measurement_waits_until_no_turn_runs(turns: tuple[int, ...], left: list[int]) -> None:
    router = Router(*turns)
    await until_quiet(cast(RouterPort, router), time.monotonic() + 3600.0, 0.0)
    assert router.left == left


async def test_a_measurement_waits_no_longer_than_its_deadline() -> None:
    router = Router(1, 1, 1)
    await until_quiet(cast(RouterPort, router), time.monotonic(), 3600.0)
    assert router.left == [1, 1, 1]


async def test_a_measurement_of_cores_that_turns_use_is_given_up_at_its_deadline() -> None:
    """It would find rates of a busy machine, and replace better ones."""
    router = Router(1, 1, 0, 0)
    await until_quiet(cast(RouterPort, router), time.monotonic() + 3600.0, 0.0, is_needed=True)
    with pytest.raises(Unavailable, match="turns ran without a pause"):
        await until_quiet(cast(RouterPort, Router(1)), time.monotonic(), 3600.0, is_needed=True)


async def test_a_measurement_that_turns_interrupt_holds_its_blocks_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first quiet moment may be far off; once a part has been measured, the others must follow soon."""
    monkeypatch.setattr(running, "QUIET_SECONDS", 0.0)
    wait = quiet_moments(cast(RouterPort, Router(1, 1, 0, 0, 1)), is_shared=True, interval=0.0)
    await wait()
    with pytest.raises(Unavailable, match="turns ran without a pause"):
        await wait()
