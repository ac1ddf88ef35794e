"""Logs at any level hold no token of a request, right or wrong."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2
import pytest
import yaml

from ringserve.client import AsyncClient, Sampling
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import RingserveError
from ringserve.services.auth.authenticator import Authenticator, TokenFile
from ringserve.services.auth.tenants import hash_token, new_token
from ringserve.services.gateway.text import TextCodec
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.workers.protocol.ranks import RankEndpoints, RingSpec
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway

KNOWN, UNKNOWN, EXPIRED = (new_token() for _ in range(3))
HEADERS = (
    f"Bearer {KNOWN}",
    f"Bearer {UNKNOWN}",
    f"Bearer {EXPIRED}",
    f"Basic {UNKNOWN}",
    UNKNOWN,
    f"Bearer {UNKNOWN} {KNOWN}",
)


@pytest.fixture
async def guarded(model_path: Path, codec: TextCodec, tmp_path: Path) -> AsyncIterator[LocalGateway]:
    file = tmp_path / "tokens.yaml"
    tenants = [
        {"name": "acme", "tokens": [{"sha256": hash_token(KNOWN)}]},
        {"name": "gone", "tokens": [{"sha256": hash_token(EXPIRED), "expires": "2020-01-01T00:00:00+00:00"}]},
    ]
    text = yaml.safe_dump({"tenants": tenants}).replace("'2020-01-01T00:00:00+00:00'", "2020-01-01T00:00:00+00:00")
    file.write_text(text)
    async with LocalGateway(model_path, codec, Authenticator(TokenFile(file))) as gateway:
        yield gateway


async def over_grpc(gateway: LocalGateway, header: str) -> str:
    """Return the status and the message that end a call."""
    async with gateway.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GetModelInfoRequest()
        try:
            await stub.GetModelInfo(request, metadata=(("authorization", header),), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return f"{error.code()} {error.details()} {error.trailing_metadata()}"
    return "served"


async def over_http(gateway: LocalGateway, header: str) -> str:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        answer = await http.post("/v1/completions", json=body, headers={"Authorization": header})
        broken = await http.post("/v1/completions", content=b"{", headers={"Authorization": header})
        return f"{answer.status_code} {answer.headers} {answer.text} {broken.text}"


async def test_tokens_of_requests_are_in_no_log_and_in_no_answer(
    guarded: LocalGateway, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "grpc", "asyncio"):
            caplog.set_level(logging.DEBUG, logger=name)
        answers = [await call(guarded, header) for call in (over_grpc, over_http) for header in HEADERS]
        async with AsyncClient(guarded.target, token=KNOWN, retry=NO_RETRIES) as client:
            served = await client.ask("x", sampling=Sampling(max_tokens=3), timeout=CALL_SECONDS)
            assert served.usage.completion_tokens == 3
            with pytest.raises(RingserveError) as refused:
                await client.ask([10**6], sampling=Sampling(max_tokens=3), timeout=CALL_SECONDS)
    assert answers[0] == "served"
    assert answers[len(HEADERS)].startswith("200 ")
    assert sum("authorization:" in answer for answer in answers) >= 2 * (len(HEADERS) - 2)
    # The clients are in this process too; what they log of their own requests is theirs to keep.
    logged = [record for record in caplog.records if not record.name.startswith(("httpcore", "httpx", "hpack"))]
    assert logged, "nothing was logged, so nothing was looked through"
    words = [*answers, str(refused.value), *(record.getMessage() + str(record.exc_text) for record in logged)]
    words += capfd.readouterr()
    for token in (KNOWN, UNKNOWN, EXPIRED):
        assert not [each for each in words if token in each]


def test_the_secret_of_a_ring_is_not_shown_with_what_tells_of_it() -> None:
    ring = RingSpec(name="prefill-0", endpoints=(RankEndpoints(tokens="a:1"),), secret="of the ring")
    assert "of the ring" not in f"{ring} {ring!r}"
