"""Turns what both rings hold of a prompt into a plan that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cp_core.cost.profile import HardwareProfile
from cp_core.layout import TokenRange
from cp_core.selector import EmpiricalFit, Selection, Turn, select
from orchestration.cached_kv import AUTO, CachedKv, choose_source
from orchestration.corrections import RingCorrections
from orchestration.prefill_work import StepLimits, WorkModel, cut
from orchestration.ring_costs import RingCosts
from orchestration.turn import CachedSource, Chunk, GroupRegistration, Plan, PrefillReport, PromptMode
from workers.steps import RING_ALGORITHMS, Algorithm, ModelInfo

WORTH_TELLING = 0.05
"""A correction that moves a prediction by more is part of a plan's reason."""


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """`compute_flops` and `link_bytes_per_second` are C and BW, per rank; 0 takes those of `profile`, which predicts
    for every ring, or without one what the ring measured at its start.

    `fit` holds the constants of the empirical selector, which has no defaults: they belong to one cluster. What only
    the decode ring keeps is pulled or computed again as `missing_kv` says: one of `cached_kv.MISSING_KV`.
    """

    selector: str = "auto"
    compute_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    profile: HardwareProfile | None = None
    fit: EmpiricalFit | None = None
    missing_kv: str = AUTO


class Planner:
    """Plans for one model. `selector` may be changed between turns; allowed are `cp_core.selector.POLICIES`.

    `corrections` are learned from what turns took (`note_prefill`), and applied to what later ones are predicted to
    take. Which algorithm a turn takes they leave alone: an algorithm's factor comes from the turns that it was chosen
    for, and says little of a turn for which both are weighed.
    """

    def __init__(self, model: ModelInfo, settings: PlannerSettings) -> None:
        self.selector = settings.selector
        self._settings = settings
        self._model = model
        self._work = WorkModel.of_shape(model.shape)
        self._costs = RingCosts(
            model,
            profile=settings.profile,
            compute_flops=settings.compute_flops,
            link_bytes_per_second=settings.link_bytes_per_second,
        )
        self.corrections = RingCorrections()

    def plan(
        self,
        *,
        num_tokens: int,
        kept_on_prefill: int,
        kept_on_decode: int,
        prefill: GroupRegistration,
        decode: GroupRegistration,
        mode: PromptMode,
        algorithm: Algorithm | None = None,
    ) -> Plan:
        """The plan of a turn of `num_tokens` prompt tokens whose beginnings both rings have kept.

        Long prompts are cut as the ring would with nothing else to do; each chunk chooses its own algorithm, since what
        is cached grows from one to the next, unless the turn asked for one.
        """
        source = self._choose_source(num_tokens, kept_on_prefill, kept_on_decode, prefill, decode)
        cached = source.cached_tokens
        pieces = self._cut(prefill, TokenRange(cached, num_tokens))
        turns = [_turn(prefill, piece) for piece in pieces]
        chosen = [self._select(prefill, turn, algorithm) for turn in turns]
        taken = _of_most_tokens(turns, chosen)
        work = self._work.work(num_tokens - cached, cached)
        factor = self.corrections.factor(prefill, taken, work)
        return Plan(
            algorithm=taken,
            reason=_reason(taken, chosen) + source.reason + _told(factor),
            new_tokens=num_tokens - cached,
            cached_tokens=cached,
            prefill_ring=prefill.name,
            decode_ring=decode.name,
            prefill_ranks=prefill.num_ranks,
            decode_ranks=decode.num_ranks,
            cached_sources=source.sources,
            chunks=tuple(
                Chunk(tokens=piece, algorithm=Algorithm(selection.algorithm))
                for piece, selection in zip(pieces, chosen, strict=True)
            ),
            predicted_prefill_seconds=sum(
                self._costs.seconds(prefill, selection.algorithm, turn)
                * self.corrections.factor(prefill, Algorithm(selection.algorithm), work)
                for turn, selection in zip(turns, chosen, strict=True)
            ),
            # By one factor, so that they compare as they did when one of them was chosen.
            alternatives=tuple(
                (name, factor * sum(self._costs.seconds(prefill, name, turn) for turn in turns))
                for name in RING_ALGORITHMS
            )
            + source.alternatives,
            prompt_mode=mode,
        )

    def plan_direct(
        self,
        *,
        num_tokens: int,
        kept_on_prefill: int,
        kept_on_decode: int,
        prefill: GroupRegistration,
        decode: GroupRegistration,
        mode: PromptMode,
        algorithm: Algorithm | None = None,
    ) -> Plan:
        """The plan of a turn whose decode ring computes the prompt itself. `prefill` is the ring that would instead."""
        other = self.plan(
            num_tokens=num_tokens,
            kept_on_prefill=kept_on_prefill,
            kept_on_decode=kept_on_decode,
            prefill=prefill,
            decode=decode,
            mode=mode,
        )
        new = TokenRange(kept_on_decode, num_tokens)
        kept = CachedSource(source="kept_on_decode", tokens=TokenRange(0, kept_on_decode))
        seconds = self.predict_direct(num_tokens, kept_on_decode, decode)
        why = "Decode ring" if algorithm is None else f"Forced: {algorithm} was asked for with the turn"
        told = _told(self._direct_factor(num_tokens, kept_on_decode, decode, Algorithm.DECODE_RING))
        return replace(
            other,
            algorithm=Algorithm.DECODE_RING,
            reason=f"{why}: {decode.name} keeps {kept_on_decode} tokens and computes the {len(new)} new ones in "
            f"{1e3 * seconds:.3g} ms predicted, with no KV to move{told}",
            new_tokens=len(new),
            cached_tokens=kept_on_decode,
            prefill_ring=decode.name,
            prefill_ranks=decode.num_ranks,
            cached_sources=(kept,) if kept_on_decode else (),
            chunks=(Chunk(tokens=new, algorithm=Algorithm.DECODE_RING),),
            predicted_prefill_seconds=seconds,
            alternatives=((Algorithm.DECODE_RING, seconds), *other.alternatives),
        )

    @property
    def may_choose_direct(self) -> bool:
        """Whether a turn that asks for no algorithm may be computed by its decode ring: not where one is forced."""
        return self.selector not in RING_ALGORITHMS

    def predict_direct(self, num_tokens: int, kept_on_decode: int, decode: GroupRegistration) -> float:
        """Seconds in which a decode ring computes the end of a prompt whose beginning it keeps, between two steps."""
        factor = self._direct_factor(num_tokens, kept_on_decode, decode, Algorithm.DECODE_RING)
        return self._direct_seconds(num_tokens, kept_on_decode, decode) * factor

    def compare_direct(
        self, num_tokens: int, kept_on_decode: int, decode: GroupRegistration, prefill: GroupRegistration
    ) -> float:
        """As `predict_direct`, to be compared with that prefill ring: by the factor of that ring's turns of like work.

        What the model leaves out it leaves out of both ways. By its own factor the way that had more turns would
        compare with one of which too little is known, and win or lose by that.
        """
        _, name = self._quicker(prefill, _turn(prefill, TokenRange(kept_on_decode, num_tokens)))
        factor = self._direct_factor(num_tokens, kept_on_decode, prefill, name)
        return self._direct_seconds(num_tokens, kept_on_decode, decode) * factor

    def _direct_factor(self, num_tokens: int, kept: int, ring: GroupRegistration, name: Algorithm) -> float:
        return self.corrections.factor(ring, name, self._work.work(num_tokens - kept, kept))

    def _direct_seconds(self, num_tokens: int, kept_on_decode: int, decode: GroupRegistration) -> float:
        turn = _turn(decode, TokenRange(kept_on_decode, num_tokens))
        return self._costs.seconds(decode, Algorithm.DECODE_RING, turn)

    def note_prefill(self, ring: GroupRegistration, report: PrefillReport) -> None:
        """Learn from what a turn took; one that shared a step, or took both algorithms, measures neither."""
        names = {chunk.algorithm for chunk in report.chunks}
        if len(names) != 1 or any(chunk.num_turns != 1 for chunk in report.chunks):
            return
        (name,) = names
        predicted = sum(self._costs.seconds(ring, name, _turn(ring, chunk.tokens)) for chunk in report.chunks)
        work = sum(self._work.work(len(chunk.tokens), chunk.tokens.start) for chunk in report.chunks)
        self.corrections.note(ring, name, work, predicted=predicted, measured=report.prefill_seconds)

    def _select(self, ring: GroupRegistration, turn: Turn, asked: Algorithm | None) -> Selection:
        if asked is not None:
            return Selection(asked, f"Forced: {asked} was asked for with the turn")
        rates = self._costs.rates(ring, is_cached=turn.cached_tokens > 0)
        return select(self.selector, turn, self._costs.shape(ring), rates, self._settings.fit)

    def _choose_source(
        self,
        num_tokens: int,
        kept_on_prefill: int,
        kept_on_decode: int,
        prefill: GroupRegistration,
        decode: GroupRegistration,
    ) -> CachedKv:
        """Compares the turn's prefill after a pull with a longer one. Each is taken whole, by its faster algorithm."""
        missing = max(0, kept_on_decode - kept_on_prefill)
        most = max(kept_on_prefill, kept_on_decode)
        pulled = self.predict_move(missing, prefill, decode) + self.predict_prefill(num_tokens, most, prefill)
        return choose_source(
            self._settings.missing_kv,
            kept_on_prefill=kept_on_prefill,
            kept_on_decode=kept_on_decode,
            pull_seconds=pulled,
            recompute_seconds=self.predict_prefill(num_tokens, kept_on_prefill, prefill) if missing else pulled,
        )

    def predict_turn(
        self,
        *,
        num_tokens: int,
        kept_on_prefill: int,
        kept_on_decode: int,
        prefill: GroupRegistration,
        decode: GroupRegistration,
    ) -> tuple[float, float]:
        """Seconds to fetch KV that only the decode ring keeps, 0 where it is computed again, and of the prefill."""
        if kept_on_decode <= kept_on_prefill:
            return 0.0, self.predict_prefill(num_tokens, kept_on_prefill, prefill)
        source = self._choose_source(num_tokens, kept_on_prefill, kept_on_decode, prefill, decode)
        missing = max(0, source.cached_tokens - kept_on_prefill)
        return (
            self.predict_move(missing, prefill, decode),
            self.predict_prefill(num_tokens, source.cached_tokens, prefill),
        )

    def predict_move(self, num_tokens: int, prefill: GroupRegistration, decode: GroupRegistration) -> float:
        """Seconds in which the KV of so many tokens goes from one of these rings to the other."""
        links = min(prefill.num_ranks * prefill.tp, decode.num_ranks * decode.tp)
        return self._costs.pull_seconds(prefill, num_tokens * self._model.kv_bytes_per_token / links)

    def predict_prefill(self, num_tokens: int, cached_tokens: int, ring: GroupRegistration) -> float:
        """Seconds of a prompt whose beginning is cached, taken whole by its faster algorithm, on an idle ring."""
        turn = _turn(ring, TokenRange(cached_tokens, num_tokens))
        seconds, name = self._quicker(ring, turn)
        return seconds * self.corrections.factor(ring, name, self._work.work(turn.new_tokens, cached_tokens))

    def _quicker(self, ring: GroupRegistration, turn: Turn) -> tuple[float, Algorithm]:
        return min((self._costs.seconds(ring, name, turn), name) for name in RING_ALGORITHMS)

    def _cut(self, ring: GroupRegistration, tokens: TokenRange) -> list[TokenRange]:
        limits = StepLimits.of(
            self._work,
            step_budget=ring.step_budget,
            chunk_tokens=ring.chunk_tokens,
            min_chunk_tokens=ring.min_chunk_tokens,
        )
        return cut(self._work, limits, tokens)


def _turn(ring: GroupRegistration, tokens: TokenRange) -> Turn:
    """`tokens` in one step, all before them cached."""
    return Turn(new_tokens=len(tokens), cached_tokens=tokens.start, num_ranks=ring.num_ranks)


def _told(factor: float) -> str:
    """Empty where it is near enough to 1."""
    if abs(factor - 1.0) <= WORTH_TELLING:
        return ""
    return f"; latest turns like it took {factor:.2f} of what was predicted"


def _of_most_tokens(turns: Sequence[Turn], chosen: Sequence[Selection]) -> Algorithm:
    tokens = dict.fromkeys(RING_ALGORITHMS, 0)
    for turn, selection in zip(turns, chosen, strict=True):
        tokens[Algorithm(selection.algorithm)] += turn.new_tokens
    return max(tokens, key=lambda name: tokens[name])


def _reason(algorithm: Algorithm, chosen: Sequence[Selection]) -> str:
    """The reason of the first chunk that took the plan's algorithm, and how many did."""
    same = [selection.reason for selection in chosen if selection.algorithm == algorithm]
    if len(chosen) == 1:
        return same[0]
    return f"{len(same)} of {len(chosen)} chunks by {algorithm}, the first because: {same[0]}"
