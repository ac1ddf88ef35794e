"""Decode steps that leave cores to prompts."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringserve.workers.model.shared import SharedCores
from ringserve.workers.prefill import step as prefill_step
from ringserve.workers.protocol.steps import DecodeCommand
from ringserve.workers.rank import worker as rank_worker
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.waiting import WAIT_SECONDS
from tests.workers.models import Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn

HOLDER = """
import sys
from ringserve.workers.model.shared import SharedCores
with SharedCores(sys.argv[1]).computing():
    print("computes", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def group() -> str:
    return f"test {uuid.uuid4()}"


def test_steps_pause_while_any_prompt_of_their_group_is_computed(group: str) -> None:
    first, second, decode, others = (SharedCores(name) for name in (group, group, group, group + "b"))
    assert decode.pause_after(0.04, 0.25) == 0.0
    with first.computing():
        with second.computing():
            assert decode.pause_after(0.03, 0.25) == pytest.approx(0.09)
        assert decode.pause_after(0.04, 0.5) == pytest.approx(0.04)
        assert decode.pause_after(0.04, 1.0) == 0.0
        assert decode.pause_after(0.1, 0.25) == pytest.approx(0.05), "with its step 0.15 s"
        assert decode.pause_after(3.0, 0.25) == 0.0
        assert others.pause_after(0.04, 0.25) == 0.0
    assert decode.pause_after(0.04, 0.25) == 0.0
    for each in (first, second, decode, others):
        each.close()
        each.close()
    assert decode.pause_after(0.04, 0.25) == 0.0


def test_a_prefill_rank_that_dies_leaves_no_lock(group: str) -> None:
    decode = SharedCores(group)
    command = [sys.executable, "-c", HOLDER, group]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"computes\n"
        assert decode.pause_after(0.04, 0.25) > 0.0
        holder.kill()
        holder.wait(WAIT_SECONDS)
    assert decode.pause_after(0.04, 0.25) == 0.0
    decode.close()


def test_a_directory_that_cannot_be_had_costs_the_pauses_alone(
    group: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    cores = SharedCores(group)
    with cores.computing():
        assert cores.pause_after(0.04, 0.25) == 0.0
    assert "decode steps leave no time to prompts" in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_pauses_beside_a_prompt_and_has_the_same_tokens(
    num_ranks: int,
    group: str,
    model_paths: Mapping[str, Path],
    oracles: Mapping[str, Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode loop waits between two steps as long as a prefill rank computes, and not once it has ended."""
    prompt, sampling = random_tokens(33), SamplingParameters(max_tokens=24)
    seen: list[bool] = []
    pauses: list[float] = []
    watch = SharedCores(group)

    def prefilled(*arguments: Any) -> Any:
        seen.append(watch.pause_after(0.04, 0.25) > 0.0)
        return prefill_step.run_prefill(*arguments)

    def recording(take: Callable[[float], list[DecodeCommand]]) -> Callable[[float], list[DecodeCommand]]:
        def taken(seconds: float) -> list[DecodeCommand]:
            if is_recording:
                pauses.append(seconds)
            return take(min(seconds, 0.001) if is_recording else seconds)

        return taken

    monkeypatch.setattr(rank_worker, "run_prefill", prefilled)
    with LocalRing(model_paths["llama_gqa"], num_ranks, cores=group) as ring:
        conversations = [ring.open(name, 64) for name in "ab"]
        firsts = [ring.prefill([Turn(each, prompt, sampling)])[each.name] for each in conversations]
        assert seen == [True] * 2 * num_ranks
        assert watch.pause_after(0.04, 0.25) == 0.0
        mailbox, is_recording = ring.workers[0].parts.mailbox, False
        monkeypatch.setattr(mailbox, "take", recording(mailbox.take))
        ring.start_decode()
        answers = []
        for computes in (True, False):
            is_recording = True
            if computes:
                with watch.computing():
                    answers.append(ring.decode(conversations[0], firsts[0], sampling))
                assert any(0.0 < seconds <= 0.15 for seconds in pauses)
            else:
                answers.append(ring.decode(conversations[1], firsts[1], sampling))
                assert not any(0.0 < seconds <= 0.15 for seconds in pauses)
            is_recording = False
            pauses.clear()
    watch.close()
    for first, answer in zip(firsts, answers, strict=True):
        assert [first, *answer] == oracles["llama_gqa"].greedy(prompt, 24)
