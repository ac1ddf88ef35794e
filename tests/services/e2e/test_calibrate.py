"""`ringserve calibrate` against rings that serve: it measures, writes what `up` takes, and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cp_core.cost.fit import PrefillSample, predicted_prefill
from cp_core.cost.profile import format_profile, read_profile
from services.calibration.own_rates import shape_of
from services.client import Client
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, ids, running_cluster

GRID = ("--tokens", "16,64,256", "--cached", "0,200", "--repeats", "1")


def test_rings_that_serve_are_measured_and_their_profile_is_written(
    cluster: Cluster, inference: Inference, tmp_path: Path
) -> None:
    free = inference.free_blocks()
    path = tmp_path / "measured.json"
    finished = cluster.ringserve.run(
        "calibrate", "--target", cluster.gateway, *GRID, "--write", str(path), "--json", seconds=100
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    measured = {(row["new_tokens"], row["cached_tokens"], row["algorithm"]) for row in report["prefills"]}
    assert measured == {
        (new, cached, name) for new in (16, 64, 256) for cached in (0, 200) for name in ("pass_kv", "pass_q")
    }
    assert all(row["seconds"] > 0 and row["predicted"] > 0 for row in report["prefills"])
    assert report["losses"].keys() >= {"auto, calibrated", "always pass_kv", "always pass_q", "empirical, fitted"}
    profile = read_profile(str(path))
    assert profile.name == "measured"
    assert profile.empirical is not None
    assert inference.free_blocks() == free


@pytest.mark.timeout(240)
def test_a_cluster_that_is_given_a_profile_plans_by_it(ringserve: Ringserve, model_path: Path, tmp_path: Path) -> None:
    gtt = read_profile("gtt")
    # Of links that carry a thousand bytes a second nobody would think on one machine.
    profile = replace(gtt, prefill=replace(gtt.prefill, link_bytes_per_second=1e3, all_to_all_bytes_per_second=1e3))
    path = tmp_path / "measured.json"
    path.write_text(format_profile(profile))
    prompt = list(range(50))
    with running_cluster(ringserve, "profiled", model_path, "--set", f"router.profile={path}") as cluster:
        door = Inference(cluster.gateway)
        first = door.answer(ids(prompt, conversation="a"))
        second = door.answer(ids([7], conversation="a"))
        with Client(cluster.gateway) as client:
            shape = shape_of(client.model_info())
        door.channel.close()
    assert second.plan.algorithm == "pass_q", "one token travels more easily than the history"
    for plan in (first.plan, second.plan):
        sample = PrefillSample(
            cp=2,
            tp=1,
            algorithm=plan.algorithm,
            new_tokens=plan.new_tokens,
            cached_tokens=plan.cached_tokens,
            seconds=1.0,
        )
        assert plan.predicted_prefill_seconds == pytest.approx(predicted_prefill(shape, profile, sample))


def test_what_cannot_be_measured_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    for options, sentence in (
        (("--tokens", "900m"), "nothing fits rings of"),
        (("--repeats", "0"), "--repeats: 0 are none; allowed are 1 or more"),
        (("--write", str(tmp_path / "nowhere" / "x.json")), "its directory does not exist"),
        (("--tokens", "many"), "--tokens: 'many' is no number of tokens"),
    ):
        finished = cluster.ringserve.run("calibrate", "--target", cluster.gateway, *options)
        assert finished.returncode == 1
        assert sentence in finished.stderr
        assert "Traceback" not in finished.stderr
