"""Settings that a leader is given, and the router's profile with the empirical selector's constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cp_core.cost.profile import format_profile, read_profile
from cp_core.cost.selector import EmpiricalFit
from cp_core.cost.sparse import MeasuredLoss, SparseLosses, format_losses
from cp_core.errors import ConfigError
from orchestration.protocol.plans import Bound
from services.cluster.hosts import LeaderHost, empirical_fit, reachable, router_losses, router_profile
from services.config import RouterConfig, config_from


def host(role: str, index: int = 0, pool: str = "", **sections: dict[str, Any]) -> LeaderHost:
    config = config_from(sections)
    (found,) = (each for each in config.pools_of(role) if each.name == pool)
    return LeaderHost(config=config, model_path="", pool=found, number=index, router_endpoint="")


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


FIT = EmpiricalFit(alpha=-1.0, beta=1.0, gamma=12.0)


def written(path: Path, fit: EmpiricalFit | None) -> str:
    path.write_text(format_profile(replace(read_profile("gtt"), empirical=fit)))
    return str(path)


def test_without_one_rings_are_predicted_by_what_they_measured() -> None:
    assert router_profile(RouterConfig()) is None
    assert empirical_fit(RouterConfig(), None) is None


def test_a_file_is_read_with_the_selector_that_was_fitted(tmp_path: Path) -> None:
    router = RouterConfig(profile=written(tmp_path / "measured.json", FIT), selector="empirical")
    profile = router_profile(router)
    assert profile is not None
    assert empirical_fit(router, profile) == FIT


def test_constants_of_the_configuration_come_first(tmp_path: Path) -> None:
    router = RouterConfig(profile=written(tmp_path / "measured.json", FIT), alpha=2.0)
    assert empirical_fit(router, router_profile(router)) == EmpiricalFit(alpha=2.0, beta=0.0, gamma=0.0)


def test_a_file_that_is_not_there_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"router.profile: hardware profile 'nowhere.json' is unknown"):
        router_profile(RouterConfig(profile="nowhere.json"))


def test_the_empirical_selector_needs_constants_from_somewhere(tmp_path: Path) -> None:
    path = written(tmp_path / "measured.json", None)
    with pytest.raises(ConfigError, match=r"needs alpha, beta and gamma, and router.profile .* has none"):
        router_profile(RouterConfig(profile=path, selector="empirical"))
    with pytest.raises(ConfigError, match="fitted on this cluster, or its profile"):
        config_from({"router": {"selector": "empirical"}})
    assert config_from({"router": {"selector": "empirical", "profile": path}}).router.profile == path


def test_losses_are_those_of_the_served_model(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    measured = MeasuredLoss(
        num_tokens=100, num_ranks=2, keep=0.5, loss=0.1, accuracy=1.0, exact_accuracy=1.0, num_questions=3
    )
    losses = SparseLosses(model="builtin:smollm2", sinks=4, window=8, measured=(measured,))
    path.write_text(format_losses(losses), encoding="utf-8")
    router = {"sparse_losses": str(path)}
    assert router_losses(config_from({"router": router, "model": {"path": "builtin:smollm2"}})) == losses
    assert router_losses(config_from({})) is None
    with pytest.raises(ConfigError, match=r"router.sparse_losses: .* of model 'builtin:smollm2'; served is"):
        router_losses(config_from({"router": router, "model": {"path": "builtin:tiny"}}))
    with pytest.raises(ConfigError, match=r"router.sparse_losses: nowhere.json cannot be read"):
        router_losses(config_from({"router": {"sparse_losses": "nowhere.json"}}))


def test_bounds_of_approximate_turns_need_measured_losses_and_exclude_each_other() -> None:
    assert config_from({"router": {"sparse_losses": "f.json", "max_loss": 0.1}}).router.bound == Bound(
        name="max_loss", limit=0.1
    )
    assert config_from({"router": {"sparse_losses": "f.json"}}).router.bound is None
    for key in ("max_loss", "max_ttft"):
        with pytest.raises(ConfigError, match=rf"router.{key}: 0.5 needs router.sparse_losses"):
            config_from({"router": {key: 0.5}})
    both = {"sparse_losses": "f.json", "max_loss": 0.1, "max_ttft": 0.5}
    with pytest.raises(ConfigError, match=r"router.max_loss: 0.1 is set beside router.max_ttft"):
        config_from({"router": both})
