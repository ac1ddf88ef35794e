"""`ringserve demo`, small: it proves itself, run from the wheel and in a folder without the repository."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from cp_core.cost.model import PREFILL_ALGORITHMS
from tests.services.e2e.cluster import ROOT, START_SECONDS, Ringserve

SMALL = ("demo", "--model", "builtin:tiny", "--tokens", "1024", "--max-tokens", "8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel."""
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")))
    return zipfile.ZipFile(path)


@pytest.fixture
def ringserve(wheel: zipfile.ZipFile, tmp_path: Path) -> Ringserve:
    """Install the wheel as pip does, beside the packages that it needs."""
    wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    return Ringserve(tmp_path / "empty", (tmp_path / "installed",))


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    folders = [ROOT / name for name in ("services", "orchestration", "workers", "cp_core", "proto/ringserve")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)).removeprefix("proto/") for path in files}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_the_demo_passes_its_own_check_and_prints_one_object(ringserve: Ringserve) -> None:
    finished = ringserve.run_process(*SMALL, "--json", seconds=START_SECONDS)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["passed"]
    assert report["equal_to_transformers"] == [True, True, True]
    assert report["right"] == [None, None, None], "the model is random"
    first, second, fork = report["turns"]
    assert first["plan"]["cached_tokens"] == 0
    assert first["usage"]["prompt_tokens"] >= 1024
    assert second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 7
    assert fork["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    # A block; a chain gives new tokens to fewer ranks where more would not pay.
    apart = max(
        16, *(turn["plan"]["new_tokens"] for turn in report["turns"] if turn["plan"]["algorithm"] == "chain"), 0
    )
    for turn in report["turns"]:
        for shares in turn["tokens_per_rank"].values():
            assert max(shares) - min(shares) <= apart
    predicted = {each["algorithm"]: each["predicted_prefill_seconds"] for each in second["plan"]["alternatives"]}
    chosen = predicted[second["plan"]["algorithm"]]
    assert chosen <= 1.02 * min(predicted[name] for name in PREFILL_ALGORITHMS), "a tie, or the fastest"
    assert "Traceback" not in finished.stderr
