"""A turn whose decode ring computes the new tokens itself, beside the way over a prefill ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_core.cost.decode import StepCost, fastest_step
from cp_core.cost.model import PASS_KV, PASS_Q, PrefillCost
from cp_core.cost.prefill import predict_migration, predict_turn
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.selector import POLICIES, EmpiricalFit, Selection, Turn, select
from cp_core.errors import ConfigError
from orchestration.placement.placer import TIE
from services.offline.planning.models import PlannedModel
from services.offline.planning.sizing import RingShape
from workers.protocol.prefill_steps import Algorithm


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


DECODE_RING = Algorithm.DECODE_RING.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A way to compute the turn. `is_chosen` for exactly one."""

    name: str
    cost: PrefillCost
    is_chosen: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """`selections` say what other policies would take, by their names; `step` is the decode step that follows.

    `chosen` is what a prefill ring takes; where `direct` is sooner, and no algorithm is forced, none is needed.
    """

    new_tokens: int
    cached_tokens: int
    shape: RingShape
    policy: str
    chosen: Selection
    alternatives: tuple[Alternative, ...]
    selections: tuple[tuple[str, Selection], ...]
    step: StepCost
    direct: DirectWay | None = None

    @property
    def seconds(self) -> float:
        """Of the chosen way."""
        return next(each.cost.total_seconds for each in self.alternatives if each.is_chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingComparison:
    """The same turn on idle rings of several sizes. `chosen` is one of them, the one that a router would take."""

    rings: tuple[Explanation, ...]
    chosen: Explanation
    reason: str


def compare_rings(rings: Sequence[Explanation]) -> RingComparison:
    """As a router does with idle rings that keep nothing of the turn: the quickest, of those that tie the smallest."""
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
    fit: EmpiricalFit | None = None,
    decode: RingShape | None = None,
    missing_tokens: int = 0,
) -> Explanation:
    """What `policy` takes for T new tokens after P cached ones, in one step, beside every other way.

    `decode` is the ring that keeps all cached tokens, of which the prefill ring lacks `missing_tokens`. Raises
    InvalidRequest for a turn without new tokens, ConfigError for an unknown policy, "empirical" without `fit`, or more
    missing tokens than cached ones.
    """
    turn = Turn(new_tokens=new_tokens, cached_tokens=cached_tokens, num_ranks=shape.cp)
    share = model.shape.share(shape.tp)
    rates = profile.prefill.rates(shape.cp, is_cached=cached_tokens > 0)
    if policy not in POLICIES:
        raise ConfigError(f"--selector: {policy!r} is unknown; allowed are {', '.join(POLICIES)}")
    deciding = ("auto", "alg1", "alg5", *(() if fit is None else ("empirical",)))
    chosen = select(policy, turn, share, rates, fit)

    def cost(cp: int, algorithm: str, new: int, cached: int) -> PrefillCost:
        return predict_turn(
            model.shape, profile, cp=cp, tp=shape.tp, algorithm=algorithm, new_tokens=new, cached_tokens=cached
        )

    ways = {name: cost(shape.cp, name, new_tokens, cached_tokens) for name in (PASS_KV, PASS_Q)}
    others: dict[str, PrefillCost] = {}
    direct = None
    if decode is not None and cached_tokens:
        direct = direct_way(
            model,
            profile,
            prefill=shape,
            decode=decode,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            missing_tokens=missing_tokens,
            prefill_seconds=ways[chosen.algorithm].total_seconds,
        )
        others[DECODE_RING] = direct.cost
    is_direct = direct is not None and direct.is_sooner and policy not in ways
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
            Alternative(name=name, cost=each, is_chosen=name == taken) for name, each in (ways | others).items()
        ),
        selections=tuple((name, select(name, turn, share, rates, fit)) for name in deciding if name != policy),
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
    )
