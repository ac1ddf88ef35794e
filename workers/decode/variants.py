"""Choice of a decode step's variant, and of the weights that a ring decodes with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringserve.cp_core.cost.decode import (
    HELIX,
    STEP_VARIANTS,
    VARIANT_POLICIES,
    DecodeLoad,
    DecodeRates,
    choose_at_start,
    choose_variant,
    predict_step,
)
from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.decode.messages import LEADER
from ringserve.workers.model.loading import LoadedModel

# (sequences, stored tokens of all) of the next step -> the variant that serves it.
VariantChoice = Callable[[int, int], str]


class DecodeChoice:
    """Variant choice by a policy of VARIANT_POLICIES, called with (sequences, stored tokens of all) before a step."""

    def __init__(self, policy: str, shape: ModelShape, num_ranks: int) -> None:
        """Choose by `policy`, without rates yet. Raises ConfigError for an unknown policy."""
        self._is_helix = policy == HELIX
        self.reason = ""
        self._num_ranks = num_ranks
        self.follow(policy)
        self._shape = shape
        self.rates: DecodeRates | None = None

    def follow(self, policy: str) -> None:
        """Choose by this policy from the next step on.

        Raises ConfigError for an unknown policy, and for one that the ring's weights do not allow: a ring decodes by
        helix from its start or never.
        """
        if policy not in VARIANT_POLICIES:
            raise ConfigError(f"decode.variant: {policy!r} is not allowed; use one of {', '.join(VARIANT_POLICIES)}")
        if self._num_ranks > 1 and (policy == HELIX) != self._is_helix:
            raise ConfigError(f"decode.variant: {policy!r} is not allowed on a ring that started with other weights")
        self._policy = policy

    def measured(self, rates: DecodeRates | None) -> None:
        """Use these rates from now on; before them, "auto" means gather."""
        self.rates = rates

    def __call__(self, num_sequences: int, stored_tokens: int) -> str:
        return choose_variant(self._policy, self._load(num_sequences, stored_tokens), self._shape, self.rates)

    def share_weights(self, model: LoadedModel, ring: RingTransport) -> LoadedModel:
        """Return the model with this rank's share of its weights, if helix is chosen; collective, once rates are known.

        By "auto" the first rank chooses for all, as every rank has rates of its own, and the first call is for good.
        With tensor parallelism nothing is chosen. Ranks that outlive their ring have packed weights, which stay whole.
        Raises ModelRefused, Unavailable.
        """
        if self._policy != "auto" or self.reason or ring.size == 1 or model.tensor.size > 1 or self.rates is None:
            return model
        choice = choose_at_start(self._shape, self.rates, ring.size)
        self.reason = choice.reason
        own = torch.tensor([choice.is_helix, model.can_be_cut], dtype=torch.int64, device=model.model.device)
        words = [torch.empty_like(own) for _ in range(ring.size)]
        ring.gather_all(own, words).wait()
        if not words[LEADER][0] or not all(word[1] for word in words):
            return model
        self._policy, self._is_helix = HELIX, True
        share = model.cut_over_ring(ring.rank, ring.size)
        share.helix.connect(ring)
        return share

    def predicted(self, num_sequences: int, stored_tokens: int) -> list[tuple[str, float]]:
        """Return (variant, predicted seconds of a step) for every variant; nothing before rates are measured."""
        if self.rates is None:
            return []
        load = self._load(num_sequences, stored_tokens)
        return [
            (variant, predict_step(variant, load, self._shape, self.rates).total_seconds) for variant in STEP_VARIANTS
        ]

    def _load(self, num_sequences: int, stored_tokens: int) -> DecodeLoad:
        return DecodeLoad(batch=num_sequences, stored_tokens=stored_tokens, num_ranks=self._num_ranks)
