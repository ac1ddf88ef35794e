"""TLS and mutual TLS at both endpoints and between our own processes, with certificates that are right and wrong."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from ringserve.client import AsyncClient, Client, Sampling, TlsFiles
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import ConfigError, RingserveError, Unavailable
from ringserve.cp_core.transport.peer_tls import PeerTls
from ringserve.services.auth.tls import ServerTls, peer_server
from ringserve.services.gateway.text import TextCodec
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer
from ringserve.services.rpc.servicers import RouterServicer
from ringserve.services.telemetry.metrics.router import RouterMetrics, RouterView
from ringserve.views import ServerInfo
from tests.services.auth.certificates import Authority
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.waiting import WAIT_SECONDS

THREE = Sampling(max_tokens=3)


def server_tls(authority: Authority, *, is_mutual: bool) -> ServerTls:
    server = authority.sign("gateway")
    return ServerTls(cert=str(server.cert), key=str(server.key), client_ca=str(authority.own.cert) if is_mutual else "")


@pytest.fixture
async def secure(model_path: Path, codec: TextCodec, authority: Authority) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(model_path, codec, tls=server_tls(authority, is_mutual=False)) as gateway:
        yield gateway


@pytest.fixture
async def mutual(model_path: Path, codec: TextCodec, authority: Authority) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(model_path, codec, tls=server_tls(authority, is_mutual=True)) as gateway:
        yield gateway


async def grpc_answer(gateway: LocalGateway, tls: TlsFiles | None) -> int:
    """Return the number of tokens of an answer over gRPC."""
    async with AsyncClient(gateway.target, tls=tls, retry=NO_RETRIES) as client:
        return (await client.ask("x", sampling=THREE, timeout=WAIT_SECONDS)).usage.completion_tokens


async def http_status(gateway: LocalGateway, context: ssl.SSLContext) -> int:
    async with httpx2.AsyncClient(base_url=gateway.url, verify=context, timeout=CALL_SECONDS) as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        return (await http.post("/v1/completions", json=body)).status_code


async def test_both_endpoints_answer_by_tls_a_client_that_trusts_the_authority(
    secure: LocalGateway, authority: Authority
) -> None:
    assert secure.url.startswith("https://")
    assert await grpc_answer(secure, TlsFiles(ca=authority.own.cert)) == 3
    assert await http_status(secure, ssl.create_default_context(cafile=str(authority.own.cert))) == 200

    def by_threads() -> int:
        with Client(secure.target, tls=TlsFiles(ca=authority.own.cert)) as client:
            return client.ask("x", sampling=THREE).usage.completion_tokens

    assert await asyncio.to_thread(by_threads) == 3


async def test_an_endpoint_with_tls_answers_no_client_without(secure: LocalGateway) -> None:
    with pytest.raises(Unavailable):
        await grpc_answer(secure, None)
    async with httpx2.AsyncClient(base_url=secure.url.replace("https", "http"), timeout=WAIT_SECONDS) as http:
        with pytest.raises(httpx2.TransportError):
            await http.get("/health")


async def test_a_client_refuses_a_server_of_another_authority(secure: LocalGateway, stranger: Authority) -> None:
    with pytest.raises(Unavailable):
        await grpc_answer(secure, TlsFiles(ca=stranger.own.cert))
    with pytest.raises(httpx2.ConnectError):
        await http_status(secure, ssl.create_default_context(cafile=str(stranger.own.cert)))


async def test_mutual_tls_lets_in_only_whom_the_authority_signed(
    mutual: LocalGateway, authority: Authority, stranger: Authority
) -> None:
    known, unknown = authority.sign("client"), stranger.sign("client")
    ca = authority.own.cert
    assert await grpc_answer(mutual, TlsFiles(ca=ca, cert=known.cert, key=known.key)) == 3
    context = ssl.create_default_context(cafile=str(ca))
    with pytest.raises(httpx2.TransportError):
        await http_status(mutual, context)  # shows nothing
    context.load_cert_chain(known.cert, known.key)
    assert await http_status(mutual, context) == 200

    for tls in (TlsFiles(ca=ca), TlsFiles(ca=ca, cert=unknown.cert, key=unknown.key)):
        with pytest.raises(Unavailable):
            await grpc_answer(mutual, tls)
    wrong = ssl.create_default_context(cafile=str(ca))
    wrong.load_cert_chain(unknown.cert, unknown.key)
    with pytest.raises(httpx2.TransportError):
        await http_status(mutual, wrong)
    # The refused clients have not affected the server.
    assert await grpc_answer(mutual, TlsFiles(ca=ca, cert=known.cert, key=known.key)) == 3


async def test_a_name_that_is_not_the_servers_is_refused_unless_it_is_told(
    model_path: Path, codec: TextCodec, authority: Authority
) -> None:
    server = authority.sign("elsewhere", "DNS:gateway.example")
    tls = ServerTls(cert=str(server.cert), key=str(server.key))
    async with LocalGateway(model_path, codec, tls=tls) as gateway:
        with pytest.raises(Unavailable):
            await grpc_answer(gateway, TlsFiles(ca=authority.own.cert))
        named = TlsFiles(ca=authority.own.cert, server_name="gateway.example")
        assert await grpc_answer(gateway, named) == 3


class View:
    """Router with the one method that these tests call."""

    async def get_server_info(self) -> ServerInfo:
        return ServerInfo(selector="auto", rings=(), conversations=7, running_turns=0)


async def test_our_own_processes_take_only_each_other(authority: Authority, stranger: Authority) -> None:
    def peer(by: Authority, trusts: Authority) -> PeerTls:
        signed = by.sign("peer", "DNS:ringserve.internal")
        return by.peer(signed, server_name="ringserve.internal", trusts=trusts)

    ours = peer(authority, authority)
    server = GrpcServer(peer_server(ours))
    known = RouterView(conversations=7, running_turns=0, rings=())
    metrics = RouterMetrics("auto", lambda: known, asyncio.get_running_loop())
    servicer = RouterServicer(View(), metrics)  # type: ignore[arg-type]
    servicer.register(server)
    address = await server.start("127.0.0.1:0")
    try:
        for tls, is_let_in in (
            (ours, True),
            (peer(stranger, authority), False),  # trusts us, and is not trusted
            (peer(authority, stranger), False),
            (None, False),
            (ours, True),
        ):
            peers = GrpcPeers(tls)
            async with asyncio.timeout(WAIT_SECONDS):
                if is_let_in:
                    assert (await peers.router(address).get_server_info()).conversations == 7
                else:
                    with pytest.raises(Unavailable):
                        await peers.router(address).get_server_info()
            await peers.close()
    finally:
        await server.stop(0)


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    signed, other = authority.sign("one"), authority.sign("two")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    cert, key = str(signed.cert), str(signed.key)
    for cause, said in (
        (ServerTls(cert=f"{tmp_path}/none.pem", key=key), "tls.cert: .*none.pem cannot be read"),
        (ServerTls(cert=cert, key=f"{tmp_path}/none.key"), "tls.key: .*none.key cannot be read"),
        (ServerTls(cert=cert, key=str(other.key)), "tls.cert: .* are not a certificate and its key"),
        (ServerTls(cert=str(nothing), key=key), "tls.cert: .* are not a certificate and its key"),
        (ServerTls(cert=cert, key=key, client_ca=str(nothing)), "tls.client_ca: .* holds no certificate"),
    ):
        for make in (cause.grpc_credentials, cause.http_context):
            with pytest.raises(ConfigError, match=said):
                make()
    with pytest.raises(ConfigError, match=r"internal_tls.ca: .* holds no certificate"):
        peer_server(PeerTls(cert=cert, key=key, ca=str(nothing)))
    with pytest.raises(ConfigError, match="cert and key belong together"):
        TlsFiles(cert=signed.cert).credentials()
    with pytest.raises(ConfigError, match=r"none.pem cannot be read"):
        TlsFiles(ca=tmp_path / "none.pem").credentials()


async def test_oversized_metadata_and_messages_are_refused_and_harm_nothing(gateway: LocalGateway) -> None:
    async with gateway.channel() as channel:
        generate: Any = channel.unary_stream("/ringserve.v1.Inference/Generate")
        model: Any = channel.unary_unary("/ringserve.v1.Inference/GetModelInfo")
        nothing: Any = channel.unary_unary("/ringserve.v1.Inference/Nothing")
        sent: dict[str, tuple[Any, str]] = {
            "metadata": (model(b"", metadata=(("x-long", "x" * 40_000),), timeout=WAIT_SECONDS), "RESOURCE_EXHAUSTED"),
            "message": (generate(b"\x1a" + b"\xff" * (65 << 20), timeout=WAIT_SECONDS).read(), "RESOURCE_EXHAUSTED"),
            "no protobuf": (generate(b"\xff\xff\xff", timeout=WAIT_SECONDS).read(), "INVALID_ARGUMENT"),
            "no protobuf of a unary method": (model(b"\xff\xff\xff", timeout=WAIT_SECONDS), "INVALID_ARGUMENT"),
            "no such method": (
                nothing(b"", timeout=WAIT_SECONDS),
                "UNIMPLEMENTED",
            ),
        }
        for what, (call, status) in sent.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code().name == status, what
            assert "Traceback" not in (caught.value.details() or "")
    assert await grpc_answer(gateway, None) == 3
    with pytest.raises(RingserveError):
        async with AsyncClient(gateway.target, retry=NO_RETRIES) as client:
            await client.ask([300])
