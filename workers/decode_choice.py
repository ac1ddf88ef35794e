"""Which variant serves the next decode step: the configured one, or by what this ring measured of itself."""

from __future__ import annotations

from cp_core.cost_model import ModelShape, Rates
from cp_core.decode_variant import VARIANT_POLICIES, DecodeLoad, DecodeRates, choose_variant
from cp_core.errors import ConfigError
from workers.steps import RingRates


class DecodeChoice:
    """`policy` is one of VARIANT_POLICIES. Called with (sequences, stored tokens of all) before every step."""

    def __init__(self, policy: str, shape: ModelShape, num_ranks: int) -> None:
        """Raises ConfigError for an unknown policy."""
        if policy not in VARIANT_POLICIES:
            raise ConfigError(f"decode.variant: {policy!r} is not allowed; use one of {', '.join(VARIANT_POLICIES)}")
        self._policy = policy
        self._shape = shape
        self._num_ranks = num_ranks
        self._rates: DecodeRates | None = None

    def measured(self, rates: RingRates, weight_bytes_per_second: float) -> None:
        """Decide by these from now on; before, "auto" gathers."""
        self._rates = DecodeRates(
            ring=Rates(
                gemm_flops=rates.gemm_flops,
                attention_flops=rates.attention_flops,
                link_bytes_per_second=rates.link_bytes_per_second,
                link_latency_seconds=rates.link_latency_seconds,
                overlap=rates.overlap,
            ),
            weight_bytes_per_second=weight_bytes_per_second,
        )

    def __call__(self, num_sequences: int, stored_tokens: int) -> str:
        load = DecodeLoad(batch=num_sequences, stored_tokens=stored_tokens, num_ranks=self._num_ranks)
        return choose_variant(self._policy, load, self._shape, self._rates)
