"""`ringserve drain` on a cluster: what a decode ring keeps goes to the other, of another size, over real ranks."""

from __future__ import annotations

import json
from urllib.request import urlopen

from ringserve.client import ServerInfo
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

NAMES = ("one", "two", "three")
ANSWER = 6


def test_the_next_turns_of_conversations_whose_ring_has_left_find_all_their_kv(
    several: Cluster, inference: Inference, stock: StockModel
) -> None:
    moved_before = _moved_bytes(inference.info())
    histories: dict[str, list[int]] = {}
    rings: dict[str, tuple[str, str]] = {}
    for number, name in enumerate(NAMES):
        prompt = random_tokens(90, seed=number)
        answer = inference.answer(ids(prompt, conversation=name, max_tokens=ANSWER))
        histories[name] = [*prompt, *answer.output_ids]
        rings[name] = (answer.plan.prefill_ring, answer.plan.decode_ring)
    _, leaving = rings[NAMES[0]]
    (staying,) = {"decode-0", "decode-wide-0"} - {leaving}
    there = [name for name in NAMES if rings[name][1] == leaving]

    drained = several.ringserve.run("drain", leaving, "--name", several.name, "--json")
    assert drained.returncode == 0, drained.stderr
    outcome = json.loads(drained.stdout)
    num_bytes = len(there) * (90 + ANSWER - 1) * _token_bytes(inference)
    nothing = {"left": 0, "no_room": 0, "failed": 0}
    assert outcome == {"ring": leaving, "drained": True, "moved": len(there), "moved_bytes": num_bytes, **nothing}

    info = inference.info()
    (told,) = [drain for drain in info.drains if drain.ring == leaving]
    assert (told.has_left, told.moved) == (True, len(there))
    assert _moved_bytes(info) == moved_before + num_bytes
    for name in NAMES:
        places = {place.ring: place.num_tokens for place in inference.conversation(name).placements}
        assert places == {rings[name][0]: 90, staying: 90 + ANSWER - 1}
        history = histories[name]
        answer = inference.answer(
            ids([7, 8], conversation=name, mode=inference_pb2.PROMPT_MODE_APPEND, max_tokens=ANSWER)
        )
        assert list(answer.output_ids) == stock.greedy([*history, 7, 8], ANSWER).token_ids
        assert answer.usage.cached_tokens == len(history) - 1
        assert answer.plan.decode_ring == staying

    undrained = several.ringserve.run("undrain", leaving, "--name", several.name)
    assert undrained.returncode == 0, undrained.stderr
    assert not inference.info().drains


def _token_bytes(inference: Inference) -> int:
    request = inference_pb2.GetModelInfoRequest()
    return inference.stub.GetModelInfo(request, timeout=WAIT_SECONDS).kv_bytes_per_token


def _moved_bytes(info: ServerInfo) -> int:
    """Return the bytes moved by drains of decode rings, and check that status and metrics agree."""
    told = sum(each.payload_bytes for each in info.kv_moves if (each.role, each.reason) == ("decode", "drain"))
    with urlopen(f"http://{info.router_metrics_endpoint}/metrics", timeout=WAIT_SECONDS) as page:
        lines = page.read().decode().splitlines()
    series = 'ringserve_router_kv_moved_bytes_total{reason="drain",role="decode"}'
    assert sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series)) == told
    return told
