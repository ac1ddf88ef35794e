"""Figures of a GPU, measured on a CPU with the sizes of a toy: the same code, and the targets that it compares with."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.gpu import command as gpu
from bench.gpu import rank, service
from bench.gpu.table import GPU, TOY, TTFT_SECONDS, TTIT_SECONDS, Line
from bench.report import Row
from bench.rings import kv_carrier
from bench.rings.kernels import kernel_row
from bench.service.served import TTFT_TOKENS, Turn, TurnTimes
from ringserve.cp_core.attention.backends import select_backend
from ringserve.services.cluster.capacity import Machine, check_fits
from ringserve.services.offline.reference import StockModel
from ringserve.services.offline.reports import Summary
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info

H100 = Machine(cores=16, memory_bytes=128e9, gpus=1, gpu_bytes=81_559 * 2.0**20)


def texts(lines: Sequence[Line]) -> list[str]:
    return [line.text for line in lines]


class FakeTurns:
    """Client of a service that answers as transformers does, but for `num_wrong` tokens of the last turn."""

    def __init__(self, stock: StockModel, num_wrong: int = 0) -> None:
        self._stock = stock
        self._num_wrong = num_wrong
        self._told: dict[str, list[int]] = {}
        self.asked: list[tuple[str, int]] = []

    def measure(self, turn: Turn) -> TurnTimes:
        told = self._told.setdefault(turn.name, [])
        assert turn.is_first == (not told)
        told += turn.token_ids.tolist()
        answer = self._stock.greedy(told, turn.max_tokens)
        told += answer.token_ids
        self.asked.append((turn.name, len(told)))
        wrong = [token + 1 for token in answer.token_ids[: self._num_wrong]] if len(self.asked) == 3 else []
        return TurnTimes(tokens=answer.seconds, token_ids=(*wrong, *answer.token_ids[len(wrong) :]))

    def forget(self, name: str) -> None:
        del self._told[name]


def test_a_line_says_whether_its_target_is_met() -> None:
    line = Line(part="kv", text="kv nixl", value=49.9, unit="GB/s", limit=50.0, is_at_least=True, beside="best 51 GB/s")
    assert line.verdict == "MISSED"
    assert str(line).split() == [
        "kv",
        "kv",
        "nixl",
        "49.9",
        "GB/s",
        "at",
        "least",
        "50",
        "MISSED",
        "best",
        "51",
        "GB/s",
    ]
    assert replace(line, value=50.0).verdict == "met"
    assert replace(line, is_at_least=False).verdict == "met"
    assert replace(line, limit=None).verdict == ""


def test_kernels_are_shares_of_the_copy_rate() -> None:
    lines = list(rank.kernels(TOY))
    fastest = select_backend("auto", "cpu", torch.float32).name
    assert texts(lines)[:2] == ["copy 1,024 bytes, torch", f"prefill 32 x 32 causal, {fastest}"]
    assert "  of few rows" in texts(lines)
    (few,) = (line for line in lines if line.text == "  of few rows")
    assert (few.unit, few.limit) == ("s", 20e-6)


@pytest.mark.parametrize(
    ("what", "case", "limit"),
    [("decode", "8 x 32,768", 0.9), ("decode", "1 x 8,192", None), ("merge", "8,192 rows, 8 parts", 0.9)],
)
def test_large_kernels_have_the_target_of_the_copy_rate(what: str, case: str, limit: float | None) -> None:
    figure = kernel_row(what, case, "triton", 1e-3, 2.7, "TB/s")
    (line,) = rank._bandwidth(figure, 3.0)
    assert (line.limit, line.is_at_least) == (limit, True)
    assert line.value == pytest.approx(0.9)


def test_steps_have_transformers_and_a_prediction_beside_them() -> None:
    lines = list(rank.steps(TOY))
    assert {"prefill 24, transformers", "decode 2 x 40, joined"} <= {*texts(lines)}
    assert texts(lines).count("  error of its prediction") == len(TOY.prompts)
    assert all("transformers" in line.beside for line in lines if line.unit == "s")


@pytest.mark.slow
def test_parts_run_in_processes_of_their_own_and_loading_in_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--device", "cpu", "--only", "loading", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == ""
    assert [line["text"] for line in told["lines"]] == ["seconds", "peak of the host's memory over the share"]


def test_kv_is_measured_by_nixl_and_by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[kv_carrier.Load] = []

    def measure(candidate: kv_carrier.Candidate, load: kv_carrier.Load) -> Row:
        loads.append(load)
        keys: dict[str, int | str] = {"carrier": candidate.name, "message_bytes": load.message_bytes}
        return Row(keys=keys, figures={"gigabytes_per_second": Summary.of([59.0, 60.0, 61.0])})

    monkeypatch.setattr(kv_carrier, "measure", measure)
    nixl, sockets = gpu.kv(GPU)
    assert (nixl.text, nixl.limit, nixl.verdict) == ("kv nixl, 16,777,216 bytes a layer", 50.0, "met")
    assert sockets.limit is None
    assert {(load.device, load.total_bytes) for load in loads} == {("cuda", 2 << 30)}


@pytest.mark.slow
def test_a_service_is_measured_turn_by_turn_beside_transformers() -> None:
    stock = StockModel(resolve_model_path("builtin:tiny"))
    turns = FakeTurns(stock)
    place = replace(TOY, shape={**TOY.shape, "vocab_size": 261})
    theirs = service.stock_times(place, resolve_model_path("builtin:tiny"))
    lines = list(service.service_lines(place, turns, theirs))
    assert texts(lines) == [
        "TTIT, 1 x 24 tokens",
        "TTIT, 2 x 40 tokens",
        "TTFT, 24 tokens",
        "  second token after the first, over TTIT",
        "TTFT, 40 tokens",
        "  second token after the first, over TTIT",
    ]
    assert all(line.value > 0.0 for line in lines)
    assert lines[2].beside.startswith("transformers ")
    assert turns._told == {}, "each conversation is deleted, so that its KV is free"


@pytest.mark.parametrize(("num_wrong", "value"), [(0, 1.0), (1, 17 / 18)])
def test_tokens_of_a_conversation_are_compared_one_by_one(num_wrong: int, value: float) -> None:
    stock = StockModel(resolve_model_path("builtin:tiny"))
    line = service.tokens_line(TOY, FakeTurns(stock, num_wrong), stock)
    assert line.value == pytest.approx(value)
    assert line.verdict == ("MISSED" if num_wrong else "met")


def test_both_rings_of_the_service_fit_on_one_h100(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPU.shape))
    config = service.config_of(GPU, GPU.dtype, ranks=1)
    info = read_model_info(tmp_path, GPU.dtype, device="cuda")
    check_fits(config, info, H100)
    rows, held = max(TTIT_SECONDS, key=lambda case: case[0] * case[1])
    answers = [
        (1 + rounds) * (1 + TTFT_TOKENS + times * GPU.steps) + 3
        for rounds, times in ((service.LONE_ROUNDS, service.LONE_STEPS), (service.BATCH_ROUNDS, service.BATCH_STEPS))
    ]
    assert max(answers) <= service.SPARE_TOKENS
    assert config.kv_cache.tokens_per_rank >= rows * (held + max(answers))
    assert config.prefill.chunk_tokens == max(TTFT_SECONDS), "a prompt is one step, as transformers computes it"
    check_fits(service.config_of(GPU, "float32", ranks=2), read_model_info(resolve_model_path("builtin:tiny")), H100)


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 0
    assert capsys.readouterr().out == "no GPU here: torch finds no CUDA device\n"
    assert main(["gpu", "--only", "kernels,all"]) == 1
    assert "--only: there is no part 'all'; allowed are cases, kernels" in capsys.readouterr().err


def test_a_part_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Line(part="kv", text="kv", value=1.0)

    def fail(_: object) -> Iterator[Line]:
        yield measured
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(gpu.PARTS, "kv", fail)
    here, there = multiprocessing.Pipe()
    gpu.run_part("kv", TOY, there)
    assert here.recv() == measured, "what was measured before is not lost"
    assert here.recv() == "RuntimeError: CUDA out of memory"
