"""`ringserve demo`, small: it proves itself, run from the wheel and in a folder without the repository."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from ringserve import __version__
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.cost.selector import PROBED_TIE
from ringserve.orchestration.placement.planner import PULL, RECOMPUTE
from tests.services.e2e.cluster import ROOT, Ringserve
from tests.waiting import START_SECONDS

SMALL = ("demo", "--model", "builtin:tiny", "--tokens", "1024", "--max-tokens", "8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel of the server."""
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")))
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel that the server depends on."""
    (path,) = WheelBuilder(str(ROOT / "proto")).build(directory=str(tmp_path_factory.mktemp("client")))
    return zipfile.ZipFile(path)


@pytest.fixture
def ringserve(wheel: zipfile.ZipFile, client_wheel: zipfile.ZipFile, tmp_path: Path) -> Ringserve:
    """Install both wheels as pip does, beside the packages that they need."""
    wheel.extractall(tmp_path / "installed")
    client_wheel.extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    return Ringserve(tmp_path / "empty", (tmp_path / "installed",))


def contents(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def files_below(*folders: Path) -> set[str]:
    """Return the files below these folders, by their path below the first folder's parent."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(folders[0].parent)) for path in files}


def test_the_wheels_have_every_file_of_one_package_between_them(
    wheel: zipfile.ZipFile, client_wheel: zipfile.ZipFile
) -> None:
    """No file is in both, so either may be upgraded or removed without breaking the other's files."""
    server = files_below(*(ROOT / name for name in ("services", "orchestration", "workers", "cp_core")))
    assert contents(wheel) == {f"ringserve/{name}" for name in server}
    assert contents(client_wheel) == files_below(ROOT / "proto/ringserve")
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    assert f"Requires-Dist: ringserve-client=={__version__}" in metadata.splitlines()


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
    predicted = {each["algorithm"]: each["predicted_prefill_seconds"] for each in second["plan"]["alternatives"]}
    # Only the decode ring retains seven of the answer; whether they are pulled depends on what the rings measured.
    is_over_prefill = second["plan"]["algorithm"] in PREFILL_ALGORITHMS
    is_left = is_over_prefill and predicted[RECOMPUTE] < predicted[PULL]
    assert second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] + (0 if is_left else 7)
    assert fork["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    # A block; a chain gives new tokens to fewer ranks where more would not pay.
    apart = max(
        16, *(turn["plan"]["new_tokens"] for turn in report["turns"] if turn["plan"]["algorithm"] == "chain"), 0
    )
    for turn in report["turns"]:
        for shares in turn["tokens_per_rank"].values():
            assert max(shares) - min(shares) <= apart
    if is_over_prefill:
        fastest = min(predicted[name] for name in PREFILL_ALGORITHMS)
        assert (1.0 - PROBED_TIE) * predicted[second["plan"]["algorithm"]] <= fastest, "a tie, or the fastest"
    assert "Traceback" not in finished.stderr
