"""A turn whose decode ring computes the new tokens itself, beside the way over a prefill ring."""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.cost.migration import predict_migration
from cp_core.cost.model import PASS_Q, PrefillCost
from cp_core.cost.prefill import predict_turn
from cp_core.cost.profile import HardwareProfile
from cp_core.errors import ConfigError
from services.offline.planning.models import PlannedModel
from services.offline.planning.sizing import RingShape


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectWay:
    """`cost` of the step on a decode ring of `shape` that keeps all cached tokens.

    The other way fetches what the prefill ring lacks of them, computes the new ones, and hands their KV over.
    """

    shape: RingShape
    cost: PrefillCost
    move_seconds: float
    prefill_seconds: float
    handoff_seconds: float

    @property
    def over_prefill_seconds(self) -> float:
        return self.move_seconds + self.prefill_seconds + self.handoff_seconds

    @property
    def is_sooner(self) -> bool:
        return self.cost.total_seconds < self.over_prefill_seconds


def direct_way(
    model: PlannedModel,
    profile: HardwareProfile,
    *,
    prefill: RingShape,
    decode: RingShape,
    new_tokens: int,
    cached_tokens: int,
    missing_tokens: int,
    prefill_seconds: float,
) -> DirectWay:
    """Between idle rings, where nobody waits for either. Raises ConfigError for more missing tokens than are cached."""
    if not 0 <= missing_tokens <= cached_tokens:
        raise ConfigError(f"--missing: {missing_tokens} is out of range; allowed are 0 to the {cached_tokens} cached")

    def move(num_tokens: int) -> float:
        return predict_migration(
            model.shape,
            profile,
            from_processes=prefill.cp * prefill.tp,
            to_processes=decode.cp * decode.tp,
            tokens=num_tokens,
            prefill_seconds=0.0,
        ).wire_seconds

    return DirectWay(
        shape=decode,
        cost=predict_turn(
            model.shape,
            profile,
            cp=decode.cp,
            tp=decode.tp,
            algorithm=PASS_Q,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
        ),
        move_seconds=move(missing_tokens),
        prefill_seconds=prefill_seconds,
        handoff_seconds=move(new_tokens),
    )
