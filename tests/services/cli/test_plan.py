"""`ringserve plan` and `ringserve explain` from the command line."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses, format_losses
from ringserve.services.cli.main import main
from ringserve.services.config.sections import PrefillConfig

MODEL = ("--model", "llama3-405b-fp8", "--hardware", "gtt")
CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_plan_predicts_every_ring_for_every_context(capsys: pytest.CaptureFixture[str]) -> None:
    plan = printed(capsys, "plan", *MODEL, "--context", "128k,1m", "--cp", "1,16", "--chunk", "whole")
    assert plan["proposal"] is None
    assert [(ring["shape"]["cp"], ring["shape"]["tp"], bool(ring["refusal"])) for ring in plan["rings"]] == [
        (1, 8, True),
        (16, 8, False),
    ]
    million = plan["rings"][1]["contexts"][1]
    assert million["tokens"] == 1_000_000
    assert million["ttft_seconds"] == pytest.approx(77.0, rel=0.1)
    assert million["kv_bytes"] == pytest.approx(4.03e9, rel=0.01)
    assert [[context["fits"] for context in ring["contexts"]] for ring in plan["rings"]] == [
        [True, False],
        [True, True],
    ]


def test_a_context_fits_by_itself_whatever_else_is_in_the_mix(capsys: pytest.CaptureFixture[str]) -> None:
    for chunk in ("whole", "64k", "4k"):
        options = ("plan", *MODEL, "--cp", "1,2,4,8", "--chunk", chunk, "--context")
        alone, mixed = (printed(capsys, *options, contexts)["rings"] for contexts in ("128k", "128k,1m"))
        assert [ring["contexts"][0] for ring in mixed] == [ring["contexts"][0] for ring in alone]
        assert [ring["contexts"][1]["fits"] for ring in mixed] == [not ring["refusal"] for ring in mixed]


def test_a_plan_computes_prompts_in_the_steps_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("plan", *MODEL, "--cp", "4", "--context", "128k")
    own, same = printed(capsys, *options), printed(capsys, *options, "--chunk", str(PrefillConfig().chunk_tokens))
    assert own == same != printed(capsys, *options, "--chunk", "whole")
    assert main([*options]) == 0
    assert "prompts are computed in steps of 4,096 tokens (prefill.chunk_tokens)" in capsys.readouterr().out


def test_plan_proposes_a_ratio_for_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    rate = ("--rate", "0.1/s", "--ttft", "60s", "--ttit", "100ms", "--chunk", "whole")
    plan = printed(capsys, "plan", *MODEL, "--context", "128k:9,1m:1", *rate)
    prefill, decode = plan["proposal"]["prefill"], plan["proposal"]["decode"]
    assert max(prefill["ttft_seconds"]) <= 60.0
    assert decode["ttit_seconds"] <= 0.1
    left, right = map(int, plan["proposal"]["ratio"].split(":"))
    shapes = [pool["num_rings"] * pool["shape"]["cp"] * pool["shape"]["tp"] for pool in (prefill, decode)]
    assert left * shapes[1] == right * shapes[0]


def test_plan_knows_of_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("plan", *MODEL, "--context", "128k", "--rate", "1/min")
    plain, drafted = printed(capsys, *options), printed(capsys, *options, "--accepted", "0.8")
    for before, after in zip(plain["rings"], drafted["rings"], strict=True):
        (without,), (context,) = before["contexts"], after["contexts"]
        assert (without["num_drafts"], without["tokens_per_step"]) == (0, 1.0)
        assert context["num_drafts"] > 0
        assert context["tokens_per_step"] == pytest.approx(
            sum(0.8**place for place in range(context["num_drafts"] + 1))
        )
        assert context["ttit_seconds"] < without["ttit_seconds"]
        assert context["ttft_seconds"] == without["ttft_seconds"]
    assert drafted["proposal"]["decode"]["tokens_per_second"] > plain["proposal"]["decode"]["tokens_per_second"]
    assert main([*options, "--accepted", "0.8"]) == 0
    shown = capsys.readouterr().out
    assert "TTIT assumes that 80% of all drafts are right: a step of one sequence checks" in shown
    assert main([*options, "--accepted", "1"]) == 1
    assert "--accepted: 1.0 is no share; allowed are 0 to below 1" in capsys.readouterr().err


def test_plan_for_people_says_what_fits_and_what_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--context", "1m", "--rate", "1/min", "--chunk", "whole"]) == 0
    shown = capsys.readouterr().out
    assert '"no" in the table: llama3-405b-fp8 on cp 1 x tp 8 does not fit' in shown
    assert "the smallest ring that holds the context is cp 8 x tp 8" in shown
    assert "was made for 131072 tokens: longer contexts are predicted without regard to quality" in shown
    assert "prefill:decode" in shown


def test_plan_reads_a_model_directory_and_a_measured_profile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from ringserve.cp_core.cost.profile import format_profile, read_profile

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "measured.json").write_text(format_profile(read_profile("gti")))
    arguments = ("--model", str(tmp_path), "--hardware", str(tmp_path / "measured.json"))
    plan = printed(capsys, "plan", *arguments, "--context", "8k", "--cp", "2", "--tp", "1,2,4")
    assert [ring["shape"]["tp"] for ring in plan["rings"]] == [1, 2, 4]
    assert plan["rings"][0]["memory"]["kv_bytes_per_token"] == 2 * 8 * 4 * 128 * 2
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float16"}))
    on_cpu = printed(capsys, "plan", *arguments, "--context", "8k", "--cp", "2", "--tp", "1", "--device", "cpu")
    assert on_cpu["rings"][0]["memory"]["kv_bytes_per_token"] == 2 * 8 * 4 * 128 * 4


def test_explain_shows_the_choice_its_reason_and_every_cost(capsys: pytest.CaptureFixture[str]) -> None:
    turn = ("--tokens", "1280", "--cached", "126720", "--ranks", "4", "--tp", "8")
    explained = printed(capsys, "explain", *MODEL, *turn)
    assert explained["chosen"]["algorithm"] == "pass_q"
    assert [each["name"] for each in explained["alternatives"] if each["is_chosen"]] == ["pass_q"]
    assert main(["explain", *MODEL, *turn, "--selector", "pass_kv"]) == 0
    assert "auto would take pass_q: fastest of five, a tie with gather-KV" in capsys.readouterr().out


def test_explain_compares_the_decode_ring_that_keeps_the_kv(capsys: pytest.CaptureFixture[str]) -> None:
    rings = ("--ranks", "4", "--tp", "8", "--decode-tp", "8", "--decode-ranks", "4")
    turn = ("--tokens", "20", "--cached", "200000", *rings)
    explained = printed(capsys, "explain", *MODEL, *turn, "--missing", "300")
    direct, ways = explained["direct"], {each["name"]: each for each in explained["alternatives"]}
    # Rings of one shape compute alike, and only one of them needs KV.
    assert ways["decode_ring"]["total_seconds"] == ways["pass_q"]["total_seconds"]
    assert direct["prefill_seconds"] == ways[explained["chosen"]["algorithm"]]["total_seconds"]
    assert direct["move_seconds"] == pytest.approx(15 * direct["handoff_seconds"])
    assert [name for name, each in ways.items() if each["is_chosen"]] == ["decode_ring"]
    forced = printed(capsys, "explain", *MODEL, *turn, "--selector", "pass_kv")
    assert [each["name"] for each in forced["alternatives"] if each["is_chosen"]] == ["pass_kv"]
    # A ring of one rank has all the attention to itself.
    assert main(["explain", *MODEL, "--tokens", "4000", *turn[2:-1], "1"]) == 0
    assert "a decode ring of 1 rank computes the turn itself in " in (shown := capsys.readouterr().out)
    assert "no sooner than by way of a prefill ring" in shown
    assert main(["explain", *MODEL, *turn, "--missing", "200001"]) != 0
    assert "--missing: 200001 is out of range; allowed are 0 to the 200000 cached" in capsys.readouterr().err


def test_explain_sets_rings_of_several_sizes_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--ranks", "1,2,4,8", "--tp", "4,8")
    chosen = []
    for tokens in ("16", "128k"):
        compared = printed(capsys, "explain", *MODEL, "--tokens", tokens, *sizes)
        rings = compared["rings"]
        shapes = [(ring["shape"]["cp"], ring["shape"]["tp"]) for ring in rings]
        assert shapes == [(cp, tp) for tp in (4, 8) for cp in (1, 2, 4, 8)]
        seconds = {
            shape: next(each["total_seconds"] for each in ring["alternatives"] if each["is_chosen"])
            for shape, ring in zip(shapes, rings, strict=True)
        }
        taken = compared["chosen"]["cp"], compared["chosen"]["tp"]
        assert seconds[taken] <= 1.1 * min(seconds.values())
        smaller = [shape for shape in shapes if shape[0] * shape[1] < taken[0] * taken[1]]
        assert all(seconds[shape] > 1.1 * min(seconds.values()) for shape in smaller)
        chosen.append(taken)
    assert chosen[0][0] == 1, "a short prompt does not pay for context parallelism"
    assert chosen[1] == (8, 8)
    assert main(["explain", *MODEL, "--tokens", "128k", *sizes]) == 0
    shown = capsys.readouterr().out
    assert "cp 8 x tp 8 takes" in shown
    assert ": the quickest" in shown
    assert "auto takes pass_kv" in shown
    assert [line.split()[1:3] for line in shown.splitlines() if line.strip().startswith("*")] == [["8", "8"]]


def test_a_plan_is_drawn_even_with_a_single_context(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", *MODEL, "--context", "128k", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "--model", "gpt", "--context", "8k"), "--model: 'gpt' is unknown; allowed are llama3-8b"),
        (("plan", *MODEL, "--context", "8k", "--hardware", "none"), "hardware profile 'none' is unknown"),
        (("plan", *MODEL, "--context", "8k", "--tp", "3"), "--tp: 3 does not divide the 8 KV heads"),
        (("plan", *MODEL, "--context", "8k", "--cp", "0"), "--cp: '0' is not a list of sizes"),
        (("plan", *MODEL, "--context", "8k", "--cp", "two"), "--cp: 'two' is not a list of sizes"),
        (("plan", *MODEL, "--context", "8k", "--cached", "1"), "--cached: 1.0 is no share"),
        (("plan", *MODEL, "--context", "8k", "--cached", "nan"), "--cached: nan is no share"),
        (("plan", *MODEL, "--context", "8k", "--ttft", "1s"), "--ttft: a limit needs traffic; give --rate too"),
        (
            ("plan", *MODEL, "--context", "8k", "--rate", "1/s", "--max-batch", "0"),
            "--max-batch: 0 is out of range",
        ),
        (("plan", *MODEL, "--context", "10m", "--cp", "1"), "llama3-405b-fp8 on cp 1 x tp 8 does not fit"),
        (("plan", "--model", "llama3-405b", "--context", "8k"), "llama3-405b on cp 64 x tp 8 does not fit: a process"),
        (("explain", *MODEL, "--tokens", "0", "--ranks", "2"), "--tokens: '0' is not a number of tokens"),
        (("explain", *MODEL, "--tokens", "1", "--ranks", "0"), "--ranks: '0' is not a list of sizes"),
        (("explain", *MODEL, "--tokens", "1", "--ranks", "2", "--tp", "3"), "--tp: 3 does not divide the 8 KV heads"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert main(list(arguments)) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"ringserve: {sentence}")
    assert len(error.splitlines()) == 1


def test_plots_need_matplotlib_and_a_place_to_write_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", *MODEL, "--context", "8k", "--plot", str(tmp_path / "none" / "plan.png")]) == 1
    assert "--plot: cannot write" in capsys.readouterr().err
    monkeypatch.setattr(
        "ringserve.services.offline.reports.find_spec",
        lambda name: None if name == "matplotlib" else util.find_spec(name),
    )
    assert main(["plan", *MODEL, "--context", "8k", "--plot", str(tmp_path / "plan.png")]) == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_explain_tells_approximate_ways_with_their_measured_loss(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "losses.json"
    measured = tuple(
        MeasuredLoss(
            num_tokens=200_000,
            num_ranks=4,
            keep=keep,
            loss=loss,
            accuracy=1.0,
            exact_accuracy=1.0,
            num_questions=5,
        )
        for keep, loss in ((0.5, 0.01), (0.25, 0.02))
    )
    path.write_text(format_losses(SparseLosses(model="m", sinks=4, window=64, measured=measured)), encoding="utf-8")
    turn = ["--tokens", "128k", "--ranks", "4", "--sparse-losses", str(path)]
    explained = printed(capsys, "explain", *MODEL, *turn)
    assert [(each["keep"], each["loss"]) for each in explained["sparse"]] == [(0.5, 0.01), (0.25, 0.02)]
    exact = next(each for each in explained["alternatives"] if each["name"] == "pass_kv")["total_seconds"]
    assert exact > explained["sparse"][0]["seconds"] > explained["sparse"][1]["seconds"]
    assert main(["explain", *MODEL, *turn]) == 0
    assert "with a share of 0.25 of other ranks' keys, an approximate prefill would take" in capsys.readouterr().out
