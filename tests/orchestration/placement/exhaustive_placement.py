"""Reference for the choice of rings: it looks at every ring, and the placer must agree with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS, PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.orchestration.placement.kv_locations import WantedTurn
from ringserve.orchestration.placement.placer import LEAVE_SECONDS, TIE
from ringserve.orchestration.placement.registry import TURN_SECONDS, WAIT_SECONDS, RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.workers.protocol.ranks import ModelInfo

Names = tuple[str, str]


class ExhaustivePlacer:
    """Placer for rings of one process a rank that predict by their own rates, with no corrections."""

    def __init__(self, rings: RingRegistry, model: ModelInfo) -> None:
        self._rings = rings
        self._model = model

    def choose(self, turn: WantedTurn, refused: Collection[RegisteredRing]) -> Names:
        prefills, decodes = (self._candidates(role, turn, refused) for role in ("prefill", "decode"))
        compared = self._compared(turn, prefills)
        options = []
        for decode in self._decode_options(turn, decodes):
            totals = [(self._total(turn, ring, decode), ring) for ring in compared]
            seconds, prefill = self._quickest(turn, totals)
            lacking = turn.match_tokens - turn.retained_on(decode)
            here = self._load(decode) + self._move(lacking, decode.registration, decode.registration)
            options.append((seconds + here, prefill, decode))
        first = options[0]
        if len(options) > 1 and first[0] > options[1][0] * (1 + TIE) + LEAVE_SECONDS:
            first = options[1]
        return first[1].name, first[2].name

    def _candidates(self, role: str, turn: WantedTurn, refused: Collection[RegisteredRing]) -> list[RegisteredRing]:
        left = [each for each in self._rings.all() if each.role == role and each.takes_turns and each not in refused]
        need = turn.num_tokens + turn.answer_tokens
        fitting = [each for each in left if each.registration.capacity_tokens >= need]
        if not fitting:
            return [max(left, key=lambda each: each.registration.capacity_tokens)]
        return [each for each in fitting if each.free_tokens >= turn.num_tokens] or fitting

    def _compared(self, turn: WantedTurn, prefills: Sequence[RegisteredRing]) -> list[RegisteredRing]:
        now = self._rings.clock()
        compared = [each for each in prefills if turn.has_kv_on(each)]
        others = [each for each in prefills if not turn.has_kv_on(each)]
        for kind in {each.kind for each in others}:
            same = [each for each in others if each.kind == kind]
            compared.append(min(same, key=lambda each: (max(each.busy_until, now), each.last_placed)))
        return compared

    def _decode_options(self, turn: WantedTurn, decodes: Sequence[RegisteredRing]) -> list[RegisteredRing]:
        own = [each for each in decodes if turn.has_kv_on(each)]
        others = [each for each in decodes if not turn.has_kv_on(each)]
        if others:
            other = min(others, key=lambda each: (self._load(each), each.last_placed))
            if not own or self._load(other) + LEAVE_SECONDS < self._load(own[0]):
                own.append(other)
        return own

    def _quickest(
        self, turn: WantedTurn, totals: Sequence[tuple[float, RegisteredRing]]
    ) -> tuple[float, RegisteredRing]:
        least = min(total for total, _ in totals)
        for total, ring in totals:
            if turn.has_kv_on(ring) and total <= least * (1 + TIE) + LEAVE_SECONDS:
                return total, ring
        tied = [each for each in totals if each[0] <= least * (1 + TIE)]
        return min(tied, key=lambda each: (each[1].registration.num_ranks, each[1].last_placed, each[1].number))

    def _total(self, turn: WantedTurn, ring: RegisteredRing, decode: RegisteredRing) -> float:
        here, source = turn.retained_on(ring), self._source(turn, ring, decode)
        there = turn.retained_on(source)
        alone = self._prefill(turn.num_tokens, here, ring)
        if there > here:
            pulled = self._move(there - here, ring.registration, source.registration)
            alone = min(alone, pulled + self._prefill(turn.num_tokens, there, ring))
        return max(0.0, ring.busy_until - self._rings.clock()) + alone

    def _source(self, turn: WantedTurn, ring: RegisteredRing, decode: RegisteredRing) -> RegisteredRing:
        """Return the ring that retains most KV; of equals the decode ring."""
        left = [
            each
            for role in ("prefill", "decode")
            for each in self._rings.all()
            if each.role == role and each.is_ready and turn.has_kv_on(each) and each not in (ring, decode)
        ]
        return max((decode, *left), key=turn.retained_on)

    def _prefill(self, num_tokens: int, cached: int, ring: RegisteredRing) -> float:
        rates = PrefillRates(ring=ring.registration.rates)
        shape, ranks = self._model.shape, ring.registration.num_ranks
        return min(
            StepPredictor(shape, rates, ranks).cost(name, num_tokens - cached, cached).total_seconds
            for name in PREFILL_ALGORITHMS
        )

    def _move(self, num_tokens: int, prefill: RingRegistration, decode: RingRegistration) -> float:
        if not num_tokens:
            return 0.0
        rates, links = prefill.rates, min(prefill.num_ranks, decode.num_ranks)
        seconds = num_tokens * self._model.kv_bytes_per_token / links / rates.link_bytes_per_second
        return rates.link_latency_seconds + seconds

    def _load(self, decode: RegisteredRing) -> float:
        limit = decode.registration.max_batch
        waiting = max(0, decode.num_turns - limit + 1) if limit else 0
        return TURN_SECONDS * decode.num_turns + WAIT_SECONDS * waiting
