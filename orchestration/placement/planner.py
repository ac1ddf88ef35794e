"""Turns what both rings hold of a prompt into a plan that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_core.cost.profile import HardwareProfile
from cp_core.cost.selector import EmpiricalFit, Selection, Turn, faster, is_clearly_less, select
from cp_core.layout.shards import TokenRange
from orchestration.placement.cached_kv import (
    AUTO,
    CachedKv,
    RetainedPrefix,
    choose_source,
    is_worth_pulling,
    retaining_most,
)
from orchestration.placement.corrections import RingCorrections
from orchestration.placement.costs import RingCosts, StepSeconds
from orchestration.placement.prefill_work import StepLimits, WorkModel, cut
from orchestration.protocol.turns import (
    CachedSource,
    PlannedChunk,
    PrefillReport,
    PromptMode,
    RingRegistration,
    TurnPlan,
)
from workers.protocol.prefill_steps import RING_ALGORITHMS, Algorithm
from workers.protocol.ranks import ModelInfo

WORTH_TELLING = 0.05
"""A correction that moves a prediction by more is part of a plan's reason."""


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """`compute_flops` and `link_bytes_per_second` are C and BW, per rank; 0 takes those of `profile`, which predicts
    for every ring, or without one what the ring measured at its start.

    `fit` holds the constants of the empirical selector, which has no defaults: they belong to one cluster. What
    another ring keeps is pulled or computed again as `missing_kv` says: one of `cached_kv.MISSING_KV`.
    """

    selector: str = "auto"
    compute_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    profile: HardwareProfile | None = None
    fit: EmpiricalFit | None = None
    missing_kv: str = AUTO


class PromptOnRings(NamedTuple):
    """A prompt of `num_tokens` tokens on a pair of rings, and how many of its first ones each of them keeps the KV of.

    `left` are rings that the prompt's conversation leaves, with what they keep of it.

    A tuple, since a router makes several for every turn.
    """

    num_tokens: int
    retained_on_prefill: int
    retained_on_decode: int
    prefill: RingRegistration
    decode: RingRegistration
    left: Sequence[RetainedPrefix] = ()

    @property
    def most(self) -> RetainedPrefix:
        """Where what the prefill ring lacks would come from."""
        return retaining_most(RetainedPrefix(self.decode, self.retained_on_decode), self.left)


class Planner:
    """Plans for one model. `selector` may be changed between turns; allowed are `cp_core.cost.selector.POLICIES`.

    `corrections` are learned from what turns took (`note_prefill`), and applied to what later ones are predicted to
    take. Which algorithm a turn takes they leave alone: an algorithm's factor comes from the turns that it was chosen
    for, and says little of a turn for which both are weighed.
    """

    def __init__(self, model: ModelInfo, settings: PlannerSettings) -> None:
        self.selector = settings.selector
        self._settings = settings
        self._kv_bytes_a_token = model.kv_bytes_per_token
        self._work = WorkModel.of_shape(model.shape)
        self._costs = RingCosts(
            model,
            profile=settings.profile,
            compute_flops=settings.compute_flops,
            link_bytes_per_second=settings.link_bytes_per_second,
        )
        self.corrections = RingCorrections()

    def plan(self, prompt: PromptOnRings, *, mode: PromptMode, algorithm: Algorithm | None = None) -> TurnPlan:
        """Long prompts are cut as the ring would with nothing else to do; each chunk chooses its own algorithm, since
        what is cached grows from one to the next, unless the turn asked for one.
        """
        ring, source = prompt.prefill, self._choose_source(prompt)
        cached = source.cached_tokens
        pieces = self._cut(ring, TokenRange(cached, prompt.num_tokens))
        seconds = [self._costs.seconds(ring, len(piece), piece.start) for piece in pieces]
        names = [self._choose(ring, *each, algorithm) for each in zip(pieces, seconds, strict=True)]
        taken = _of_most_tokens(pieces, names)
        first = names.index(taken)
        why = self._select(ring, pieces[first], seconds[first], algorithm).reason
        work = self._work.work(prompt.num_tokens - cached, cached)
        factors = {name: self.corrections.factor(ring, name, work) for name in RING_ALGORITHMS}
        return TurnPlan(
            algorithm=taken,
            reason=_reason(taken, names, why) + source.reason + _told(factors[taken]),
            new_tokens=prompt.num_tokens - cached,
            cached_tokens=cached,
            prefill_ring=ring.name,
            decode_ring=prompt.decode.name,
            prefill_ranks=ring.num_ranks,
            decode_ranks=prompt.decode.num_ranks,
            cached_sources=source.sources,
            chunks=tuple(PlannedChunk(tokens=piece, algorithm=name) for piece, name in zip(pieces, names, strict=True)),
            predicted_prefill_seconds=sum(
                each.by(name) * factors[name] for each, name in zip(seconds, names, strict=True)
            ),
            # By one factor, so that they compare as they did when one of them was chosen.
            alternatives=tuple(
                (name, factors[taken] * sum(each.by(name) for each in seconds)) for name in RING_ALGORITHMS
            )
            + source.alternatives,
            prompt_mode=mode,
        )

    def plan_direct(self, prompt: PromptOnRings, *, mode: PromptMode, algorithm: Algorithm | None = None) -> TurnPlan:
        """The plan of a turn whose decode ring computes the prompt itself; its prefill ring would instead."""
        other = self.plan(prompt, mode=mode)
        num_tokens, retained_on_decode, decode = prompt.num_tokens, prompt.retained_on_decode, prompt.decode
        new = TokenRange(retained_on_decode, num_tokens)
        kept = CachedSource(source="kept_on_decode", tokens=TokenRange(0, retained_on_decode))
        seconds = self.predict_direct(num_tokens, retained_on_decode, decode)
        why = "Decode ring" if algorithm is None else f"Forced: {algorithm} was asked for with the turn"
        told = _told(self._direct_factor(num_tokens, retained_on_decode, decode, Algorithm.DECODE_RING))
        return replace(
            other,
            algorithm=Algorithm.DECODE_RING,
            reason=f"{why}: {decode.name} keeps {retained_on_decode} tokens and computes the {len(new)} new ones in "
            f"{1e3 * seconds:.3g} ms predicted, with no KV to move{told}",
            new_tokens=len(new),
            cached_tokens=retained_on_decode,
            prefill_ring=decode.name,
            prefill_ranks=decode.num_ranks,
            cached_sources=(kept,) if retained_on_decode else (),
            chunks=(PlannedChunk(tokens=new, algorithm=Algorithm.DECODE_RING),),
            predicted_prefill_seconds=seconds,
            alternatives=((Algorithm.DECODE_RING, seconds), *other.alternatives),
        )

    @property
    def may_choose_direct(self) -> bool:
        """Whether a turn that asks for no algorithm may be computed by its decode ring: not where one is forced."""
        return self.selector not in RING_ALGORITHMS

    def predict_direct(self, num_tokens: int, retained_on_decode: int, decode: RingRegistration) -> float:
        """Seconds in which a decode ring computes the end of a prompt whose beginning it keeps, between two steps."""
        factor = self._direct_factor(num_tokens, retained_on_decode, decode, Algorithm.DECODE_RING)
        return self._direct_seconds(num_tokens, retained_on_decode, decode) * factor

    def compare_direct(
        self, num_tokens: int, retained_on_decode: int, decode: RingRegistration, prefill: RingRegistration
    ) -> float:
        """As `predict_direct`, to be compared with that prefill ring: by the factor of that ring's turns of like work.

        What the model leaves out it leaves out of both ways. By its own factor the way that had more turns would
        compare with one of which too little is known, and win or lose by that.
        """
        name = self._costs.seconds(prefill, num_tokens - retained_on_decode, retained_on_decode).fastest
        factor = self._direct_factor(num_tokens, retained_on_decode, prefill, name)
        return self._direct_seconds(num_tokens, retained_on_decode, decode) * factor

    def _direct_factor(self, num_tokens: int, kept: int, ring: RingRegistration, name: Algorithm) -> float:
        return self.corrections.factor(ring, name, self._work.work(num_tokens - kept, kept))

    def _direct_seconds(self, num_tokens: int, retained_on_decode: int, decode: RingRegistration) -> float:
        new_tokens = num_tokens - retained_on_decode
        return self._costs.seconds(decode, new_tokens, retained_on_decode).by(Algorithm.DECODE_RING)

    def note_prefill(self, ring: RingRegistration, report: PrefillReport) -> None:
        """Learn from what a turn took; one that shared a step, or took both algorithms, measures neither."""
        names = {chunk.algorithm for chunk in report.chunks}
        if len(names) != 1 or any(chunk.num_turns != 1 for chunk in report.chunks):
            return
        (name,) = names
        predicted = sum(
            self._costs.seconds(ring, len(chunk.tokens), chunk.tokens.start).by(name) for chunk in report.chunks
        )
        work = sum(self._work.work(len(chunk.tokens), chunk.tokens.start) for chunk in report.chunks)
        self.corrections.note(ring, name, work, predicted=predicted, measured=report.prefill_seconds)

    def predict_turn(
        self, num_tokens: int, kept: int, ring: RingRegistration, most: RetainedPrefix
    ) -> tuple[float, float]:
        """Of a turn on a prefill ring that keeps the first `kept` tokens: seconds to fetch what it lacks of those that
        `most` keeps, 0 where they are computed again, and of the prefill.
        """
        prefill = self.predict_prefill(num_tokens, kept, ring)
        if most.num_tokens <= kept:
            return 0.0, prefill
        move, after = self._predict_pulled(num_tokens, kept, ring, most)
        is_pulled = is_worth_pulling(self._settings.missing_kv, pull_seconds=move + after, recompute_seconds=prefill)
        return (move, after) if is_pulled else (0.0, prefill)

    def predict_move(self, num_tokens: int, ring: RingRegistration, other: RingRegistration) -> float:
        """Seconds in which the KV of so many tokens goes from one of these rings to the other."""
        links = min(ring.num_ranks * ring.tp, other.num_ranks * other.tp)
        return self._costs.pull_seconds(ring, num_tokens * self._kv_bytes_a_token / links)

    def predict_prefill(self, num_tokens: int, cached_tokens: int, ring: RingRegistration) -> float:
        """Seconds of a prompt whose beginning is cached, taken whole by its faster algorithm, on an idle ring."""
        new_tokens = num_tokens - cached_tokens
        seconds = self._costs.seconds(ring, new_tokens, cached_tokens)
        name, work = seconds.fastest, self._work.work(new_tokens, cached_tokens)
        return seconds.by(name) * self.corrections.factor(ring, name, work)

    def _predict_pulled(
        self, num_tokens: int, kept: int, ring: RingRegistration, most: RetainedPrefix
    ) -> tuple[float, float]:
        """Seconds of fetching all that the prefill ring lacks, and of the prefill after it."""
        return (
            self.predict_move(most.num_tokens - kept, ring, most.ring),
            self.predict_prefill(num_tokens, most.num_tokens, ring),
        )

    def _choose_source(self, prompt: PromptOnRings) -> CachedKv:
        """Compares the turn's prefill after a pull with a longer one. Each is taken whole, by its faster algorithm."""
        pull = recompute = 0.0
        num_tokens, kept, ring, most = prompt.num_tokens, prompt.retained_on_prefill, prompt.prefill, prompt.most
        if most.num_tokens > kept:
            pull = sum(self._predict_pulled(num_tokens, kept, ring, most))
            recompute = self.predict_prefill(num_tokens, kept, ring)
        return choose_source(
            self._settings.missing_kv,
            retained_on_prefill=kept,
            retained_on_decode=most.num_tokens,
            pull_seconds=pull,
            recompute_seconds=recompute,
            other_ring="" if most.ring is prompt.decode else most.ring.name,
        )

    def _choose(
        self, ring: RingRegistration, tokens: TokenRange, seconds: StepSeconds, asked: Algorithm | None
    ) -> Algorithm:
        """As `_select`, without the words: plans of long prompts have dozens of chunks and tell the reason of one."""
        if self.selector != "auto" or asked is not None:
            return Algorithm(self._select(ring, tokens, seconds, asked).algorithm)
        is_pass_q = ring.num_ranks > 1 and is_clearly_less(seconds.pass_q, seconds.pass_kv)
        return Algorithm.PASS_Q if is_pass_q else Algorithm.PASS_KV

    def _select(
        self, ring: RingRegistration, tokens: TokenRange, seconds: StepSeconds, asked: Algorithm | None
    ) -> Selection:
        if asked is not None:
            return Selection(asked, f"Forced: {asked} was asked for with the turn")
        turn = Turn(new_tokens=len(tokens), cached_tokens=tokens.start, num_ranks=ring.num_ranks)
        if self.selector == "auto":
            return faster(turn, seconds.pass_kv, seconds.pass_q)
        rates = self._costs.rates(ring, is_cached=tokens.start > 0)
        return select(self.selector, turn, self._costs.shape(ring), rates, self._settings.fit)

    def _cut(self, ring: RingRegistration, tokens: TokenRange) -> list[TokenRange]:
        limits = StepLimits.of(
            self._work,
            step_budget=ring.step_budget,
            chunk_tokens=ring.chunk_tokens,
            min_chunk_tokens=ring.min_chunk_tokens,
        )
        return cut(self._work, limits, tokens)


def _told(factor: float) -> str:
    """Empty where it is near enough to 1."""
    if abs(factor - 1.0) <= WORTH_TELLING:
        return ""
    return f"; latest turns like it took {factor:.2f} of what was predicted"


def _of_most_tokens(pieces: Sequence[TokenRange], names: Sequence[Algorithm]) -> Algorithm:
    tokens = dict.fromkeys(RING_ALGORITHMS, 0)
    for piece, name in zip(pieces, names, strict=True):
        tokens[name] += len(piece)
    return max(tokens, key=lambda name: tokens[name])


def _reason(algorithm: Algorithm, names: Sequence[Algorithm], why: str) -> str:
    """How many chunks took the plan's algorithm, and why the first of them did."""
    if len(names) == 1:
        return why
    return f"{names.count(algorithm)} of {len(names)} chunks by {algorithm}, the first because: {why}"
