"""One turn over gRPC, by the stubs that protoc generates."""

import argparse
import os

import grpc

from ringserve.v1 import inference_pb2, inference_pb2_grpc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", default="127.0.0.1:50051", help="gateway, HOST:PORT")
options = parser.parse_args()
token = os.environ.get("RINGSERVE_TOKEN")
metadata = (("authorization", f"Bearer {token}"),) if token else ()

with grpc.insecure_channel(options.target) as channel:
    inference = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(
        text="Once upon a time", sampling_params=inference_pb2.SamplingParams(max_tokens=32)
    )
    for response in inference.Generate(request, timeout=60, metadata=metadata):
        match response.WhichOneof("response"):
            case "start":
                plan = response.start.plan
                print(inference_pb2.Algorithm.Name(plan.algorithm), "because", plan.reason)
            case "chunk":
                print(response.chunk.text, end="", flush=True)
            case "complete":
                usage = response.complete.usage
                reason = inference_pb2.FinishReason.Name(response.complete.finish_reason)
                print(f"\n{reason}, {usage.completion_tokens} tokens")
