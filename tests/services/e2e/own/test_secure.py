"""A secured cluster serves known clients only."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import grpc
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ringserve.client import Client, Sampling
from ringserve.client.retries import NO_RETRIES
from ringserve.cp_core.errors import DeadlineExceeded, Forbidden, NotFound, Unauthenticated, Unavailable
from ringserve.services.cluster.ray_guard import asks_for_token
from ringserve.services.offline.reference import StockModel
from ringserve.workers.kv.frames import SettleFrame, encode
from ringserve.workers.protocol.transfers import TransferKey
from tests.services.auth.certificates import Authority
from tests.services.e2e.cluster import pid_at, wait_until
from tests.services.e2e.own.conftest import Secure
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens


def test_tenants_are_served_exactly_and_apart_over_grpc_and_http(secure: Secure, stock: StockModel) -> None:
    prompt = random_tokens(200)
    with secure.client("acme") as acme, secure.client("beta") as beta:
        answer = acme.ask(
            prompt, conversation_id="diary", sampling=Sampling(max_tokens=6, temperature=0.0), timeout=WAIT_SECONDS
        )
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


def test_kv_moves_both_ways_by_tls_and_every_token_is_that_of_the_stock_model(
    secure: Secure, stock: StockModel
) -> None:
    """Two processes prefill, two ranks decode; what decode wrote goes back for the next turn."""
    history: list[int] = []
    with secure.client("acme") as acme:
        for turn in range(3):
            new = random_tokens(150 - 40 * turn, seed=turn)
            answer = acme.ask(
                new, conversation_id="long", sampling=Sampling(max_tokens=20, temperature=0.0), timeout=WAIT_SECONDS
            )
            history += new
            assert list(answer.token_ids) == stock.greedy(history, 20).token_ids
            # The last token of an answer was not computed on.
            assert answer.usage.cached_tokens == (len(history) - len(new) - 1 if turn else 0)
            history += answer.token_ids
        acme.delete_conversation("long")


def test_strangers_at_the_endpoints_of_ranks_are_sent_away_and_harm_nobody(
    secure: Secure, stock: StockModel, stranger: Authority
) -> None:
    ports = rank_ports(secure.cluster.pid)
    assert len(ports) >= 4, "two rings of two processes, each with a KV port"
    wrong, prompt = stranger.peer(trusts=secure.authority), random_tokens(120, seed=9)
    with secure.client("acme") as acme, contextlib.ExitStack() as guests:
        for address in ports:
            plain = guests.enter_context(socket.create_connection(address, 10))
            plain.sendall(encode(SettleFrame(TransferKey("turn-1", 1, "prefill-0", "decode-0"))))
            guests.enter_context(socket.create_connection(address, 10))  # and a connection that sends nothing
            with pytest.raises(OSError, match=r".+"):
                talk(wrong.call(socket.create_connection(address, 10), address[0]))
            assert b"RSKV" not in everything_of(plain)
        answer = acme.ask(prompt, sampling=Sampling(max_tokens=6, temperature=0.0), timeout=WAIT_SECONDS)
        assert list(answer.token_ids) == stock.greedy(prompt, 6).token_ids


def rank_ports(pid: int) -> set[tuple[str, int]]:
    """Return the addresses where rank processes of a cluster listen."""
    ranks = [each for each in psutil.Process(pid).children(recursive=True) if " rank " in " ".join(each.cmdline())]
    return {
        (each.laddr.ip, each.laddr.port)
        for rank in ranks
        for each in rank.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def talk(connection: ssl.SSLSocket) -> None:
    """Send a greeting, and read the first answer. Raises an error where the server refuses the certificate.

    In TLS 1.3 the server checks the client's certificate after the client's handshake has ended, so only the first
    read shows a refusal.
    """
    with connection:
        connection.sendall(b"RSKV")
        if not connection.recv(1):
            raise ConnectionError("sent away")


def everything_of(connection: socket.socket) -> bytes:
    """Receive until the other end closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            received += part
    return received


def test_ray_itself_wants_the_token_of_this_cluster(secure: Secure) -> None:
    processes = psutil.Process(secure.cluster.pid).children(recursive=True)
    words = (word for each in processes for word in each.cmdline())
    control = next(word.partition("=")[2] for word in words if word.startswith("--gcs-address="))
    assert asks_for_token(control)
    assert asks_for_token(control, "0" * 64)
    (token,) = {each.environ()["RAY_AUTH_TOKEN"] for each in processes if each.name() == "raylet"}
    assert not asks_for_token(control, token)
    gateway = psutil.Process(pid_at(secure.cluster.gateway))
    assert "RAY_AUTH_TOKEN" not in gateway.environ(), "clients reach the gateway; it has no business with Ray"
    assert token not in (secure.cluster.ringserve.directory / "state" / "secure.log").read_text()


def test_strangers_and_plain_text_get_nowhere(secure: Secure) -> None:
    with secure.client("nobody") as nobody, pytest.raises(Unauthenticated):
        nobody.ask("x", timeout=WAIT_SECONDS)
    with secure.openai("nobody") as http, pytest.raises(openai.AuthenticationError):
        http.models.list()
    for address in (secure.cluster.gateway, secure.cluster.router):
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)  # type: ignore[attr-defined]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    # Of the authority that the router trusts, and yet no certificate is no certificate.
    trusted = grpc.ssl_channel_credentials(secure.authority.own.cert.read_bytes())
    name = (("grpc.ssl_target_name_override", "ringserve.internal"),)
    with grpc.secure_channel(secure.cluster.router, trusted, options=name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)  # type: ignore[attr-defined]


def test_commands_call_by_tls_with_the_token_of_the_environment(secure: Secure) -> None:
    with secure.client("acme") as acme, pytest.raises(Forbidden):
        acme.server_info()
    command = ("status", "--target", secure.cluster.gateway, "--tls-ca", str(secure.authority.own.cert), "--json")
    done = secure.cluster.ringserve.run(*command, RINGSERVE_TOKEN=secure.tokens["ops"])
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rings"]) == 2
    without = secure.cluster.ringserve.run(*command)
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
            answer = first.ask([1, 2, 3], conversation_id="both", sampling=Sampling(max_tokens=4), timeout=WAIT_SECONDS)
        other = replace(secure, cluster=replace(secure.cluster, gateway=addresses["gateway"], http=addresses["http"]))
        with other.client("beta") as beta, pytest.raises(NotFound):
            beta.conversation("both")
        with other.client("acme") as acme:
            assert acme.conversation("both").num_tokens == 3 + answer.usage.completion_tokens
            acme.delete_conversation("both")
        # It looks for the router for as long as the request allows.
        no_way_in = pytest.raises((Unavailable, DeadlineExceeded))
        with Client(_addresses(plain)["gateway"], retry=NO_RETRIES) as stranger, no_way_in:
            stranger.ask("x", timeout=3)
    finally:
        for process in (second, open_one):
            process.terminate()
        assert [process.wait(WAIT_SECONDS) for process in (second, open_one)] == [0, 0], (
            log.read_text() + plain.read_text()
        )


def _addresses(log: Path) -> dict[str, str]:
    """Return the addresses that a gateway logs at its start."""
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
    assert " DEBUG " in log
    for token in secure.tokens.values():
        assert token not in log
    for key in secure.authority.directory.glob("*.key"):
        assert key.read_text().splitlines()[1] not in log
