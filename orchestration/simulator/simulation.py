"""One simulated run: conversations arrive, turns are placed, planned, prefilled, migrated and decoded.

What happens to a turn: placed -> reserved on both rings (else asked again later) -> KV pulled from the decode ring
where the plan says so -> queue -> steps -> what of the migration is exposed -> decode batch -> think -> next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from cp_core.cost.decode import fastest_step
from cp_core.cost.memory import WeightBytes, process_memory
from cp_core.cost.migration import predict_migration
from cp_core.cost.prefill import predict_turn
from cp_core.cost.profile import HardwareProfile
from cp_core.errors import CapacityExceeded, ConfigError
from cp_core.layout import TokenRange
from orchestration.cached_kv import KeptOn
from orchestration.groups import Group, GroupRegistry, Placed
from orchestration.planner import Planner, PlannerSettings
from orchestration.prefill_scheduler import PrefillScheduler, PrefillScheduling, ScheduledStep
from orchestration.prefill_work import StepLimits, WorkModel
from orchestration.simulator.clock import Clock
from orchestration.simulator.decode_ring import DecodingTurn, SimulatedDecodeRing
from orchestration.simulator.placement import POLICIES, AskedTurn, Rings, Whereabouts
from orchestration.simulator.prefill_ring import PrefillingTurn, SimulatedPrefillRing
from orchestration.simulator.results import SimulationResult, TurnRecord, summarise
from orchestration.simulator.trace import TracedConversation, TracedTurn
from orchestration.turn import GroupRegistration, Plan, PromptMode
from workers.steps import ModelInfo, RingRates

# Mean contexts of a decode batch are rounded to this: a step of 1,000 tokens more takes no longer that one could see.
CONTEXT_GRAIN = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShape:
    """`num_rings` rings of cp ranks of tp processes."""

    num_rings: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    """`placement` is one of `placement.POLICIES`. A turn that finds no room asks again after `retry_seconds`."""

    model: ModelInfo
    weights: WeightBytes
    profile: HardwareProfile
    prefill: PoolShape
    decode: PoolShape
    placement: str
    selector: str = "auto"
    chunk_tokens: int = 65_536
    max_batch: int = 32
    scheduling: PrefillScheduling = field(default_factory=PrefillScheduling)
    retry_seconds: float = 5.0


@dataclass(slots=True, eq=False)
class _Conversation:
    """`tokens` of all finished turns; `at` is the next turn's number."""

    number: int
    traced: TracedConversation
    where: Whereabouts
    tokens: int = 0
    at: int = 0

    @property
    def turn(self) -> TracedTurn:
        return self.traced.turns[self.at]


class Simulation:
    """Runs once. Raises ConfigError for an unknown placement, or where a ring cannot hold the longest conversation."""

    def __init__(self, settings: SimulationSettings, trace: Sequence[TracedConversation]) -> None:
        if settings.placement not in POLICIES:
            raise ConfigError(f"placement is {settings.placement!r}; allowed are {', '.join(POLICIES)}")
        self._settings = settings
        self._shape = settings.model.shape
        self._planner = Planner(settings.model, PlannerSettings(selector=settings.selector))
        self._clock = Clock()
        self._trace = trace
        self._registry = GroupRegistry(lambda: self._clock.now)
        self._rings = Rings(registry=self._registry, prefill=self._prefill_rings(), decode=self._decode_rings())
        self._policy = POLICIES[settings.placement](self._rings, self._planner)
        self._records: list[TurnRecord] = []
        self._num_retries = 0
        self._check_capacity()

    def run(self) -> SimulationResult:
        """All turns of the trace, to the last token."""
        for number, traced in enumerate(self._trace):
            conversation = _Conversation(number, traced, Whereabouts())
            self._clock.after(traced.start_seconds, lambda one=conversation: self._next_turn(one))  # type: ignore[misc]
        self._clock.run()
        for kv in (*(ring.kv for ring in self._rings.prefill), *(ring.kv for ring in self._rings.decode)):
            kv.check_integrity()
        return summarise(
            self._settings.placement,
            self._records,
            num_retries=self._num_retries,
            seconds=self._clock.now,
            busy_seconds=[ring.busy_seconds for ring in self._rings.prefill],
            largest_batch=max(ring.largest_batch for ring in self._rings.decode),
        )

    # --- a turn ------------------------------------------------------------------------------------------------------

    def _next_turn(self, conversation: _Conversation) -> None:
        if conversation.at < len(conversation.traced.turns):
            self._clock.after(conversation.turn.think_seconds, lambda: self._arrive(conversation, self._clock.now))

    def _arrive(self, conversation: _Conversation, asked: float) -> None:
        turn = conversation.turn
        prompt = conversation.tokens + turn.new_tokens

        def plan(prefill: SimulatedPrefillRing, decode: SimulatedDecodeRing) -> Plan:
            # The last prompt token is always computed.
            most = min(conversation.tokens, prompt - 1)
            own = [ring for ring in (conversation.where.prefill, conversation.where.decode) if ring is not None]
            return self._planner.plan(
                num_tokens=prompt,
                kept_on_prefill=min(most, prefill.kv.held(conversation.number)),
                kept_on_decode=min(most, decode.kv.held(conversation.number)),
                prefill=prefill.group.registration,
                decode=decode.group.registration,
                mode=PromptMode.APPEND if conversation.tokens else PromptMode.NEW,
                others=[
                    KeptOn(ring.group.registration, min(most, ring.kv.held(conversation.number)))
                    for ring in own
                    if self._policy.fetches_from_left and ring is not prefill and ring is not decode
                ],
            )

        asked_turn = AskedTurn(
            prompt_tokens=prompt,
            history_tokens=conversation.tokens,
            output_tokens=turn.output_tokens,
            where=conversation.where,
        )
        prefill, decode = self._policy.choose(
            asked_turn, lambda prefill, decode: plan(prefill, decode).predicted_prefill_seconds
        )
        chosen = plan(prefill, decode)
        before = prefill.kv.held(conversation.number)
        on_decode = decode.kv.held(conversation.number)
        if not prefill.kv.try_pin(conversation.number, prompt):
            self._retry(conversation, asked, self._settings.retry_seconds)
            return
        if not decode.kv.try_pin(conversation.number, prompt + turn.output_tokens):
            prefill.kv.settle(conversation.number, before)
            self._retry(conversation, asked, self._settings.retry_seconds)
            return
        turn_id = f"{conversation.number}-{conversation.at}"
        try:
            prefill.reserve(turn_id, TokenRange(chosen.cached_tokens, prompt))
        except CapacityExceeded as error:
            prefill.kv.settle(conversation.number, before)
            decode.kv.settle(conversation.number, on_decode)
            self._retry(conversation, asked, error.retry_after_seconds or self._settings.retry_seconds)
            return
        # What other rings hold of the conversation stays there until it is the least recently used.
        conversation.where = Whereabouts(prefill, decode, prompt, prompt + turn.output_tokens)
        placed = self._registry.place(
            prefill.group, decode.group, prefill_seconds=chosen.predicted_prefill_seconds, num_tokens=prompt
        )
        prefill.group.num_turns += 1
        decode.group.num_turns += 1
        self._prefill(conversation, turn_id, chosen, prefill, decode, placed, asked)

    def _retry(self, conversation: _Conversation, asked: float, seconds: float) -> None:
        self._num_retries += 1
        self._clock.after(seconds, lambda: self._arrive(conversation, asked))

    def _prefill(
        self,
        conversation: _Conversation,
        turn_id: str,
        plan: Plan,
        prefill: SimulatedPrefillRing,
        decode: SimulatedDecodeRing,
        placed: Placed,
        asked: float,
    ) -> None:
        pulled = sum(len(each.tokens) for each in plan.cached_sources if each.source != "kept_on_prefill")
        seconds = plan.predicted_prefill_seconds
        sent = self._migration_seconds(plan.new_tokens, seconds)

        def done() -> None:
            # The prompt stays on the prefill ring; the decode ring still needs the turn's place.
            prefill.group.num_turns -= 1
            placed.end_prefill()
            prefill.kv.settle(conversation.number, conversation.tokens + conversation.turn.new_tokens)
            self._clock.after(sent, lambda: self._decode(conversation, plan, decode, asked))

        turn = PrefillingTurn(turn_id, plan.chunks, done)
        # Pulling computes nothing and nothing hides it.
        pull = self._migration_seconds(pulled, 0.0) if pulled else 0.0
        self._clock.after(pull, lambda: prefill.enter(turn))

    def _decode(self, conversation: _Conversation, plan: Plan, decode: SimulatedDecodeRing, asked: float) -> None:
        turn = conversation.turn
        prompt = conversation.tokens + turn.new_tokens
        started = first_at = self._clock.now

        def first() -> None:
            nonlocal first_at
            first_at = self._clock.now

        def last() -> None:
            decode.group.num_turns -= 1
            decode.kv.settle(conversation.number, prompt + turn.output_tokens)
            self._records.append(
                TurnRecord(
                    asked=asked,
                    ttft_seconds=first_at - asked,
                    decode_seconds=self._clock.now - started,
                    prompt_tokens=prompt,
                    cached_tokens=plan.cached_tokens,
                    output_tokens=turn.output_tokens,
                    algorithm=plan.algorithm,
                )
            )
            conversation.tokens = prompt + turn.output_tokens
            conversation.at += 1
            self._next_turn(conversation)

        decode.admit(DecodingTurn(prompt + turn.output_tokens // 2, turn.output_tokens, first, last))

    # --- what takes how long -----------------------------------------------------------------------------------------

    def _step_seconds(self, step: ScheduledStep) -> float:
        """Of all pieces, which share the step's overhead."""
        pool = self._settings.prefill
        costs = [
            predict_turn(
                self._shape,
                self._settings.profile,
                cp=pool.cp,
                tp=pool.tp,
                algorithm=step.algorithm,
                new_tokens=len(piece.tokens),
                cached_tokens=piece.tokens.start,
            )
            for piece in step.pieces
        ]
        alone = sum(cost.total_seconds - cost.overhead_seconds for cost in costs)
        return alone + max(cost.overhead_seconds for cost in costs)

    def _migration_seconds(self, tokens: int, prefill_seconds: float) -> float:
        pools = (self._settings.prefill, self._settings.decode)
        sizes = [pool.cp * pool.tp for pool in pools]
        return predict_migration(
            self._shape,
            self._settings.profile,
            from_processes=sizes[0],
            to_processes=sizes[1],
            tokens=tokens,
            prefill_seconds=prefill_seconds,
        ).exposed_seconds

    # --- the rings ---------------------------------------------------------------------------------------------------

    def _prefill_rings(self) -> list[SimulatedPrefillRing]:
        pool = self._settings.prefill
        longest = max((_num_tokens(one) for one in self._trace), default=1)
        registration = self._registration("prefill", pool, min(longest, self._settings.chunk_tokens), longest)
        scheduling, work = self._settings.scheduling, WorkModel.of_shape(self._shape)
        limits = StepLimits.of(
            work,
            step_budget=scheduling.step_budget,
            chunk_tokens=self._settings.chunk_tokens,
            min_chunk_tokens=scheduling.min_chunk_tokens,
        )
        # As the leader of a ring begins: as if steps were matrix products alone.
        rate = pool.cp * pool.tp * registration.rates.gemm_flops / work.flops_per_unit
        rings = []
        for number in range(pool.num_rings):
            group = self._announced(registration, number)
            scheduler = PrefillScheduler(group.name, work, limits, scheduling, rate=rate)
            rings.append(SimulatedPrefillRing(group, self._clock, scheduler, self._step_seconds))
        return rings

    def _decode_rings(self) -> list[SimulatedDecodeRing]:
        settings, pool = self._settings, self._settings.decode
        registration = self._registration("decode", pool, settings.max_batch, 0)

        @cache
        def rounded(batch: int, thousands: int) -> float:
            return fastest_step(
                self._shape,
                settings.weights,
                settings.profile,
                cp=pool.cp,
                tp=pool.tp,
                batch=batch,
                context_tokens=thousands * CONTEXT_GRAIN,
            ).total_seconds

        return [
            SimulatedDecodeRing(
                self._announced(registration, number),
                self._clock,
                settings.max_batch,
                lambda batch, context: rounded(batch, round(context / CONTEXT_GRAIN)),
            )
            for number in range(pool.num_rings)
        ]

    def _announced(self, registration: GroupRegistration, number: int) -> Group:
        """Ring `number` of a pool, as the router's registry knows it."""
        name = f"{registration.role}-{number}"
        self._registry.register(replace(registration, name=name, endpoint=f"{name}:1"))
        group = self._registry.named(registration.role, name)
        assert group is not None, "it was registered just now"
        return group

    def _registration(self, role: str, pool: PoolShape, step_tokens: int, context_tokens: int) -> GroupRegistration:
        """What a ring of this shape would measure of itself and announce."""
        settings = self._settings
        memory = process_memory(
            self._shape,
            settings.weights,
            settings.profile,
            cp=pool.cp,
            tp=pool.tp,
            step_tokens=step_tokens,
            context_tokens=context_tokens,
        )
        rates = settings.profile.prefill
        return GroupRegistration(
            role=role,
            name=role,
            endpoint="",
            incarnation="1",
            num_ranks=pool.cp,
            tp=pool.tp,
            rates=RingRates(
                gemm_flops=rates.gemm_flops,
                attention_flops=rates.attention_flops,
                link_bytes_per_second=rates.link_bytes_per_second,
                link_latency_seconds=rates.link_latency_seconds,
                overlap=rates.overlap,
            ),
            capacity_tokens=memory.max_tokens(pool.cp),
            max_batch=settings.max_batch if role == "decode" else 0,
            chunk_tokens=settings.chunk_tokens,
            step_budget=settings.scheduling.step_budget,
            min_chunk_tokens=settings.scheduling.min_chunk_tokens,
        )

    def _check_capacity(self) -> None:
        longest = max((_num_tokens(one) for one in self._trace), default=0)
        for ring in (self._rings.prefill[0], self._rings.decode[0]):
            shape = ring.group.registration
            if longest > shape.capacity_tokens:
                raise ConfigError(
                    f"trace: a conversation comes to {longest} tokens, and a {shape.role} ring of cp {shape.num_ranks} "
                    f"x tp {shape.tp} holds {shape.capacity_tokens}; allowed are larger rings"
                )


def _num_tokens(conversation: TracedConversation) -> int:
    return sum(turn.new_tokens + turn.output_tokens for turn in conversation.turns)
