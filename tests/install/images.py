"""The image of the pods, built by buildah from Debian's and PyPI's packages, and the engine that runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helm.charts import ROOT

RUNTIME = Path(__file__).with_name("runtime.py")
PROGRAMS = ("podman", "buildah", "runc", "mmdebstrap", "iptables")
BASE = "localhost/python:3.11-slim-bookworm"
BASE_PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs")
BASE_SECONDS = 900.0
BUILD_SECONDS = 3600.0
CONTROL_SECONDS = 120.0


class Unable(Exception):
    """This machine cannot run containers; the text says why."""


class EngineError(Exception):
    """podman refused; the text has its own words."""


@dataclass(frozen=True)
class Engine:
    """podman and buildah with a storage of their own in `folder`: no image or container of the user's is touched."""

    folder: Path

    def command(self, program: str) -> list[str]:
        storage = [f"--root={self.folder / 'storage'}", f"--runroot={self.folder / 'run'}", "--storage-driver=overlay"]
        if program == "buildah":
            return [program, *storage]
        return [program, *storage, f"--runtime={self.runtime}", "--cgroup-manager=cgroupfs", "--events-backend=file"]

    @property
    def runtime(self) -> Path:
        """An executable: engines take a path and no arguments."""
        return self.folder / "oci-runtime"

    def podman(self, *arguments: str, seconds: float = CONTROL_SECONDS, check: bool = True) -> str:
        """Return what podman printed. Raises EngineError with `check`, TimeoutExpired."""
        done = subprocess.run(
            [*self.command("podman"), *arguments], capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode and check:
            raise EngineError(f"podman {' '.join(arguments)}: {done.stderr.strip()[-600:]}")
        return done.stdout

    def prepare(self) -> None:
        """Make the folder and see that containers run at all. Raises Unable."""
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise Unable(f"not installed: {', '.join(missing)}; as root: apt-get install --no-install-recommends ...")
        if os.geteuid() != 0:
            raise Unable("pods get addresses on a bridge, which takes root")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.runtime.write_text(f'#!/bin/sh\nexec {sys.executable} {RUNTIME} "$@"\n')
        self.runtime.chmod(0o755)

    def has(self, image: str) -> bool:
        return bool(self.podman("images", "--quiet", image).strip())

    def make_base(self) -> None:
        """Make the image that the Dockerfile takes as its base, unless it is there."""
        if self.has(BASE):
            return
        archive = self.folder / "base.tar"
        make = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(archive)]
        subprocess.run(make, check=True, timeout=BASE_SECONDS)
        self.podman("import", str(archive), BASE, seconds=BASE_SECONDS)
        archive.unlink()

    def try_one(self) -> None:
        """Run a container of the base. Raises Unable with the engine's own words."""
        try:
            self.podman("run", "--rm", "--network=none", BASE, "true")
        except EngineError as error:
            raise Unable(f"containers do not run here: {error}") from None

    def build(self, image: str) -> None:
        """Build the image for CPUs of this working tree, with pip's sources on this machine.

        Layers that were built before are used again.
        """
        settings = self.folder / "pip.conf"
        build = [*self.command("buildah"), "build", "--isolation=oci", f"--runtime={self.runtime}", "--network=host"]
        build += ["--pull-never", "--layers", f"--build-arg=BASE={BASE}", "--target=cpu", f"--tag={image}"]
        settings.write_text(pip_settings())
        for source in (CERTIFICATES, *paths_in(settings.read_text())):
            build.append(f"--volume={source}:{source}:ro")
        build.append(f"--volume={settings}:/etc/pip.conf:ro")
        subprocess.run([*build, str(ROOT)], check=True, timeout=BUILD_SECONDS)


def pip_settings() -> str:
    """Return one configuration of pip with what this machine's files and environment say together.

    Levels replace each other as pip reads them: global, user, site, environment.
    """
    levels = ("global", "user", "site", ":env:")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        level, _, key = name.rpartition(".")
        if level in levels:
            found[key] = max(found.get(key, (-1, "")), (levels.index(level), value.strip("'\"")))
    return "\n".join(["[global]", *(f"{key} = {value}" for key, (_, value) in found.items()), ""])


def paths_in(settings: str) -> Sequence[Path]:
    """Return the files and folders of this machine that settings of pip name, outermost ones alone."""
    words = [word for line in settings.splitlines() for word in line.split()]
    named = {Path(word) for word in words if word.startswith("/")}
    # Pages of an index link to files beside it.
    named |= {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
    found = sorted(path for path in named if path.exists())
    outermost: list[Path] = []
    for path in found:
        if not path.is_relative_to(CERTIFICATES) and not any(path.is_relative_to(each) for each in outermost):
            outermost.append(path)
    return outermost
