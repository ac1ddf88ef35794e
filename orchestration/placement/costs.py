"""What prefills are predicted to take on a ring: by a measured hardware profile, or by the ring's own rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_core.cost.model import ModelShape, PrefillRates, RingRates, StepPredictor
from cp_core.cost.prefill import sum_seconds
from cp_core.cost.profile import HardwareProfile
from orchestration.protocol.turns import RingRegistration
from workers.model.info import tensor_share
from workers.protocol.prefill_steps import Algorithm
from workers.protocol.ranks import ModelInfo

MAX_KNOWN = 4096
"""Kinds of rings whose predictors are kept. Each new measurement of a ring's rates makes it another kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Rings that are alike in all that a step's time depends on. Of the sums over a rank's tensor parallel processes
    it has the seconds for each of the rank's tokens, and those that a step's messages take to start.
    """

    rates: PrefillRates
    predictor: StepPredictor
    sum_seconds_a_token: float
    sum_start_seconds: float


class StepSeconds(NamedTuple):
    """By algorithm, but for the sums over tensor parallel processes, which are the same in both."""

    pass_kv: float
    pass_q: float
    sums: float

    def by(self, algorithm: Algorithm) -> float:
        """All of it. A decode ring computes a prompt by pass-Q."""
        return (self.pass_kv if algorithm is Algorithm.PASS_KV else self.pass_q) + self.sums

    @property
    def fastest(self) -> Algorithm:
        return Algorithm.PASS_Q if self.pass_q < self.pass_kv else Algorithm.PASS_KV


class RingCosts:
    """Of one model. `profile` stands for every ring; without, each ring's registered rates do.

    `compute_flops` and `link_bytes_per_second` take the place of either's attention rate and link; 0 leaves them.
    """

    def __init__(
        self,
        model: ModelInfo,
        *,
        profile: HardwareProfile | None = None,
        compute_flops: float = 0.0,
        link_bytes_per_second: float = 0.0,
    ) -> None:
        self._model = model
        self._shape = model.shape
        self._profile = profile
        self._compute_flops = compute_flops
        self._link_bytes_per_second = link_bytes_per_second
        self._shapes: dict[int, ModelShape] = {}
        self._kinds: dict[tuple[RingRates | None, int, int, bool], _Kind] = {}

    def rates(self, ring: RingRegistration, *, is_cached: bool) -> PrefillRates:
        """What one rank does in a step, after cached tokens or without."""
        return self._kind(ring, is_cached).rates

    def shape(self, ring: RingRegistration) -> ModelShape:
        """What one of a rank's tensor parallel processes computes."""
        if ring.tp not in self._shapes:
            self._shapes[ring.tp] = tensor_share(self._model, ring.tp).shape
        return self._shapes[ring.tp]

    def seconds(self, ring: RingRegistration, new_tokens: int, cached_tokens: int) -> StepSeconds:
        """Of one step, by each algorithm: T new tokens after P cached ones."""
        kind = self._kind(ring, cached_tokens > 0)
        pass_kv, pass_q = kind.predictor.seconds(new_tokens, cached_tokens)
        sums = kind.sum_start_seconds + -(-new_tokens // ring.num_ranks) * kind.sum_seconds_a_token
        return StepSeconds(pass_kv, pass_q, sums)

    def pull_seconds(self, ring: RingRegistration, num_bytes: float) -> float:
        """Of KV that comes back from a decode ring, `num_bytes` over each link."""
        if self._profile is not None and num_bytes:
            return ring.rates.link_latency_seconds + num_bytes / self._profile.kv_link_bytes_per_second
        return self.rates(ring, is_cached=False).message_seconds(num_bytes)

    def _kind(self, ring: RingRegistration, is_cached: bool) -> _Kind:
        # A profile stands for all rings of a size; without, what is cached changes nothing.
        key = (
            (ring.rates, ring.num_ranks, ring.tp, False)
            if self._profile is None
            else (None, ring.num_ranks, ring.tp, is_cached)
        )
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_KNOWN:
                self._kinds.clear()
            kind = self._kinds[key] = self._made(ring, is_cached)
        return kind

    def _made(self, ring: RingRegistration, is_cached: bool) -> _Kind:
        rates = self._given(ring, is_cached)
        seconds_a_token = start = 0.0
        if ring.tp > 1 and self._profile is not None:
            seconds_a_token = sum_seconds(self._shape, self._profile, ring.tp, 1)
        elif ring.tp > 1:
            # Of the embedding, and after each attention and MLP; taken to pass links like those of the ring.
            num_sums = 1 + 2 * self._model.num_layers
            num_bytes = 2 * (ring.tp - 1) / ring.tp * self._model.hidden_size * self._model.element_bytes
            seconds_a_token = num_sums * num_bytes / rates.ring.link_bytes_per_second
            start = num_sums * rates.ring.link_latency_seconds
        return _Kind(
            rates=rates,
            predictor=StepPredictor(self.shape(ring), rates, ring.num_ranks),
            sum_seconds_a_token=seconds_a_token,
            sum_start_seconds=start,
        )

    def _given(self, ring: RingRegistration, is_cached: bool) -> PrefillRates:
        """By the profile or the ring itself, with what the settings put in their place."""
        if self._profile is None:
            found = PrefillRates(ring=ring.rates)
        else:
            found = self._profile.prefill.rates(ring.num_ranks, is_cached=is_cached)
        return replace(
            found,
            ring=replace(
                found.ring,
                attention_flops=self._compute_flops or found.ring.attention_flops,
                link_bytes_per_second=self._link_bytes_per_second or found.ring.link_bytes_per_second,
            ),
        )
