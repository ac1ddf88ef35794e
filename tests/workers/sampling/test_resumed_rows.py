"""Resumed sequences: one that joins a batch with a part of its answer gets the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.cost.decode import VARIANTS
from ringserve.workers.sampling.parameters import SamplingParameters, TokenHistory
from tests.workers.models import VOCAB_SIZE, random_tokens
from tests.workers.rings import LocalRing, Turn

PROMPT = random_tokens(13)
SAMPLINGS = {
    "penalties": SamplingParameters(
        temperature=1.0,
        seed=4,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        max_tokens=20,
    ),
    "min_tokens": SamplingParameters(
        max_tokens=20, min_tokens=14, stop_token_ids=tuple(range(0, VOCAB_SIZE, 2)), logprobs=1
    ),
}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_rest_of_an_answer_is_the_same(
    name: str, variant: str, num_ranks: int, model_paths: Mapping[str, Path]
) -> None:
    sampling = SAMPLINGS[name]
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
        whole = ring.open("whole", 64)
        first = ring.prefill([Turn(whole, PROMPT, sampling)])["whole"]
        ring.start_decode()
        ring.admit(whole, first, sampling, history=TokenHistory.of(sampling, PROMPT, [first]))
        events = ring.events_until_finished(["whole"])["whole"]
        answer = [first, *(event.token_id for event in events if event.token_id is not None)]
        assert len(answer) > 10
        ring.stop_decode()
    with LocalRing(model_paths["llama_gqa"], num_ranks, decode_variant=variant) as ring:
        parts = {cut: ring.open(f"part-{cut}", 64) for cut in (2, 9)}
        ring.prefill([Turn(part, [*PROMPT, *answer[: cut - 1]]) for cut, part in parts.items()])
        ring.start_decode()
        for cut, part in parts.items():
            history = TokenHistory.of(sampling, PROMPT, answer[:cut])
            ring.admit(part, answer[cut - 1], sampling, num_generated=cut, history=history)
        rest = ring.events_until_finished([part.name for part in parts.values()])
    for cut, part in parts.items():
        assert [event.token_id for event in rest[part.name]] == answer[cut:]
