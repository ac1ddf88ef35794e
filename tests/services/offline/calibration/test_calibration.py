"""Calibration of rings from the durations of their prefills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from ringserve.client import Client, RingInfo, ServerInfo
from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PASS_Q
from ringserve.cp_core.cost.profile import format_profile, read_profile
from ringserve.cp_core.errors import Busy, ConfigError, Unavailable
from ringserve.services.offline.calibration.fitting import Calibration, calibrate, profile_from_rings, shape_of
from ringserve.services.offline.calibration.measurement import (
    ANSWER_TOKENS,
    Calibrator,
    Cell,
    grid,
    max_sequence_tokens,
)
from ringserve.services.offline.calibration.report import calibration_json, closing_lines, write_calibration_plot
from tests.services.offline.calibration.ring import INFO, FakeClient, server, truth
from tests.waiting import WAIT_SECONDS

CELLS = grid([128, 512, 2048, 8192, 32768], [0, 4096, 60_000], 100_000)


def calibrated(client: FakeClient, cells: list[Cell] | None = None, repeats: int = 3) -> Calibration:
    calibrator = Calibrator(cast(Client, client), repeats=repeats, timeout=WAIT_SECONDS, seed=0)
    measurements = calibrator.prefills(cells or CELLS)
    steps = calibrator.steps([1000, 50_000])
    before = profile_from_rings(INFO, client.server_info().rings, "measured")
    return calibrate(shape_of(INFO), before, measurements, steps)


@pytest.fixture(scope="module")
def exact() -> Calibration:
    """Return a calibration of rings without noise."""
    return calibrated(FakeClient())


def test_a_fitted_profile_predicts_what_was_measured_and_what_was_not() -> None:
    calibration = calibrated(FakeClient(noise=0.03))
    assert calibration.fitted.rms < 0.04
    assert calibration.held_out is not None
    assert calibration.held_out.rms < 0.06
    wrong_before = [abs(row.by_rates / row.measurement.sample.seconds - 1) for row in calibration.rows]
    assert max(wrong_before) > 0.4, "the rings' own rates are far off"


def test_a_machine_that_is_slow_in_between_hides_no_ratio_between_the_algorithms() -> None:
    calibration = calibrated(FakeClient(drift=0.5), repeats=1)
    assert calibration.fitted.rms > 0.05, "times differ from those of a steady machine"
    by_cell = {(row.measurement.cell, row.measurement.sample.algorithm): row for row in calibration.rows}
    for cell in CELLS:
        kv, q = (by_cell[cell, name] for name in (PASS_KV, PASS_Q))
        ratio = q.measurement.sample.seconds / kv.measurement.sample.seconds
        assert q.fitted / kv.fitted == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("algorithm", [PASS_KV, PASS_Q])
def test_a_prefill_that_was_disturbed_each_time_spoils_no_other(algorithm: str) -> None:
    calibration = calibrated(FakeClient(noise=0.02, disturbed=(512, 4096, algorithm)))
    rows = {(row.measurement.cell, row.measurement.sample.algorithm): row for row in calibration.rows}
    spoilt = rows.pop((Cell(new_tokens=512, cached_tokens=4096), algorithm))
    assert spoilt.fitted < 0.5 * spoilt.measurement.sample.seconds
    wrong = [abs(row.fitted / row.measurement.sample.seconds - 1) for row in rows.values()]
    assert max(wrong) < 0.06


@pytest.fixture(scope="module")
def noisy() -> Calibration:
    """Return a calibration of rings whose times vary by 2%."""
    return calibrated(FakeClient(noise=0.02))


def test_auto_by_what_was_fitted_loses_less_than_any_fixed_choice(noisy: Calibration) -> None:
    losses = dict(noisy.losses)
    assert losses["auto, calibrated"] < 0.03
    assert losses["auto, calibrated on other cells"] < 0.03
    assert losses["auto, calibrated"] < losses["always pass_q"]
    assert losses["auto, calibrated"] <= losses["always pass_kv"]
    assert min(losses.values()) >= 0.0


def test_what_a_chain_takes_is_measured_and_not_assumed(noisy: Calibration) -> None:
    """Its overhead and overlap are others than the ring's, and the choice among three loses next to nothing."""
    found, true = noisy.profile.prefill, truth().prefill
    assert true.chain_overlap is not None
    overhead, real = (
        each.chain_overhead * (each.layer_overhead_seconds + 3 * each.link_latency_seconds) for each in (found, true)
    )
    assert overhead == pytest.approx(real, rel=0.15)
    assert found.lone_speed == true.lone_speed, "the ring has measured it"
    assert found.chain_overlap == pytest.approx(true.chain_overlap, abs=0.2)
    chains = [row for row in noisy.rows if row.measurement.sample.algorithm == CHAIN]
    assert all(row.fitted == pytest.approx(row.measurement.sample.seconds, rel=0.06) for row in chains)
    losses = dict(noisy.losses)
    assert losses["auto, calibrated"] < 0.01 < losses["always chain"]


def test_a_slow_and_a_late_rank_are_in_the_predictions_of_chains() -> None:
    calibration = calibrated(FakeClient(speeds=(1.0, 2.0, 2.0, 2.0), lateness=(0.0, 0.02, 0.0, 0.0)))
    chains = [row for row in calibration.rows if row.measurement.sample.algorithm == CHAIN]
    assert all(row.fitted == pytest.approx(row.measurement.sample.seconds, rel=0.2) for row in chains)


def test_each_prefill_is_measured_by_three_algorithms_and_nothing_is_left_behind() -> None:
    client = FakeClient()
    calibration = calibrated(client, repeats=2)
    assert client.conversations == {}
    assert len(client.deleted) == 2, "one for each number of cached tokens above 0"
    assert {row.measurement.sample.algorithm for row in calibration.rows} == {PASS_KV, PASS_Q, CHAIN}
    assert all(len(row.measurement.seconds) == 2 for row in calibration.rows)
    cells = {(row.measurement.sample.new_tokens, row.measurement.sample.cached_tokens) for row in calibration.rows}
    assert cells == {(cell.new_tokens, cell.cached_tokens) for cell in CELLS}


def test_prefills_of_several_steps_are_fitted_step_by_step() -> None:
    cells = grid([2048, 8192, 32768], [0, 4096], 100_000)
    calibration = calibrated(FakeClient(chunk_tokens=1000), cells)
    assert max(len(row.measurement.sample.cuts) for row in calibration.rows) == 32
    assert calibration.fitted.rms < 0.02


def test_a_ring_of_one_rank_has_nothing_to_choose() -> None:
    calibration = calibrated(FakeClient(num_ranks=1))
    assert {row.measurement.sample.algorithm for row in calibration.rows} == {PASS_KV}
    assert calibration.losses == ()


def test_a_prefill_that_shared_its_steps_is_measured_again() -> None:
    client = FakeClient(shared=3)
    assert calibrated(client).fitted.rms < 0.02
    # Each cell by all in three rounds, once more a set to get ready; the three that were shared besides.
    assert sum(bool(name) for name in client.asked) == 9 * len(CELLS) + 3 + 3 - 1


def test_a_chain_that_had_no_room_for_its_cuts_is_measured_again() -> None:
    client = FakeClient(level=2)
    assert calibrated(client).fitted.rms < 0.02
    assert client.asked.count(CHAIN) == 3 * len(CELLS) + 2


def test_a_service_that_is_always_busy_is_not_measured() -> None:
    client = FakeClient(shared=10**6)
    with pytest.raises(Busy, match="shared their steps with other turns, lost their cache, or had no room for"):
        calibrated(client)
    assert client.conversations == {}


def test_decode_is_fitted_to_the_time_between_tokens(exact: Calibration) -> None:
    assert len(exact.steps) == 2
    for sample, predicted in exact.steps:
        assert predicted == pytest.approx(sample.seconds, rel=0.05)


def test_what_is_written_is_what_the_router_reads(exact: Calibration, tmp_path: Path) -> None:
    profile = exact.profile
    path = tmp_path / "measured.json"
    path.write_text(format_profile(profile))
    assert read_profile(str(path)) == profile


def test_the_report_has_every_prefill_beside_its_prediction(exact: Calibration, tmp_path: Path) -> None:
    calibration = exact
    report = json.loads(calibration_json(calibration))
    assert len(report["prefills"]) == 3 * len(CELLS)
    assert {"seconds", "predicted", "predicted_by_rates", "predicted_held_out", "runs"} <= report["prefills"][0].keys()
    assert report["profile"]["prefill"]["gemm_flops"] == calibration.profile.prefill.gemm_flops
    assert any("chain: " in line and "times as fast alone" in line for line in closing_lines(calibration))
    write_calibration_plot(calibration, tmp_path / "calibration.png")
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot: cannot write"):
        write_calibration_plot(calibration, tmp_path / "nowhere" / "calibration.png")


# --- what is measured ------------------------------------------------------------------------------------------------


def test_of_the_default_sizes_those_that_fit_are_taken() -> None:
    assert max(cell.cached_tokens + cell.new_tokens for cell in grid(None, None, 1200)) + ANSWER_TOKENS <= 1200
    with pytest.raises(ConfigError, match="nothing fits rings of 20 tokens"):
        grid(None, None, 20)


def test_sizes_that_were_asked_for_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"--tokens 900 with --cached 100: 1017 tokens .* allow at most 1000"):
        grid([900], [100], 1000)


def test_the_smallest_ring_says_how_much_fits() -> None:
    assert max_sequence_tokens(INFO, server(2)) == 100_000
    assert max_sequence_tokens(INFO, ServerInfo()) == INFO.max_context_length


def test_rings_that_tell_no_rates_cannot_be_calibrated() -> None:
    with pytest.raises(Unavailable, match="no prefill ring states its rates"):
        profile_from_rings(INFO, [RingInfo(role="prefill", name="prefill-0")], "x")


def test_too_few_prefills_fit_nothing() -> None:
    with pytest.raises(ConfigError, match="2 prefills cannot fit a profile; allowed are 3 or more"):
        calibrated(FakeClient(), [Cell(cached_tokens=0, new_tokens=100)])
