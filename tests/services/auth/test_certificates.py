"""Client certificates that stand for tenants, at both endpoints."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from ringserve.client import AsyncClient, Sampling, TlsFiles
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import ConfigError, NotFound, RingserveError, Unauthenticated
from ringserve.services.auth.authenticator import (
    Authenticator,
    Certificate,
    TokenFile,
    read_grpc_certificate,
    read_ssl_certificate,
)
from ringserve.services.auth.tenants import hash_token
from ringserve.services.auth.tls import ServerTls
from ringserve.services.config import Config
from ringserve.services.config.sections import AuthConfig, TlsConfig
from ringserve.services.gateway.text import TextCodec
from tests.services.auth.certificates import Authority, Signed
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway

THREE = Sampling(max_tokens=3, temperature=0.0)
TENANTS = {
    "tenants": [
        {"name": "acme", "certificates": [{"common_name": "acme-batch"}, {"dns": "batch.acme.example"}]},
        {
            "name": "beta",
            "tokens": [{"sha256": hash_token("b-token")}],
            "certificates": [{"uri": "spiffe://beta.example/web"}],
        },
        {"name": "ops", "tokens": [{"sha256": hash_token("o-token")}], "operator": True},
    ]
}
PLAIN = "DNS:client.example"
# (common name, alternative names, token) and the tenant they stand for, or what is said of them.
SHOWN: dict[str, tuple[str, str, str, str]] = {
    "by common name": ("acme-batch", PLAIN, "", "acme"),
    "by DNS name, in whatever case": ("x", "DNS:Batch.Acme.example", "", "acme"),
    "by URI": ("x", "URI:spiffe://beta.example/web", "", "beta"),
    "two names of one tenant": ("acme-batch", "DNS:batch.acme.example", "", "acme"),
    "a name nobody has, and a token": ("x", PLAIN, "o-token", "ops"),
    "both agree": ("x", "URI:spiffe://beta.example/web", "b-token", "beta"),
    "a name nobody has": ("x", PLAIN, "", "none given"),
    "another type of name": ("batch.acme.example", "URI:acme-batch", "", "none given"),
    "names of two tenants": ("acme-batch", "URI:spiffe://beta.example/web", "", "names more than one tenant"),
    "another tenant's token": ("acme-batch", PLAIN, "b-token", "belong to different tenants"),
    "a wrong token": ("acme-batch", PLAIN, "stolen", "not known"),
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture
async def gateway(
    model_path: Path, codec: TextCodec, tmp_path: Path, authority: Authority
) -> AsyncIterator[LocalGateway]:
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump(TENANTS))
    server = authority.sign("gateway")
    tls = ServerTls(cert=str(server.cert), key=str(server.key), client_ca=str(authority.own.cert))
    async with LocalGateway(model_path, codec, Authenticator(TokenFile(file)), tls) as gateway:
        yield gateway
        await gateway.wait_idle()


class Shower:
    """A client that shows a certificate at both endpoints."""

    def __init__(self, gateway: LocalGateway, authority: Authority, signed: Signed, token: str = "") -> None:
        self._gateway = gateway
        self._tls = TlsFiles(ca=authority.own.cert, cert=signed.cert, key=signed.key)
        self._context = ssl.create_default_context(cafile=str(authority.own.cert))
        self._context.load_cert_chain(signed.cert, signed.key)
        self._token = token

    def by_grpc(self) -> AsyncClient:
        return AsyncClient(self._gateway.target, tls=self._tls, token=self._token, retry=NO_RETRIES)

    def by_http(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        return httpx2.AsyncClient(
            base_url=self._gateway.url, verify=self._context, headers=headers, timeout=CALL_SECONDS
        )


async def test_both_endpoints_know_a_tenant_by_its_certificate(gateway: LocalGateway, authority: Authority) -> None:
    for number, (name, alternatives, token, expected) in enumerate(SHOWN.values()):
        signed = authority.sign(name, alternatives)
        shower = Shower(gateway, authority, signed, token)
        async with shower.by_grpc() as client, shower.by_http() as http:
            body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 3}
            if expected in ("acme", "beta", "ops"):
                await client.ask("x", conversation_id=f"grpc-{number}", sampling=THREE)
                answer = await http.post("/v1/completions", json={**body, "conversation_id": f"http-{number}"})
                assert answer.status_code == 200, answer.text
                for endpoint in ("grpc", "http"):
                    await gateway.service.router.get_conversation(f"{expected}/{endpoint}-{number}")
            else:
                with pytest.raises(Unauthenticated, match=expected):
                    await client.ask("x", sampling=THREE)
                answer = await http.post("/v1/completions", json=body)
                assert (answer.status_code, expected in answer.text) == (401, True)
                assert "acme" not in answer.text


async def test_what_a_certificate_owns_another_cannot_reach(gateway: LocalGateway, authority: Authority) -> None:
    acme = Shower(gateway, authority, authority.sign("acme-batch", PLAIN))
    beta = Shower(gateway, authority, authority.sign("beta", "URI:spiffe://beta.example/web"))
    async with acme.by_grpc() as mine, beta.by_grpc() as other, acme.by_http() as http, beta.by_http() as other_http:
        await mine.ask("x", conversation_id="diary", sampling=THREE)
        with pytest.raises(NotFound):
            await other.conversation("diary")
        assert (await other_http.get("/v1/conversations/diary")).status_code == 404
        assert (await http.get("/v1/conversations/diary")).status_code == 200


async def test_requests_of_one_connection_and_of_another_are_each_ones_own(
    gateway: LocalGateway, authority: Authority
) -> None:
    acme = Shower(gateway, authority, authority.sign("acme-batch", PLAIN))
    nobody = Shower(gateway, authority, authority.sign("nobody", PLAIN))
    async with acme.by_http() as http, nobody.by_http() as other:
        for _ in range(3):
            assert (await http.get("/v1/models")).status_code == 200
            assert (await other.get("/v1/models")).status_code == 401


def test_without_a_certificate_nothing_is_proven() -> None:
    assert read_ssl_certificate(None) is None
    assert read_grpc_certificate({}) is None
    assert read_grpc_certificate({"transport_security_type": [b"ssl"], "peer_dns": []}) is None
    shown = read_grpc_certificate({"x509_pem_cert": [b"..."], "x509_common_name": [b"a\xff"], "peer_email": [b"a@b.c"]})
    assert shown == Certificate(frozenset({("common_name", "a\N{REPLACEMENT CHARACTER}")}))


@pytest.mark.parametrize(
    ("certificates", "said"),
    [
        ("acme", "certificates: must be a list"),
        (["acme"], "certificates[0]: must hold common_name, dns, uri"),
        ([{}], "certificates[0]: must hold one of"),
        ([{"common_name": "a", "dns": "b"}], "certificates[0]: must hold one of"),
        ([{"email": "a@b"}], "certificates[0].email: no such key"),
        ([{"dns": 7}], "certificates[0].dns: must be a text"),
        ([{"uri": ""}], "certificates[0].uri: must be a text"),
        ([{"dns": "A.b"}, {"dns": "a.B"}], "certificates[1].dns: is given twice"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, certificates: object, said: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "a", "certificates": certificates}]}))
    with pytest.raises(ConfigError) as caught:
        TokenFile(file)
    assert said in str(caught.value)


def test_one_name_does_not_stand_for_two_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    entries = [{"name": name, "certificates": [{"common_name": "x"}]} for name in ("a", "b")]
    file.write_text(yaml.safe_dump({"tenants": entries}))
    with pytest.raises(ConfigError, match=r"tenants\[1\].certificates\[0\].common_name: is given twice"):
        TokenFile(file)


def test_certificates_that_no_door_asks_for_are_refused_before_anything_starts(
    tmp_path: Path, authority: Authority
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump(TENANTS))
    signed = authority.sign("server")
    auth = AuthConfig(tokens=str(file))
    tls = TlsConfig(cert=str(signed.cert), key=str(signed.key))
    for refused in (TlsConfig(), tls):
        with pytest.raises(
            ConfigError, match=r"tenants\[0\].certificates: clients are not asked for certificates; set tls.client_ca"
        ):
            Config(tls=refused, auth=auth).check_files()
    asking = TlsConfig(cert=tls.cert, key=tls.key, client_ca=str(authority.own.cert))
    Config(tls=asking, auth=auth).check_files()
    with pytest.raises(RingserveError, match="clients are not asked for certificates"):
        TokenFile(file, takes_certificates=False)
