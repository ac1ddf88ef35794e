"""Pools of further sizes in the configuration: from every source, by name, and a sentence for every error."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import Config, config_from, load_config
from tests.services.config.test_config import refusal

Values = dict[str, dict[str, Any]]


def sizes(config: Config, role: str) -> list[tuple[str, int, int, int]]:
    """(name, rings, cp, tp) of each of its pools."""
    return [(pool.name, pool.rings, pool.cp, pool.tp) for pool in config.pools_of(role)]


def test_without_further_pools_each_role_has_the_one_it_always_had() -> None:
    config = config_from({"prefill": {"rings": 3, "cp": 4}, "decode": {"tp": 2, "threads_per_rank": 5}})
    assert sizes(config, "prefill") == [("", 3, 4, 1)]
    assert sizes(config, "decode") == [("", 1, 2, 2)]
    assert [pool.role for pool in config.pools] == ["prefill", "decode"]
    assert [pool.num_threads for pool in config.pools] == [12, 20]


def test_pools_are_read_from_file_environment_and_command_line_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: {cp: 4, pools: {short: {rings: 2}, wide: {cp: 8, tp: 2}}}")
    config = load_config(
        path,
        {"prefill.pools.short.threads_per_rank": "3", "decode.pools.small.resource": "123"},
        {"RINGSERVE_PREFILL__POOLS__WIDE__CP": "6", "RINGSERVE_PREFILL__POOLS__MIDDLE__CP": "2"},
    )
    assert sizes(config, "prefill") == [("", 1, 4, 1), ("middle", 1, 2, 1), ("short", 2, 1, 1), ("wide", 1, 6, 2)]
    assert config.prefill.pools["short"].threads_per_rank == 3
    assert config.decode.pools["small"].resource == "123", "a text stays one"


def test_a_whole_mapping_takes_the_place_of_what_was_written_before(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: {pools: {short: {rings: 2, threads_per_rank: 4}, wide: {cp: 8}}}")
    config = load_config(path, {"prefill.pools.short": "{cp: 2}"}, {})
    assert sizes(config, "prefill") == [("", 1, 2, 1), ("short", 1, 2, 1), ("wide", 1, 8, 1)]
    assert config.prefill.pools["short"].threads_per_rank == 1
    assert not load_config(path, {"prefill.pools": "{}"}, {}).prefill.pools


def test_pools_are_written_out_and_travel_to_other_processes(tmp_path: Path) -> None:
    config = config_from({"decode": {"pools": {"small": {"cp": 1, "rings": 2}}}})
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(asdict(config)))
    assert load_config(path, environment={}) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_ring_has_a_name_of_its_own_whatever_the_order_of_the_pools() -> None:
    pools = {"b": {"rings": 2}, "a": {"rings": 3}, "a1": {}}
    config = config_from({"prefill": {"rings": 2, "pools": pools}, "decode": {"pools": {"a": {}}}})
    names = [pool.ring_name(number) for pool in config.pools for number in range(pool.rings)]
    assert names == [
        *("prefill-0", "prefill-1", "prefill-a-0", "prefill-a-1", "prefill-a-2"),
        *("prefill-a1-0", "prefill-b-0", "prefill-b-1", "decode-0", "decode-a-0"),
    ]
    assert len(set(names)) == len(names)
    assert [pool.num_before for pool in config.pools] == [0, 2, 5, 6, 0, 1]


def test_a_pool_takes_the_resource_of_its_role_unless_it_has_one() -> None:
    pools = {"plain": {}, "own": {"resource": "short-nodes"}}
    config = config_from({"prefill": {"pools": pools}, "ray": {"prefill_resource": "prefill-nodes"}})
    found = {pool.ring_name(0): pool.resource for pool in config.pools}
    assert found == {
        "prefill-0": "prefill-nodes",
        "prefill-plain-0": "prefill-nodes",
        "prefill-own-0": "short-nodes",
        "decode-0": "",
    }


KEYS = "rings, cp, tp, threads_per_rank, resource"
NAME = "give up to 16 of a-z and 0-9, a letter first"


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ({"short": {"cp": 0}}, "prefill.pools.short.cp: 0 is not allowed; give a whole number from 1 to 64"),
        ({"short": {"cp": "one"}}, "prefill.pools.short.cp: 'one' is not allowed; give a whole number from 1 to 64"),
        ({"short": {"cpp": 1}}, "prefill.pools.short.cpp: there is no such key; did you mean prefill.pools.short.cp?"),
        ({"short": {"chunk_tokens": 1}}, f"prefill.pools.short.chunk_tokens: there is no such key; give one of {KEYS}"),
        ({"short": 2}, f"prefill.pools.short: 2 holds no keys; give some of {KEYS}"),
        ({"short": None}, f"prefill.pools.short: None holds no keys; give some of {KEYS}"),
        ([{"cp": 1}], "prefill.pools: [{'cp': 1}] is not allowed; give up to 16 names, each with rings, cp"),
        (None, "prefill.pools: None is not allowed; give up to 16 names"),
        ({"Short": {}}, f"prefill.pools: 'Short' is not allowed; {NAME}"),
        ({"short-1": {}}, f"prefill.pools: 'short-1' is not allowed; {NAME}"),
        ({0: {}}, f"prefill.pools: 0 is not allowed; {NAME}"),
        ({"": {}}, f"prefill.pools: '' is not allowed; {NAME}"),
        ({"a" * 17: {}}, f"prefill.pools: 'aaaaaaaaaaaaaaaaa' is not allowed; {NAME}"),
        ({f"p{i}": {} for i in range(17)}, "prefill.pools: {'p0': {}, "),
    ],
)
def test_what_is_no_pool_is_refused(pools: object, said: str) -> None:
    assert refusal({"prefill": {"pools": pools}}).startswith(said)


def test_an_override_reaches_into_pools_and_is_refused_by_its_whole_key() -> None:
    for key in ("prefill.pools.short.cp.more", "prefill.pools.short.more"):
        with pytest.raises(ConfigError, match=f"{key}: there is no such key"):
            load_config(overrides={key: "2"}, environment={})


def test_metrics_ports_of_the_roles_must_not_meet() -> None:
    metrics = {"prefill": "0.0.0.0:9500", "decode": "0.0.0.0:9503"}
    many: Values = {"prefill": {"pools": {"short": {"rings": 3}}}, "metrics": metrics}
    said = refusal(many)
    assert said.startswith("metrics.decode: decode rings take the ports from 9503 to 9503, and prefill rings take")
    assert refusal(many | {"metrics": {"decode": "0.0.0.0:65535"}, "decode": {"rings": 2}}) == (
        "metrics.decode: 2 rings take the ports from 65535 on; the last port is 65535"
    )
    config_from(many | {"metrics": metrics | {"decode": "0.0.0.0:9504"}})
    config_from(many | {"metrics": metrics | {"decode": "0.0.0.0:0"}})
    config_from(many | {"metrics": metrics | {"decode": ""}})
