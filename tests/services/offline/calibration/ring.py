"""Fake client of rings whose durations follow a profile, with noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count, pairwise
from operator import ne

from ringserve.client import Answer, ModelInfo, Plan, RingInfo, Sampling, ServerInfo
from ringserve.client.results import Chunk
from ringserve.cp_core.cost.fit import (
    PrefillSample,
    StepPart,
    StepSample,
    predicted_prefill,
    predicted_step,
    with_chain_cuts,
)
from ringserve.cp_core.cost.memory import weight_bytes
from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.services.offline.calibration.fitting import profile_from_rings, shape_of
from ringserve.views import RingRates

INFO = ModelInfo(
    model_path="model",
    dtype="bfloat16",
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=32000,
    max_context_length=1 << 17,
    kv_bytes_per_token=2 * 16 * 8 * 64 * 2,
    num_parameters=1_200_000_000,
)


def truth() -> HardwareProfile:
    """Return the true profile of the rings, slower than their own rates in every respect."""
    gtt = read_profile("gtt")
    prefill = replace(
        gtt.prefill,
        gemm_flops=3e14,
        attention_flops=2e14,
        link_bytes_per_second=5e9,
        link_latency_seconds=2e-4,
        all_to_all_bytes_per_second=4e9,
        all_to_all_latency_seconds=3e-4,
        layer_overhead_seconds=1e-4,
        rank_overhead_seconds=0.0,
        cached_overhead_seconds=5e-5,
        chain_overhead=1.5,
        chain_overlap=0.5,
        lone_speed=2.0,
    )
    return replace(gtt, prefill=prefill)


def server(num_ranks: int, speeds: tuple[float, ...] = (), lateness: tuple[float, ...] = ()) -> ServerInfo:
    rates = RingRates(
        gemm_flops=5e14,
        attention_flops=4e14,
        link_bytes_per_second=1e10,
        link_latency_seconds=5e-5,
        overlap=1.0,
        lone_speed=2.0,
        speeds=speeds,
        lateness=lateness,
    )
    return ServerInfo(
        rings=tuple(
            RingInfo(role=role, name=f"{role}-0", num_ranks=num_ranks, tp=1, capacity_tokens=100_000, rates=measured)
            for role, measured in (("prefill", rates), ("decode", None))
        )
    )


@dataclass
class FakeClient:
    """Fake client that answers as a gateway does.

    `shared` prefills are reported as computed together with another turn, and `level` chains as having had no room for
    their cuts. All algorithms of a cell are slower by the same share, up to `drift`.
    Prefills of `disturbed` (new tokens, cached tokens, algorithm) take four times as long.
    """

    num_ranks: int = 4
    noise: float = 0.0
    drift: float = 0.0
    shared: int = 0
    level: int = 0
    speeds: tuple[float, ...] = ()
    lateness: tuple[float, ...] = ()
    disturbed: tuple[int, int, str] | None = None
    chunk_tokens: int = 8192
    conversations: dict[str, list[int]] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    _draw: random.Random = field(default_factory=lambda: random.Random(1))
    _slower: float = 1.0
    _measured: tuple[int, int] = (0, 0)

    def model_info(self) -> ModelInfo:
        return INFO

    def server_info(self) -> ServerInfo:
        return server(self.num_ranks, self.speeds, self.lateness)

    def delete_conversation(self, conversation_id: str) -> None:
        del self.conversations[conversation_id]
        self.deleted.append(conversation_id)

    def ask(
        self,
        prompt: Sequence[int],
        *,
        conversation_id: str,
        mode: str,
        sampling: Sampling,
        algorithm: str,
        timeout: float,
    ) -> Answer:
        prompt = list(prompt)
        self.asked.append(algorithm)
        known = self.conversations.get(conversation_id, [])
        cached = next(compress(count(), map(ne, known, prompt)), min(len(known), len(prompt) - 1))
        if conversation_id:
            self.conversations[conversation_id] = prompt
        bounds = [*range(cached, len(prompt), self.chunk_tokens), len(prompt)]
        sample = PrefillSample(
            cp=self.num_ranks,
            tp=1,
            algorithm=algorithm or "pass_kv",
            new_tokens=len(prompt) - cached,
            cached_tokens=cached,
            seconds=1.0,
            cuts=tuple(bounds[1:-1]),
            speeds=self.speeds,
            lateness=self.lateness,
        )
        # Ranks cut a chain by their own rates.
        sample = with_chain_cuts(shape_of(INFO), profile_from_rings(INFO, self.server_info().rings, "rings"), sample)
        is_level = self.level > 0 and algorithm == "chain"
        self.level -= is_level
        num_turns, self.shared = (2, self.shared - 1) if self.shared and algorithm else (1, self.shared)
        seconds = predicted_prefill(shape_of(INFO), truth(), sample) * self._draw.uniform(
            1 - self.noise, 1 + self.noise
        )
        if self._measured != (sample.new_tokens, cached):
            self._slower = 1.0 + self._draw.uniform(0.0, self.drift)
            self._measured = (sample.new_tokens, cached)
        seconds *= self._slower
        if (sample.new_tokens, cached, sample.algorithm) == self.disturbed:
            seconds *= 4.0
        plan = Plan(
            algorithm=sample.algorithm,
            new_tokens=sample.new_tokens,
            cached_tokens=cached,
            prefill_ring="prefill-0",
            decode_ring="decode-0",
            prefill_ranks=self.num_ranks,
            decode_ranks=self.num_ranks,
            prefill_seconds=seconds,
            chunks=tuple(
                Chunk(
                    start=start,
                    stop=stop,
                    algorithm=sample.algorithm,
                    num_turns=num_turns,
                    fallback="level_cuts" if is_level else "",
                )
                for start, stop in pairwise(bounds)
            ),
        )
        step = StepSample(cp=self.num_ranks, tp=1, batch=1, context_tokens=len(prompt), part=StepPart.STEP, seconds=1.0)
        ttit = predicted_step(shape_of(INFO), weight_bytes(shape_of(INFO)), truth(), step)
        return Answer(plan=plan, ttit_seconds=ttit if (sampling.max_tokens or 0) > 1 else 0.0)
