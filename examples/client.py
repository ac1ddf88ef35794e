"""Conversation of two turns by the typed client, the first one streamed."""

import argparse
import os

from ringserve.client import Client, Sampling

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", default="127.0.0.1:50051", help="gateway, HOST:PORT")
options = parser.parse_args()

with Client(options.target, token=os.environ.get("RINGSERVE_TOKEN", "")) as client:
    tale = client.talk()
    with tale.stream("Once upon a time", sampling=Sampling(max_tokens=32), timeout=60) as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
    print()
    second = tale.ask(" And then?", sampling=Sampling(max_tokens=16), timeout=60)
    print(second.text)
    print(f"{second.plan.algorithm}: {second.plan.reason}")
    print(f"{second.usage.cached_tokens} of {second.usage.prompt_tokens} prompt tokens were cached")
    tale.delete()
