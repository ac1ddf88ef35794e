"""Files that the router's configuration names: its profile and losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringserve.cp_core.cost.profile import format_profile, read_profile
from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses, format_losses
from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.plans import Bound
from ringserve.services.config import RouterConfig, config_from
from ringserve.services.config.files import router_losses, router_profile


def test_without_one_rings_are_predicted_by_what_they_measured() -> None:
    assert router_profile(RouterConfig()) is None


def test_a_profile_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(format_profile(read_profile("gtt")))
    assert router_profile(RouterConfig(profile=str(path))) == read_profile("gtt")


def test_a_file_that_is_not_there_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"router.profile: hardware profile 'nowhere.json' is unknown"):
        router_profile(RouterConfig(profile="nowhere.json"))


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
        with pytest.raises(ConfigError, match=rf"router.{key}: 0.5 is not allowed without router.sparse_losses"):
            config_from({"router": {key: 0.5}})
    both = {"sparse_losses": "f.json", "max_loss": 0.1, "max_ttft": 0.5}
    with pytest.raises(ConfigError, match=r"router.max_loss: 0.1 is not allowed beside router.max_ttft"):
        config_from({"router": both})
