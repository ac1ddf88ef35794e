"""Keys of the model: a word that YAML takes for false, and quantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringserve.services.config import config_from, load_config
from tests.services.config.test_config import refusal, written


def test_the_word_off_is_a_text_where_one_is_wanted(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "model: {compile: off}"), environment={}).model.compile == "off"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_quantised_weights_need_a_gpu_and_bfloat16(device: str, dtype: str) -> None:
    model = {"quantization": "fp8", "device": device, "dtype": dtype}
    assert refusal({"model": model}) == (
        f"model.quantization: 'fp8' needs model.device cuda and model.dtype bfloat16; allowed with {device} and "
        f"{dtype} is none"
    )
    fitting = {"model": model | {"device": "cuda", "dtype": "bfloat16"}}
    assert config_from(fitting).model.quantization == "fp8"


def test_words_that_are_not_allowed_are_refused_with_those_that_are() -> None:
    assert refusal({"model": {"compile": "on"}}) == "model.compile: 'on' is not allowed; use one of auto, off"
    said = refusal({"model": {"quantization": "int8"}})
    assert said == "model.quantization: 'int8' is not allowed; use one of none, fp8"
