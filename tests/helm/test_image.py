"""Dockerfile and chart agree. The tests read the Dockerfile and need no container engine."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

import ringserve
from tests.helm.charts import CHART, ROOT

LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stage(name: str) -> list[str]:
    """Return the instructions of a build stage."""
    starts = [number for number, line in enumerate(LINES) if line.startswith("FROM ")]
    (start,) = (number for number in starts if LINES[number].endswith(f" AS {name}"))
    stop = min([number for number in starts if number > start], default=len(LINES))
    return LINES[start:stop]


def values() -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image_of_each_device_runs_as_the_user_that_the_chart_demands(device: str) -> None:
    (user,) = (line for line in stage(device) if line.startswith("USER "))
    context = values()["podSecurityContext"]
    assert user == f"USER {context['runAsUser']}:{context['runAsGroup']}"
    assert f"COPY --from=install-{device} /venv /venv" in stage(device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_packages_of_the_project_are_copied_and_installed_with_the_pinned_versions(device: str) -> None:
    copied = {
        line.split()[1] for line in stage(f"install-{device}") if line.startswith("COPY ") and "--from" not in line
    }
    folders = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {*folders, "proto"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    installs = [line for name in ("build", "install") for line in stage(f"{name}-{device}") if "pip install" in line]
    assert len(installs) == 2
    assert all("-c constraints.txt" in line for line in installs)
    assert ("$TORCH_CPU_INDEX" in installs[0]) == (device == "cpu")


def test_the_image_for_gpus_has_their_kernels_nixl_and_a_compiler_and_the_other_has_none() -> None:
    """Triton compiles what starts its kernels where they run; NIXL has a package for each version of CUDA."""
    gpu, cpu = ("\n".join(stage(f"install-{device}")) for device in ("cuda", "cpu"))
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"gpu", "nixl", "otel"} <= set(extras)
    assert '".[otel,gpu]"' in gpu
    assert '"nixl-cu$(python -c' in gpu
    assert '".[otel]"' in cpu
    assert "nixl" not in cpu
    assert any("g++" in line for line in stage("cuda"))
    assert not any("g++" in line for line in stage("cpu"))
    assert any("g++" in line for line in stage("compiler")), "kernels of CPUs are compiled where ringserve is installed"
    pins = (ROOT / "constraints.txt").read_text()
    versions = {pin.partition("==")[2] for pin in pins.splitlines() if pin.startswith("nixl-cu")}
    assert len(versions) == 1, "both versions of CUDA have the same NIXL"


def test_an_image_is_built_from_a_mirror_too() -> None:
    """An argument of a stage is one of all stages that begin with it. No address of an index stands anywhere else."""
    defaults = dict(line.removeprefix("ARG ").split("=", 1) for line in stage("base") if line.startswith("ARG "))
    assert defaults.keys() == {"PIP_INDEX_URL", "TORCH_CPU_INDEX"}
    outside = [line for line in LINES if "https://" in line and not line.startswith(("#", "ARG ", "LABEL "))]
    assert not outside
    for device in ("cpu", "cuda"):
        assert f"FROM compiler AS build-{device}" in stage(f"build-{device}")


def test_what_is_copied_is_let_into_the_build() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word for line in LINES if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    assert copied == let_in


def test_chart_project_client_and_image_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = PROJECT["project"]["version"]
    assert chart["appVersion"] == version
    assert ringserve.__version__ == version
    (labels,) = (line for line in stage("runtime") if line.startswith("LABEL "))
    assert f'org.opencontainers.image.version="{version}"' in labels
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={values()['ray']['version']}" in pins
