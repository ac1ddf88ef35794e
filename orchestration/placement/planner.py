"""Planner: makes a turn's plan, and the sentence that gives its reason, from the KV of the prompt that rings retain.

The router and the simulator have one each. It owns the corrections, and calls no other process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.selector import NAMES, PROBED_TIE, TIE, duration, forced, least, why_fastest
from ringserve.cp_core.cost.steps import StepLimits, WorkModel, cut
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.placement.costs import RingCorrections, RingCosts, StepSeconds
from ringserve.orchestration.protocol.plans import CachedSource, PlannedChunk, PromptMode, SparsePlan, TurnPlan
from ringserve.orchestration.protocol.turns import PrefillReport, RingRegistration
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm

AUTO, PULL, RECOMPUTE = "auto", "pull", "recompute"
MISSING_KV = (AUTO, PULL, RECOMPUTE)
"""Policies for KV that another ring retains and the prefill ring lacks."""
RETAINED, PULLED, PULLED_FROM_OTHER = "kept_on_prefill", "pulled_from_decode", "pulled_from_other"
"""Sources of cached KV: values of `CachedSource.source`."""


@dataclass(frozen=True, slots=True)
class RetainedPrefix:
    """Ring that retains the KV of the first `num_tokens` tokens of a turn's prompt."""

    ring: RingRegistration
    num_tokens: int


def retaining_most(decode: RetainedPrefix, leaving: Iterable[RetainedPrefix]) -> RetainedPrefix:
    """Return the turn's decode ring, unless a ring that its conversation leaves retains more."""
    most = decode
    for other in leaving:
        if other.num_tokens > most.num_tokens:
            most = other
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedKv:
    """Decision that the first `cached_tokens` tokens are not computed.

    `alternatives` has (policy, predicted seconds until the prefill ends) for pull and recompute. It may be empty.
    """

    cached_tokens: int
    sources: tuple[CachedSource, ...]
    alternatives: tuple[tuple[str, float], ...] = ()


def is_worth_pulling(policy: str, *, pull_seconds: float, recompute_seconds: float) -> bool:
    """Return whether the prefill ring pulls KV that it lacks; equal costs go to the pull. See `choose_source`."""
    return policy == PULL or (policy == AUTO and pull_seconds <= recompute_seconds)


def choose_source(
    policy: str,
    *,
    retained_on_prefill: int,
    retained_elsewhere: int,
    pull_seconds: float,
    recompute_seconds: float,
    other_ring: str = "",
) -> CachedKv:
    """Choose between pulling KV that the prefill ring lacks and computing it again.

    `policy` is one of MISSING_KV. The seconds are predicted for pull and prefill together, and for the longer prefill
    alone. If `other_ring` is given, it is that ring, and not the turn's decode ring, that retains the
    `retained_elsewhere` tokens. KV that the prefill ring retains is always used.
    """
    retained = CachedSource(source=RETAINED, tokens=TokenRange(0, retained_on_prefill))
    if retained_elsewhere <= retained_on_prefill:
        return CachedKv(cached_tokens=retained_on_prefill, sources=(retained,) if retained_on_prefill else ())
    missing = TokenRange(retained_on_prefill, retained_elsewhere)
    is_pulled = is_worth_pulling(policy, pull_seconds=pull_seconds, recompute_seconds=recompute_seconds)
    name = PULLED_FROM_OTHER if other_ring else PULLED
    sources = (retained, CachedSource(source=name, tokens=missing, ring=other_ring)) if is_pulled else (retained,)
    return CachedKv(
        cached_tokens=missing.stop if is_pulled else missing.start,
        sources=tuple(source for source in sources if len(source.tokens)),
        alternatives=((PULL, pull_seconds), (RECOMPUTE, recompute_seconds)),
    )


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """Planner settings. `missing_kv` is one of `MISSING_KV`.

    `profile` predicts for every ring; without one, predictions come from the rates that each ring measured at its
    start. Set `has_exact_rates` if these rates predict every algorithm exactly, as in simulations, which compute steps
    from them.
    """

    selector: str = "auto"
    profile: HardwareProfile | None = None
    missing_kv: str = AUTO
    has_exact_rates: bool = False


class PromptOnRings(NamedTuple):
    """Prompt of `num_tokens` tokens on a pair of rings, and for how many of its first tokens each ring retains the KV.

    `leaving` are rings that the prompt's conversation leaves, with what they retain of it. This class is a NamedTuple,
    which is fast to make: a router makes several for every turn.
    """

    num_tokens: int
    retained_on_prefill: int
    retained_on_decode: int
    prefill: RingRegistration
    decode: RingRegistration
    leaving: Sequence[RetainedPrefix] = ()

    @property
    def most(self) -> RetainedPrefix:
        """Ring from which the prefill ring would pull the KV that it lacks."""
        return retaining_most(RetainedPrefix(self.decode, self.retained_on_decode), self.leaving)


class Planner:
    """Planner for one model. `selector` may change between turns; allowed are `cp_core.cost.selector.POLICIES`.

    `corrections` are learned from measured turns (`note_prefill`) and applied to later predictions. They do not
    influence the choice of algorithm: an algorithm's factor comes only from turns for which it was chosen, and says
    little about turns for which another might be.
    """

    def __init__(self, model: ModelInfo, settings: PlannerSettings) -> None:
        self.selector = settings.selector
        self._settings = settings
        self._tie = TIE if settings.profile is not None or settings.has_exact_rates else PROBED_TIE
        self._kv_bytes_a_token = model.kv_bytes_per_token
        self._work = WorkModel.of_shape(model.shape)
        self._costs = RingCosts(model, profile=settings.profile)
        self.corrections = RingCorrections()

    def plan(self, prompt: PromptOnRings, *, mode: PromptMode, algorithm: Algorithm | None = None) -> TurnPlan:
        """Plan a turn whose prompt a prefill ring computes.

        Long prompts are cut into chunks as an idle ring would cut them. Unless the turn asks for an algorithm, each
        chunk gets its own, because the cached prefix grows from chunk to chunk.
        """
        ring, source = prompt.prefill, self._choose_source(prompt)
        cached = source.cached_tokens
        pieces = self._cut(ring, TokenRange(cached, prompt.num_tokens))
        seconds = [self._costs.seconds(ring, len(piece), piece.start) for piece in pieces]
        names = [self._choose(ring, *each, algorithm) for each in zip(pieces, seconds, strict=True)]
        taken = _of_most_tokens(pieces, names)
        work = self._work.work(prompt.num_tokens - cached, cached)
        factors = {name: self.corrections.factor(ring, name, work, is_cached=cached > 0) for name in RING_ALGORITHMS}
        predicted = sum(each.total(name) * factors[name] for each, name in zip(seconds, names, strict=True))
        return TurnPlan(
            algorithm=taken,
            reason=f"{_name_mix(taken, names)}, predicted {duration(predicted)}: "
            + self._explain(ring, taken, names, seconds, prompt.num_tokens, algorithm),
            new_tokens=prompt.num_tokens - cached,
            cached_tokens=cached,
            prefill_ring=ring.name,
            decode_ring=prompt.decode.name,
            prefill_ranks=ring.num_ranks,
            decode_ranks=prompt.decode.num_ranks,
            cached_sources=source.sources,
            chunks=tuple(PlannedChunk(tokens=piece, algorithm=name) for piece, name in zip(pieces, names, strict=True)),
            predicted_prefill_seconds=predicted,
            # All are multiplied by the same factor, so that their order is that of the choice, which uses no factors.
            alternatives=tuple(
                (name, factors[taken] * sum(each.total(name) for each in seconds)) for name in RING_ALGORITHMS
            )
            + source.alternatives,
            prompt_mode=mode,
            correction=factors[taken],
        )

    def _explain(
        self,
        ring: RingRegistration,
        taken: Algorithm,
        names: Sequence[Algorithm],
        seconds: Sequence[StepSeconds],
        num_tokens: int,
        asked: Algorithm | None,
    ) -> str:
        """Say why the chunks of a prompt use these algorithms."""
        if asked is not None:
            return "the request asked for it"
        if self.selector != "auto":
            return "router.selector sets it"
        if ring.num_ranks == 1:
            return "a ring of one rank sends no messages"
        if len(set(names)) > 1:
            return "fastest for each chunk"
        return why_fastest(
            {name: sum(each.total(name) for each in seconds) for name in RING_ALGORITHMS}, taken, num_tokens, self._tie
        )

    def plan_direct(self, prompt: PromptOnRings, *, mode: PromptMode, algorithm: Algorithm | None = None) -> TurnPlan:
        """Plan a turn whose decode ring computes the prompt; `prompt.prefill` is the ring that would otherwise."""
        other = self.plan(prompt, mode=mode)
        num_tokens, retained_on_decode, decode = prompt.num_tokens, prompt.retained_on_decode, prompt.decode
        new = TokenRange(retained_on_decode, num_tokens)
        retained = CachedSource(source="kept_on_decode", tokens=TokenRange(0, retained_on_decode))
        seconds = self.predict_direct(num_tokens, retained_on_decode, decode)
        why = "its KV need not move" if algorithm is None else "the request asked for it"
        return replace(
            other,
            algorithm=Algorithm.DECODE_RING,
            reason=f"decode ring, predicted {duration(seconds)}: {why}",
            correction=self._direct_factor(num_tokens, retained_on_decode, decode, Algorithm.DECODE_RING),
            new_tokens=len(new),
            cached_tokens=retained_on_decode,
            prefill_ring=decode.name,
            prefill_ranks=decode.num_ranks,
            cached_sources=(retained,) if retained_on_decode else (),
            chunks=(PlannedChunk(tokens=new, algorithm=Algorithm.DECODE_RING),),
            predicted_prefill_seconds=seconds,
            alternatives=((Algorithm.DECODE_RING, seconds), *other.alternatives),
        )

    def plan_sparse(self, prompt: PromptOnRings, sparse: SparsePlan, *, mode: PromptMode) -> TurnPlan:
        """Plan a turn that a prefill ring computes with only a part of the keys."""
        exact = self.plan(prompt, mode=mode, algorithm=Algorithm.PASS_KV)
        cached, ring = exact.cached_tokens, prompt.prefill
        seconds = self.predict_sparse(prompt.num_tokens, cached, ring, sparse.sparsity)
        return replace(
            exact,
            reason=f"sparse pass-KV, predicted {duration(seconds)}: {sparse.bound} {sparse.limit:g} allows "
            f"{sparse.keep:g} of other ranks' keys",
            predicted_prefill_seconds=seconds,
            alternatives=(("sparse", seconds), *exact.alternatives),
            sparse=sparse,
        )

    def predict_exact(
        self, num_tokens: int, cached_tokens: int, ring: RingRegistration, asked: Algorithm | None
    ) -> float:
        """Return the seconds of a prompt with a cached prefix, cut and computed on an idle ring as `plan` assumes."""
        work = self._work.work(num_tokens - cached_tokens, cached_tokens)
        total = 0.0
        for piece in self._cut(ring, TokenRange(cached_tokens, num_tokens)):
            seconds = self._costs.seconds(ring, len(piece), piece.start)
            name = self._choose(ring, piece, seconds, asked)
            total += seconds.total(name) * self.corrections.factor(ring, name, work, is_cached=cached_tokens > 0)
        return total

    def predict_sparse(self, num_tokens: int, cached_tokens: int, ring: RingRegistration, sparsity: Sparsity) -> float:
        """Return the seconds of a prompt with a cached prefix, computed with part of the keys on an idle ring."""
        pieces = self._cut(ring, TokenRange(cached_tokens, num_tokens))
        work = self._work.work(num_tokens - cached_tokens, cached_tokens)
        seconds = sum(self._costs.sparse_seconds(ring, sparsity, len(piece), piece.start) for piece in pieces)
        return seconds * self.corrections.factor(ring, Algorithm.PASS_KV, work, is_cached=cached_tokens > 0)

    @property
    def may_choose_direct(self) -> bool:
        """True if the decode ring may compute a turn that asks for no algorithm: not if the selector forces one."""
        return self.selector == "auto"

    def predict_direct(self, num_tokens: int, retained_on_decode: int, decode: RingRegistration) -> float:
        """Return the seconds in which a decode ring computes the end of a prompt whose beginning it retains."""
        factor = self._direct_factor(num_tokens, retained_on_decode, decode, Algorithm.DECODE_RING)
        return self._direct_seconds(num_tokens, retained_on_decode, decode) * factor

    def compare_direct(
        self, num_tokens: int, retained_on_decode: int, decode: RingRegistration, prefill: RingRegistration
    ) -> float:
        """Predict as `predict_direct` does, but correct by the factor of the prefill ring's turns of like work.

        The cost model leaves out the same for both rings. If each had its own factor, a ring with many measured turns
        would be compared with one of which too little is known.
        """
        name = self._costs.seconds(prefill, num_tokens - retained_on_decode, retained_on_decode).fastest
        factor = self._direct_factor(num_tokens, retained_on_decode, prefill, name)
        return self._direct_seconds(num_tokens, retained_on_decode, decode) * factor

    def _direct_factor(self, num_tokens: int, retained: int, ring: RingRegistration, name: Algorithm) -> float:
        return self.corrections.factor(ring, name, self._work.work(num_tokens - retained, retained))

    def _direct_seconds(self, num_tokens: int, retained_on_decode: int, decode: RingRegistration) -> float:
        new_tokens = num_tokens - retained_on_decode
        return self._costs.direct_seconds(decode, new_tokens, retained_on_decode)

    def note_prefill(self, ring: RingRegistration, report: PrefillReport) -> None:
        """Learn from a measured turn.

        A turn that shared a step with others, or used several algorithms, is ignored: its time measures none of them.
        """
        names = {chunk.algorithm for chunk in report.chunks}
        if len(names) != 1 or any(chunk.num_turns != 1 for chunk in report.chunks):
            return
        (name,) = names
        predicted = sum(
            self._costs.seconds(ring, len(chunk.tokens), chunk.tokens.start).total(name) for chunk in report.chunks
        )
        work = sum(self._work.work(len(chunk.tokens), chunk.tokens.start) for chunk in report.chunks)
        is_cached, seconds = report.chunks[0].tokens.start > 0, report.prefill_seconds
        self.corrections.note(ring, name, work, predicted=predicted, measured=seconds, is_cached=is_cached)

    def predict_turn(
        self, num_tokens: int, retained: int, ring: RingRegistration, most: RetainedPrefix
    ) -> tuple[float, float]:
        """Predict a turn on a prefill ring that retains `retained` tokens: (seconds of the pull, of the prefill).

        The pull fetches the tokens that `most` retains and the ring lacks; 0 if they are computed again.
        """
        prefill = self.predict_prefill(num_tokens, retained, ring)
        if most.num_tokens <= retained:
            return 0.0, prefill
        move, after = self._predict_pulled(num_tokens, retained, ring, most)
        is_pulled = is_worth_pulling(self._settings.missing_kv, pull_seconds=move + after, recompute_seconds=prefill)
        return (move, after) if is_pulled else (0.0, prefill)

    def predict_move(self, num_tokens: int, ring: RingRegistration, other: RingRegistration) -> float:
        """Return the seconds in which the KV of so many tokens goes from one of these rings to the other."""
        links = min(ring.num_ranks * ring.tp, other.num_ranks * other.tp)
        return self._costs.pull_seconds(ring, num_tokens * self._kv_bytes_a_token / links)

    def predict_prefill(self, num_tokens: int, cached_tokens: int, ring: RingRegistration) -> float:
        """Return the seconds of a prompt with a cached prefix, computed uncut by its fastest algorithm.

        The ring is idle.
        """
        new_tokens = num_tokens - cached_tokens
        seconds = self._costs.seconds(ring, new_tokens, cached_tokens)
        name, work = seconds.fastest, self._work.work(new_tokens, cached_tokens)
        return seconds.total(name) * self.corrections.factor(ring, name, work)

    def _predict_pulled(
        self, num_tokens: int, retained: int, ring: RingRegistration, most: RetainedPrefix
    ) -> tuple[float, float]:
        """Return the seconds to pull all KV that the prefill ring lacks, and the seconds of the prefill after it."""
        return (
            self.predict_move(most.num_tokens - retained, ring, most.ring),
            self.predict_prefill(num_tokens, most.num_tokens, ring),
        )

    def _choose_source(self, prompt: PromptOnRings) -> CachedKv:
        """Compare a pull and the prefill after it with the longer prefill without a pull.

        Each prefill is predicted uncut, with its fastest algorithm.
        """
        pull = recompute = 0.0
        num_tokens, retained, ring, most = prompt.num_tokens, prompt.retained_on_prefill, prompt.prefill, prompt.most
        if most.num_tokens > retained:
            pull = sum(self._predict_pulled(num_tokens, retained, ring, most))
            recompute = self.predict_prefill(num_tokens, retained, ring)
        return choose_source(
            self._settings.missing_kv,
            retained_on_prefill=retained,
            retained_elsewhere=most.num_tokens,
            pull_seconds=pull,
            recompute_seconds=recompute,
            other_ring="" if most.ring is prompt.decode else most.ring.name,
        )

    def _choose(
        self, ring: RingRegistration, tokens: TokenRange, seconds: StepSeconds, asked: Algorithm | None
    ) -> Algorithm:
        """Return the algorithm of one chunk: asked for, set by the configuration, or the fastest."""
        if asked is not None:
            return asked
        if self.selector != "auto":
            return Algorithm(forced(self.selector).algorithm)
        if ring.num_ranks == 1:
            return Algorithm.PASS_KV
        return Algorithm(least(seconds.without_sums, tokens.stop, self._tie))

    def _cut(self, ring: RingRegistration, tokens: TokenRange) -> list[TokenRange]:
        limits = StepLimits.of(
            self._work,
            step_budget=ring.step_budget,
            chunk_tokens=ring.chunk_tokens,
            min_chunk_tokens=ring.min_chunk_tokens,
        )
        return cut(self._work, limits, tokens)


def _of_most_tokens(pieces: Sequence[TokenRange], names: Sequence[Algorithm]) -> Algorithm:
    tokens = dict.fromkeys(RING_ALGORITHMS, 0)
    for piece, name in zip(pieces, names, strict=True):
        tokens[name] += len(piece)
    return max(tokens, key=lambda name: tokens[name])


def _name_mix(taken: Algorithm, names: Sequence[Algorithm]) -> str:
    """Name the chunks' algorithm, or the one of most tokens with its share: "pass-KV for 3 of 4 chunks"."""
    if len(set(names)) == 1:
        return NAMES[taken]
    return f"{NAMES[taken]} for {names.count(taken)} of {len(names)} chunks"
