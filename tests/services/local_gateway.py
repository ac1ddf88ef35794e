"""A whole gateway in this process: both its servers on loopback, and a service whose ranks are threads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
import pytest
from openai import AsyncOpenAI

from ringserve.services.auth.authenticator import Authenticator
from ringserve.services.auth.tls import ServerTls
from ringserve.services.config.sections import HttpConfig
from ringserve.services.gateway.openai.app import HttpApi
from ringserve.services.gateway.openai.server import HttpServer
from ringserve.services.gateway.requests import RequestReader
from ringserve.services.gateway.servicer import InferenceServicer
from ringserve.services.gateway.text import TextCodec
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.telemetry.metrics.gateway import GatewayMetrics
from ringserve.services.telemetry.tracing import SpanTracer
from ringserve.v1 import inference_pb2_grpc
from ringserve.workers.model.builtin import write_tokenizer
from tests.orchestration.service import Service
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.models import Oracle, save_model

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

MODEL = "tiny-model"
CALL_SECONDS = WAIT_SECONDS


class LocalGateway:
    """Gateway before rings of 2 prefill ranks and 1 decode rank, as an async context."""

    def __init__(
        self,
        model_path: Path,
        codec: TextCodec,
        authenticator: Authenticator | None = None,
        tls: ServerTls | None = None,
        tracer: SpanTracer | None = None,
        service: Service | None = None,
        http: HttpConfig | None = None,
    ) -> None:
        """`tracer` is the gateway's and the leaders'; `service` takes the place of the one described above."""
        self.service = service or Service(model_path, 2, 1)
        for leader in self.service.peers.leaders.values():
            leader.tracer = tracer or leader.tracer
        self._is_secure = tls is not None
        self.metrics = GatewayMetrics()
        self.codec = codec
        reader = RequestReader(self.service.model, codec, max_seconds=CALL_SECONDS, names=(MODEL, str(model_path)))
        self.servicer = InferenceServicer(
            self.service.model,
            str(model_path),
            MODEL,
            codec,
            reader,
            self.service.router,
            self.service.peers,
            self.metrics,
            authenticator,
            tracer,
        )
        admit = self.servicer.admit if authenticator else None
        self._grpc = GrpcServer(tls.grpc_credentials() if tls else None, admit=admit)
        self._grpc.add(
            "ringserve.v1.Inference",
            lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(self.servicer, target),
        )
        api = HttpApi(
            self.servicer, MODEL, self.service.model, authenticator, config=http, metrics=self.metrics.registry
        )
        self._http = HttpServer(api.app, tls.http_context() if tls else None)
        self.target = ""
        self.url = ""

    async def __aenter__(self) -> LocalGateway:
        await self.service.__aenter__()
        self.target = await self._grpc.start("127.0.0.1:0")
        scheme = "https" if self._is_secure else "http"
        self.url = f"{scheme}://{await self._http.start('127.0.0.1:0')}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.stop(1.0)
        await self._grpc.stop(1.0)
        await self.service.__aexit__(kind, error, trace)

    def openai(self, **options: object) -> AsyncOpenAI:
        """OpenAI's own client. Without retries: a test sees the first answer."""
        settings: dict[str, object] = {"api_key": "unused", "max_retries": 0, "timeout": CALL_SECONDS}
        return AsyncOpenAI(base_url=f"{self.url}/v1", **settings | options)  # type: ignore[arg-type]

    def anthropic(self, **options: object) -> AsyncAnthropic:
        """Anthropic's own client, as `openai`."""
        from anthropic import AsyncAnthropic  # here: its import takes two seconds in each process that collects tests

        settings: dict[str, object] = {"api_key": "unused", "max_retries": 0, "timeout": CALL_SECONDS}
        return AsyncAnthropic(base_url=self.url, **settings | options)  # type: ignore[arg-type]

    def channel(self) -> grpc.aio.Channel:
        """Open a channel without TLS, whatever the endpoints expect."""
        return grpc.aio.insecure_channel(self.target)

    async def wait_idle(self, seconds: float = WAIT_SECONDS) -> None:
        """Return when no turn runs anywhere, and none holds KV; fail the test after `seconds`."""
        pools = [leader.ring.pool for leader in self.service.peers.leaders.values()]
        await eventually(
            lambda: (
                not self.service.router.num_running
                and not any(rank.active_blocks for pool in pools for rank in pool.usage())
            ),
            seconds,
        )


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random model with a byte-level tokenizer."""
    path = save_model("llama_gqa", tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def codec(model_path: Path) -> TextCodec:
    return TextCodec(model_path)


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Oracle:
    return Oracle(model_path)


@pytest.fixture
async def gateway(model_path: Path, codec: TextCodec) -> AsyncIterator[LocalGateway]:
    """Start a gateway before a whole service. Every test leaves its KV free or retained, and nothing running."""
    async with LocalGateway(model_path, codec) as gateway:
        yield gateway
        await gateway.wait_idle()
        gateway.service.check_integrity()
