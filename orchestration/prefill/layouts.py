"""Layout of a step's new tokens over a prefill ring: in chunks, whole on one rank, or cut for a chain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringserve.cp_core.cost.chain import ChainRates, Cuts, chain_order, chain_rates, quick_cuts
from ringserve.cp_core.cost.model import PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
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
from ringserve.orchestration.protocol.plans import LayoutFallback
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.views import RingRates
from ringserve.workers.model.info import tensor_share
from ringserve.workers.protocol.ranks import ModelInfo

log = logging.getLogger(__name__)

ROUNDING = 1
"""Tokens by which a rank may exceed the level that all ranks approach."""


@dataclass(frozen=True, slots=True)
class StepForm:
    """Form of a step by its algorithm: the order of a chain and its rates in it, or the segments of sp_ntp."""

    order: tuple[int, ...] = ()
    chain: ChainRates | None = None
    num_segments: int = 1

    @classmethod
    def of_chain(cls, model: ModelInfo, tp: int, rates: RingRates, held: Sequence[tuple[int, ...]]) -> StepForm:
        """Return the form of a chain of ranks that each are `tp` processes; `held` is that of `chain_order`."""
        shape = tensor_share(model, tp).shape
        return cls(chain_order(rates, held), chain_rates(shape, PrefillRates(ring=rates), len(held)))

    @classmethod
    def of_segments(cls, model: ModelInfo, tp: int, rates: RingRates, num_ranks: int, tokens: TokenRange) -> StepForm:
        """Return the form of sp_ntp by the longest piece of the step."""
        predictor = StepPredictor(tensor_share(model, tp).shape, PrefillRates(ring=rates), num_ranks)
        return cls(num_segments=predictor.segments(len(tokens), tokens.start))


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """Layout of a piece's new tokens; `stored` says where their KV lies if not where they are computed.

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

    `load[r]` tokens of the step's other pieces are computed on rank r. `whole_on` is the rank that takes the piece
    whole, if it has room; `form` is that of the step. Raises CapacityExceeded.
    """
    shards = sequence.shards
    fallback = None
    if whole_on is not None:
        whole = PieceLayout(whole_layout(piece.start, len(piece), whole_on, shards.num_ranks))
        if _has_room(pool, sequence, whole.kv.held):
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
        # What comes later may fill the ranks that now hold less, and finds its room in any case.
        most = worst_case_held(shards.extend(found.kv).held, num_left)
        if _has_room(pool, sequence, most):
            return replace(found, fallback=fallback)
        found = _chain_layout(piece.start, _level_cuts(cuts, counts, form.order), counts, form.order)
        fallback = LayoutFallback.LEVEL_CUTS
    pool.make_room(sequence, shards.extend(found.kv).held)
    return replace(found, fallback=fallback)


def _has_room(pool: KvPool, sequence: SequenceKv, held: Sequence[int]) -> bool:
    """Give a sequence room beyond the even shares that were reserved for it, if there is any."""
    try:
        pool.make_room(sequence, held)
    except CapacityExceeded as error:
        log.info("sequence %s stays level: %s", sequence.kv_id, error)
        return False
    return True


def _chain_layout(start: int, cuts: Cuts, counts: Sequence[int], order: Sequence[int]) -> PieceLayout:
    layout = cut_layout(start, cuts, order)
    stored = stored_on_chain(start, cuts, counts, order)
    return PieceLayout(layout, None if stored == layout.shard_map() else stored)


def _level_cuts(cuts: Cuts, counts: Sequence[int], order: Sequence[int]) -> Cuts:
    """Return the nearest cuts by which every rank gets the tokens that it is to store."""
    level, levelled = 0, [0]
    for rank, cut in zip(order, cuts[1:], strict=True):
        level += counts[rank]
        levelled.append(max(cut, level))
    return tuple(levelled)


def worst_case_held(held: Sequence[int], num_tokens: int) -> list[int]:
    """Return the most tokens that each rank may hold after `num_tokens` more, pulled or in chunks of any sizes.

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
