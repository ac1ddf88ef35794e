"""Cluster of two rings of different shapes, with little room: TLS and tokens at its gateway, mutual TLS inside."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from openai import DefaultHttpxClient, OpenAI

from ringserve.client import Client, RetryPolicy, TlsFiles
from tests.services.auth.certificates import Authority
from tests.services.e2e.cluster import Cluster, Inference, Ringserve, running_cluster
from tests.waiting import WAIT_SECONDS

OPERATOR = "ops"


@dataclass(frozen=True)
class Secure:
    """A cluster, its clients' tokens and whom they trust."""

    cluster: Cluster
    authority: Authority
    tokens: dict[str, str]
    config: Path

    def client(self, tenant: str, retry: RetryPolicy | None = None) -> Client:
        tls = TlsFiles(ca=self.authority.own.cert)
        return Client(self.cluster.gateway, token=self.tokens.get(tenant, ""), tls=tls, retry=retry)

    def openai(self, tenant: str) -> OpenAI:
        trust = DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(self.authority.own.cert)))
        key = self.tokens.get(tenant, "unknown")
        return OpenAI(base_url=f"https://{self.cluster.http}/v1", api_key=key, http_client=trust, max_retries=0)

    def inference(self) -> Inference:
        """Open a channel of the operator, who may ask for the state of the service."""
        trust = grpc.ssl_channel_credentials(self.authority.own.cert.read_bytes())
        known = grpc.access_token_call_credentials(self.tokens[OPERATOR])
        return Inference(self.cluster.gateway, grpc.composite_channel_credentials(trust, known))


@pytest.fixture(scope="package")
def secure(ringserve: Ringserve, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """Start the cluster: two processes that share the heads prefill, two ranks that share the tokens decode.

    The decode ring has room for 1024 tokens of KV. Told to end, the service lets turns end first.
    """
    directory = tmp_path_factory.mktemp("secure")
    authority = Authority.make(directory / "authority")
    server, inside = authority.sign("gateway"), authority.sign("inside", "DNS:ringserve.internal")
    made = {
        tenant: json.loads(ringserve.run("token", "--tenant", tenant, "--json").stdout)
        for tenant in ("acme", "beta", OPERATOR)
    }
    tenants = [
        {"name": name, "tokens": [{"sha256": entry["sha256"]}], "operator": name == OPERATOR}
        for name, entry in made.items()
    ]
    file = directory / "tokens.yaml"
    file.write_text(json.dumps({"tenants": tenants}))
    sections = {
        "tls": {"cert": str(server.cert), "key": str(server.key)},
        "internal_tls": {
            "cert": str(inside.cert),
            "key": str(inside.key),
            "ca": str(authority.own.cert),
            "server_name": "ringserve.internal",
        },
        "auth": {"tokens": str(file)},
        "gateway": {"model_name": "tiny-and-secret"},
        # The model drafts for itself, too.
        "decode": {"draft_model": str(model_path), "draft_context": 128},
        "logs": {"level": "debug"},  # the log is looked through for secrets
    }
    config = directory / "cluster.yaml"
    config.write_text(json.dumps(sections))
    values = (
        *("prefill.cp=1", "prefill.tp=2", "decode.cp=2"),
        *("kv_cache.tokens_per_rank=512", "kv_cache.block_tokens=4", "decode.headroom_tokens=16"),
    )
    options = ["--config", str(config), *(word for value in values for word in ("--set", value))]
    with running_cluster(ringserve, "secure", model_path, *options, "--drain-seconds", f"{WAIT_SECONDS:g}") as cluster:
        yield Secure(cluster, authority, {name: entry["token"] for name, entry in made.items()}, config)
