"""Clusters that cannot fit on this machine: refused before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster import capacity, local
from ringserve.services.cluster.capacity import (
    BUSY_SPARE_WAIT,
    FAILED_SPARE_WAIT,
    SPARE_WAIT,
    Machine,
    SpareSchedule,
    carrier_advice,
    check_fits,
    check_programs,
    dtype_advice,
    this_machine,
)
from ringserve.services.cluster.local import LocalCluster, read_draft_model
from ringserve.services.config import Config, config_from
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info, tensor_share
from ringserve.workers.protocol.ranks import ModelInfo

LARGE = Machine(cores=64, memory_bytes=1e12, gpus=8, gpu_bytes=80e9)


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return read_model_info(resolve_model_path("builtin:tiny"), dtype="float32")


def config(**sections: Mapping[str, object]) -> Config:
    return config_from(sections)


def test_the_default_configuration_fits_on_this_machine(model: ModelInfo) -> None:
    check_fits(Config(), model, this_machine())


def test_more_processes_than_cores_can_start_are_refused(model: ModelInfo) -> None:
    small = Machine(cores=2, memory_bytes=1e12)
    check_fits(config(prefill={"cp": 12}, decode={"cp": 4}), model, small)
    with pytest.raises(
        ConfigError, match=r"^prefill: 17 processes of ranks \(13 of prefill, 4 of decode\) do not start"
    ):
        check_fits(config(prefill={"cp": 13}, decode={"cp": 4}), model, small)


def test_the_pool_that_asks_for_most_is_named(model: ModelInfo) -> None:
    pools = {"pools": {"wide": {"rings": 20, "cp": 2}}}
    with pytest.raises(ConfigError, match=r"^decode\.pools\.wide: 44 processes of ranks .* do not start on 4 cores"):
        check_fits(config(decode=pools), model, Machine(cores=4, memory_bytes=1e12))


@pytest.mark.parametrize(("gpus", "fits"), [(0, False), (3, False), (4, True)])
def test_every_process_needs_a_gpu_of_its_own(model: ModelInfo, gpus: int, fits: bool) -> None:
    cuda = config(model={"device": "cuda"})
    machine = Machine(cores=64, memory_bytes=1e12, gpus=gpus, gpu_bytes=80e9)
    if fits:
        check_fits(cuda, model, machine)
    else:
        with pytest.raises(ConfigError, match=f"4 processes .* need a GPU each, and this machine offers {gpus};"):
            check_fits(cuda, model, machine)


def test_ranks_that_share_gpus_fit_on_fewer_of_them(model: ModelInfo) -> None:
    machine = Machine(cores=64, memory_bytes=1e12, gpus=1, gpu_bytes=80e9)
    check_fits(config(model={"device": "cuda", "gpus_per_rank": 0.25}), model, machine)
    with pytest.raises(
        ConfigError, match=r"4 processes .* need 0\.3 of a GPU each, and this machine offers 1; let ranks"
    ):
        check_fits(config(model={"device": "cuda", "gpus_per_rank": 0.3}), model, machine)


def test_ranks_that_share_a_gpu_share_its_memory(model: ModelInfo) -> None:
    machine = Machine(cores=64, memory_bytes=1e12, gpus=1, gpu_bytes=4e9)
    kv = {"tokens_per_rank": 65536 * 4}
    check_fits(config(model={"device": "cuda"}, kv_cache=kv), model, replace(machine, gpus=4))
    with pytest.raises(ConfigError, match=r"^kv_cache.tokens_per_rank: .* on each of 4 ranks .* on each GPU; .* fit$"):
        check_fits(config(model={"device": "cuda", "gpus_per_rank": 0.25}, kv_cache=kv), model, machine)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_that_does_not_fit_is_refused_with_the_number_of_tokens_that_fit(model: ModelInfo, device: str) -> None:
    machine = Machine(cores=64, memory_bytes=3e9, gpus=4, gpu_bytes=1e9)
    large = config(model={"device": device}, kv_cache={"tokens_per_rank": 65536 * 64})
    with pytest.raises(ConfigError, match=r"^kv_cache.tokens_per_rank: .* tokens fit$") as refused:
        check_fits(large, model, machine)
    fitting = int(str(refused.value).split()[-3])
    kv = {"tokens_per_rank": fitting}
    check_fits(config(model={"device": device}, kv_cache=kv), model, machine)
    with pytest.raises(ConfigError):
        check_fits(config(model={"device": device}, kv_cache={"tokens_per_rank": fitting + 16}), model, machine)


def test_where_memory_decides_the_tokens_only_the_weights_have_to_fit(model: ModelInfo) -> None:
    sized = config(model={"device": "cuda"}, kv_cache={"memory_fraction": 0.9})
    machine = Machine(cores=64, memory_bytes=1e12, gpus=4, gpu_bytes=1e9)
    check_fits(sized, model, machine)
    with pytest.raises(ConfigError, match=r"^kv_cache.memory_fraction: 16 tokens .* no KV fits beside the weights"):
        check_fits(sized, model, replace(machine, gpu_bytes=1e8))


def test_weights_that_leave_no_memory_are_refused(model: ModelInfo) -> None:
    with pytest.raises(ConfigError, match="no KV fits beside the weights, choose fewer ranks"):
        check_fits(Config(), model, Machine(cores=64, memory_bytes=1e9))


def test_tensor_parallel_processes_hold_their_share_of_weights_and_kv(model: ModelInfo) -> None:
    halves = config(prefill={"cp": 1, "tp": 2}, decode={"cp": 1, "tp": 2})
    whole = config(prefill={"cp": 1}, decode={"cp": 1})
    needed = {}
    for name, each in (("halves", halves), ("whole", whole)):
        with pytest.raises(ConfigError) as refused:
            check_fits(each, model, Machine(cores=64, memory_bytes=1.0))
        needed[name] = str(refused.value).split("need ")[1].split(",")[0]
    assert needed["halves"] == needed["whole"]


def test_a_cluster_that_cannot_fit_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*arguments: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(local, "start_own_ray", start)
    monkeypatch.setattr(local, "this_machine", lambda: Machine(cores=2, memory_bytes=1e12))
    ports = {"listen": "127.0.0.1:0", "http": "", "metrics": ""}
    cluster = LocalCluster(config(prefill={"cp": 64}, gateway=ports))
    with pytest.raises(ConfigError, match="66 processes of ranks"):
        cluster.start()
    cluster.stop()


@pytest.mark.parametrize(
    ("dtype", "device", "can_multiply", "advice"),
    [
        ("float32", "cpu", True, "model.dtype=bfloat16 would be faster here"),
        ("float32", "cpu", False, ""),
        ("bfloat16", "cpu", True, ""),
        ("bfloat16", "cpu", False, "does not multiply bfloat16: model.dtype=float32 would be faster here"),
        ("float16", "cpu", True, "does not multiply float16: model.dtype=float32 would be faster here"),
        ("bfloat16", "cuda", False, ""),
    ],
)
def test_up_says_where_another_dtype_would_be_faster(
    dtype: str, device: str, can_multiply: bool, advice: str, model: ModelInfo
) -> None:
    large = replace(model, num_parameters=135_000_000)
    said = dtype_advice(config(model={"dtype": dtype, "device": device}).model, large, can_multiply=can_multiply)
    assert (advice in said) if advice else not said


def test_a_small_model_gains_too_little_by_bfloat16_to_say_so(model: ModelInfo) -> None:
    assert not dtype_advice(Config().model, model, can_multiply=True)


@pytest.mark.parametrize(
    ("sections", "is_installed", "is_said"),
    [
        ({"model": {"device": "cuda"}}, False, True),
        ({"model": {"device": "cuda"}}, True, False),
        ({"model": {"device": "cuda"}, "kv_transfer": {"carrier": "sockets"}}, False, False),
        ({}, False, False),
    ],
)
def test_kv_by_sockets_between_gpus_is_said_where_a_package_would_make_it_fast(
    sections: Mapping[str, Mapping[str, object]], is_installed: bool, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "find_spec", lambda _: object() if is_installed else None)
    assert ("pip install 'ringserve[nixl]'" in carrier_advice(config(**sections))) == is_said


def test_the_packed_copy_of_a_head_that_is_the_embedding_needs_memory_on_decode_ranks(model: ModelInfo) -> None:
    tied = replace(model, tied_parameters=1_000_000_000)
    rings = config(prefill={"cp": 3}, decode={"cp": 2})
    weights = 5 * (300e6 + 4 * tied.num_parameters)
    with pytest.raises(ConfigError, match=rf"their weights and processes {(weights + 8e9) / 1e9:.1f} GB"):
        check_fits(rings, tied, Machine(cores=64, memory_bytes=9e9))


def test_the_parameters_of_a_tied_head_are_those_of_the_embedding(model: ModelInfo) -> None:
    assert model.tied_parameters in (0, model.vocab_size * model.hidden_size)
    tied = replace(model, tied_parameters=model.vocab_size * model.hidden_size)
    assert tensor_share(tied, 2).tied_parameters == tied.tied_parameters // 2


@pytest.mark.parametrize(
    ("sections", "torch_version", "missing"),
    [
        ({}, "2.13.0", "nothing: the ranks are on a CPU"),
        ({"model": {"device": "cuda"}}, "2.13.0+cpu", "torch for CUDA, not 2.13.0+cpu"),
        ({"model": {"device": "cuda", "attention_backend": "flash_attn_3"}}, "2.13.0", "fa3_fwd_interface for model"),
        ({"kv_transfer": {"carrier": "nixl"}}, "2.13.0", "nixl_cu12 for kv_transfer.carrier 'nixl'"),
    ],
)
def test_what_ranks_need_and_this_machine_lacks_is_named_in_a_sentence(
    sections: Mapping[str, Mapping[str, object]], torch_version: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    if not sections:
        check_programs(config(), torch_version, {})
        return
    with pytest.raises(ConfigError, match=re.escape(missing)) as raised:
        check_programs(config(**sections), torch_version, {})
    is_gpu = "model" in sections
    assert ("a C compiler, by which Triton starts its kernels" in str(raised.value)) == is_gpu
    with pytest.raises(ConfigError, match=re.escape(missing)) as raised:
        check_programs(config(**sections), torch_version, {"CC": "cc"})
    assert "a C compiler" not in str(raised.value)


def test_each_decode_ring_has_a_draft_model_and_its_kv(model: ModelInfo) -> None:
    decode = config(decode={"rings": 3, "cp": 2, "draft_context": 1000, "max_batch": 10})
    drafting = replace(model, num_parameters=10**9, tied_parameters=0)
    need = 3 * (4e9 + 10_000 * model.kv_bytes_per_token)
    machine = Machine(cores=64, memory_bytes=need + 8e9)
    check_fits(decode, model, machine, drafting)
    with pytest.raises(ConfigError, match=r"their weights and processes 1\d\.\d GB"):
        check_fits(decode, model, replace(machine, memory_bytes=need), drafting)
    check_fits(decode, model, replace(machine, memory_bytes=8e9))


def test_a_draft_model_must_have_the_models_tokens(tmp_path: Path) -> None:
    own = resolve_model_path("builtin:tiny")
    assert read_draft_model(Config(), own) is None
    off = config(decode={"draft_model": "/none", "drafts": "off"})
    assert read_draft_model(off, own) is None
    same = read_draft_model(config(decode={"draft_model": "builtin:tiny"}), own)
    assert same is not None
    assert same.num_layers
    with pytest.raises(ConfigError, match=r"^decode\.draft_model: model path '/none' is not a directory"):
        read_draft_model(config(decode={"draft_model": "/none"}), own)
    other = tmp_path / "other"
    shutil.copytree(own, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|done|>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"^decode\.draft_model: the tokenizer of .*/other differs .* in 3 entries; "):
        read_draft_model(config(decode={"draft_model": str(other)}), own)


def test_a_spare_waits_for_an_idle_core_but_not_for_ever() -> None:
    idle = 0.0
    spares = SpareSchedule(idle_seconds=lambda: idle)
    spares.wait(0.0)
    assert not any(spares.is_due(now) for now in (1.0, SPARE_WAIT - 1, SPARE_WAIT, SPARE_WAIT + 9)), "all are busy"
    idle += 0.5
    assert not spares.is_due(SPARE_WAIT + 10), "half a core"
    idle += 1.0
    assert spares.is_due(SPARE_WAIT + 11)
    spares.wait(SPARE_WAIT + 11, FAILED_SPARE_WAIT)
    assert not spares.is_due(FAILED_SPARE_WAIT), "after another that failed"
    assert not spares.is_due(SPARE_WAIT + 11 + FAILED_SPARE_WAIT + BUSY_SPARE_WAIT - 1)
    assert spares.is_due(SPARE_WAIT + 11 + FAILED_SPARE_WAIT + BUSY_SPARE_WAIT)
    assert not SpareSchedule(has_spare=False).is_due(float("inf"))
