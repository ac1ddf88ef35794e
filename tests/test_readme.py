"""Examples of README and documents, run or loaded as they stand."""

import asyncio
import io
import os
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import grpc
import pytest

from ringserve.services.auth.tenants import hash_token, read_tenants
from ringserve.services.cli.main import main, parse
from ringserve.services.cluster.state import ClusterStage, ClusterState, remove_state, started_after_boot, write_state
from ringserve.services.config import Config, load_config
from ringserve.v1 import inference_pb2
from tests.services.local_gateway import MODEL, LocalGateway, codec, gateway, model_path
from tests.waiting import WAIT_SECONDS

__all__ = ["codec", "gateway", "model_path"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]


def answer(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """Answer every Generate with the same short turn."""
    plan = inference_pb2.Plan(
        algorithm=inference_pb2.ALGORITHM_PASS_Q, reason="it is the follow-up of " + request.conversation_id
    )
    yield inference_pb2.GenerateResponse(start=inference_pb2.GenerateStart(plan=plan))
    yield inference_pb2.GenerateResponse(chunk=inference_pb2.GenerateStreamChunk(text="there was"))
    usage = inference_pb2.Usage(completion_tokens=request.sampling_params.max_tokens)
    complete = inference_pb2.GenerateComplete(finish_reason=inference_pb2.FINISH_REASON_LENGTH, usage=usage)
    yield inference_pb2.GenerateResponse(complete=complete)


@pytest.fixture
def target() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    generate = grpc.unary_stream_rpc_method_handler(
        answer,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler("ringserve.v1.Inference", {"Generate": generate})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait(timeout=WAIT_SECONDS)


def example_with(language: str, word: str) -> str:
    """Return the one example in a language that contains a word."""
    example: str
    (example,) = (text for kind, text in EXAMPLES if kind == language and word in text)
    return example


def test_python_example_of_the_readme_runs_and_prints_plan_text_and_usage(target: str) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        exec(example_with("python", "InferenceStub").replace("127.0.0.1:50051", target), {})
    assert "ALGORITHM_PASS_Q because it is the follow-up of tale\nthere was" in printed.getvalue()
    assert "completion_tokens: 32" in printed.getvalue()


def commands_of(*texts: str) -> list[list[str]]:
    """Return the lines of shell blocks as words, without comments; a backslash joins lines."""
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


async def test_every_shell_command_of_the_readme_runs_as_written(
    gateway: LocalGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway in this process stands for the cluster that `serve` starts and `down` stops; both are only parsed."""
    monkeypatch.setenv("RINGSERVE_STATE", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("Tell me of rings.\n/plan\n"))
    readme = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = commands_of(*readme)
    assert {words[0] for words in commands} == {"make", "source", "ringserve"}
    own = [words[1:] for words in commands if words[0] == "ringserve"]
    assert [words[0] for words in own] == ["serve", "status", "generate", "generate", "chat", "down"]

    def run() -> list[int]:
        statuses = []
        for words in own:
            if words[0] in ("serve", "down"):
                parse(words)
                is_running = words[0] == "serve"
                gateway_at = ClusterState(
                    name="default",
                    pid=os.getpid(),
                    started=started_after_boot(os.getpid()),
                    stage=ClusterStage.READY,
                    gateway=gateway.target,
                )
                write_state(gateway_at) if is_running else remove_state("default")
            else:
                # Random weights know no end, and a chat has no limit of its own.
                statuses.append(main([*words, "--max-tokens", "64"] if words[0] == "chat" else words))
        return statuses

    assert await asyncio.to_thread(run) == [0] * 4
    shown = capsys.readouterr()
    assert "prefill rings: 1 of cp 2; decode rings: 1 of cp 1" in shown.out
    assert '"conversation_id": "tale"' in shown.out
    assert "> " in shown.out
    assert shown.err.count("TTFT") == 2  # of the first generate, and of /plan


def test_shell_commands_of_the_documents_are_known() -> None:
    blocks = [text for kind, text in EXAMPLES if kind == "sh"]
    named = [words[1:] for words in commands_of(*blocks) if words[0] == "ringserve"]
    assert len(named) > 10
    for words in named:
        parse(words)


async def test_habits_of_the_documents_are_taken(gateway: LocalGateway) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        example = example_with("python", "from ringserve.client.errors").replace("127.0.0.1:50051", gateway.target)
        await asyncio.to_thread(exec, example, {})
    assert len(re.findall(r"^(?:length|stop) -\d", printed.getvalue(), re.MULTILINE)) == 2
    assert printed.getvalue().splitlines()[-1] == "ids 19"


async def test_both_clients_of_the_readme_are_answered(gateway: LocalGateway) -> None:
    with redirect_stdout(io.StringIO()) as printed:
        for word in ("from openai import", "ringserve.client import Client, Sampling"):
            example = example_with("python", word).replace("127.0.0.1:50051", gateway.target)
            example = example.replace("http://127.0.0.1:8000", gateway.url).replace("builtin:smollm2", MODEL)
            example = example.replace(
                "    messages=", "    max_tokens=64,\n    messages="
            )  # random weights know no end
            await asyncio.to_thread(exec, example, {})
    # Each prints the reason of a plan.
    assert printed.getvalue().count("pass-KV, predicted") == 2


def test_configuration_shown_in_the_documents_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(example_with("yaml", "kv_cache:"))
    assert load_config(path, environment={}) == Config()


def test_pools_of_the_documents_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(example_with("yaml", "pools:"))
    config = load_config(path, environment={})
    assert config.prefill.pools["short"].rings == 4


def test_secure_configuration_of_the_documents_may_listen_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(example_with("yaml", "internal_tls:"))
    config = load_config(path, environment={})
    assert config.gateway.listen.startswith("0.0.0.0")
    assert config.tls.files is not None
    assert config.internal_tls.files is not None


def test_tokens_of_the_documents_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    hashes = iter([hash_token("a"), hash_token("b")])
    path.write_text(re.sub(r"sha256: \.\.\.", lambda _: f"sha256: {next(hashes)}", example_with("yaml", "tenants:")))
    tenants = read_tenants(path, takes_certificates=True)
    assert len(tenants.grants) == 2
