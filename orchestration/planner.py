"""Turns what both rings hold of a prompt into a plan that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_core.cost_model import ModelShape, Rates, predict_prefill
from cp_core.layout import TokenRange
from cp_core.selector import EmpiricalFit, Selection, Turn, select
from orchestration.cached_kv import AUTO, CachedKv, choose_source
from orchestration.prefill_work import StepLimits, WorkModel, cut
from orchestration.turn import Chunk, GroupRegistration, Plan, PromptMode
from workers.model_info import tensor_share
from workers.steps import Algorithm, ModelInfo, RingRates


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """`compute_flops` and `link_bytes_per_second` are C and BW, per rank; 0 takes what the ring measured at its start.

    `fit` holds the constants of the empirical selector, which has no defaults: they belong to one cluster. What only
    the decode ring keeps is pulled or computed again as `missing_kv` says: one of `cached_kv.MISSING_KV`.
    """

    selector: str = "auto"
    compute_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    fit: EmpiricalFit | None = None
    missing_kv: str = AUTO


class Planner:
    """Plans for one model. `selector` may be changed between turns; allowed are `cp_core.selector.POLICIES`."""

    def __init__(self, model: ModelInfo, settings: PlannerSettings) -> None:
        self.selector = settings.selector
        self._settings = settings
        self._model = model
        self._work = WorkModel.of_shape(model.shape)
        self._shapes: dict[int, ModelShape] = {}

    def plan(
        self,
        *,
        num_tokens: int,
        kept_on_prefill: int,
        kept_on_decode: int,
        prefill: GroupRegistration,
        decode: GroupRegistration,
        mode: PromptMode,
    ) -> Plan:
        """The plan of a turn of `num_tokens` prompt tokens whose beginnings both rings have kept.

        Long prompts are cut as the ring would with nothing else to do; each chunk chooses its own algorithm, since what
        is cached grows from one to the next.
        """
        rates, shape = self._rates(prefill.rates), self._shape(prefill.tp)
        source = self._choose_source(num_tokens, kept_on_prefill, kept_on_decode, prefill, decode)
        cached = source.cached_tokens
        pieces = self._cut(prefill, TokenRange(cached, num_tokens))
        turns = [
            Turn(new_tokens=len(piece), cached_tokens=piece.start, num_ranks=prefill.num_ranks) for piece in pieces
        ]
        chosen = [select(self.selector, turn, shape, rates, self._settings.fit) for turn in turns]
        sums = sum(self._tensor_sums(turn, rates, prefill.tp) for turn in turns)
        algorithm = _of_most_tokens(turns, chosen)
        return Plan(
            algorithm=algorithm,
            reason=_reason(algorithm, chosen) + source.reason,
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
            predicted_prefill_seconds=sums
            + sum(
                _predict(shape, rates, selection.algorithm, turn) for turn, selection in zip(turns, chosen, strict=True)
            ),
            alternatives=tuple(
                (name, sums + sum(_predict(shape, rates, name, turn) for turn in turns)) for name in Algorithm
            )
            + source.alternatives,
            prompt_mode=mode,
        )

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
        return self._rates(prefill.rates).message_seconds(num_tokens * self._model.kv_bytes_per_token / links)

    def predict_prefill(self, num_tokens: int, cached_tokens: int, ring: GroupRegistration) -> float:
        """Seconds of a prompt whose beginning is cached, taken whole by its faster algorithm, on an idle ring."""
        rates, shape = self._rates(ring.rates), self._shape(ring.tp)
        turn = Turn(new_tokens=num_tokens - cached_tokens, cached_tokens=cached_tokens, num_ranks=ring.num_ranks)
        sums = self._tensor_sums(turn, rates, ring.tp)
        return sums + min(_predict(shape, rates, name, turn) for name in Algorithm)

    def _cut(self, ring: GroupRegistration, tokens: TokenRange) -> list[TokenRange]:
        limits = StepLimits.of(
            self._work,
            step_budget=ring.step_budget,
            chunk_tokens=ring.chunk_tokens,
            min_chunk_tokens=ring.min_chunk_tokens,
        )
        return cut(self._work, limits, tokens)

    def _rates(self, measured: RingRates) -> Rates:
        return Rates(
            gemm_flops=measured.gemm_flops,
            attention_flops=self._settings.compute_flops or measured.attention_flops,
            link_bytes_per_second=self._settings.link_bytes_per_second or measured.link_bytes_per_second,
            link_latency_seconds=measured.link_latency_seconds,
            overlap=measured.overlap,
        )

    def _shape(self, tp: int) -> ModelShape:
        """What one of `tp` tensor parallel processes computes."""
        if tp not in self._shapes:
            self._shapes[tp] = tensor_share(self._model, tp).shape
        return self._shapes[tp]

    def _tensor_sums(self, turn: Turn, rates: Rates, tp: int) -> float:
        """Seconds of the sums over tensor parallel processes: of the embedding, and after each attention and MLP.

        Every algorithm needs the same ones. They are taken to pass links like those of the ring.
        """
        if tp == 1:
            return 0.0
        num_bytes = -(-turn.new_tokens // turn.num_ranks) * self._model.hidden_size * self._model.element_bytes
        return (1 + 2 * self._model.num_layers) * rates.message_seconds(2 * (tp - 1) / tp * num_bytes)


def _predict(shape: ModelShape, rates: Rates, algorithm: str, turn: Turn) -> float:
    cost = predict_prefill(shape, rates, turn.num_ranks, algorithm, turn.new_tokens, turn.cached_tokens)
    return cost.total_seconds


def _of_most_tokens(turns: Sequence[Turn], chosen: Sequence[Selection]) -> Algorithm:
    tokens = dict.fromkeys(Algorithm, 0)
    for turn, selection in zip(turns, chosen, strict=True):
        tokens[Algorithm(selection.algorithm)] += turn.new_tokens
    return max(tokens, key=lambda name: tokens[name])


def _reason(algorithm: Algorithm, chosen: Sequence[Selection]) -> str:
    """The reason of the first chunk that took the plan's algorithm, and how many did."""
    same = [selection.reason for selection in chosen if selection.algorithm == algorithm]
    if len(chosen) == 1:
        return same[0]
    return f"{len(same)} of {len(chosen)} chunks by {algorithm}, the first because: {same[0]}"
