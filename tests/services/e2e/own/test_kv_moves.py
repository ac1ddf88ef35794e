"""`ringserve drain` on a cluster: what a decode ring keeps of conversations goes to the other, over real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from ringserve.v1 import inference_pb2
from services.reference import StockModel
from tests.services.e2e.cluster import CALL_SECONDS, Cluster, Inference, Ringserve, ids, running_cluster
from tests.workers.models import random_tokens

NAMES = ("one", "two", "three")
ANSWER = 6
DRAIN_SECONDS = 100.0


@pytest.fixture(scope="module")
def two_decode_rings(ringserve: Ringserve, model_path: Path) -> Iterator[Cluster]:
    values = ("prefill.cp=1", "decode.groups=2", "metrics.router=127.0.0.1:0")
    options = [word for value in values for word in ("--set", value)]
    with running_cluster(ringserve, "moving", model_path, *options) as cluster:
        yield cluster


def test_the_next_turns_of_conversations_whose_ring_has_left_find_all_their_kv(
    ringserve: Ringserve, two_decode_rings: Cluster, stock: StockModel
) -> None:
    inference = Inference(two_decode_rings.gateway)
    histories: dict[str, list[int]] = {}
    rings: dict[str, str] = {}
    for number, name in enumerate(NAMES):
        prompt = random_tokens(90, seed=number)
        answer = inference.answer(ids(prompt, conversation=name, max_tokens=ANSWER))
        histories[name] = [*prompt, *answer.output_ids]
        rings[name] = answer.plan.decode_ring
    leaving = rings[NAMES[0]]
    there = [name for name in NAMES if rings[name] == leaving]

    drained = ringserve.run("drain", leaving, "--name", "moving", "--json", seconds=DRAIN_SECONDS)
    assert drained.returncode == 0, drained.stderr
    outcome = json.loads(drained.stdout)
    num_bytes = len(there) * (90 + ANSWER - 1) * _token_bytes(inference)
    nothing = {"left": 0, "no_room": 0, "failed": 0}
    assert outcome == {"ring": leaving, "drained": True, "moved": len(there), "moved_bytes": num_bytes, **nothing}

    info = inference.info()
    (told,) = [drain for drain in info.drains if drain.ring == leaving]
    assert (told.has_left, told.moved) == (True, len(there))
    assert _moved_bytes(info) == num_bytes
    for name in NAMES:
        places = {place.group: place.num_tokens for place in inference.conversation(name).placements}
        assert places == {"prefill-0": 90, ({"decode-0", "decode-1"} - {leaving}).pop(): 90 + ANSWER - 1}
        history = histories[name]
        answer = inference.answer(
            ids([7, 8], conversation=name, mode=inference_pb2.PROMPT_MODE_APPEND, max_tokens=ANSWER)
        )
        assert list(answer.output_ids) == stock.greedy([*history, 7, 8], ANSWER).token_ids
        assert answer.usage.cached_tokens == len(history) - 1
        assert answer.plan.decode_ring != leaving

    undrained = ringserve.run("undrain", leaving, "--name", "moving", seconds=DRAIN_SECONDS)
    assert undrained.returncode == 0, undrained.stderr
    assert not inference.info().drains


def _token_bytes(inference: Inference) -> int:
    request = inference_pb2.GetModelInfoRequest()
    return inference.stub.GetModelInfo(request, timeout=CALL_SECONDS).kv_bytes_per_token


def _moved_bytes(info: inference_pb2.GetServerInfoResponse) -> int:
    """As the service's status says; and the same as Prometheus is told."""
    (told,) = [each for each in info.kv_moves if (each.role, each.reason) == ("decode", "drain")]
    with urlopen(f"http://{info.router_metrics_endpoint}/metrics", timeout=CALL_SECONDS) as page:
        lines = page.read().decode().splitlines()
    series = 'ringserve_router_kv_moved_bytes_total{reason="drain",role="decode"}'
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(series)]
    assert float(value) == told.payload_bytes
    return told.payload_bytes
