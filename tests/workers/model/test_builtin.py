"""Builtin model: an ordinary model directory, the same on every machine, with readable answers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringserve.cp_core.errors import ModelRefused
from ringserve.workers.model.builtin import builtin_directory, cache_directory, has_random_weights, resolve_model_path
from ringserve.workers.model.info import read_model_info
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.waiting import WAIT_SECONDS
from tests.workers.sampling.one_row import choose_token

TEXT = "".join(topics.values())


@pytest.fixture(scope="module")
def tiny(builtin_cache: Path) -> Path:
    return resolve_model_path("builtin:tiny", {"RINGSERVE_CACHE": str(builtin_cache)})


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_same_files_are_written_everywhere(tiny: Path, tmp_path: Path) -> None:
    other = resolve_model_path("builtin:tiny", {"XDG_CACHE_HOME": str(tmp_path)})
    assert other.is_relative_to(tmp_path / "ringserve" / "models")
    assert digests(other) == digests(tiny)


def test_the_weights_are_those_of_version_1(tiny: Path) -> None:
    """Check the weights: a change needs a new version of it, or old caches would serve another model by this name."""
    assert tiny.name == "tiny-1"
    assert digests(tiny)["model.safetensors"].startswith("303248b3f2a6cc54")


def test_several_processes_may_write_it_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from ringserve.workers.model.builtin import resolve_model_path;"
        "resolve_model_path('builtin:tiny', {'RINGSERVE_CACHE': sys.argv[1]})"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with ThreadPoolExecutor(3) as threads:
        runs = list(threads.map(lambda _: subprocess.run(command, check=False, timeout=WAIT_SECONDS), range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-1"], "a draft was left behind"


def test_neither_writing_it_nor_reading_its_shape_loads_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from ringserve.workers.model.builtin import resolve_model_path;"
        "from workers.model.info import read_model_info;"
        "print(read_model_info(resolve_model_path('builtin:tiny', {'RINGSERVE_CACHE': sys.argv[1]})).num_layers);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False, timeout=WAIT_SECONDS
    )
    assert (run.returncode, run.stdout) == (0, b"4\n")


def test_its_shape_is_read_from_its_files(tiny: Path, model: Any) -> None:
    info = read_model_info(tiny)
    assert (info.num_heads, info.num_kv_heads, info.head_dim) == (8, 2, 64)
    assert info.eos_token_ids == (257, 260)
    assert info.num_parameters == pytest.approx(model.num_parameters(), rel=1e-3)


def test_any_text_comes_back_from_its_tokens(tokenizer: Any) -> None:
    for text in ("Hello", "  two  spaces\n\n\ttab", "naïve ☃ 漢字", TEXT[:5000], ""):
        token_ids = tokenizer(text).input_ids
        assert len(token_ids) == len(text.encode()), "one token a byte, and none added"
        assert tokenizer.decode(token_ids) == text


def test_special_tokens_are_one_token_each(tokenizer: Any) -> None:
    assert tokenizer("<|user|>hi<|end|>").input_ids == [258, ord("h"), ord("i"), 260]


def test_a_longer_chat_extends_the_rendering_of_the_shorter(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b."},
        {"role": "user", "content": "c?"},
    ]
    first = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert first == "<|user|>a?<|end|><|assistant|>"
    assert whole == first + "b.<|end|><|user|>c?<|end|><|assistant|>"


def generate(model: Any, prompt: bytes, num_tokens: int, sampling: SamplingParameters) -> list[int]:
    past, tokens, inputs = None, list(prompt), list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(torch.tensor([inputs]), past_key_values=past, use_cache=True, logits_to_keep=1)
            past = output.past_key_values
            token = choose_token(output.logits[0, -1], sampling, len(tokens))
            assert token is not None
            inputs = [token]
            tokens += inputs
    return tokens[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_writes_printable_text_that_does_not_end_or_repeat_itself(model: Any, temperature: float) -> None:
    for prompt in (b"Hi", TEXT[:2000].encode()):
        tokens = generate(model, prompt, 100, SamplingParameters(temperature=temperature, seed=1))
        assert all(0x20 <= token < 0x7F for token in tokens)
        assert len(set(pairwise(tokens))) > 40


def test_an_unknown_name_and_a_missing_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no builtin model 'large'; give builtin:tiny or builtin:smollm2"):
        resolve_model_path("builtin:large")
    with pytest.raises(ModelRefused, match="is not a directory"):
        resolve_model_path(str(tmp_path / "nowhere"))
    fetched = r"give a directory \('hf download Qwen/Qwen3-8B --local-dir DIR' fetches the model of that name\), or"
    with pytest.raises(ModelRefused, match=fetched):
        resolve_model_path("Qwen/Qwen3-8B")


def test_a_model_that_must_be_fetched_is_refused_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="run 'ringserve import builtin:smollm2'"):
        resolve_model_path("builtin:smollm2", {"RINGSERVE_CACHE": str(tmp_path)})
    directory = builtin_directory("smollm2", {"RINGSERVE_CACHE": str(tmp_path)})
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert resolve_model_path("builtin:smollm2", {"RINGSERVE_CACHE": str(tmp_path)}) == directory


def test_only_the_tiny_model_is_random() -> None:
    assert [has_random_weights(model) for model in ("builtin:tiny", "builtin:smollm2", "/models/a")] == [
        True,
        False,
        False,
    ]


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_directory({"RINGSERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/ringserve")
    assert cache_directory({}) == Path.home() / ".cache" / "ringserve"


def test_a_cache_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelRefused, match="cannot write builtin:tiny"):
        resolve_model_path("builtin:tiny", {"RINGSERVE_CACHE": str(blocked)})
