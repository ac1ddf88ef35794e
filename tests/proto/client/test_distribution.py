"""Distribution `ringserve-client`: built, unpacked beside gRPC and protobuf alone, and used with a real gateway."""

from __future__ import annotations

import asyncio
import json
import sys
import zipfile
from pathlib import Path

import google.protobuf
import grpc
import pytest
import typing_extensions
from hatchling.builders.wheel import WheelBuilder

import ringserve
from tests.services.local_gateway import LocalGateway
from tests.test_repository import ROOT
from tests.waiting import WAIT_SECONDS

PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[2:]
from ringserve.client import Client, Sampling
from ringserve.client.errors import NotFound
with Client(sys.argv[1]) as client:
    answer = client.ask("Once upon a time", sampling=Sampling(max_tokens=3))
    try:
        client.conversation("nowhere")
    except NotFound as error:
        said = str(error)
print(json.dumps({"tokens": len(answer.token_ids), "said": said, "modules": sorted(sys.modules)}))
"""
SERVER = ("ringserve.services", "ringserve.orchestration", "ringserve.workers", "ringserve.cp_core")
FOREIGN = (*SERVER, "torch", "ray", "transformers", "numpy", "google.rpc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    (path,) = WheelBuilder(str(ROOT / "proto")).build(directory=str(tmp_path_factory.mktemp("client")))
    return zipfile.ZipFile(path)


async def test_the_client_is_answered_where_only_grpc_and_protobuf_are_installed(
    gateway: LocalGateway, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "installed")
    needed = tmp_path / "needed"
    (needed / "google").mkdir(parents=True)
    (needed / "google/protobuf").symlink_to(Path(google.protobuf.__file__).parent)
    (needed / "google/_upb").symlink_to(Path(google.protobuf.__file__).parent.parent / "_upb")
    (needed / "grpc").symlink_to(Path(grpc.__file__).parent)
    (needed / "typing_extensions.py").symlink_to(Path(typing_extensions.__file__))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", PROGRAM, gateway.target, str(tmp_path / "installed"), str(needed)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WAIT_SECONDS):
        printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    report = json.loads(printed)
    assert report["tokens"] == 3
    assert "nowhere" in report["said"]
    assert [name for name in report["modules"] if name.startswith(FOREIGN)] == []


def test_the_client_asks_pip_for_nothing_but_grpc_and_protobuf(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    lines = metadata.partition("\n\n")[0].splitlines()
    assert {line for line in lines if line.startswith("Requires-Dist")} == {
        "Requires-Dist: grpcio>=1.85.1",
        "Requires-Dist: protobuf>=7.36.2",
    }
    assert f"Version: {ringserve.__version__}" in lines
