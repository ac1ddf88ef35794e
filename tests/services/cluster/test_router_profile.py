"""Where the router's profile and the empirical selector's constants come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cp_core.cost.profile import format_profile, read_profile
from cp_core.cost.selector import EmpiricalFit
from cp_core.errors import ConfigError
from services.cluster.hosts import empirical_fit, router_profile
from services.config import RouterConfig, config_from

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
