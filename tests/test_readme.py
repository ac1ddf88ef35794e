"""What the README shows, done."""

import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import grpc
import pytest

from ringserve.v1 import inference_pb2
from services.config import Config, load_config

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def answer(
    request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.GenerateResponse]:
    """The same short turn for every Generate."""
    plan = inference_pb2.Plan(algorithm="pass_q", reason="it is the follow-up of " + request.conversation_id)
    yield inference_pb2.GenerateResponse(start=inference_pb2.GenerateStart(plan=plan))
    yield inference_pb2.GenerateResponse(chunk=inference_pb2.GenerateStreamChunk(text="there was"))
    usage = inference_pb2.Usage(completion_tokens=request.sampling_params.max_tokens)
    yield inference_pb2.GenerateResponse(complete=inference_pb2.GenerateComplete(finish_reason="length", usage=usage))


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
    server.stop(grace=None).wait(timeout=10)


def test_python_example_of_the_readme_runs_and_prints_plan_text_and_usage(target: str) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(example.replace("127.0.0.1:50051", target), {})
    assert "pass_q because it is the follow-up of tale\nthere was" in printed.getvalue()
    assert "completion_tokens: 32" in printed.getvalue()


def test_configuration_shown_in_the_readme_is_the_default(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(example)
    assert load_config(path, environment={}) == Config()
