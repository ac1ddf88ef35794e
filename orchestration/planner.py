"""Turns what both rings hold of a prompt into a plan that says why."""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.layout import TokenRange
from orchestration.turn import CachedSource, GroupRegistration, Plan, PromptMode
from workers.steps import Algorithm, ModelInfo


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    selector: str = "auto"
    compute_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    alpha: float = -1.059
    beta: float = 1.145
    gamma: float = 12.112


class Planner:
    def __init__(self, model: ModelInfo, settings: PlannerSettings) -> None:
        self.selector = settings.selector

    def plan(self, *, num_tokens: int, kept_on_prefill: int, kept_on_decode: int, prefill: GroupRegistration, decode: GroupRegistration, mode: PromptMode) -> Plan:
        cached = max(kept_on_prefill, kept_on_decode)
        sources = []
        if kept_on_prefill:
            sources.append(CachedSource(source="kept_on_prefill", tokens=TokenRange(0, kept_on_prefill)))
        if cached > kept_on_prefill:
            sources.append(CachedSource(source="pulled_from_decode", tokens=TokenRange(kept_on_prefill, cached)))
        new = num_tokens - cached
        algorithm = Algorithm.PASS_Q if self.selector == "pass_q" or (self.selector == "auto" and new * 4 < num_tokens) else Algorithm.PASS_KV
        return Plan(algorithm=algorithm, reason="x", new_tokens=new, cached_tokens=cached, prefill_ring=prefill.name, decode_ring=decode.name, prefill_ranks=prefill.num_ranks, decode_ranks=decode.num_ranks, cached_sources=tuple(sources), predicted_prefill_seconds=0.0, alternatives=(), prompt_mode=mode)
