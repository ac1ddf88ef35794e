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
from ringserve.services.config.rings import MAX_POOLS

Values = dict[str, dict[str, Any]]


def sizes(config: Config, role: str) -> list[tuple[str, int, int, int]]:
    """(name, rings, cp, tp) of each of its pools."""
    return [(pool.name, pool.rings, pool.cp, pool.tp) for pool in config.pools_of(role)]


def refusal(values: Values) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(values)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


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


@pytest.mark.parametrize("key", ["rings", "cp", "tp", "threads_per_rank"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_numbers_of_a_pool_have_the_ranges_of_its_role(role: str, key: str) -> None:
    for value in (0, 1025):
        said = refusal({role: {"pools": {"short": {key: value}}}})
        assert said.startswith(f"{role}.pools.short.{key}: {value} is out of range; allowed is 1 to ")
        assert said.partition("allowed")[2] == refusal({role: {key: value}}).partition("allowed")[2]


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ({"short": {"cp": "one"}}, "prefill.pools.short.cp: 'one' is not of type int"),
        ({"short": {"cpp": 1}}, "prefill.pools.short.cpp: no such key; allowed are rings, cp, tp, threads_per_rank,"),
        ({"short": {"chunk_tokens": 1}}, "prefill.pools.short.chunk_tokens: no such key"),
        ({"short": 2}, "prefill.pools.short: 2 holds no keys; allowed are rings, cp"),
        ({"short": None}, "prefill.pools.short: None holds no keys"),
        ([{"cp": 1}], "prefill.pools: [{'cp': 1}] is no mapping from names to rings, cp"),
        (None, "prefill.pools: None is no mapping from names"),
        ({"Short": {}}, "prefill.pools: 'Short' is no name of a pool; allowed are up to 16 of a-z and 0-9"),
        ({"short-1": {}}, "prefill.pools: 'short-1' is no name of a pool"),
        ({0: {}}, "prefill.pools: '0' is no name of a pool"),
        ({"": {}}, "prefill.pools: '' is no name of a pool"),
        ({"a" * 17: {}}, "prefill.pools: 'aaaaaaaaaaaaaaaaa' is no name of a pool"),
        ({f"p{i}": {} for i in range(MAX_POOLS + 1)}, "prefill.pools: 17 pools are too many; allowed are 16"),
    ],
)
def test_what_is_no_pool_is_refused(pools: object, said: str) -> None:
    assert refusal({"prefill": {"pools": pools}}).startswith(said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("prefill.pools.short.cp.more", r"prefill\.pools\.short\.cp\.more: no such key"),
        ("prefill.pools.short.more", r"prefill\.pools\.short\.more: no such key"),
        ("prefill.cp.more.still", r"prefill\.cp\.more\.still: no such key"),
    ],
)
def test_an_override_of_what_a_pool_does_not_have_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(overrides={override: "2"}, environment={})


def test_a_key_of_what_holds_no_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: {pools: {short: 7}}")
    with pytest.raises(ConfigError, match=r"^prefill\.pools\.short: 7 holds no keys, so its cp cannot be set$"):
        load_config(path, {"prefill.pools.short.cp": "2"}, {})


def test_metrics_ports_of_the_roles_must_not_meet() -> None:
    metrics = {"prefill": "0.0.0.0:9500", "decode": "0.0.0.0:9503"}
    many: Values = {"prefill": {"pools": {"short": {"rings": 3}}}, "metrics": metrics}
    said = refusal(many)
    assert said.startswith("metrics.decode: its 1 rings take the ports from 9503 to 9503, and those of metrics.prefill")
    assert refusal(many | {"metrics": {"decode": "0.0.0.0:65535"}, "decode": {"rings": 2}}) == (
        "metrics.decode: 2 rings take the ports from 65535 to 65536, and 65535 is the last"
    )
    config_from(many | {"metrics": metrics | {"decode": "0.0.0.0:9504"}})
    config_from(many | {"metrics": metrics | {"decode": "0.0.0.0:0"}})
    config_from(many | {"metrics": metrics | {"decode": ""}})
