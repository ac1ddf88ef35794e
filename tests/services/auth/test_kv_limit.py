"""The limit of a tenant's KV, over both endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import yaml

from ringserve.client import Sampling
from ringserve.cp_core.errors import CapacityExceeded, InvalidRequest
from ringserve.services.auth.authenticator import Authenticator, TokenFile
from ringserve.services.auth.tenants import hash_token
from ringserve.services.gateway.text import TextCodec
from tests.services.auth.test_isolation import client_of
from tests.services.local_gateway import MODEL, LocalGateway
from tests.workers.models import random_tokens

TENANTS = {
    "tenants": [
        {"name": "small", "tokens": [{"sha256": hash_token("s-token")}], "max_kv_tokens": 3000},
        {"name": "free", "tokens": [{"sha256": hash_token("f-token")}]},
    ]
}
LONG = Sampling(max_tokens=2500, ignore_eos=True)


@pytest.fixture
async def limited(model_path: Path, codec: TextCodec, tmp_path: Path) -> AsyncIterator[LocalGateway]:
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump(TENANTS))
    async with LocalGateway(model_path, codec, Authenticator(TokenFile(file))) as gateway:
        yield gateway
        await gateway.wait_idle()
        gateway.service.check_integrity()


async def test_what_does_not_fit_beside_running_turns_is_refused_with_limit_and_load(limited: LocalGateway) -> None:
    prompt = random_tokens(50)
    async with client_of(limited, "s-token") as small, client_of(limited, "f-token") as free:
        async with small.stream(prompt, sampling=LONG) as stream:
            await anext(stream)
            said = "'small': its running turns may need 2550 KV tokens and this request 550, of 3000 allowed"
            with pytest.raises(CapacityExceeded, match=said) as caught:
                await small.ask(prompt, sampling=Sampling(max_tokens=500))
            assert caught.value.retry_after_seconds == 1.0
            async with limited.openai(api_key="s-token") as http:
                with pytest.raises(openai.RateLimitError, match=said) as refused:
                    await http.completions.create(model=MODEL, prompt=prompt, max_tokens=500)
            assert refused.value.response.headers["retry-after"] == "1"
            await small.ask(prompt, sampling=Sampling(max_tokens=3))
            async with free.stream(prompt, sampling=Sampling(max_tokens=4000)) as other:
                await anext(other)
        await limited.wait_idle()
        await small.ask(prompt, sampling=Sampling(max_tokens=10))


async def test_what_could_never_be_is_bad_input_at_both_endpoints(limited: LocalGateway) -> None:
    said = "50 prompt tokens and max_tokens 2951 make 3001, and tenant 'small' may hold at most 3000 KV tokens"
    async with client_of(limited, "s-token") as small, limited.openai(api_key="s-token") as http:
        with pytest.raises(InvalidRequest, match=said):
            await small.ask(random_tokens(50), sampling=Sampling(max_tokens=2951))
        with pytest.raises(openai.BadRequestError, match=said):
            await http.completions.create(model=MODEL, prompt=random_tokens(50), max_tokens=2951)
