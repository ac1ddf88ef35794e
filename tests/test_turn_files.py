"""The files whose code one ordinary turn executes: what a reader of a turn's path opens. `-s` prints them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ringserve.services.gateway.text import TextCodec
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from ringserve.workers.model.builtin import write_tokenizer
from tests.orchestration.service import Service
from tests.services.local_gateway import LocalGateway
from tests.waiting import WAIT_SECONDS
from tests.workers.models import save_model

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("services", "orchestration", "workers", "cp_core")
MAX_FILES = 75
"""Files that an ordinary turn may execute. A reader of its path opens them all."""


@contextmanager
def noting_files(files: set[str]) -> Iterator[None]:
    """Add the file of every function that this thread, or one that it starts, calls in the context."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def answer(stub: inference_pb2_grpc.InferenceAsyncStub, text: str) -> inference_pb2.GenerateComplete:
    """Answer one turn of conversation c."""
    sampling = inference_pb2.SamplingParams(max_tokens=3)
    request = inference_pb2.GenerateRequest(text=text, conversation_id="c", sampling_params=sampling)
    *_, last = [response async for response in stub.Generate(request, timeout=WAIT_SECONDS)]
    return last.complete


def quiet_service(model: Path) -> Service:
    """Make rings of 2 and 3 that announce themselves once, and whose ranks nobody watches.

    Both go on beside a turn and are no part of it; a slow turn has them in it, a fast one not.
    """
    made = Service(model, 2, 3)
    for leader in made.peers.leaders.values():
        quiet = replace(leader.settings, announce_interval=3600.0, watch_interval=3600.0)
        leader.settings = leader.ring.settings = quiet
    return made


def of_the_project(files: set[str]) -> list[Path]:
    real = (Path(name).resolve() for name in list(files))
    inside = (path.relative_to(ROOT) for path in real if path.is_relative_to(ROOT))
    return sorted(path for path in inside if path.parts[0] in FLOORS)


async def test_one_ordinary_turn_executes_code_of_few_files(tmp_path: Path) -> None:
    """Ranks are threads here. Two turns come first: what begins once has begun then.

    Of three more the one with the fewest files counts, since conversations expire beside a turn.
    """
    model = save_model("llama_gqa", tmp_path)
    write_tokenizer(model)
    files: set[str] = set()
    counted: list[list[Path]] = []
    with noting_files(files):
        async with (
            LocalGateway(model, TextCodec(model), service=quiet_service(model)) as gateway,
            gateway.channel() as channel,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            for text in ("Once upon a time", " and then", " and again", " and again", " and again"):
                files.clear()
                complete = await answer(stub, text)
                counted.append(of_the_project(files))
            await gateway.wait_idle()
    assert complete.usage.cached_tokens
    paths = min(counted[2:], key=len)
    print(len(paths), dict(Counter(path.parts[0] for path in paths)), *paths, sep="\n")
    assert len(paths) <= MAX_FILES
