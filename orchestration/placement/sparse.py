"""Choice whether a turn with a bound is sparse: the least time that a loss allows, or the least loss for a time.

Without a bound every turn is exact. An exact turn has no loss, and is one of the choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ringserve.cp_core.cost.selector import duration, is_clearly_less
from ringserve.cp_core.cost.sparse import PredictedLoss, SparseLosses
from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.placement.kv_locations import Choice, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.planner import Planner
from ringserve.orchestration.placement.registry import RingRegistry
from ringserve.orchestration.protocol.plans import MAX_LOSS, Bound, SparsePlan
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.workers.protocol.prefill_steps import Algorithm


class _Option(NamedTuple):
    """Way to compute a turn: its loss, the seconds to its first token, and its sparsity; None: exact."""

    loss: float
    seconds: float
    predicted: PredictedLoss | None


class SparseChooser:
    """Chooser by measured losses and predicted times. `bound` is for turns that name none.

    `losses` is None if the operator measured none; turns that name a bound are then refused.
    """

    def __init__(
        self,
        rings: RingRegistry,
        placer: RingPlacer,
        planner: Planner,
        losses: SparseLosses | None = None,
        bound: Bound | None = None,
    ) -> None:
        self._rings = rings
        self._placer = placer
        self._planner = planner
        self._losses = losses
        self._bound = bound

    def bound_of(self, request: TurnRequest) -> Bound | None:
        """Return the bound of a turn: its own, or the configured bound if it asks for no exact algorithm.

        None: the turn is exact.
        """
        may_default = request.algorithm in (None, Algorithm.PASS_KV)
        bound = request.bound or (self._bound if may_default else None)
        return None if bound is None or (bound.name == MAX_LOSS and not bound.limit) else bound

    def choose(self, request: TurnRequest, wanted: Callable[[Sparsity | None], WantedTurn]) -> SparsePlan | None:
        """Return how sparse a turn is; None if it is exact, or nothing is predicted to be sooner.

        `wanted` tells the turn with what it may use of its conversation's KV at a sparsity. Raises InvalidRequest,
        which names the bound, if nothing meets it or nothing was measured for such a turn; Unavailable.
        """
        bound = self.bound_of(request)
        if bound is None:
            return None
        exact = wanted(None)
        choice = self._placer.choose(exact)
        ring, seconds = choice.prefill.registration, choice.prefill_seconds
        if not choice.is_direct:
            seconds = self._planner.predict_exact(exact.num_tokens, _cached(exact, choice), ring, exact.algorithm)
        options = [_Option(0.0, choice.wait_seconds + seconds, None)]
        for predicted in self._predicted(bound, exact.num_tokens):
            sparse = replace(wanted(predicted.sparsity), algorithm=Algorithm.PASS_KV)
            over = self._placer.choose(sparse)
            ring = over.prefill.registration
            seconds = self._planner.predict_sparse(sparse.num_tokens, _cached(sparse, over), ring, predicted.sparsity)
            options.append(_Option(predicted.loss, over.wait_seconds + seconds, predicted))
        chosen = _least_time(bound, options) if bound.name == MAX_LOSS else _least_loss(bound, options)
        return None if chosen is None else _plan(bound, chosen)

    def _predicted(self, bound: Bound, num_tokens: int) -> list[PredictedLoss]:
        if self._losses is None:
            raise InvalidRequest(
                f"{bound.name}: {bound.limit:g} is not allowed, since no losses are known here; measure them by "
                f"ringserve calibrate --sparse, and name the file in router.sparse_losses"
            )
        num_ranks = max((ring.registration.num_ranks for ring in self._rings.ready("prefill")), default=1)
        try:
            return [each for each in self._losses.predict(num_tokens, num_ranks) if not each.sparsity.is_exact]
        except InvalidRequest as error:
            raise InvalidRequest(f"{bound.name}: {bound.limit:g} is not allowed: {error}") from None


def _cached(turn: WantedTurn, choice: Choice) -> int:
    """Return the tokens that a turn's prefill ring need not compute; what the decode ring alone retains is pulled."""
    return max(turn.retained_on(choice.prefill), turn.retained_on(choice.decode))


def _least_time(bound: Bound, options: list[_Option]) -> PredictedLoss | None:
    """Return the soonest option within a loss; the exact one if others are not clearly sooner."""
    exact = options[0]
    best = min((each for each in options if each.loss <= bound.limit), key=lambda each: (each.seconds, each.loss))
    return best.predicted if is_clearly_less(best.seconds, exact.seconds) else None


def _least_loss(bound: Bound, options: list[_Option]) -> PredictedLoss | None:
    """Return the option of least loss that is in time. Raises InvalidRequest if none is."""
    in_time = [each for each in options if each.seconds <= bound.limit]
    if not in_time:
        soonest = min(each.seconds for each in options)
        raise InvalidRequest(
            f"{bound.name}: {bound.limit:g} s is met by no measured share of keys; the least that is predicted now is "
            f"{duration(soonest)}"
        )
    return min(in_time, key=lambda each: (each.loss, each.seconds)).predicted


def _plan(bound: Bound, chosen: PredictedLoss) -> SparsePlan:
    sparsity, nearest = chosen.sparsity, chosen.nearest
    return SparsePlan(
        keep=sparsity.keep,
        sinks=sparsity.sinks,
        window=sparsity.window,
        bound=bound.name,
        limit=bound.limit,
        predicted_loss=chosen.loss,
        measured_loss=nearest.loss,
        measured_accuracy=nearest.accuracy,
        measured_tokens=nearest.num_tokens,
    )
