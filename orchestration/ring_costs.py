"""What prefills are predicted to take on a ring: by a measured hardware profile, or by the ring's own rates."""

from __future__ import annotations

from dataclasses import replace

from cp_core.cost.profile import HardwareProfile
from cp_core.cost.share import sum_seconds
from cp_core.cost_model import PASS_Q, ModelShape, Rates, predict_prefill
from cp_core.selector import Turn
from orchestration.turn import GroupRegistration
from workers.model_info import tensor_share
from workers.steps import Algorithm, ModelInfo


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
        self._profile = profile
        self._compute_flops = compute_flops
        self._link_bytes_per_second = link_bytes_per_second
        self._shapes: dict[int, ModelShape] = {}

    def rates(self, ring: GroupRegistration, *, is_cached: bool) -> Rates:
        """What one rank does in a step, after cached tokens or without."""
        if self._profile is None:
            measured = ring.rates
            return Rates(
                gemm_flops=measured.gemm_flops,
                attention_flops=self._compute_flops or measured.attention_flops,
                link_bytes_per_second=self._link_bytes_per_second or measured.link_bytes_per_second,
                link_latency_seconds=measured.link_latency_seconds,
                overlap=measured.overlap,
            )
        found = self._profile.prefill.rates(ring.num_ranks, is_cached=is_cached)
        return replace(
            found,
            attention_flops=self._compute_flops or found.attention_flops,
            link_bytes_per_second=self._link_bytes_per_second or found.link_bytes_per_second,
        )

    def shape(self, ring: GroupRegistration) -> ModelShape:
        """What one of a rank's tensor parallel processes computes."""
        if ring.tp not in self._shapes:
            self._shapes[ring.tp] = tensor_share(self._model, ring.tp).shape
        return self._shapes[ring.tp]

    def seconds(self, ring: GroupRegistration, algorithm: str, turn: Turn) -> float:
        """Of one step: T new tokens after P cached ones. A decode ring computes them by pass-Q."""
        algorithm = PASS_Q if algorithm == Algorithm.DECODE_RING else algorithm
        rates = self.rates(ring, is_cached=turn.cached_tokens > 0)
        cost = predict_prefill(self.shape(ring), rates, turn.num_ranks, algorithm, turn.new_tokens, turn.cached_tokens)
        return cost.total_seconds + self._tensor_sums(ring, rates, turn)

    def pull_seconds(self, ring: GroupRegistration, num_bytes: float) -> float:
        """Of KV that comes back from a decode ring, `num_bytes` over each link."""
        if self._profile is not None and num_bytes:
            return ring.rates.link_latency_seconds + num_bytes / self._profile.kv_link_bytes_per_second
        return self.rates(ring, is_cached=False).message_seconds(num_bytes)

    def _tensor_sums(self, ring: GroupRegistration, rates: Rates, turn: Turn) -> float:
        """Seconds of the sums over tensor parallel processes: of the embedding, and after each attention and MLP.

        Every algorithm needs the same ones. Without a profile they are taken to pass links like those of the ring.
        """
        if ring.tp == 1:
            return 0.0
        rows = -(-turn.new_tokens // turn.num_ranks)
        if self._profile is not None:
            return sum_seconds(self._model.shape, self._profile, ring.tp, rows)
        num_bytes = rows * self._model.hidden_size * self._model.element_bytes
        return (1 + 2 * self._model.num_layers) * rates.message_seconds(2 * (ring.tp - 1) / ring.tp * num_bytes)
