"""Costs of sparse prefills: seconds by hand, the file of losses, and losses between and beyond measured lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses, format_losses, read_losses, sparse_seconds
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError, InvalidRequest
from ringserve.cp_core.layout.sparsity import Sparsity
from tests.cp_core.cost.test_model import RATES, TINY


def measured(num_tokens: int, keep: float, loss: float, num_ranks: int = 2) -> MeasuredLoss:
    return MeasuredLoss(
        num_tokens=num_tokens,
        num_ranks=num_ranks,
        keep=keep,
        loss=loss,
        accuracy=0.75,
        exact_accuracy=1.0,
        num_questions=4,
    )


LOSSES = SparseLosses(
    model="m",
    sinks=4,
    window=16,
    measured=(
        measured(1000, 0.5, 0.02),
        measured(2000, 0.5, 0.01),
        measured(1000, 0.25, 0.03),
        measured(2000, 0.25, 0.09),
        measured(1000, 0.25, 0.2, num_ranks=4),
    ),
)


def test_a_length_between_two_measured_ones_has_the_worse_loss_of_both() -> None:
    half, quarter = LOSSES.predict(1400, 2)
    assert (half.sparsity.keep, half.loss, half.nearest.num_tokens) == (0.5, 0.02, 1000)
    assert (quarter.sparsity.keep, quarter.loss, quarter.nearest.num_tokens) == (0.25, 0.09, 1000)
    assert (half.sparsity.sinks, half.sparsity.window) == (4, 16)


def test_lengths_at_and_below_the_shortest_have_its_loss() -> None:
    for num_tokens in (1, 1000):
        assert [each.loss for each in LOSSES.predict(num_tokens, 2)] == [0.02, 0.03]


def test_a_smaller_ring_has_the_loss_of_the_next_larger_one() -> None:
    assert [each.loss for each in LOSSES.predict(500, 3)] == [0.2]


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "told"),
    [(2001, 2, "up to 2000 tokens; the prompt has 2001"), (10, 5, "up to 4 ranks; a ring has 5")],
)
def test_what_was_not_measured_is_refused(num_tokens: int, num_ranks: int, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        LOSSES.predict(num_tokens, num_ranks)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    path.write_text(format_losses(LOSSES), encoding="utf-8")
    assert read_losses(path) == LOSSES
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(LOSSES.measured) + 2


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_losses(path)
    good = json.loads(format_losses(LOSSES))
    bads: tuple[Any, ...] = (
        [],
        {**good, "window": "16"},
        {**good, "measured": []},
        {**good, "measured": [{**good["measured"][0], "keep": 2.0}]},
        {**good, "measured": [{**good["measured"][0], "loss": -1.0}]},
        {**good, "measured": [{"keep": 0.5}]},
    )
    for bad in bads:
        path.write_text(json.dumps(bad), encoding="utf-8")
        with pytest.raises(ConfigError, match="calibrate --sparse"):
            read_losses(path)


SPARSE = Sparsity(keep=0.25, sinks=0, window=1)


def test_sparse_pass_kv_by_hand() -> None:
    """T=80, P=80, N=2, three layers of which one is sparse: 20 of 80 stored keys reach the other rank."""
    model = replace(TINY, num_layers=3)
    pairs = 80 * 80 + 80 * 81 / 2
    iteration = 4 * 4 * 2 * pairs / 4 / 1e5
    full, thin = (1e-3 + 2 * stored * 2 * 2 * 4 / 1e5 for stored in (80, 20))
    asked, scored = 1e-3 + 40 * 4 * 2 * 4 / 1e5, 4 * 4 * 2 * 80 * 80 / 1e5 / 2
    exposed = max(0.0, full - iteration) - max(0.0, thin - iteration / 4)
    saved = iteration * 3 / 4 + exposed - asked - scored
    exact = StepPredictor(model, RATES, 2).seconds(80, 80)["pass_kv"]
    assert exact - sparse_seconds(model, RATES, 2, SPARSE, 80, 80) == pytest.approx(saved)


def test_a_prefill_that_keeps_all_keys_or_has_no_sparse_layer_takes_the_time_of_pass_kv() -> None:
    for model, ranks, sparsity in (
        (replace(TINY, num_layers=9), 4, Sparsity(keep=1.0)),
        (TINY, 4, SPARSE),
        (replace(TINY, num_layers=9), 1, SPARSE),
    ):
        exact = StepPredictor(model, RATES, ranks).seconds(80, 80)["pass_kv"]
        assert sparse_seconds(model, RATES, ranks, sparsity, 80, 80) == pytest.approx(exact)


def test_the_fewer_keys_of_a_long_prompt_are_kept_the_less_time_it_takes() -> None:
    model = replace(TINY, num_layers=32)
    times = [sparse_seconds(model, RATES, 4, Sparsity(keep=keep), 100_000, 0) for keep in (1.0, 0.5, 0.25, 0.125)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.5 * times[0]
