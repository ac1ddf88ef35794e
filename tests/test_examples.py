"""Every example that needs only Python and a shell runs as documented."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringserve.services.gateway.text import TextCodec
from tests.programs import require
from tests.services.gateway.openai.test_tools import model_of
from tests.services.local_gateway import LocalGateway
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[1]

EXAMPLES = {
    "client.py": (["{python}", "client.py", "--target", "{target}"], "47 of 58 prompt tokens were cached"),
    "grpc_stubs.py": (["{python}", "grpc_stubs.py", "--target", "{target}"], "FINISH_REASON_LENGTH, 32 tokens"),
    "openai_client.py": (["{python}", "openai_client.py", "--url", "{url}/v1"], "prompt tokens were cached"),
    "openai_ttft.py": (["{python}", "openai_ttft.py", "--url", "{url}/v1", "--lines", "2"], "another chat: "),
    "structured.py": (["{python}", "structured.py", "--url", "{url}/v1"], " of 5 stars"),
    "tools.py": (["{python}", "tools.py", "--url", "{url}/v1"], "count_chairs('"),
    "responses.py": (["{python}", "responses.py", "--url", "{url}/v1"], " tokens were cached"),
    "curl.sh": (["sh", "curl.sh", "{url}"], "data: [DONE]"),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose chat template takes tools, and whose answers may end."""
    return model_of("hermes", tmp_path_factory.mktemp("hermes"))


@pytest.fixture
async def gateway(model_path: Path) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(model_path, TextCodec(model_path)) as gateway:
        yield gateway
        await gateway.wait_idle()


@pytest.mark.parametrize(("command", "said"), EXAMPLES.values(), ids=EXAMPLES.keys())
async def test_an_example_runs_as_it_is(gateway: LocalGateway, command: list[str], said: str) -> None:
    if "curl.sh" in command:
        require("curl")
    words = [word.format(python=sys.executable, target=gateway.target, url=gateway.url) for word in command]
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=ROOT / "examples",
        env=os.environ | {"PYTHONPATH": str(ROOT / "proto")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WAIT_SECONDS):
        printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert said in printed.decode()
