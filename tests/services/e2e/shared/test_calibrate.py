"""`ringserve calibrate` against rings that serve: it measures, writes what `up` takes, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

from ringserve.cp_core.cost.profile import read_profile
from tests.services.e2e.cluster import Cluster, Inference

GRID = ("--tokens", "16,64,256", "--cached", "0,200", "--repeats", "1")


def test_rings_that_serve_are_measured_and_their_profile_is_written(
    cluster: Cluster, inference: Inference, tmp_path: Path
) -> None:
    free = inference.free_blocks()
    path = tmp_path / "measured.json"
    finished = cluster.ringserve.run("calibrate", "--target", cluster.gateway, *GRID, "--write", str(path), "--json")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    measured = {(row["new_tokens"], row["cached_tokens"], row["algorithm"]) for row in report["prefills"]}
    assert measured == {
        (new, cached, name) for new in (16, 64, 256) for cached in (0, 200) for name in ("pass_kv", "pass_q", "chain")
    }
    assert all(row["seconds"] > 0 and row["predicted"] > 0 for row in report["prefills"])
    assert report["losses"].keys() >= {"auto, calibrated", "always pass_kv", "always pass_q"}
    profile = read_profile(str(path))
    assert profile.name == "measured"
    assert inference.free_blocks() == free


def test_what_cannot_be_measured_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    for options, sentence in (
        (("--tokens", "900m"), "nothing fits rings of"),
        (("--repeats", "0"), "--repeats: 0 is out of range; allowed are 1 or more"),
        (("--write", str(tmp_path / "nowhere" / "x.json")), "its directory does not exist"),
        (("--tokens", "many"), "--tokens: 'many' is not a number of tokens"),
    ):
        finished = cluster.ringserve.run("calibrate", "--target", cluster.gateway, *options)
        assert finished.returncode == 1
        assert sentence in finished.stderr
        assert "Traceback" not in finished.stderr
