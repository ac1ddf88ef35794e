"""Why a turn would be computed in one way, and what each other way would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_core.cost.decode import StepCost, fastest_step
from cp_core.cost.prefill import predict_turn
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.share import process_share
from cp_core.cost_model import PASS_KV, PASS_Q, PrefillCost
from cp_core.errors import ConfigError
from cp_core.selector import POLICIES, EmpiricalFit, Selection, Turn, select
from orchestration.placement import TIE
from services.planning.models import PlannedModel
from services.planning.sizing import RingShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A way to compute the turn. `is_chosen` for exactly one."""

    name: str
    cost: PrefillCost
    is_chosen: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """`selections` say what other policies would take, by their names; `step` is the decode step that follows."""

    new_tokens: int
    cached_tokens: int
    shape: RingShape
    policy: str
    chosen: Selection
    alternatives: tuple[Alternative, ...]
    selections: tuple[tuple[str, Selection], ...]
    step: StepCost

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
) -> Explanation:
    """What `policy` takes for T new tokens after P cached ones, in one step, beside every other way.

    Raises InvalidRequest for a turn without new tokens, ConfigError for an unknown policy or "empirical" without `fit`.
    """
    turn = Turn(new_tokens=new_tokens, cached_tokens=cached_tokens, num_ranks=shape.cp)
    share = process_share(model.shape, shape.tp)
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
            Alternative(name=name, cost=each, is_chosen=name == chosen.algorithm)
            for name, each in (ways | others).items()
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
    )
