"""Every served family against transformers' eager attention: logits over rings, follow-ups, and decoded tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ringserve.workers.model.loading import load_model
from ringserve.workers.model.support import EXPERT_FAMILIES, FAMILIES
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.sampling.parameters import SamplingParameters
from tests.workers.models import FAMILY_SWITCHES, KINDS, Oracle, random_tokens, save_family
from tests.workers.rings import LocalRing, Turn

DRAWS = [(family, switches) for family, draws in FAMILY_SWITCHES.items() for switches in draws]
ALGORITHMS = (Algorithm.PASS_KV, Algorithm.PASS_Q, Algorithm.GATHER_KV, Algorithm.SP_NTP, Algorithm.CHAIN)
LENGTHS = (46, 1, 9)
"""New tokens of the turns: the second is shorter than the ring, so ranks without tokens attend others' queries."""
VARIANTS = ("gather", "pass_q", "helix")


def test_every_family_is_compared() -> None:
    in_kinds = {kind.partition("_")[0] for kind in KINDS}
    assert {*FAMILIES, *EXPERT_FAMILIES} == {*FAMILY_SWITCHES, *in_kinds}


@pytest.mark.parametrize(
    ("number", "family", "switches"), [(number, *draw) for number, draw in enumerate(DRAWS)], ids=str
)
def test_a_family_answers_as_transformers_does(
    number: int, family: str, switches: dict[str, Any], tmp_path: Path
) -> None:
    path = save_family(family, switches, tmp_path)
    oracle, algorithm = Oracle(path), ALGORITHMS[number % len(ALGORITHMS)]
    variant = ("gather", "pass_q")[number % 2]  # a ring that may choose helix computes no prefill steps
    history: list[int] = []
    with LocalRing(path, 3, packs_weights=True, decode_variant=variant) as ring:
        conversation = ring.open("a", 128)
        for length in LENGTHS:
            new = random_tokens(length, seed=length)
            (logits,) = ring.prefill_logits([Turn(conversation, new)], algorithm)
            history += new
            expected = oracle.logits(history)[-length:]
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        sampling = SamplingParameters(max_tokens=6)
        ring.start_decode()
        first = int(expected[-1].argmax())
        following = ring.decode(conversation, first, sampling)
    assert [first, *following] == oracle.greedy(history, 6)


def _forms() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (family, switches, variant): the first draw of a family with each variant, every other draw with one."""
    for family in ("granite", "cohere", "gemma", "gemma3_text", "mistral", "qwen3"):
        for number, switches in enumerate(FAMILY_SWITCHES[family]):
            for variant in VARIANTS if number == 0 else VARIANTS[-number:][:1]:
                yield family, switches, variant


@pytest.mark.parametrize(("family", "switches", "variant"), list(_forms()))
def test_a_family_with_scales_of_its_own_decodes_in_every_form(
    family: str, switches: dict[str, Any], variant: str, tmp_path: Path
) -> None:
    path = save_family(family, switches, tmp_path)
    oracle, prompt, sampling = Oracle(path), random_tokens(2), SamplingParameters(max_tokens=10)
    with LocalRing(path, 3, decode_variant=variant) as ring:
        conversation = ring.open("a", 64)
        first = ring.prefill([Turn(conversation, prompt, sampling)])["a"]
        ring.start_decode()
        following = ring.decode(conversation, first, sampling)
    assert [first, *following] == oracle.greedy(prompt, 10)


def test_experts_are_not_cut(tmp_path: Path) -> None:
    """So a decode ring does not choose helix by itself for a family whose plan it cannot follow."""
    path = save_family("qwen3_moe", FAMILY_SWITCHES["qwen3_moe"][0], tmp_path)
    assert not load_model(path, "float32", "cpu").can_be_cut


@pytest.mark.parametrize(
    ("family", "switches"), [draw for draw in DRAWS if draw[0] in ("qwen2_moe", "glm4_moe", "olmo2")]
)
def test_the_parameters_of_a_family_are_counted(family: str, switches: dict[str, Any], tmp_path: Path) -> None:
    loaded = load_model(save_family(family, switches, tmp_path), "float32", "cpu")
    assert loaded.info.num_parameters == pytest.approx(loaded.model.num_parameters(), rel=0.25)
