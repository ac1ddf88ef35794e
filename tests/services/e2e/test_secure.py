"""A whole cluster with mutual TLS inside, TLS and tokens at its doors: who is known is served, nobody else."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import DefaultHttpxClient, OpenAI

from cp_core.errors import Forbidden, NotFound, Unauthenticated, Unavailable
from services.client import Client, Sampling, TlsFiles
from services.client.retries import NO_RETRIES
from services.reference import StockModel
from tests.services.auth.certificates import Authority
from tests.services.e2e.cluster import Cluster, Ringserve, running_cluster, wait_until
from tests.workers.models import random_tokens

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Secure:
    """A cluster, its clients' tokens and whom they trust."""

    cluster: Cluster
    authority: Authority
    tokens: dict[str, str]
    config: Path

    def client(self, tenant: str) -> Client:
        return Client(self.cluster.gateway, token=self.tokens.get(tenant, ""), tls=TlsFiles(ca=self.authority.own.cert))

    def openai(self, tenant: str) -> OpenAI:
        trust = DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(self.authority.own.cert)))
        key = self.tokens.get(tenant, "unknown")
        return OpenAI(base_url=f"https://{self.cluster.http}/v1", api_key=key, http_client=trust, max_retries=0)


@pytest.fixture(scope="module")
def secure(ringserve: Ringserve, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    directory = tmp_path_factory.mktemp("secure")
    authority = Authority.make(directory / "authority")
    server, inside = authority.sign("gateway"), authority.sign("inside", "DNS:ringserve.internal")
    made = {
        tenant: json.loads(ringserve.run("token", "--tenant", tenant, "--json").stdout)
        for tenant in ("acme", "beta", "ops")
    }
    tenants = [
        {"name": name, "tokens": [{"sha256": entry["sha256"]}], "operator": name == "ops"}
        for name, entry in made.items()
    ]
    file = directory / "tokens.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    values = {
        "tls.cert": server.cert,
        "tls.key": server.key,
        "internal_tls.cert": inside.cert,
        "internal_tls.key": inside.key,
        "internal_tls.ca": authority.own.cert,
        "internal_tls.server_name": "ringserve.internal",
        "auth.tokens": file,
        "gateway.model_name": "tiny-and-secret",
    }
    sections: dict[str, dict[str, str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = str(value)
    config = directory / "cluster.yaml"
    config.write_text(json.dumps(sections))
    with running_cluster(ringserve, "secure", model_path, "--config", str(config)) as cluster:
        yield Secure(cluster, authority, {name: entry["token"] for name, entry in made.items()}, config)


def test_tenants_are_served_exactly_and_apart_over_both_doors(secure: Secure, stock: StockModel) -> None:
    prompt = random_tokens(200)
    with secure.client("acme") as acme, secure.client("beta") as beta:
        answer = acme.ask(prompt, conversation_id="diary", sampling=Sampling(max_tokens=6, temperature=0.0), timeout=60)
        assert list(answer.token_ids) == stock.greedy(prompt, 6).token_ids
        with pytest.raises(NotFound):
            beta.conversation("diary")
        with secure.openai("acme") as http, secure.openai("beta") as other:
            body = {"conversation_id": "diary", "prompt_mode": "append"}
            again = http.completions.create(
                model="tiny-and-secret", prompt=[1, 2], max_tokens=2, temperature=0, extra_body=body
            )
            assert (again.model_extra or {})["ringserve"]["plan"]["cached_tokens"] == 205
            with pytest.raises(openai.NotFoundError):
                other.completions.create(model="tiny-and-secret", prompt=[1, 2], extra_body=body)
        acme.delete_conversation("diary")


def test_strangers_and_plain_text_get_nowhere(secure: Secure) -> None:
    with secure.client("nobody") as nobody, pytest.raises(Unauthenticated):
        nobody.ask("x", timeout=30)
    with secure.openai("nobody") as http, pytest.raises(openai.AuthenticationError):
        http.models.list()
    for address in (secure.cluster.gateway, secure.cluster.router):
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    # Of the authority that the router trusts, and yet no certificate is no certificate.
    trusted = grpc.ssl_channel_credentials(secure.authority.own.cert.read_bytes())
    name = (("grpc.ssl_target_name_override", "ringserve.internal"),)
    with grpc.secure_channel(secure.cluster.router, trusted, options=name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]


def test_commands_call_by_tls_with_the_token_of_the_environment(secure: Secure) -> None:
    with secure.client("acme") as acme, pytest.raises(Forbidden):
        acme.server_info()
    command = [
        *(sys.executable, "-m", "services.cli.main", "status", "--target", secure.cluster.gateway),
        *("--tls-ca", str(secure.authority.own.cert), "--json"),
    ]
    environment = dict(secure.cluster.ringserve.environment)
    done = subprocess.run(
        command,
        env=environment | {"RINGSERVE_TOKEN": secure.tokens["ops"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["groups"]) == 2
    without = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert without.returncode == 1
    assert without.stderr == "ringserve: authorization: none given; send 'Bearer TOKEN'\n"


def test_one_more_gateway_guards_the_same_conversations(secure: Secure, model_path: Path, tmp_path: Path) -> None:
    """`ringserve gateway` takes keys and tokens from the same configuration; without them it has no way in."""
    log, plain = tmp_path / "gateway.log", tmp_path / "plain.log"
    command = ["gateway", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--router", secure.cluster.router]
    command += ["--model", str(model_path)]
    second = secure.cluster.ringserve.start(*command, "--config", str(secure.config), output=log)
    open_one = secure.cluster.ringserve.start(*command, output=plain)
    try:
        addresses = _addresses(log)
        with secure.client("acme") as first:
            answer = first.ask([1, 2, 3], conversation_id="both", sampling=Sampling(max_tokens=4), timeout=60)
        other = replace(secure, cluster=replace(secure.cluster, gateway=addresses["gateway"], http=addresses["http"]))
        with other.client("beta") as beta, pytest.raises(NotFound):
            beta.conversation("both")
        with other.client("acme") as acme:
            assert acme.conversation("both").num_tokens == 3 + answer.usage.completion_tokens
            acme.delete_conversation("both")
        with Client(_addresses(plain)["gateway"], retry=NO_RETRIES) as stranger, pytest.raises(Unavailable):
            stranger.ask("x", timeout=30)
    finally:
        for process in (second, open_one):
            process.terminate()
        assert [process.wait(30) for process in (second, open_one)] == [0, 0], log.read_text() + plain.read_text()


def _addresses(log: Path) -> dict[str, str]:
    """What a gateway says it listens on."""
    wait_until(lambda: "\n" in log.read_text() and '"gateway"' in log.read_text(), "the gateway serves", 60)
    addresses: dict[str, str] = json.loads(next(line for line in log.read_text().splitlines() if '"gateway"' in line))
    return addresses


def test_a_gateway_for_strangers_is_refused_unless_asked_for(secure: Secure, model_path: Path) -> None:
    command = ["gateway", "--listen", "0.0.0.0:0", "--router", secure.cluster.router, "--model", str(model_path)]
    refused = secure.cluster.ringserve.run(*command)
    assert refused.returncode == 1
    assert refused.stderr.startswith("ringserve: --listen: 0.0.0.0:0 is reached from other machines and lacks TLS")
    assert len(refused.stderr.splitlines()) == 1


def test_the_log_of_the_cluster_holds_no_secret(secure: Secure) -> None:
    log = (secure.cluster.ringserve.directory / "state" / "secure.log").read_text()
    assert "acme/req-" in log
    for token in secure.tokens.values():
        assert token not in log
