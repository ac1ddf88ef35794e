"""The configuration: what wins over what, and a sentence for everything that is wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.services.config import Config, config_from, load_config


def written(directory: Path, text: str | bytes) -> Path:
    path = directory / "cluster.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_without_anything_the_defaults_hold() -> None:
    assert load_config(environment={}) == Config()


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path, "prefill: {cp: 3, chunk_tokens: 100, max_waiting: 7}\ndecode: {max_batch: 5}")
    config = load_config(
        path,
        {"prefill.cp": "5"},
        {"RINGSERVE_PREFILL__CP": "4", "RINGSERVE_PREFILL__CHUNK_TOKENS": "200", "HOME": "/nowhere"},
    )
    assert (config.prefill.cp, config.prefill.chunk_tokens, config.prefill.max_waiting) == (5, 200, 7)
    assert (config.decode.max_batch, config.prefill.rings) == (5, 1)


def test_a_switch_is_read_from_every_place(tmp_path: Path) -> None:
    path = written(tmp_path, "gateway: {page: false}")
    config = load_config(path, {"router.retain_prompts": "false"}, {"RINGSERVE_PREFILL__STEP_BUDGET": "2e4"})
    assert (config.gateway.page, config.router.retain_prompts, config.prefill.step_budget) == (False, False, 2e4)
    assert config.prefill.scheduling == PrefillScheduling(step_budget=2e4, step_seconds=0.15)


def test_variables_that_are_no_keys_are_left_alone() -> None:
    assert load_config(environment={"RINGSERVE_STATE": "/tmp/state", "RINGSERVE_CACHE": "x"}) == Config()


def test_what_is_written_out_reads_back_as_the_same(tmp_path: Path) -> None:
    config = config_from({"prefill": {"cp": 3}, "router": {"missing_kv": "pull", "conversation_ttl_seconds": 5e3}})
    assert load_config(written(tmp_path, yaml.safe_dump(dataclasses.asdict(config))), environment={}) == config


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path, text), environment={}) == Config()


def test_the_process_environment_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGSERVE_DECODE__MAX_BATCH", "9")
    assert load_config().decode.max_batch == 9


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("gateway.metrics", "", ""),  # switches it off
        ("gateway.listen", "[::1]:50051", "[::1]:50051"),
        ("model.path", "123", "123"),
        ("model.path", "~", "~"),
        ("gateway.max_seconds", "90", 90.0),
        ("prefill.max_queue_work", "5e14", 5e14),  # which YAML 1.1 takes for a text
        ("decode.max_batch", "0x10", 16),
    ],
)
def test_a_value_from_outside_is_read_as_its_key_wants_it(key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    variable = f"RINGSERVE_{section}__{name}".upper()
    for config in (load_config(overrides={key: text}, environment={}), load_config(environment={variable: text})):
        assert getattr(getattr(config, section), name) == value


def test_a_number_without_a_point_in_the_file_is_a_float_where_one_is_wanted(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "timeouts: {step: 5}\nprefill: {max_queue_work: 5e14}"), environment={})
    assert config.timeouts.step == 5.0
    assert isinstance(config.timeouts.step, float)
    assert config.prefill.max_queue_work == 5e14


def test_every_section_is_frozen_and_named_by_keywords_only() -> None:
    for field in dataclasses.fields(Config):
        section = getattr(Config(), field.name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            section.anything = 1
        with pytest.raises(TypeError):
            type(section)(1)


# --- what is refused -------------------------------------------------------------------------------------------------


def refusal(values: Mapping[str, Mapping[str, Any]]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(values)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


RANGES = [
    ("tracing.sample_ratio", 0.0, 1.0),
    ("prefill.rings", 1, 1024),
    ("prefill.cp", 1, 64),
    ("prefill.tp", 1, 64),
    ("prefill.max_waiting", 1, 1_000_000),
    ("prefill.threads_per_rank", 1, 1024),
    ("prefill.chunk_tokens", 1, 1 << 24),
    ("prefill.step_budget", 0, 1e15),
    ("prefill.step_seconds", 0, 3600),
    ("prefill.min_chunk_tokens", 1, 1 << 24),
    ("prefill.whole_tokens", 0, 1 << 24),
    ("prefill.ageing_seconds", 0.001, 86_400),
    ("prefill.max_queue_work", 1, 1e15),
    ("decode.rings", 1, 1024),
    ("decode.cp", 1, 64),
    ("decode.tp", 1, 64),
    ("decode.max_batch", 1, 4096),
    ("decode.max_waiting", 1, 1_000_000),
    ("decode.headroom_tokens", 1, 1 << 20),
    ("decode.max_direct_tokens", 0, 4096),
    ("decode.max_direct_seconds", 0, 60),
    ("decode.threads_per_rank", 1, 1024),
    ("kv_cache.block_tokens", 1, 4096),
    ("kv_cache.tokens_per_rank", 16, 1 << 30),
    *(("kv_cache.memory_fraction", 0.0, 0.95), ("kv_cache.kept_fraction", 0.0, 1.0)),
    ("kv_transfer.slot_bytes", 1 << 20, 16 << 20),
    ("model.gpus_per_rank", 0.01, 1.0),
    ("router.max_conversations", 1, 1 << 24),
    ("router.conversation_ttl_seconds", 0.0, 1e9),
    ("router.max_waiting_turns", 1, 100_000),
    *(("router.max_loss", 0.0, 1e6), ("router.max_ttft", 0.0, 86_400)),
    ("gateway.max_seconds", 0.1, 86_400),
    ("gateway.max_calls", 1, 1_000_000),
    ("metrics.tenants", 0, 1000),
    *((f"timeouts.{name}", 0.1, 86_400) for name in vars(Config().timeouts)),
]


@pytest.mark.parametrize(("key", "low", "high"), RANGES)
def test_a_number_out_of_range_is_refused_with_key_value_and_range(key: str, low: float, high: float) -> None:
    section, name = key.split(".")
    for value in (low - 1, high * 2 + 1, *([float("nan"), float("inf")] if isinstance(high, float) else [])):
        said = refusal({section: {name: value}})
        assert said.startswith(f"{key}: {float(value) if isinstance(high, float) else value}")
        assert f"allowed is {low} to {high}" in said


def test_every_number_has_a_range() -> None:
    said = refusal({"timeouts": {"heartbeat": 3.0, "lost": 5.0}})
    assert said.startswith("timeouts.lost: 5 s is too short for a heartbeat every 3 s")
    numbers = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(getattr(Config(), section.name))
        if isinstance(field.default, int | float) and not isinstance(field.default, bool)
    }
    assert numbers == {key for key, _, _ in RANGES}


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("prefill.cp", "two", "int"),
        ("prefill.cp", 2.0, "int"),
        ("prefill.cp", True, "int"),
        ("prefill.cp", None, "int"),
        ("prefill.cp", [2], "int"),
        ("timeouts.step", "long", "float"),
        ("timeouts.step", True, "float"),
        ("timeouts.step", None, "float"),
        ("timeouts.step", {"a": 1}, "float"),
        ("timeouts.step", 10**400, "float"),
        *(("gateway.page", 1, "bool"), ("gateway.page", "yes", "bool")),
        ("model.path", 7, "str"),
        ("gateway.metrics", None, "str"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(key: str, value: object, kind: str) -> None:
    section, name = key.split(".")
    assert refusal({section: {name: value}}) == f"{key}: {value!r} is not of type {kind}"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("model.dtype", "fp32", "float32, bfloat16, float16"),
        ("model.device", "gpu", "cpu, cuda"),
        ("kv_transfer.carrier", "rdma", "auto, nixl, sockets"),
        ("decode.variant", "pass_kv", "auto, gather, pass_q, helix"),
        ("router.missing_kv", "fetch", "auto, pull, recompute"),
        ("router.selector", "best", "auto, pass_kv, pass_q, gather_kv, chain, sp_ntp"),
        ("metrics.also_as", "sglang", ", vllm"),
        ("http.unknown_fields", "drop", "refuse, ignore"),
    ],
)
def test_a_word_that_is_not_allowed_is_refused_with_those_that_are(key: str, value: str, allowed: str) -> None:
    section, name = key.split(".")
    assert refusal({section: {name: value}}) == f"{key}: {value!r} is not allowed; use one of {allowed}"


@pytest.mark.parametrize(
    ("device", "transport", "sentence"),
    [
        ("cpu", "mpi", "'mpi' is no ring transport; allowed are auto, nccl, sockets"),
        ("cpu", "nccl", "ring transport 'nccl' does not support device 'cpu'; allowed are auto, sockets"),
        ("cpu", "gloo", "'gloo' is no ring transport; allowed are auto, nccl, sockets"),
    ],
)
def test_a_ring_transport_that_does_not_serve_the_device_is_refused(device: str, transport: str, sentence: str) -> None:
    values = {"model": {"device": device, "ring_transport": transport}}
    assert refusal(values) == f"model.ring_transport: {sentence}"
    assert config_from({"model": {"device": device, "ring_transport": "auto"}}).model.device == device


@pytest.mark.parametrize(
    "key",
    [
        *("gateway.listen", "gateway.http", "gateway.metrics", "router.listen"),
        *("metrics.router", "metrics.prefill", "metrics.decode"),
    ],
)
@pytest.mark.parametrize("value", ["localhost", ":1", "h:", "h:x", "h:65536", "h:-1", "h:²", "h:" + "9" * 5000])
def test_what_is_no_address_is_refused(key: str, value: str) -> None:
    section, name = key.split(".")
    said = refusal({section: {name: value}})
    assert said.startswith(f"{key}: {value!r} is no address; write HOST:PORT")


def test_listening_nowhere_is_refused_and_no_metrics_are_allowed() -> None:
    assert "gateway.listen: '' is no address" in refusal({"gateway": {"listen": ""}})
    assert config_from({"gateway": {"metrics": ""}}).gateway.metrics == ""
    assert config_from({"gateway": {"http": ""}}).gateway.http == ""
    assert config_from({"metrics": {"decode": ""}}).metrics.decode == ""


LOOPBACK = ["127.0.0.1:1", "127.5.5.5:1", "[::1]:1", "localhost:1"]
ELSEWHERE = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "gateway.example:1", "localhost.example:1"]
TLS = {"cert": "/c.pem", "key": "/k.pem"}


@pytest.mark.parametrize("key", ["listen", "http"])
def test_an_endpoint_that_strangers_would_reach_is_refused_unless_it_is_asked_for(key: str) -> None:
    for address in LOOPBACK:
        assert getattr(config_from({"gateway": {key: address}}).gateway, key) == address
    for address in ELSEWHERE:
        endpoint = {"gateway": {key: address}}
        said = refusal(endpoint)
        assert said.startswith(f"gateway.{key}: {address} is reached from other machines and lacks TLS (tls.cert) and")
        assert "gateway.insecure: true" in said
        assert refusal(endpoint | {"tls": TLS}).endswith("gateway.insecure: true")
        assert "lacks TLS (tls.cert);" in refusal(endpoint | {"auth": {"tokens": "/t"}})
        config_from(endpoint | {"tls": TLS, "auth": {"tokens": "/t"}})
        config_from({"gateway": {key: address, "insecure": True}})


def test_plain_endpoints_are_the_default_and_files_of_keys_are_found_from_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (Config().tls.files, Config().internal_tls.files, Config().auth.tokens) == (None, None, "")
    monkeypatch.chdir("/")
    config = config_from(
        {
            "tls": {"cert": "a/c.pem", "key": "a/k.pem", "client_ca": ""},
            "internal_tls": {"cert": "c", "key": "k", "ca": "/ca", "server_name": "inside"},
            "auth": {"tokens": "t"},
        }
    )
    server, peer = config.tls.files, config.internal_tls.files
    assert server is not None
    assert peer is not None
    assert (server.cert, server.key, server.client_ca) == ("/a/c.pem", "/a/k.pem", "")
    assert (peer.cert, peer.key, peer.ca, peer.server_name) == ("/c", "/k", "/ca", "inside")
    assert config.auth.tokens == "/t"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tls": {"cert": "c"}}, "tls.cert: belongs together with tls.key"),
        ({"tls": {"key": "k"}}, "tls.cert: belongs together with tls.key"),
        ({"tls": {"client_ca": "c"}}, "tls.client_ca: clients can prove themselves only"),
        ({"internal_tls": {"cert": "c", "key": "k"}}, "internal_tls.cert: belongs together with"),
        ({"internal_tls": {"ca": "c"}}, "internal_tls.cert: belongs together with"),
        ({"gateway": {"insecure": "yes"}}, "gateway.insecure: 'yes' is not of type bool"),
        ({"gateway": {"insecure": 1}}, "gateway.insecure: 1 is not of type bool"),
    ],
)
def test_files_of_keys_belong_together(values: dict[str, dict[str, Any]], said: str) -> None:
    assert refusal(values).startswith(said)


def test_an_empty_model_path_is_refused() -> None:
    assert refusal({"model": {"path": ""}}).startswith("model.path: '' is not allowed")


def test_an_unknown_section_and_an_unknown_key_are_named_with_those_allowed() -> None:
    sections = ", ".join(field.name for field in dataclasses.fields(Config))
    assert refusal({"prefil": {"cp": 2}}) == f"prefil: no such section; allowed are {sections}"
    said = refusal({"prefill": {"cpp": 2}})
    assert said.startswith("prefill.cpp: no such key; allowed are rings, cp, tp")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"prefill": "2"}, "prefill: overrides are written section.key=value"),
        ({"prefill.cp": "[2"}, "prefill.cp: '[2' is not a valid value"),
        ({"prefill.cp": ""}, "prefill.cp: None is not of type int"),
        ({"prefill.cp.more": "2"}, "prefill.cp.more: no such key"),
        ({"nothing.cp": "{"}, "nothing: no such section"),
        ({"prefill.": "2"}, "prefill.: no such key"),
    ],
)
def test_a_wrong_override_is_refused(overrides: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(overrides=overrides, environment={})


def test_a_wrong_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode\.cp: '\{' is not a valid value"):
        load_config(environment={"RINGSERVE_DECODE__CP": "{"})
    with pytest.raises(ConfigError, match="nowhere: no such section"):
        load_config(environment={"RINGSERVE_NOWHERE__CP": "2"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill: [1\ndecode: 2", "is not valid YAML: line 2: "),
        ("prefill:\n\tcp: 2", "is not valid YAML: line 2: "),
        ("a: !!python/object:os.system {}", "is not valid YAML: line 1: "),
        (b"\xff\xfe\xfa", "is not UTF-8 text"),
        ("\x07", "is not valid YAML: "),
        ("just words", "must hold sections of keys"),
        ("[1, 2]", "must hold sections of keys"),
        ("prefill:", "must hold sections of keys"),
        ("prefill: 2", "must hold sections of keys"),
        ("1: {cp: 2}", "1: no such section"),
        ("prefill: {1: 2}", "prefill.1: no such key"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_sentence(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_config(written(tmp_path, text), environment={})
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        load_config(tmp_path / "none.yaml", environment={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path, environment={})
