"""Turn explanation: the chosen algorithm, the reason, and the predicted cost of every alternative.

`ringserve explain` prints it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringserve.cp_core.cost.decode import StepCost, fastest_step
from ringserve.cp_core.cost.model import PASS_KV, PASS_Q, PREFILL_ALGORITHMS
from ringserve.cp_core.cost.prefill import predict_migration, predict_turn
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.selector import POLICIES, Selection, Turn, fastest, select
from ringserve.cp_core.cost.sparse import SparseLosses, sparse_seconds
from ringserve.cp_core.cost.steps import PrefillCost
from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.placement.placer import TIE
from ringserve.services.offline.planning.models import PlannedModel
from ringserve.services.offline.planning.sizing import RingShape
from ringserve.workers.protocol.steps import Algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectPrefill:
    """Comparison of a turn's prefill on the decode ring itself with the same turn by way of a prefill ring.

    `cost` is for one step on a decode ring of `shape` that retains all cached tokens. For a prefill ring, the cached
    tokens that it lacks are fetched from the decode ring, the new tokens are computed, and their KV is handed over.
    Seconds.
    """

    shape: RingShape
    cost: PrefillCost
    move_seconds: float
    prefill_seconds: float
    handoff_seconds: float

    @property
    def via_prefill_ring_seconds(self) -> float:
        return self.move_seconds + self.prefill_seconds + self.handoff_seconds

    @property
    def is_sooner(self) -> bool:
        return self.cost.total_seconds < self.via_prefill_ring_seconds


def predict_direct(
    model: PlannedModel,
    profile: HardwareProfile,
    *,
    prefill: RingShape,
    decode: RingShape,
    new_tokens: int,
    cached_tokens: int,
    missing_tokens: int,
    prefill_seconds: float,
) -> DirectPrefill:
    """Predict the prefill on the decode ring, and the transfers from and to the prefill ring; all rings are idle.

    `prefill_seconds` is for the prefill ring, which lacks `missing_tokens`. Raises ConfigError if these are more than
    `cached_tokens`.
    """
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

    return DirectPrefill(
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


DECODE_RING = Algorithm.DECODE_RING.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Way to compute the turn; `is_chosen` is true for exactly one of an Explanation's."""

    name: str
    cost: PrefillCost
    is_chosen: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOption:
    """Approximate way to compute a turn: a share `keep` of other ranks' keys is sent. Seconds are predicted.

    `loss` is by measurements, in nats a token; `measured_tokens` is the prompt length of the nearest one.
    """

    keep: float
    seconds: float
    loss: float
    measured_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Choice for one turn with all alternatives.

    `chosen` is the algorithm selected for the prefill ring. If `direct` is sooner and the policy is `auto`, the decode
    ring computes the turn instead. `unforced` is what `auto` would have chosen, if an algorithm is forced. `step` is
    the decode step that follows. `sparse` are the approximate ways, the least loss first.
    """

    new_tokens: int
    cached_tokens: int
    shape: RingShape
    policy: str
    chosen: Selection
    alternatives: tuple[Alternative, ...]
    unforced: Selection | None
    step: StepCost
    direct: DirectPrefill | None = None
    sparse: tuple[SparseOption, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of the chosen alternative."""
        return next(each.cost.total_seconds for each in self.alternatives if each.is_chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingComparison:
    """Comparison of one turn on idle rings of several sizes; `chosen` is the ring that a router would take."""

    rings: tuple[Explanation, ...]
    chosen: Explanation
    reason: str


def compare_rings(rings: Sequence[Explanation]) -> RingComparison:
    """Choose as a router does among idle rings that retain nothing of the turn.

    The quickest ring wins; among rings that tie with it the smallest does.
    """
    quickest = min(rings, key=lambda ring: ring.seconds)
    tied = [ring for ring in rings if ring.seconds <= quickest.seconds * (1 + TIE)]
    chosen = min(tied, key=lambda ring: (ring.shape.num_processes, ring.seconds))
    reason = "the quickest"
    if chosen is not quickest:
        reason = f"within {TIE:.0%} of the quickest, {quickest.shape}, and with fewer processes"
    return RingComparison(rings=tuple(rings), chosen=chosen, reason=reason)


def explain_turn(
    model: PlannedModel,
    profile: HardwareProfile,
    shape: RingShape,
    *,
    policy: str,
    new_tokens: int,
    cached_tokens: int,
    decode: RingShape | None = None,
    missing_tokens: int = 0,
    losses: SparseLosses | None = None,
) -> Explanation:
    """Explain the selection of `policy` for T new tokens after P cached ones, computed in one step.

    `decode` is the ring that retains all cached tokens; the prefill ring lacks `missing_tokens` of them. Raises
    InvalidRequest for a turn without new tokens, or one that is longer, or on more ranks, than the measurements in
    `losses`. Raises ConfigError for an unknown policy, or more missing tokens than cached ones.
    """
    turn = Turn(new_tokens=new_tokens, cached_tokens=cached_tokens, num_ranks=shape.cp)
    share = model.shape.share(shape.tp)
    rates = profile.prefill.rates(shape.cp, is_cached=cached_tokens > 0)
    if policy not in POLICIES:
        raise ConfigError(f"--selector: {policy!r} is unknown; allowed are {', '.join(POLICIES)}")
    chosen = select(policy, turn, share, rates)

    def cost(cp: int, algorithm: str, new: int, cached: int) -> PrefillCost:
        return predict_turn(
            model.shape, profile, cp=cp, tp=shape.tp, algorithm=algorithm, new_tokens=new, cached_tokens=cached
        )

    by_ring = {name: cost(shape.cp, name, new_tokens, cached_tokens) for name in PREFILL_ALGORITHMS}
    others: dict[str, PrefillCost] = {}
    direct = None
    if decode is not None and cached_tokens:
        direct = predict_direct(
            model,
            profile,
            prefill=shape,
            decode=decode,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            missing_tokens=missing_tokens,
            prefill_seconds=by_ring[chosen.algorithm].total_seconds,
        )
        others[DECODE_RING] = direct.cost
    is_direct = direct is not None and direct.is_sooner and policy == "auto"
    taken = DECODE_RING if is_direct else chosen.algorithm
    if cached_tokens:
        others["everything computed again, pass_kv"] = cost(shape.cp, PASS_KV, new_tokens + cached_tokens, 0)
    if shape.cp > 1:
        others["one rank that holds all cached tokens"] = cost(1, PASS_KV, new_tokens, cached_tokens)
    return Explanation(
        new_tokens=new_tokens,
        cached_tokens=cached_tokens,
        shape=shape,
        policy=policy,
        chosen=chosen,
        alternatives=tuple(
            Alternative(name=name, cost=each, is_chosen=name == taken) for name, each in (by_ring | others).items()
        ),
        unforced=None if policy == "auto" else fastest(turn, share, rates),
        step=fastest_step(
            model.shape,
            model.weights,
            profile,
            cp=shape.cp,
            tp=shape.tp,
            batch=1,
            context_tokens=new_tokens + cached_tokens,
        ),
        direct=direct,
        sparse=tuple(
            SparseOption(
                keep=each.sparsity.keep,
                seconds=by_ring[PASS_KV].sum_seconds
                + sparse_seconds(share, rates, shape.cp, each.sparsity, new_tokens, cached_tokens),
                loss=each.loss,
                measured_tokens=each.nearest.num_tokens,
            )
            for each in (losses.predict(new_tokens + cached_tokens, shape.cp) if losses is not None else ())
        ),
    )
