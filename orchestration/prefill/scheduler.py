"""Prefill scheduler: which tokens of which turns the next step computes, and on which ranks they lie.

reserved ──ready──> waiting ──next_step──> in a step ──commit──> waiting ... ──commit of the last token──> removed
    └──────────────────┴────────── remove ──────┴──────────────────┘

Two orders share the ring. *By length* takes the highest priority first, and of equals the turn that is finished first:
a step holds as many whole prompts as fit, and a prompt that is longer than a step has steps of its own. Tenants share
the steps by work: a turn's place follows from the work already computed for its tenant, plus that tenant's shorter
turns, plus its own. So a lone prompt comes second at the latest beside forty equal prompts of another tenant. *By age*
takes the earliest turn first, where a level of priority counts like `ageing_seconds` of waiting.

The oldest turns get `AGE_SHARE` of all work. If they have had less, the next step begins with them, and the rest is
filled by length. So beside that share a short prompt waits only for shorter prompts, however long the others are. The
oldest turn advances however many short prompts come: a turn that arrives more than `ageing_seconds` times the
difference in priority later cannot overtake it.

Pure Python and synchronous; time is an argument, so that the simulator runs the same code as the leader.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ringserve.cp_core.cost.chain import ChainRates, Cuts, chain_order, chain_rates, quick_cuts
from ringserve.cp_core.cost.model import PrefillRates
from ringserve.cp_core.cost.steps import StepLimits, StepPredictor, WorkModel
from ringserve.cp_core.errors import CapacityExceeded
from ringserve.cp_core.layout.shards import (
    PrefillLayout,
    ShardMap,
    TokenRange,
    balanced_layout,
    cut_layout,
    level_counts,
    segment_layout,
    stored_on_chain,
    whole_layout,
)
from ringserve.orchestration.protocol.plans import LayoutFallback, PlannedChunk
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.views import RingRates
from ringserve.workers.model.info import tensor_share
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from ringserve.orchestration.ring.leader import TenantShares


AGE_SHARE = 0.25
"""Share of all work that the oldest turns get."""
RATE_MEMORY = 0.9
"""Weight of earlier steps in the measured rate, per step."""
MIN_RETRY_SECONDS = 0.1
"""Shortest time after which a refused client is told to retry."""
log = logging.getLogger(__name__)
ROUNDING = 1
"""Tokens that a rank may hold beyond its even share, since shares are whole numbers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one turn that a step computes."""

    turn_id: str
    tokens: TokenRange


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Next step of the ring: all pieces in one pass, by one algorithm. `work` is in work units.

    A step that `yields` lets other steps run between its layers. `debt` is the change that it made to the work owed to
    the oldest turns.
    """

    number: int
    algorithm: Algorithm
    pieces: tuple[Piece, ...]
    work: float
    yields: bool = False
    debt: float = 0.0


@dataclass(slots=True, eq=False)
class _Item:
    """One turn. Tokens [position, stop) are to be computed; `advice` has its planned chunks once it may compute."""

    turn_id: str
    position: int
    stop: int
    priority: int
    arrived: float
    tenant: str
    advice: tuple[PlannedChunk, ...] = ()

    @property
    def num_left(self) -> int:
        return self.stop - self.position

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm of the planned chunk that holds the next token."""
        place = bisect_right(self.advice, self.position, key=lambda chunk: chunk.tokens.stop)
        return self.advice[min(place, len(self.advice) - 1)].algorithm


class PrefillScheduler:
    """Queue of one incarnation of a ring. `rate`, in work units a second, is a guess until a step has been measured.

    `lone_limits` limit a step whose turn is the only one ready; None: `limits` do. Such a step may be long if its
    layers are short, since it yields to shorter turns between two layers. `shares` bounds the work of each tenant.
    """

    def __init__(
        self,
        name: str,
        work: WorkModel,
        limits: StepLimits,
        scheduling: PrefillScheduling,
        *,
        rate: float,
        lone_limits: StepLimits | None = None,
        shares: TenantShares | None = None,
    ) -> None:
        self._shares = shares
        self.limit_steps(limits, lone_limits)
        self._name = name
        self._work = work
        self._scheduling = scheduling
        self._items: dict[str, _Item] = {}
        self._rate = rate
        self._measured_work = 0.0
        self._measured_seconds = 0.0
        self._num_steps = 0
        # Work units that the oldest turns lack of their share; negative: their excess, at most their last step's.
        self._debt = 0.0
        # Work units computed for each tenant. A new tenant starts at the lowest count of the tenants that wait.
        # Source: start-time fair queueing (Goyal, Vin, Cheng 1996).
        self._served: dict[str, float] = {}

    def limit_steps(self, limits: StepLimits, lone_limits: StepLimits | None = None) -> None:
        """Limit the steps from the next one on; `lone_limits` replace `limits` in steps of a lone turn, if given."""
        self.limits = limits
        self.lone_limits = lone_limits or limits

    # --- the queue ---------------------------------------------------------------------------------------------------

    def reserve(
        self,
        turn_id: str,
        *,
        tokens: TokenRange,
        priority: int,
        now: float,
        tenant: str = "",
        has_begun: bool = False,
    ) -> None:
        """Enter a turn that computes at most `tokens`; it does not compute before `ready`.

        Raises CapacityExceeded, with the time to retry, if the queue would exceed its limit of work, or the tenant its
        share of that limit. The share is not checked for a turn that `has_begun` on another ring. An empty queue takes
        a turn of any length, because a turn beyond the limit would never fit.
        """
        asked, load = self._work.work(len(tokens), tokens.start), self.load
        limit = self._scheduling.max_queue_work
        if load and load + asked > limit:
            seconds = self.seconds_for(load + min(asked, limit) - limit)
            raise CapacityExceeded(
                f"prefill ring {self._name}: {load:.0f} work units are waiting, the prompt adds {asked:.0f} and at "
                f"most {limit:.0f} are allowed; retry in {seconds:.1f} s",
                retry_after_seconds=seconds,
            )
        if self._shares is not None and not has_begun:
            mine = self._load(item for item in self._items.values() if item.tenant == tenant)
            retry = self.seconds_for(asked)
            self._shares.check("work units", tenant, mine=mine, asked=asked, total=load, limit=limit, retry=retry)
        self._welcome(tenant)
        self._items[turn_id] = _Item(turn_id, tokens.start, tokens.stop, priority, now, tenant)

    def _welcome(self, tenant: str) -> None:
        """Raise the served work of a tenant without turns to the lowest of the others: idle time earns no lead."""
        if not self._items:
            self._served.clear()
        present = {item.tenant for item in self._items.values()}
        if tenant not in present:
            least = min((self._served.get(each, 0.0) for each in present), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)

    def ready(self, turn_id: str, chunks: Sequence[PlannedChunk]) -> None:
        """Let the turn compute the tokens of `chunks`, whose algorithms are advice; the scheduler cuts them anew."""
        item = self._items[turn_id]
        item.position, item.stop = chunks[0].tokens.start, chunks[-1].tokens.stop
        item.advice = tuple(chunks)

    def remove(self, turn_id: str) -> None:
        """Remove a turn from the queue. Idempotent."""
        self._items.pop(turn_id, None)

    @property
    def load(self) -> float:
        """Work units of all turns that are reserved, waiting or computing."""
        return self._load(self._items.values())

    def _load(self, items: Iterable[_Item]) -> float:
        return sum(self._work.work(item.num_left, item.position) for item in items)

    @property
    def num_waiting(self) -> int:
        """Turns that may compute and have not finished."""
        return sum(1 for item in self._items.values() if item.advice)

    @property
    def rate(self) -> float:
        """Work units a second in recent steps."""
        return self._measured_work / self._measured_seconds if self._measured_seconds else self._rate

    @property
    def is_measured(self) -> bool:
        """True once the rate has been measured on computed steps."""
        return self._measured_seconds > 0.0

    def seconds_for(self, work: float) -> float:
        """Return the seconds in which the ring computes `work` units."""
        return max(MIN_RETRY_SECONDS, work / self.rate)

    # --- schedule, (run,) commit -------------------------------------------------------------------------------------

    def next_step(self) -> ScheduledStep | None:
        """Return the step to compute now, which the caller runs and commits; None if no turn is ready."""
        ready = [item for item in self._items.values() if item.advice]
        if not ready:
            return None
        by_age, by_length = sorted(ready, key=self._by_age), self._by_length(ready)
        if len(ready) == 1:
            filling = _Filling(self._work, self.lone_limits)
            filling.add_at_least(ready[0])
        else:
            filling = self._fill(by_age, by_length)
        work = sum(filling.work.values())
        # A step of ordinary length need not yield: it is over soon enough.
        is_long = self.lone_limits is not self.limits and work > self.limits.budget
        return self._step(filling, by_age[0], yields=len(ready) == 1 and is_long)

    def next_step_within(self, outer: ScheduledStep) -> ScheduledStep | None:
        """Return a step to compute between two layers of `outer`, a step that yields; None if no turn may overtake.

        A turn may overtake if it has less work than `outer`, and no lower priority than its turns. Among such turns the
        two orders choose, and the step has ordinary length. While the oldest turn is in `outer` and the oldest turns
        are owed work, no turn may overtake.
        """
        inside = {piece.turn_id for piece in outer.pieces}
        items = [item for turn_id, item in self._items.items() if item.advice]
        delayed = [item for item in items if item.turn_id in inside]
        least = max((item.priority for item in delayed), default=min((item.priority for item in items), default=0))
        ready = [
            item
            for item in items
            if item.turn_id not in inside
            and item.priority >= least
            and self._work.work(item.num_left, item.position) < outer.work
        ]
        if not ready:
            return None
        oldest = min(items, key=self._by_age)
        if self._debt > 0 and oldest.turn_id in inside:
            return None
        filling = self._fill(sorted(ready, key=self._by_age), self._by_length(ready))
        return self._step(filling, oldest, is_within=True)

    def _step(
        self, filling: _Filling, oldest: _Item, *, yields: bool = False, is_within: bool = False
    ) -> ScheduledStep:
        debt = self._count(filling, oldest, is_within=is_within)
        self._num_steps += 1
        return ScheduledStep(
            number=self._num_steps,
            algorithm=_algorithm_of_most(filling.work),
            pieces=tuple(
                Piece(item.turn_id, TokenRange(item.position, item.position + length))
                for item, length in filling.tokens.items()
            ),
            work=sum(filling.work.values()),
            yields=yields,
            debt=debt,
        )

    def commit(self, step: ScheduledStep, seconds: float) -> None:
        """Record that the step was computed in `seconds`. Turns removed meanwhile are ignored."""
        self._measured_work = RATE_MEMORY * self._measured_work + step.work
        self._measured_seconds = RATE_MEMORY * self._measured_seconds + seconds
        for piece in step.pieces:
            item = self._items.get(piece.turn_id)
            if item is None:
                continue
            item.position = piece.tokens.stop
            if not item.num_left:
                self.remove(piece.turn_id)

    def take_back(self, step: ScheduledStep) -> None:
        """Undo the accounting of a step of `next_step_within` that was not computed: the outer step had ended."""
        self._debt -= step.debt
        for piece in step.pieces:
            if (item := self._items.get(piece.turn_id)) is not None:
                self._served[item.tenant] -= self._work.work(len(piece.tokens), piece.tokens.start)

    def without(self, step: ScheduledStep, turn_ids: Iterable[str]) -> ScheduledStep:
        """Return the step without turns that could not take part."""
        gone = set(turn_ids)
        pieces = tuple(piece for piece in step.pieces if piece.turn_id not in gone)
        work = sum(self._work.work(len(piece.tokens), piece.tokens.start) for piece in pieces)
        return replace(step, pieces=pieces, work=work)

    # --- the two orders ----------------------------------------------------------------------------------------------

    def _by_age(self, item: _Item) -> tuple[float, str]:
        return item.arrived - item.priority * self._scheduling.ageing_seconds, item.turn_id

    def _by_length(self, items: Iterable[_Item]) -> list[_Item]:
        """Order turns by priority, then by the work that their tenant will have had when they end, lowest first.

        With one tenant that is shortest first.
        """
        work = {item: self._work.work(item.num_left, item.position) for item in items}
        up_to: dict[_Item, float] = {}
        totals: dict[tuple[str, int], float] = {}
        for item in sorted(work, key=lambda item: (work[item], item.arrived, item.turn_id)):
            level = (item.tenant, item.priority)
            up_to[item] = totals[level] = totals.get(level, self._served[item.tenant]) + work[item]
        return sorted(work, key=lambda item: (-item.priority, up_to[item], work[item], item.arrived, item.turn_id))

    def _fill(self, by_age: Sequence[_Item], by_length: Sequence[_Item]) -> _Filling:
        """Choose the turns of the next step, and the number of tokens of each."""
        filling, is_due = _Filling(self._work, self.limits), self._debt > 0
        if is_due:
            filling.add_oldest(by_age)
        filling.add_at_least(by_length[0])
        filling.add_whole(by_length)
        if is_due:
            filling.extend(by_age[0])
        return filling

    def _count(self, filling: _Filling, oldest: _Item, *, is_within: bool) -> float:
        """Update the work owed to the oldest turns by a step's work for them and for the others; return the change.

        The oldest turns are credited at most with what their last step gave them beyond their share. A step within
        another one keeps the credit of that one, if it is larger.
        """
        for item, units in filling.work.items():
            self._served[item.tenant] += units
        paid = sum(units for item, units in filling.work.items() if item is oldest or item in filling.by_age)
        others = sum(filling.work.values()) - paid
        lead = (1 - AGE_SHARE) * paid
        before = self._debt
        self._debt += AGE_SHARE * others - lead
        if paid:
            self._debt = max(self._debt, min(before, -lead) if is_within else -lead)
        return self._debt - before


class _Filling:
    """Step under construction: `tokens` and `work` of each turn; `by_age` are the turns chosen for their age."""

    def __init__(self, work: WorkModel, limits: StepLimits) -> None:
        self.tokens: dict[_Item, int] = {}
        self.work: dict[_Item, float] = {}
        self.by_age: set[_Item] = set()
        self._model = work
        self._limits = limits
        self._room = limits.budget
        self._tokens_left = limits.tokens

    def add_oldest(self, by_age: Sequence[_Item]) -> None:
        """Fill the share of the oldest turns: the first turn in any case, then whole prompts that fit."""
        share, tokens = AGE_SHARE * self._limits.budget, max(1, int(AGE_SHARE * self._limits.tokens))
        for item in by_age:
            length = self._at_most(item, share, tokens)
            if not self.tokens:
                length = max(length, self._least(item))
            elif length < item.num_left:
                break
            self._put(item, length)
            self.by_age.add(item)
            share -= self.work[item]
            tokens -= length
        # The least chunk may cost more than the share: the step becomes longer, so that the other turns lose no room.
        self._room += max(0.0, -share)

    def add_at_least(self, item: _Item) -> None:
        """Add as much of a turn as fits, at least the least chunk; nothing if the step has no tokens left."""
        if item not in self.tokens and self._tokens_left:
            self._put(item, max(self._at_most(item, self._room, self._tokens_left), self._least(item)))

    def add_whole(self, by_length: Sequence[_Item]) -> None:
        """Add every turn that fits whole."""
        for item in by_length:
            if item not in self.tokens and self._at_most(item, self._room, self._tokens_left) == item.num_left:
                self._put(item, item.num_left)

    def extend(self, item: _Item) -> None:
        """Give a turn of the step the room that no other turn uses."""
        length, work = self.tokens[item], self.work[item]
        longer = self._at_most(item, self._room + work, self._tokens_left + length)
        if longer > length:
            self._room += work
            self._tokens_left += length
            self._put(item, longer)

    def _put(self, item: _Item, length: int) -> None:
        self.tokens[item] = length
        self.work[item] = self._model.work(length, item.position)
        self._room -= self.work[item]
        self._tokens_left -= length

    def _at_most(self, item: _Item, budget: float, tokens: int) -> int:
        return max(0, min(item.num_left, tokens, self._model.longest(budget, item.position)))

    def _least(self, item: _Item) -> int:
        return min(item.num_left, self._limits.min_chunk, self._tokens_left)


def _algorithm_of_most(work: dict[_Item, float]) -> Algorithm:
    """Return the algorithm that was planned for most of the step's work; on a tie the first of RING_ALGORITHMS."""
    totals = dict.fromkeys(RING_ALGORITHMS, 0.0)
    for item, units in work.items():
        totals[item.algorithm] += units
    return max(totals, key=lambda name: totals[name])


@dataclass(frozen=True, slots=True)
class StepForm:
    """Form of a step: for a chain the order of its ranks and its rates, for sp_ntp the number of segments."""

    order: tuple[int, ...] = ()
    chain: ChainRates | None = None
    num_segments: int = 1

    @classmethod
    def of_chain(cls, model: ModelInfo, tp: int, rates: RingRates, held: Sequence[tuple[int, ...]]) -> StepForm:
        """Return the form of a chain whose ranks have `tp` processes each. `chain_order` explains `held`."""
        shape = tensor_share(model, tp).shape
        return cls(chain_order(rates, held), chain_rates(shape, PrefillRates(ring=rates), len(held)))

    @classmethod
    def of_segments(cls, model: ModelInfo, tp: int, rates: RingRates, num_ranks: int, tokens: TokenRange) -> StepForm:
        """Return the form of sp_ntp by the longest piece of the step."""
        predictor = StepPredictor(tensor_share(model, tp).shape, PrefillRates(ring=rates), num_ranks)
        return cls(num_segments=predictor.segments(len(tokens), tokens.start))


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """Layout of a piece's new tokens. `stored` is where their KV is stored, if not on the ranks that compute it.

    `fallback` is set if a better layout had no room.
    """

    layout: PrefillLayout
    stored: ShardMap | None = None
    fallback: LayoutFallback | None = None

    @property
    def kv(self) -> ShardMap:
        """Places of the new tokens' KV."""
        return self.layout.shard_map() if self.stored is None else self.stored


def lay_out(
    pool: KvPool,
    sequence: SequenceKv,
    piece: TokenRange,
    *,
    num_left: int,
    load: Sequence[int],
    whole_on: int | None,
    form: StepForm,
) -> PieceLayout:
    """Return the layout of a piece, for which the sequence then has room; `num_left` tokens of its turn come later.

    `load[r]` tokens of the step's other pieces are computed on rank r. If rank `whole_on` has room, it takes
    the whole piece. `form` is the step's. Raises CapacityExceeded.
    """
    shards = sequence.shards
    fallback = None
    if whole_on is not None:
        whole = PieceLayout(whole_layout(piece.start, len(piece), whole_on, shards.num_ranks))
        if _try_make_room(pool, sequence, whole.kv.held):
            return whole
        fallback = LayoutFallback.SPREAD
    level = balanced_layout(piece.start, len(piece), shards.held, load)
    counts = [level.tokens_on(rank) for rank in range(shards.num_ranks)]
    if form.chain is None or shards.num_ranks == 1:
        pool.make_room(sequence, shards.extend(level.shard_map()).held)
        layout = segment_layout(piece.start, counts, form.num_segments) if form.num_segments > 1 else level
        return PieceLayout(layout, fallback=fallback)
    cuts = quick_cuts(len(piece), piece.start, form.chain)
    found = _chain_layout(piece.start, cuts, counts, form.order)
    if found.kv.held != tuple(counts):
        # Later tokens go to the ranks that hold less then. Each rank must have room for its worst case.
        most = worst_case_held(shards.extend(found.kv).held, num_left)
        if _try_make_room(pool, sequence, most):
            return replace(found, fallback=fallback)
        found = _chain_layout(piece.start, _level_cuts(cuts, counts, form.order), counts, form.order)
        fallback = LayoutFallback.LEVEL_CUTS
    pool.make_room(sequence, shards.extend(found.kv).held)
    return replace(found, fallback=fallback)


def _try_make_room(pool: KvPool, sequence: SequenceKv, held: Sequence[int]) -> bool:
    """Give a sequence room beyond the even shares that were reserved for it; return False if there is none."""
    try:
        pool.make_room(sequence, held)
    except CapacityExceeded as error:
        log.info("sequence %s is spread evenly, for lack of room on a rank: %s", sequence.kv_id, error)
        return False
    return True


def _chain_layout(start: int, cuts: Cuts, counts: Sequence[int], order: Sequence[int]) -> PieceLayout:
    layout = cut_layout(start, cuts, order)
    stored = stored_on_chain(start, cuts, counts, order)
    return PieceLayout(layout, None if stored == layout.shard_map() else stored)


def _level_cuts(cuts: Cuts, counts: Sequence[int], order: Sequence[int]) -> Cuts:
    """Return the nearest cuts by which every rank computes or receives all tokens that it is to store."""
    level, levelled = 0, [0]
    for rank, cut in zip(order, cuts[1:], strict=True):
        level += counts[rank]
        levelled.append(max(cut, level))
    return tuple(levelled)


def worst_case_held(held: Sequence[int], num_tokens: int) -> list[int]:
    """Return, by rank, the most tokens that it may hold after `num_tokens` more, pulled or in chunks of any sizes.

    Every chunk gives each rank the same number of tokens, and one more to its emptiest ranks. So a rank gains at most
    as much as any emptier rank. In the worst case it grows as if all emptier ranks held as many tokens as itself.
    """
    if not num_tokens:
        return list(held)
    most = []
    for own in held:
        raised = [max(own, other) for other in held]
        gains = level_counts(raised, num_tokens)
        most.append(max(own + gain for gain, other in zip(gains, raised, strict=True) if other == own) + ROUNDING)
    return most
