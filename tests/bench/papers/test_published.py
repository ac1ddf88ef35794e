"""Shipped tables, and the errors of the cost model on them."""

from __future__ import annotations

import csv
import json
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest

from bench.papers.published import (
    full_prefills,
    published_model,
    table_4,
    table_8,
    token_times,
)
from bench.papers.reproduction import (
    Reproduction,
    reproduce,
    root_mean_square,
    score_selectors,
)
from bench.papers.selectors import comparisons
from ringserve.cp_core.cost.fit import PREFILL_CONSTANTS, StepPart, fit_decode, fit_prefill
from ringserve.cp_core.cost.profile import read_profile
from ringserve.services.offline.planning.models import planned_model, shipped_models

TURNS = comparisons([row.sample for row in table_4()])
DATA = Path(__file__).parents[2] / "data"
PUBLISHED = Path(str(files("bench.papers") / "published"))
TABLES = {
    "decode_attention_us.csv": "b00e74a16e85c4f314edb04bc972549c9adf0dcb48427c3169b1cf52d798a9b4",
    "prefill_pass_kv_vs_pass_q.csv": "9d30316e8aaee5e075ed315de9d2cbc284ef3dd48df750d1cac99be3cdd32e24",
    "ring_breakdown_us.csv": "8ff92ee20d5f8574d3b224561c08fdcef27d16686d54c1a6da7aafcc24c29aac",
    "ttft_ttit_ms.csv": "3adaf606cd062189a47e17be0a770e0a63d588471a21850c2d3a5222be266252",
}
"""SHA-256 of each table as it was copied from the paper."""


@pytest.fixture(scope="module")
def reproduction() -> Reproduction:
    return reproduce()


@pytest.mark.parametrize(("name", "checksum"), TABLES.items())
def test_tables_are_shipped_as_they_were_published(name: str, checksum: str) -> None:
    assert sha256((PUBLISHED / name).read_bytes()).hexdigest() == checksum


def test_the_published_model_is_that_of_table_9() -> None:
    table_9 = json.loads((DATA / "llama3_405b.json").read_text())
    model = published_model()
    assert model.shape.num_layers == table_9["num_layers"]
    assert model.shape.hidden_size == table_9["model_dim"]
    assert model.shape.intermediate_size == table_9["ffn_dim"]
    assert model.shape.num_heads == table_9["num_heads"]
    assert model.shape.num_kv_heads == table_9["num_kv_heads"]
    assert planned_model("llama3-405b").weights.total / 2 == pytest.approx(table_9["num_parameters"], rel=0.003)


def test_all_rows_are_there_and_repeated_ones_once() -> None:
    assert len(table_4()) == 28
    labels = [row.label for row in full_prefills()]
    assert len(labels) == len(set(labels)) == 12
    # CP2 at 128K is there with both the values that were published for it.
    assert sorted(row.sample.seconds for row in token_times() if row.sample.cp == 2)[0] == pytest.approx(0.06023)
    assert len(token_times()) == 10
    assert len([row for row in table_8() if row.sample.part is StepPart.WHOLE]) == 6


def test_shipped_constants_are_those_that_fit_all_rows() -> None:
    """Start the fit at the profile and end there, within its four digits."""
    profile, model = read_profile("gtt"), published_model()
    prefill = fit_prefill(model.shape, profile, [row.sample for row in (*table_4(), *full_prefills())])
    for name in PREFILL_CONSTANTS:
        assert getattr(prefill.prefill, name) == pytest.approx(getattr(profile.prefill, name), rel=5e-3), name
    samples = [row.sample for row in (*token_times(), *table_8())]
    decode = fit_decode(model.shape, model.weights, profile, samples)
    for name in decode.decode.__dataclass_fields__:
        assert getattr(decode.decode, name) == pytest.approx(getattr(profile.decode, name), rel=5e-3), name


def test_ttft_of_either_half_follows_from_the_other_within_5_percent_rms_and_10_at_worst(
    reproduction: Reproduction,
) -> None:
    """Take one algorithm of every turn of table 4, alternating, and every second row of the others as a half."""
    rows = reproduction.prefills
    first = [
        (place // 2 + place % 2) % 2 == 0 if row.table == "4" else place % 2 == 0 for place, row in enumerate(rows)
    ]
    assert sum(first) == len(rows) / 2
    for half in (True, False):
        errors = [row.held_out_error or 0.0 for row, is_first in zip(rows, first, strict=True) if is_first == half]
        assert root_mean_square(errors) <= 0.05
        assert max(map(abs, errors)) <= 0.10


def test_halves_by_whole_turns_miss_the_two_turns_whose_published_times_are_one_too_long_and_one_too_short(
    reproduction: Reproduction,
) -> None:
    """Miss T=4160 and T=6400, whose times differ by 0.5% though one has half as many new tokens again."""
    targets = {target.text: target for target in reproduction.targets}
    assert 0.05 < targets["TTFT, halves by whole turns, rms"].value < 0.06
    assert 0.15 < targets["TTFT, halves by whole turns, worst"].value < 0.17
    assert not targets["TTFT, halves by whole turns, rms"].is_met


def test_the_shipped_profile_meets_every_ttft_within_10_percent(reproduction: Reproduction) -> None:
    errors = [row.error for row in reproduction.prefills]
    assert root_mean_square(errors) <= 0.03
    assert max(map(abs, errors)) <= 0.10


def test_a_million_tokens_on_16_hosts_take_77_seconds_within_10_percent(reproduction: Reproduction) -> None:
    (million,) = [row for row in reproduction.prefills if "T=1000000" in row.label]
    assert million.published == 77.0
    assert million.predicted == pytest.approx(77.0, rel=0.10)
    assert million.held_out == pytest.approx(77.0, rel=0.10)


def test_ttit_and_whole_pass_q_of_table_8_are_met_within_5_percent_rms(reproduction: Reproduction) -> None:
    for is_table_8 in (True, False):
        errors = [row.error for row in reproduction.steps if (row.table == "8") == is_table_8]
        assert root_mean_square(errors) <= 0.05


def test_the_columns_of_table_8_do_not_add_up_to_its_last_one() -> None:
    """Differ by up to 21%: no model that adds the columns can meet both within 5%."""
    with (PUBLISHED / "decode_attention_us.csv").open() as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    sums = [
        sum(float(row[name]) for name in ("ring_attention_us", "sendrecv_us", "all2all_us"))
        / float(row["whole_pass_q_us"])
        for row in rows
    ]
    assert max(sums) == pytest.approx(1.21, abs=0.005)
    assert root_mean_square([ratio - 1.0 for ratio in sums]) > 0.09


def test_table_5_fixes_the_all_to_all_and_agrees_with_the_attention_that_was_fitted(
    reproduction: Reproduction,
) -> None:
    """Expect exchanges shorter than the model's hops, which include the wait for a late peer."""
    rows = reproduction.iterations
    with (PUBLISHED / "ring_breakdown_us.csv").open() as lines:
        table = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    columns = ("sendrecv_us", "attention_us", "all2all_us")
    published = [float(row[name]) / 1e6 for row in table for name in columns if row[name]]
    assert [row.published for row in rows] == pytest.approx(published)
    largest = {"attention": 0.06, "all-to-all": 0.01}
    for row in rows:
        if "exchange" in row.label:
            assert row.predicted > row.published
        else:
            assert abs(row.error) <= largest[row.label.rpartition(" ")[2]], row.label


def test_selectors_take_what_the_paper_says_and_calibrated_ones_are_right_everywhere() -> None:
    right = {score.name: score for score in score_selectors(read_profile("gtt"))}
    stated = {
        "Algorithm 1, nominal": 12,
        "Algorithm 5, nominal": 11,
        "Algorithm 1, table 5": 13,
        "Algorithm 5, table 5": 12,
        "empirical as printed, ln": 4,
        "empirical as printed, log10": 10,
        "cost model, the smaller time": 14,
    }
    assert {name: right[name].num_right for name in stated} == stated
    assert all(score.num_right == 14 for score in right.values() if score.is_calibrated)
    assert sum(score.is_calibrated for score in right.values()) == 4
    # A tie goes to pass-KV: the one turn that this gets wrong differs by less than the tie.
    assert right["auto: cost model with ties"].num_right == 13
    assert right["auto: cost model with ties"].worst_loss < 0.02


def test_the_printed_constants_are_wrong_in_the_rows_that_they_are_wrong_in() -> None:
    """Choose pass-Q everywhere with natural logarithms, pass-KV with decimal ones."""
    scores = {score.name: score for score in score_selectors(read_profile("gtt"))}
    assert set(scores["empirical as printed, ln"].chosen) == {"pass_q"}
    assert set(scores["empirical as printed, log10"].chosen) == {"pass_kv"}
    best = ["pass_kv" if each.advantage > 0 else "pass_q" for each in TURNS]
    wrong = [
        each.turn.new_tokens
        for each, name, right in zip(TURNS, scores["Algorithm 1, nominal"].chosen, best, strict=True)
        if name != right
    ]
    assert wrong == [4160, 6400]


def test_models_are_shipped_with_heads_that_share_their_kv_evenly() -> None:
    for name in shipped_models():
        model = planned_model(name)
        assert model.shape.num_heads % model.shape.num_kv_heads == 0
        assert model.max_positions >= 4096
