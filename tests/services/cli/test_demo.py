"""Ctrl-C while the demo's first answer arrives, with a gateway of this process in place of a cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ringserve.services.cli.main import EXIT_INTERRUPTED, main
from ringserve.services.cluster.stopping import STOP_SIGNALS
from ringserve.services.config import Config
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.workers.model.builtin import write_tokenizer
from tests.waiting import WAIT_SECONDS
from tests.workers.models import save_model


class Interrupting(inference_pb2_grpc.InferenceServicer):
    """Gateway that answers with one token; then this process gets Ctrl-C, and the answer never ends."""

    def __init__(self) -> None:
        self.was_left = threading.Event()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        context.add_callback(self.was_left.set)
        yield inference_pb2.GenerateResponse(start=inference_pb2.GenerateStart())
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.GenerateStreamChunk(text="A", token_ids=[65]))
        os.kill(os.getpid(), signal.SIGINT)
        self.was_left.wait(WAIT_SECONDS)


class FakeCluster:
    """Fake of `LocalCluster`: the gateway alone."""

    gateway: Interrupting

    def __init__(self, config: Config, progress: Callable[[str], None], stopped: threading.Event) -> None:
        FakeCluster.gateway = Interrupting()  # type: ignore[abstract]  # the demo calls no other method
        self._server = grpc.server(ThreadPoolExecutor(2))
        inference_pb2_grpc.add_InferenceServicer_to_server(self.gateway, self._server)
        self.gateway_address = ""

    def start(self) -> None:
        self.gateway_address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        assert self.gateway.was_left.wait(WAIT_SECONDS), "the demo leaves its turn before it ends the cluster"
        self._server.stop(0).wait(WAIT_SECONDS)
        self.gateway_address = ""


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give the handlers of signals back that the demo takes for the rest of its process."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_while_it_answers_leaves_the_turn_ends_the_cluster_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_tokenizer(save_model("llama_gqa", tmp_path))
    clusters: list[FakeCluster] = []

    def cluster(*arguments: object) -> FakeCluster:
        clusters.append(FakeCluster(*arguments))  # type: ignore[arg-type]
        return clusters[-1]

    monkeypatch.setattr("ringserve.services.cluster.local.LocalCluster", cluster)
    assert main(["demo", "--model", str(tmp_path), "--tokens", "600", "--max-tokens", "5000"]) == EXIT_INTERRUPTED
    (stopped,) = clusters
    assert stopped.gateway_address == "", "it was stopped"
    shown = capsys.readouterr()
    assert "interrupted, stopping" in shown.out
    assert "Traceback" not in shown.out + shown.err
