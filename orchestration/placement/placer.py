"""Choice of the rings of a turn: those on which its first token is predicted to come soonest.

    seconds = queue + move + prefill        on a prefill ring
    seconds = load + move                   on a decode ring
    seconds = queue + stall + prefill       on a decode ring that retains the KV and computes the rest itself

The stall is the time that the prompt delays the turns of the ring's batch, summed over them.

Affinity is no rule of its own. A ring that retains a conversation's KV need neither pull it nor compute it. The
conversation leaves such a ring if pulling or computing the KV elsewhere takes less time than the ring's queue. A
prefill ring that lacks KV pulls it or computes it again. It pulls from the ring that retains most of it: the turn's
decode ring, or a ring that the conversation leaves. A decode ring gets from the prefill ring what it lacks. So if a
conversation goes to another decode ring, KV that only the old decode ring retained goes there by way of the prefill
ring. If the conversation's decode ring could compute a few new tokens itself (`DirectPlacer`), that is compared with
the way over a prefill ring, hand-off included.

If rings are about equal, a turn prefers the rings that served its cache key last. The router's admission and the
simulator call this. Pure Python and synchronous.

A turn with a bound may be sparse (`SparseChooser`): it is chosen for the least time within a bound on the loss, or for
the least loss within a bound on the time. An exact turn has no loss, and is one of the choices. Without a bound every
turn is exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from ringserve.cp_core.cost.selector import duration, is_clearly_less
from ringserve.cp_core.cost.sparse import PredictedLoss, SparseLosses
from ringserve.cp_core.errors import InvalidRequest, Unavailable
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.placement.cache_keys import KeyedRings
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, WantedTurn
from ringserve.orchestration.placement.planner import Planner, RetainedPrefix, retaining_most
from ringserve.orchestration.placement.registry import LoadShare, RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.plans import MAX_LOSS, Bound, RingAlternative, SparsePlan
from ringserve.orchestration.protocol.turns import RingRegistration, TurnRequest
from ringserve.workers.protocol.steps import Algorithm

TIE = 0.1
"""Predictions that differ by less than this share count as equal: predictions are no more exact than that."""
LEAVE_SECONDS = 0.02
"""Seconds that a conversation must save to leave its KV: the saving is only predicted, and the KV is there."""
IDLE_DELAY = 4.0
"""On a decode ring without turns a prompt may take this many times `max_direct_seconds`: it delays only later turns."""
MAX_ALTERNATIVES = 8
"""Most prefill rings that a plan lists."""


class DirectOffer(NamedTuple):
    """Predicted times of a turn whose decode ring computes the prompt.

    `is_too_long`: the prompt would delay the ring's batch longer than allowed. Then the offer is only for turns that
    ask for it.
    """

    alternative: RingAlternative
    is_too_long: bool


class DirectPlacer:
    """Predictions for turns whose decode ring computes the prompt."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def offer(
        self, turn: WantedTurn, prefill: RegisteredRing, decode: RegisteredRing, now: float
    ) -> DirectOffer | None:
        """Predict a turn, to be compared with the way over `prefill`.

        Return None if the decode ring may not compute the prompt, or lacks the KV.
        """
        ring, retained = decode.registration, turn.retained_on(decode)
        if not self._may(turn) or not retained or turn.num_tokens - retained > ring.max_direct_tokens:
            return None
        seconds = self._planner.compare_direct(turn.num_tokens, retained, ring, prefill.registration)
        alternative = RingAlternative(
            ring=decode.name,
            num_ranks=ring.num_ranks,
            tp=ring.tp,
            queue_seconds=decode.queue_seconds(now),
            move_seconds=0.0,
            prefill_seconds=seconds,
            stall_seconds=seconds * decode.num_turns,
        )
        step = self._planner.predict_direct(turn.num_tokens, retained, ring)
        most = ring.max_direct_seconds * (1.0 if decode.num_turns else IDLE_DELAY)
        return DirectOffer(alternative, is_too_long=step > most)

    def _may(self, turn: WantedTurn) -> bool:
        if turn.algorithm is not None:
            return turn.asks_for_direct
        return not turn.refused_direct and self._planner.may_choose_direct

    def handoff_seconds(self, turn: WantedTurn, prefill: RegisteredRing, decode: RegisteredRing) -> float:
        """Return the seconds of the new tokens' hand-off, which a decode ring that computes them saves."""
        new_tokens = turn.num_tokens - turn.retained_on(decode)
        return self._planner.predict_move(new_tokens, prefill.registration, decode.registration)


def refuse_direct(turn: WantedTurn, max_tokens: int) -> NoReturn:
    """Refuse a turn that asks for its decode ring to compute the prompt, though no ring can.

    `max_tokens` is the most new tokens that any decode ring computes. Raises InvalidRequest.
    """
    retained = 0 if turn.decode is None else min(turn.match_tokens, turn.decode.num_tokens)
    raise InvalidRequest(
        f"algorithm: {turn.algorithm} is for up to {max_tokens} new tokens (decode.max_direct_tokens) after KV that "
        f"the conversation's decode ring retains; this turn has {turn.num_tokens - retained} after {retained}"
    )


class _Cost(NamedTuple):
    """Predicted seconds on one prefill ring."""

    ring: RegisteredRing
    queue: float
    move: float
    prefill: float
    total: float

    def alternative(self, handoff: float) -> RingAlternative:
        """Return the cost as an alternative of a plan, with `handoff` seconds after the prefill."""
        ring = self.ring.registration
        return RingAlternative(
            ring=ring.name,
            num_ranks=ring.num_ranks,
            tp=ring.tp,
            queue_seconds=self.queue,
            move_seconds=self.move,
            prefill_seconds=self.prefill,
            handoff_seconds=handoff,
        )


class _Option(NamedTuple):
    """Decode ring with the best prefill ring for it, and the offer to do without a prefill ring.

    `handoff` is 0 if there is no `direct` offer: then all prefill rings would have the same hand-off.
    """

    decode: RegisteredRing
    decode_seconds: float
    cost: _Cost
    costs: Sequence[_Cost]
    direct: DirectOffer | None
    handoff: float

    def is_direct(self, turn: WantedTurn) -> bool:
        """Return whether the decode ring computes the prompt: because the turn asks for it, or because it is sooner."""
        if self.direct is None:
            return False
        # A tie goes to the decode ring, which has the KV: predictions leave out the cost of a second process.
        is_sooner = self.direct.alternative.total_seconds < (1.0 + TIE) * (self.cost.total + self.handoff)
        return turn.asks_for_direct or (is_sooner and not self.direct.is_too_long)

    def total(self, turn: WantedTurn) -> float:
        """Return the seconds by which decode rings compare."""
        # If the decode ring lacks the KV, the prefill ring cannot pull from it; `cost.prefill` is then the longer
        # prefill.
        if self.direct is not None and self.is_direct(turn):
            return self.direct.alternative.total_seconds + self.decode_seconds
        return self.cost.total + self.decode_seconds


class RingPlacer:
    """Placer: chooses from the registry's rings by the planner's predictions."""

    def __init__(self, rings: RingRegistry, planner: Planner) -> None:
        self._rings = rings
        self._planner = planner
        self._direct = DirectPlacer(planner)
        self._keyed = KeyedRings(rings)

    def choose(self, turn: WantedTurn, refused: Collection[RegisteredRing] = ()) -> Choice:
        """Choose the rings that are predicted to answer first; none of `refused`, which had no room for the turn.

        Raises Unavailable if a kind of ring is missing, InvalidRequest if the turn asks for its decode ring to compute
        the prompt and no ring can. If no ring could ever hold the turn, the largest ring is chosen; the caller refuses
        turns that are too long.
        """
        prefills = self._prefill_options(turn, refused)
        now = self._rings.clock()
        options = [self._option(turn, prefills, decode, now) for decode in self._decode_options(turn, refused)]
        if turn.asks_for_direct:
            options = [option for option in options if option.direct is not None]
        if not options:
            refuse_direct(turn, max(ring.registration.max_direct_tokens for ring in self._rings.ready("decode")))
        chosen = options[0]
        if len(options) > 1 and chosen.total(turn) > _worth_leaving(options[1].total(turn)):
            chosen = options[1]
        direct, is_direct, cost = chosen.direct and chosen.direct.alternative, chosen.is_direct(turn), chosen.cost
        return Choice(
            prefill=cost.ring,
            decode=chosen.decode,
            prefill_seconds=direct.prefill_seconds if direct and is_direct else cost.prefill,
            wait_seconds=direct.queue_seconds if direct and is_direct else cost.queue + cost.move,
            remarks=self._remarks(turn, chosen),
            alternatives=_listed(chosen),
            is_direct=is_direct,
            direct=direct,
        )

    def choose_prefill(self, turn: WantedTurn, decode: RegisteredRing) -> Choice:
        """Choose a prefill ring for a turn that decodes on `decode` and has none yet. Raises Unavailable."""
        prefills = self._prefill_options(turn, ())
        cost = self._first_of_the_quickest(turn, self._prefill_costs(turn, prefills, decode, self._rings.clock()))
        return Choice(prefill=cost.ring, decode=decode, prefill_seconds=cost.prefill)

    def place(self, turn: WantedTurn, choice: Choice) -> LoadShare:
        """Add the turn to the load of its rings, until the returned share ends.

        Later turns with its cache key prefer these rings.
        """
        if turn.cache_key:
            self._keyed.note(turn.cache_key, choice)
        return self._rings.place(
            None if choice.is_direct else choice.prefill,
            choice.decode,
            prefill_seconds=choice.prefill_seconds,
            num_tokens=turn.num_tokens,
        )

    # --- which rings are compared ------------------------------------------------------------------------------------

    def _prefill_options(self, turn: WantedTurn, refused: Collection[RegisteredRing]) -> list[RegisteredRing]:
        """Return the least busy ring of each kind.

        Add the cache key's ring and the conversation's own, however busy these are.
        """
        own, keyed = self._own("prefill", turn.prefill, refused), self._keyed_ring("prefill", turn)
        for accepts in _by_room(turn):
            others = self._rings.least_busy(lambda ring: ring is not own and _may_take(ring, refused, accepts))  # noqa: B023
            if keyed is not None and keyed not in (own, *others) and _may_take(keyed, refused, accepts):
                others.append(keyed)
            if own is not None and accepts(own):
                others.append(own)
            if others:
                return others
        return [self._largest("prefill", refused)]

    def _decode_options(self, turn: WantedTurn, refused: Collection[RegisteredRing]) -> list[RegisteredRing]:
        """Return the conversation's own ring, and the least loaded other one if its load could make up for the KV."""
        own, keyed = self._own("decode", turn.decode, refused), self._keyed_ring("decode", turn)
        for accepts in _by_room(turn):
            other = self._rings.least_loaded(lambda ring: ring is not own and _may_take(ring, refused, accepts))  # noqa: B023
            if keyed is not None and other is not None and keyed is not own and _may_take(keyed, refused, accepts):
                other = keyed if keyed.load_seconds <= other.load_seconds + LEAVE_SECONDS else other
            if own is None or not accepts(own):
                if other is not None:
                    return [other]
            elif other is None or other.load_seconds + LEAVE_SECONDS >= own.load_seconds:
                return [own]
            else:
                return [own, other]
        return [self._largest("decode", refused)]

    def _own(self, role: str, place: KvLocation | None, refused: Collection[RegisteredRing]) -> RegisteredRing | None:
        """Return the conversation's ring, if it takes turns."""
        own = None if place is None else self._rings.named(role, place.ring)
        return own if own is not None and own.takes_turns and own not in refused else None

    def _keyed_ring(self, role: str, turn: WantedTurn) -> RegisteredRing | None:
        """Return the ring of the latest turn with the same cache key."""
        return self._keyed.of(turn.cache_key, role) if turn.cache_key else None

    def _largest(self, role: str, refused: Collection[RegisteredRing]) -> RegisteredRing:
        """Return the ring of the largest capacity. Raises Unavailable if there is none."""
        ready = self._rings.ready(role)
        remaining = [ring for ring in ready if ring not in refused]
        if not remaining:
            drained = self._rings.drained(role)  # none comes back by itself
            if drained:
                raise Unavailable(
                    f"no {role} ring is ready: an operator drained {', '.join(drained)}; retry when one is back"
                )
            why = "".join(f"; ring {name} cannot be rebuilt: {failure}" for name, failure in self._rings.failures(role))
            raise Unavailable(f"no {'other ' if ready else ''}{role} ring is ready{why}; retry in a few seconds")
        return max(remaining, key=lambda ring: ring.registration.capacity_tokens)

    # --- costs -------------------------------------------------------------------------------------------------------

    def _option(
        self, turn: WantedTurn, prefills: Sequence[RegisteredRing], decode: RegisteredRing, now: float
    ) -> _Option:
        costs = self._prefill_costs(turn, prefills, decode, now)
        cost = self._first_of_the_quickest(turn, costs)
        direct = self._direct.offer(turn, cost.ring, decode, now)
        handoff = self._direct.handoff_seconds(turn, cost.ring, decode) if direct else 0.0
        return _Option(decode, self._decode_seconds(turn, decode), cost, costs, direct, handoff)

    def _decode_seconds(self, turn: WantedTurn, decode: RegisteredRing) -> float:
        """Return the seconds of the ring's load, and of the move of the history that it lacks.

        New tokens' KV must come to every decode ring, so it is left out.
        """
        lacking = turn.match_tokens - turn.retained_on(decode)
        ring = decode.registration
        return decode.load_seconds + self._planner.predict_move(lacking, ring, ring)

    def _prefill_costs(
        self, turn: WantedTurn, prefills: Sequence[RegisteredRing], decode: RegisteredRing, now: float
    ) -> list[_Cost]:
        on_decode = RetainedPrefix(decode.registration, turn.retained_on(decode))
        retaining = [
            RetainedPrefix(ring.registration, turn.retained_on(ring))
            for ring in self.own_rings(turn)
            if ring is not decode
        ]
        costs = []
        for ring in prefills:
            registration = ring.registration
            most = retaining_most(on_decode, (other for other in retaining if other.ring is not registration))
            move, prefill = self._planner.predict_turn(turn.num_tokens, turn.retained_on(ring), registration, most)
            queue = ring.queue_seconds(now)
            costs.append(_Cost(ring, queue, move, prefill, queue + move + prefill))
        return costs

    def _first_of_the_quickest(self, turn: WantedTurn, costs: Sequence[_Cost]) -> _Cost:
        """Choose among tied costs: the conversation's own ring, the key's, the smallest, the one idle for longest."""
        least = (quickest := min(costs, key=lambda cost: cost.total)).total
        for cost in costs:  # shared KV is another history's, so its ring is not the conversation's own
            if not turn.shared and turn.has_kv_on(cost.ring) and cost.total <= _worth_leaving(least):
                return cost
        tied = [cost for cost in costs if cost.total <= least * (1 + TIE)]
        keyed = self._keyed_ring("prefill", turn)
        for cost in tied:
            if cost.ring is keyed:
                return cost
        if turn.shared:
            return quickest
        return min(
            tied, key=lambda cost: (_num_processes(cost.ring.registration), cost.ring.last_placed, cost.ring.number)
        )

    def own_rings(self, turn: WantedTurn) -> list[RegisteredRing]:
        """Return the conversation's rings that can be asked for retained KV, including rings that drain."""
        places = (("prefill", turn.prefill), ("decode", turn.decode))
        own = [self._rings.named(role, place.ring) for role, place in places if place is not None]
        return [ring for ring in own if ring is not None and ring.is_ready and turn.retained_on(ring)]

    # --- remarks -----------------------------------------------------------------------------------------------------

    def _remarks(self, turn: WantedTurn, chosen: _Option) -> tuple[str, ...]:
        """Say why the choice of rings is an exception."""
        is_direct, remarks = chosen.is_direct(turn), []
        if chosen.direct is not None and chosen.direct.is_too_long and not is_direct:
            remarks.append(f"ring {chosen.decode.name} would delay its batch too long by computing the prompt itself")
        if turn.refused_direct:
            remarks.append(f"ring {turn.refused_direct} could not compute the prompt itself")
        places = (("prefill", turn.prefill, chosen.cost.ring), ("decode", turn.decode, chosen.decode))
        for role, place, ring in places[is_direct:]:
            if place is not None and place.ring != ring.name:
                remarks.append(f"the conversation leaves {role} ring {place.ring}")
        return tuple(remarks)


def _by_room(turn: WantedTurn) -> tuple[Callable[[RegisteredRing], bool], ...]:
    """Return the conditions on a ring, tried in order: known to have room now, and large enough at all."""

    def fits(ring: RegisteredRing) -> bool:
        return ring.registration.capacity_tokens >= turn.num_tokens + turn.answer_tokens

    def has_room(ring: RegisteredRing) -> bool:
        return ring.free_tokens >= turn.num_tokens and fits(ring)

    return has_room, fits


def _may_take(
    ring: RegisteredRing, refused: Collection[RegisteredRing], accepts: Callable[[RegisteredRing], bool]
) -> bool:
    return ring.takes_turns and accepts(ring) and ring not in refused


def _worth_leaving(other: float) -> float:
    """Return the seconds on a conversation's own ring beyond which it goes to another that takes `other`."""
    return other * (1 + TIE) + LEAVE_SECONDS


def _listed(option: _Option) -> tuple[RingAlternative, ...]:
    """Return the alternatives that a plan lists; none if there was no choice.

    They are the decode ring, if it could compute the prompt, and the fastest few prefill rings, the chosen one among
    them.
    """
    if option.direct is None and len(option.costs) == 1:
        return ()
    quickest = heapq.nsmallest(MAX_ALTERNATIVES, option.costs, key=lambda cost: cost.total)
    if not any(cost is option.cost for cost in quickest):
        quickest[-1] = option.cost
    prefills = tuple(cost.alternative(option.handoff) for cost in quickest)
    return prefills if option.direct is None else (option.direct.alternative, *prefills)


def _num_processes(ring: RingRegistration) -> int:
    return ring.num_ranks * ring.tp


class _SparseOption(NamedTuple):
    """Way to compute a turn: its loss, the seconds to its first token, and its sparsity with its loss.

    `predicted` is None for the exact way.
    """

    loss: float
    seconds: float
    predicted: PredictedLoss | None


class SparseChooser:
    """Chooser of a turn's sparsity, by measured losses and predicted times. `bound` holds for turns that name none.

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
        """Return the bound of a turn: its own, or, if it asks for no algorithm or for pass-KV, the configured one.

        None: the turn is exact.
        """
        may_default = request.algorithm in (None, Algorithm.PASS_KV)
        bound = request.bound or (self._bound if may_default else None)
        return None if bound is None or (bound.name == MAX_LOSS and not bound.limit) else bound

    def choose(self, request: TurnRequest, wanted: Callable[[Sparsity | None], WantedTurn]) -> SparsePlan | None:
        """Return the turn's sparse plan; None if it has no bound, or if the exact way is the best within it.

        `wanted(sparsity)` returns the turn with the KV of its conversation that it may use at that sparsity (None:
        exact). Raises InvalidRequest, which names the bound, if nothing meets it or nothing was measured for such a
        turn; Unavailable.
        """
        bound = self.bound_of(request)
        if bound is None:
            return None
        exact = wanted(None)
        choice = self._placer.choose(exact)
        ring, seconds = choice.prefill.registration, choice.prefill_seconds
        if not choice.is_direct:
            seconds = self._planner.predict_exact(exact.num_tokens, _cached(exact, choice), ring, exact.algorithm)
        options = [_SparseOption(0.0, choice.wait_seconds + seconds, None)]
        for predicted in self._predicted(bound, exact.num_tokens):
            sparse = replace(wanted(predicted.sparsity), algorithm=Algorithm.PASS_KV)
            over = self._placer.choose(sparse)
            ring = over.prefill.registration
            seconds = self._planner.predict_sparse(sparse.num_tokens, _cached(sparse, over), ring, predicted.sparsity)
            options.append(_SparseOption(predicted.loss, over.wait_seconds + seconds, predicted))
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
    """Return the tokens that a turn's prefill ring need not compute: it pulls KV that only the decode ring retains."""
    return max(turn.retained_on(choice.prefill), turn.retained_on(choice.decode))


def _least_time(bound: Bound, options: list[_SparseOption]) -> PredictedLoss | None:
    """Return the soonest option within a loss; the exact one if others are not clearly sooner."""
    exact = options[0]
    best = min((each for each in options if each.loss <= bound.limit), key=lambda each: (each.seconds, each.loss))
    return best.predicted if is_clearly_less(best.seconds, exact.seconds) else None


def _least_loss(bound: Bound, options: list[_SparseOption]) -> PredictedLoss | None:
    """Return the option of least loss that is in time. Raises InvalidRequest if none is."""
    in_time = [each for each in options if each.seconds <= bound.limit]
    if not in_time:
        soonest = min(each.seconds for each in options)
        raise InvalidRequest(
            f"{bound.name}: no measured share of keys meets {bound.limit:g} s; the shortest time predicted now is "
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
