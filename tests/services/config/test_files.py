"""Files that the router's configuration names: its profile with the empirical selector's constants, and losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.cost.profile import format_profile, read_profile
from ringserve.cp_core.cost.selector import EmpiricalFit
from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses, format_losses
from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.plans import Bound
from ringserve.services.config import RouterConfig, config_from
from ringserve.services.config.files import empirical_fit, router_losses, router_profile

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


def test_a_file_that_is_not_there_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"router.profile: hardware profile 'nowhere.json' is unknown"):
        router_profile(RouterConfig(profile="nowhere.json"))


def test_the_empirical_selector_needs_constants_from_somewhere(tmp_path: Path) -> None:
    path = written(tmp_path / "measured.json", None)
    with pytest.raises(ConfigError, match=r"needs alpha, beta and gamma, and router.profile .* has none"):
        router_profile(RouterConfig(profile=path, selector="empirical"))
    with pytest.raises(ConfigError, match="with constants fitted on this cluster"):
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
