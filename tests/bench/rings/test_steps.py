"""Bench of one rank's steps, at sizes of a CPU and with a recorder of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.report import table
from bench.rings import steps
from bench.rings.steps import (
    COMPILED,
    FORMS,
    FORMS_OF_CPUS,
    FORMS_OF_RANKS,
    JOINED,
    RECORDED,
    WARM_STEPS,
    LogitsChange,
    StepBench,
    StepCases,
    bench_model,
)
from tests.workers.decode.recording import KeptFunctions, TabledAttention
from tests.workers.models import save_model

CASES = StepCases(prefill=(40,), decode=((1, 20), (3, 33)), num_steps=2)


@pytest.mark.slow
def test_every_form_is_measured_and_the_change_by_8_bit_floats_is_told(tmp_path: Path) -> None:
    recorder, told = KeptFunctions(), list[str]()
    with bench_model(save_model("qwen3", tmp_path), None, "bfloat16", "cpu") as model:
        bench = StepBench(model, CASES, 1, "reference", recorder, "eager")
        figures, changes = bench.measure(FORMS, told.append)
    assert told == list(FORMS)
    decode = [("decode", "1 x 20"), ("decode", "3 x 33")]
    prefill = ("prefill", "40")
    expected = 5 * [prefill, *decode] + 2 * decode + [prefill, *decode]
    assert [(each.keys["what"], each.keys["case"]) for each in figures] == expected
    assert all(each.value("seconds") > 0 for each in figures)
    assert recorder.num_replayed > recorder.num_recorded > 0
    assert table([each.cells() for each in figures]).row_count == len(figures)
    (change,) = changes
    assert 0.0 < change.mean < change.largest
    assert change.loss > 0.0
    assert "% of the most likely tokens are the same" in str(change)


@pytest.mark.slow
def test_each_case_is_recorded_anew_since_its_inputs_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps of two cases with one row each: a recording of the first would read memory that is gone."""
    recorder = KeptFunctions()
    monkeypatch.setattr(steps, "select_backend", lambda *_: TabledAttention())
    with bench_model(save_model("qwen3", tmp_path), None, "bfloat16", "cpu") as model:
        cases = StepCases(prefill=(), decode=((1, 20), (1, 33)), num_steps=2)
        StepBench(model, cases, 1, "reference", recorder, "eager").measure((JOINED, COMPILED, RECORDED), print)
    assert recorder.num_recorded == 2
    assert recorder.num_replayed == 2 * (WARM_STEPS + 2 - 1)


def test_the_change_of_logits_is_that_of_their_probabilities() -> None:
    before = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    same = LogitsChange.of("fp8", before, before + 2.0)
    assert (same.mean, same.largest, same.same) == (2.0, 2.0, 1.0)
    assert same.loss == pytest.approx(0.0, abs=1e-15)
    other = LogitsChange.of("fp8", before, torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    p = 1 / (1 + torch.e)
    assert other.loss == pytest.approx((1 - 2 * p) / 2)
    assert other.same == 0.5


def test_the_command_measures_a_model_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(save_model("llama_gqa", tmp_path))
    few = ["--prefill", "16", "--decode", "2x16", "--steps", "1", "--rounds", "1"]
    assert main(["steps", "--model", path, "--json", *few]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["form"] for each in found["steps"]} == set(FORMS_OF_CPUS)
    assert [each["form"] for each in found["changes"]] == ["fp8"]
    assert main(["steps", "--model", path, "--json", "--packed", *few]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["form"] for each in found["steps"]] == [form for form in FORMS_OF_RANKS for _ in range(2)]
    assert found["changes"] == []
    assert main(["steps", "--model", path, "--json", "--forms", "joined", *few]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["form"] for each in found["steps"]} == {"joined"}


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--decode", "3by4", "--decode: '3by4' is not a whole number of 1 or more"),
        ("--prefill", "0", "--prefill: '0' is not a whole number of 1 or more"),
        ("--forms", "ahead", "--forms: there is no form 'ahead' here; allowed are transformers, stock, joined, fp8"),
        ("--steps", "0", "--steps: 0 is too few; allowed are 1 or more"),
        ("--device", "cuda", "--device: 'cuda', but torch finds no GPU here; allowed is cpu"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["steps", option, value]) != 0
    assert sentence in capsys.readouterr().err
