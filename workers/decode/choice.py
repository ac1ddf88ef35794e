"""Choice of the variant for the next decode step: the configured one, or the faster one by the ring's own rates."""

from __future__ import annotations

from cp_core.cost.decode import (
    VARIANT_POLICIES,
    VARIANTS,
    DecodeLoad,
    DecodeRates,
    choose_variant,
    predict_step,
)
from cp_core.cost.model import ModelShape
from cp_core.errors import ConfigError


class DecodeChoice:
    """Variant choice by a policy of VARIANT_POLICIES, called with (sequences, stored tokens of all) before a step."""

    def __init__(self, policy: str, shape: ModelShape, num_ranks: int) -> None:
        """Choose by `policy`, without rates yet. Raises ConfigError for an unknown policy."""
        self.follow(policy)
        self._shape = shape
        self._num_ranks = num_ranks
        self._rates: DecodeRates | None = None

    def follow(self, policy: str) -> None:
        """Choose by this policy from the next step on. Raises ConfigError for an unknown one."""
        if policy not in VARIANT_POLICIES:
            raise ConfigError(f"decode.variant: {policy!r} is not allowed; use one of {', '.join(VARIANT_POLICIES)}")
        self._policy = policy

    def measured(self, rates: DecodeRates) -> None:
        """Use these rates from now on; before them, "auto" means gather."""
        self._rates = rates

    def __call__(self, num_sequences: int, stored_tokens: int) -> str:
        return choose_variant(self._policy, self._load(num_sequences, stored_tokens), self._shape, self._rates)

    def predicted(self, num_sequences: int, stored_tokens: int) -> list[tuple[str, float]]:
        """Return (variant, predicted seconds of a step) for every variant; nothing before rates are measured."""
        if self._rates is None:
            return []
        load = self._load(num_sequences, stored_tokens)
        return [(variant, predict_step(variant, load, self._shape, self._rates).total_seconds) for variant in VARIANTS]

    def _load(self, num_sequences: int, stored_tokens: int) -> DecodeLoad:
        return DecodeLoad(batch=num_sequences, stored_tokens=stored_tokens, num_ranks=self._num_ranks)
