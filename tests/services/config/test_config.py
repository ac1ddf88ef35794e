"""Sources of the configuration: what wins over what, and one sentence for each value that is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from ringserve.cp_core.attention.backends import BACKENDS
from ringserve.cp_core.cost.decode import VARIANT_POLICIES
from ringserve.cp_core.cost.selector import POLICIES
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.ring_backend import RING_TRANSPORTS
from ringserve.orchestration.placement.planner import MISSING_KV
from ringserve.services.config import LOG_LEVELS, Config, config_from, load_config
from ringserve.services.config.sections import PoolConfig
from ringserve.services.config.sources import keys_of
from ringserve.services.telemetry.logs import LOG_FORMATS
from ringserve.workers.protocol.ranks import COMPILE_POLICIES, QUANTIZATIONS

KEYS = {
    f"{section.name}.{name}": key
    for section in fields(Config)
    for name, key in keys_of(type(getattr(Config(), section.name))).items()
}
NUMBERS = {
    key: (bounds["ge"], bounds["le"])
    for key, info in KEYS.items()
    if (bounds := {name: getattr(rule, name) for rule in info.metadata for name in ("ge", "le") if hasattr(rule, name)})
}


def written(directory: Path, text: str | bytes) -> Path:
    path = directory / "cluster.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def at(key: str, value: object) -> dict[str, dict[str, Any]]:
    """Return sections with one key."""
    section, _, name = key.partition(".")
    return {section: {name: value}}


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def refusal(values: Mapping[str, Mapping[str, Any]]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- sources ---------------------------------------------------------------------------------------------------------


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path, "prefill: {cp: 3, chunk_tokens: 100, max_waiting: 7}\ndecode: {max_batch: 5}")
    config = load_config(
        path,
        {"prefill.cp": "5"},
        {"RINGSERVE_PREFILL__CP": "4", "RINGSERVE_PREFILL__CHUNK_TOKENS": "200", "HOME": "/nowhere"},
    )
    assert (config.prefill.cp, config.prefill.chunk_tokens, config.prefill.max_waiting) == (5, 200, 7)
    assert (config.decode.max_batch, config.prefill.rings) == (5, 1)


def test_variables_that_are_no_keys_are_left_alone() -> None:
    assert load_config(environment={"RINGSERVE_STATE": "/tmp/state", "RINGSERVE_CACHE": "x"}) == Config()


def test_the_process_environment_is_read_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGSERVE_DECODE__MAX_BATCH", "9")
    assert load_config().decode.max_batch == 9
    assert load_config(environment={}) == Config()


def test_what_is_written_out_reads_back_as_the_same(tmp_path: Path) -> None:
    config = config_from({"prefill": {"cp": 3}, "router": {"missing_kv": "pull", "conversation_ttl_seconds": 5e3}})
    assert load_config(written(tmp_path, yaml.safe_dump(asdict(config))), environment={}) == config


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path, text), environment={}) == Config()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("gateway.metrics", "", ""),  # switches it off
        ("gateway.listen", "[::1]:50051", "[::1]:50051"),
        ("model.path", "123", "123"),
        ("model.path", "~", "~"),
        ("model.compile", "off", "off"),
        ("gateway.max_seconds", "90", 90.0),
        ("gateway.page", "no", False),
        ("prefill.max_queue_work", "5e14", 5e14),
        ("decode.max_batch", "0x10", 16),
        ("kv_cache.tokens_per_rank", "1.048576e+06", 1 << 20),  # as Helm writes it
    ],
)
def test_a_value_is_read_in_the_type_of_its_key_from_every_source(
    tmp_path: Path, key: str, text: str, value: object
) -> None:
    section, name = key.split(".")
    quoted = f'"{text}"' if text in ("", "~") or text.startswith("[") or text == "123" else text
    for config in (
        load_config(overrides={key: text}, environment={}),
        load_config(environment={f"RINGSERVE_{section}__{name}".upper(): text}),
        load_config(written(tmp_path, f"{section}: {{{name}: {quoted}}}"), environment={}),
    ):
        assert value_of(config, key) == value
        assert type(value_of(config, key)) is type(value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"prefill": "2"}, "prefill: overrides are written section.key=value"),
        ({"prefill.cp": "[2"}, "prefill.cp: '[2' is not allowed; give a whole number from 1 to 64"),
        ({"prefill.cp": ""}, "prefill.cp: '' is not allowed; give a whole number from 1 to 64"),
        ({"prefill.cp.more": "2"}, "prefill.cp.more: there is no such key; give one of rings, cp, tp,"),
        ({"prefill.": "2"}, "prefill.: there is no such key; give one of rings, cp, tp,"),
        ({"nothing.cp": "{"}, "nothing: there is no such section; give one of model, prefill, decode,"),
    ],
)
def test_a_wrong_override_is_refused(overrides: Mapping[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(overrides=overrides, environment={})


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
        ("prefill:", "prefill: None holds no keys; give some of rings, cp"),
        ("prefill: 2", "prefill: 2 holds no keys; give some of rings, cp"),
        ("1: {cp: 2}", "1: there is no such section"),
        ("prefill: {1: 2}", "prefill.1: there is no such key"),
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


# --- keys ------------------------------------------------------------------------------------------------------------


def test_every_section_is_frozen() -> None:
    for field in fields(Config):
        section = getattr(Config(), field.name)
        with pytest.raises(FrozenInstanceError):
            section.anything = 1


def test_every_key_has_a_meaning_and_an_example_that_it_takes() -> None:
    needs = {
        "router.max_loss": {"router": {"sparse_losses": "f.json"}},
        "router.max_ttft": {"router": {"sparse_losses": "f.json"}},
        "kv_cache.memory_fraction": {"model": {"device": "cuda"}},
        "model.quantization": {"model": {"device": "cuda", "dtype": "bfloat16"}},
        "tls.cert": {"tls": {"key": "k"}},
        "tls.key": {"tls": {"cert": "c"}},
        "tls.client_ca": {"tls": {"cert": "c", "key": "k"}},
        "internal_tls.cert": {"internal_tls": {"key": "k", "ca": "c"}},
        "internal_tls.key": {"internal_tls": {"cert": "c", "ca": "c"}},
        "internal_tls.ca": {"internal_tls": {"cert": "c", "key": "k"}},
    }
    unguarded = {"gateway": {"insecure": True}, "internal_tls": {"insecure": True}}
    for key, info in KEYS.items():
        assert info.description, key
        section, _, name = key.partition(".")
        values = {part: dict(held) for part, held in (unguarded | needs.get(key, {})).items()}
        assert info.examples, key
        (example,) = info.examples
        values.setdefault(section, {})[name] = example
        taken = value_of(config_from(values), key)
        assert taken == ({name: PoolConfig(**pool) for name, pool in example.items()} if "pools" in key else example)
        assert taken != value_of(Config(), key), f"the example of {key} is its default"


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_out_of_its_range_is_refused_with_key_value_and_range(key: str) -> None:
    low, high = NUMBERS[key]
    shown = "from {} to {}".format(*(f"{bound:g}" if isinstance(bound, float) else bound for bound in (low, high)))
    is_float = KEYS[key].annotation is float
    for value in (low - 1, high * 2 + 1, *([float("nan"), float("inf")] if is_float else [1.5])):
        kind = "number" if is_float else "whole number"
        assert refusal(at(key, value)) == f"{key}: {value!r} is not allowed; give a {kind} {shown}"


def test_every_number_has_a_range() -> None:
    assert {key for key, info in KEYS.items() if info.annotation in (int, float)} == NUMBERS.keys()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("prefill.cp", "two", "a whole number from 1 to 64"),
        ("prefill.cp", True, "a whole number from 1 to 64"),
        ("prefill.cp", None, "a whole number from 1 to 64"),
        ("prefill.cp", [2], "a whole number from 1 to 64"),
        ("timeouts.step", "5", "a number from 0.1 to 86400"),
        ("timeouts.step", True, "a number from 0.1 to 86400"),
        ("timeouts.step", None, "a number from 0.1 to 86400"),
        ("timeouts.step", 10**60, "a number from 0.1 to 86400"),
        ("gateway.page", "maybe", "true or false"),
        ("gateway.insecure", None, "true or false"),
        ("gateway.model_name", 7, "a text, e.g. llama3-8b"),
        ("gateway.metrics", None, "HOST:PORT, or '' for none, e.g. 0.0.0.0:9464"),
        ("model.dtype", "fp32", "one of auto, float32, bfloat16, float16"),
        ("metrics.also_as", "sglang", "one of '', vllm"),
        ("model.path", "", "a Hugging Face model directory, builtin:smollm2, builtin:tiny or builtin:needle, e.g. "),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_is_allowed(key: str, value: object, allowed: str) -> None:
    assert refusal(at(key, value)).startswith(f"{key}: {value!r} is not allowed; give {allowed}")


def test_a_long_value_is_cut() -> None:
    assert len(refusal(at("gateway.listen", "h:" + "9" * 5000))) < 200


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.attention_backend", ("auto", *(kind.name for kind in BACKENDS))),
        ("model.ring_transport", RING_TRANSPORTS),
        ("model.compile", COMPILE_POLICIES),
        ("model.quantization", QUANTIZATIONS),
        ("decode.variant", VARIANT_POLICIES),
        ("router.selector", POLICIES),
        ("router.missing_kv", MISSING_KV),
        ("logs.level", LOG_LEVELS),
        ("logs.format", LOG_FORMATS),
    ],
)
def test_a_key_allows_the_words_that_the_code_knows(key: str, words: tuple[str, ...]) -> None:
    kind = KEYS[key].annotation
    assert get_origin(kind) is Literal
    assert get_args(kind) == words


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefil": {"cp": 2}}, "prefil: there is no such section; did you mean prefill?"),
        ({"prefill": {"cpp": 2}}, "prefill.cpp: there is no such key; did you mean prefill.cp?"),
        ({"timeouts": {"x": 2}}, "timeouts.x: there is no such key; give one of start, step, control, transfer,"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one_or_all(values: dict[str, Any], said: str) -> None:
    assert refusal(values).startswith(said)
