"""One simulated run: conversations arrive; turns are placed, planned, prefilled, migrated and decoded.

Used by `ringserve simulate`. A turn: placed -> reserved on both rings (or placed elsewhere, or asked again later) ->
KV pulled from the decode ring if the plan says so -> queue -> steps -> exposed part of the migration -> decode batch ->
think time -> next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ringserve.cp_core.errors import CapacityExceeded, ConfigError, Unavailable
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, WantedTurn, spare_role
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.planner import RETAINED, Planner, PlannerSettings, PromptOnRings, RetainedPrefix
from ringserve.orchestration.placement.registry import LoadShare, RegisteredRing
from ringserve.orchestration.protocol.plans import PromptMode, TurnPlan
from ringserve.orchestration.protocol.turns import PrefillReport
from ringserve.orchestration.router.drains import LOOK_SECONDS
from ringserve.orchestration.router.lifecycle import MAX_REFUSALS
from ringserve.services.offline.reports import Summary
from ringserve.services.offline.simulator.cluster import Cluster, ClusterShape
from ringserve.services.offline.simulator.placement import POLICIES, ROUTER
from ringserve.services.offline.simulator.results import SimulationResult, Tally, TurnRecord, binned
from ringserve.services.offline.simulator.rings import (
    Clock,
    DecodingTurn,
    PrefillingTurn,
    SimulatedDecodeRing,
    SimulatedPrefillRing,
)
from ringserve.services.offline.simulator.scaling import ClusterScaling, ScalingShape
from ringserve.services.offline.simulator.shared import SharedPrompts, location
from ringserve.services.offline.simulator.trace import TracedConversation, TracedTurn
from ringserve.workers.protocol.steps import Algorithm

RETRY_SECONDS = 5.0
"""Seconds until a refused turn asks again, if no ring gave a time."""


@dataclass(slots=True, eq=False)
class _Conversation:
    """Conversation state: `tokens` of its finished turns, index `at` of its next turn, and locations of its KV."""

    kv_id: str
    traced: TracedConversation
    tokens: int = 0
    at: int = 0
    prefill: KvLocation | None = None
    decode: KvLocation | None = None

    @property
    def turn(self) -> TracedTurn:
        return self.traced.turns[self.at]


@dataclass(slots=True, eq=False)
class _Turn:
    """Turn with reservations on both rings. Times are by the simulated clock."""

    conversation: _Conversation
    asked: float
    choice: Choice
    plan: TurnPlan
    placed: LoadShare
    lacking: int
    """Tokens whose KV the decode ring lacks."""
    pull_seconds: float = 0.0
    started: float = 0.0
    admitted: float = 0.0
    first_at: float = 0.0

    @property
    def moved_tokens(self) -> int:
        """Cached tokens that another ring sends to the prefill ring."""
        return sum(len(each.tokens) for each in self.plan.cached_sources if each.source != RETAINED)


class Simulation:
    """Run of a trace under one placement.

    `trace` is iterated several times, and must give the same conversations each time, in the order in which they begin.
    Raises ConfigError for an unknown placement, or if a ring cannot hold the longest conversation.
    """

    def __init__(
        self,
        shape: ClusterShape,
        trace: Iterable[TracedConversation],
        placement: str,
        selector: str = "auto",
        scaling: ScalingShape | None = None,
    ) -> None:
        if placement not in POLICIES:
            raise ConfigError(f"placement is {placement!r}; allowed are {', '.join(POLICIES)}")
        self._placement = placement
        self._planner = Planner(shape.model, PlannerSettings(selector=selector, has_exact_rates=True))
        self._clock = Clock()
        self._trace = trace
        longest = max((each.num_tokens for each in trace), default=1)
        has_blocks = any(each.block_ids for each in trace)
        self.cluster = Cluster(shape, self._clock, longest, has_blocks=has_blocks)
        self._policy = POLICIES[placement](self.cluster, self._planner)
        self._shared = SharedPrompts(self.cluster) if has_blocks else None
        self._tally = Tally()
        scaling = scaling or ScalingShape()
        if scaling.way != "none" and placement != ROUTER:
            raise ConfigError(f"placement is {placement!r}; with scaling only {ROUTER!r} is allowed")
        self._way = scaling.way
        self._scaling = ClusterScaling(self.cluster, self._clock, scaling)
        self._num_open = 0  # conversations that have begun and not ended
        self._has_begun_all = False
        self._tell: Callable[[], None] = lambda: None

    def run(self, tell: Callable[[], None] = lambda: None) -> SimulationResult:
        """Run all turns of the trace to the last token; `tell` is called for every conversation that begins."""
        self._tell = tell
        self._schedule_next(enumerate(self._trace))
        if self._way != "none":
            self._scale()
        self._clock.run()
        self._scaling.count()
        self.cluster.check_integrity()
        return self._summary()

    def _scale(self) -> None:
        """Look at the load again and again, until the last conversation has ended."""
        self._scaling.look()
        if self._num_open or not self._has_begun_all:
            self._clock.after(LOOK_SECONDS, self._scale)

    # --- a turn ------------------------------------------------------------------------------------------------------

    def _schedule_next(self, coming: Iterator[tuple[int, TracedConversation]]) -> None:
        """Schedule the next conversation, which schedules the one after it when it begins."""
        number, traced = next(coming, (0, None))
        if traced is None:
            self._has_begun_all = True
            return
        conversation = _Conversation(str(number), traced)

        def begin() -> None:
            self._tell()
            self._num_open += 1
            self._next_turn(conversation)
            self._schedule_next(coming)

        self._clock.after(traced.start_seconds - self._clock.now, begin)

    def _next_turn(self, conversation: _Conversation) -> None:
        if conversation.at < len(conversation.traced.turns):
            self._clock.after(conversation.turn.think_seconds, lambda: self._arrive(conversation, self._clock.now))
        else:
            self._num_open -= 1

    def _arrive(self, conversation: _Conversation, asked: float) -> None:
        """Place the turn, with as many attempts as the router makes, or let it ask again later."""
        prompt = conversation.tokens + conversation.turn.new_tokens
        wanted = WantedTurn(
            num_tokens=prompt,
            answer_tokens=conversation.turn.output_tokens,
            # The last prompt token is always computed.
            match_tokens=min(conversation.tokens, prompt - 1),
            prefill=conversation.prefill,
            decode=conversation.decode,
        )
        if self._shared is not None:
            wanted = self._shared.find(wanted, conversation.traced.block_ids)
        refused: list[RegisteredRing] = []
        seconds = RETRY_SECONDS
        while len(refused) <= MAX_REFUSALS:
            try:
                choice = self._policy.choose(wanted, refused)
            except Unavailable:
                break
            if self._shared is not None and not isinstance(self._policy, RingPlacer):
                wanted = self._shared.find(wanted, conversation.traced.block_ids, choice)
            before = len(refused)
            try:
                turn = self._try_reserve(conversation, asked, wanted, choice, refused)
            except CapacityExceeded as full:
                refused.append(choice.prefill)
                seconds = full.retry_after_seconds or seconds
            else:
                if turn is not None:
                    self._prefill(turn)
                    return
            self._tally.num_refusals += len(refused) - before
        self._tally.num_retries += 1
        self._clock.after(seconds, lambda: self._arrive(conversation, asked))

    def _try_reserve(
        self,
        conversation: _Conversation,
        asked: float,
        wanted: WantedTurn,
        choice: Choice,
        refused: list[RegisteredRing],
    ) -> _Turn | None:
        """Reserve both rings; return None, change nothing and extend `refused` if a ring has no room for the KV.

        Raises CapacityExceeded if the prefill ring's queue is full.
        """
        kv_id, prompt = conversation.kv_id, wanted.num_tokens
        prefill, decode = self.cluster.prefill[choice.prefill.name], self.cluster.decode[choice.decode.name]
        rings: tuple[SimulatedPrefillRing | SimulatedDecodeRing, ...] = (prefill, decode)
        sources = [wanted.shares_on(ring.entry) for ring in rings]
        before = [ring.kv.held(source or kv_id) for ring, source in zip(rings, sources, strict=True)]
        has_room = [
            ring.kv.try_pin(kv_id, tokens, shares=source, shared_tokens=wanted.retained_on(ring.entry))
            for ring, source, tokens in zip(rings, sources, (prompt, prompt + wanted.answer_tokens), strict=True)
        ]

        def roll_back() -> None:
            for ring, held, source, has in zip(rings, before, sources, has_room, strict=True):
                if has:
                    ring.kv.unpin(kv_id, 0 if source else held)

        if not all(has_room):
            refused.extend(ring.entry for ring, has in zip(rings, has_room, strict=True) if not has)
            roll_back()
            return None
        on_prefill, on_decode = (
            min(wanted.match_tokens, held) if wanted.has_kv_on(ring.entry) else 0
            for ring, held in zip(rings, before, strict=True)
        )
        plan = self._plan(conversation, wanted, choice, on_prefill, on_decode)
        try:
            prefill.reserve(_turn_id(conversation), TokenRange(plan.cached_tokens, prompt))
        except CapacityExceeded:
            roll_back()
            raise
        placed = self.cluster.registry.place(
            choice.prefill, choice.decode, prefill_seconds=choice.prefill_seconds, num_tokens=prompt
        )
        placed.correct(plan.predicted_prefill_seconds)
        choice.prefill.num_turns += 1
        choice.decode.num_turns += 1
        return _Turn(conversation, asked, choice, plan, placed, lacking=prompt - on_decode)

    def _plan(
        self, conversation: _Conversation, wanted: WantedTurn, choice: Choice, on_prefill: int, on_decode: int
    ) -> TurnPlan:
        """Plan a turn of which the chosen rings retain `on_prefill` and `on_decode` tokens."""
        return self._planner.plan(
            PromptOnRings(
                num_tokens=wanted.num_tokens,
                retained_on_prefill=on_prefill,
                retained_on_decode=on_decode,
                prefill=choice.prefill.registration,
                decode=choice.decode.registration,
                leaving=self._on_previous_rings(conversation.kv_id, wanted, choice),
            ),
            mode=PromptMode.APPEND if conversation.tokens else PromptMode.NEW,
        )

    def _on_previous_rings(self, kv_id: str, wanted: WantedTurn, choice: Choice) -> list[RetainedPrefix]:
        """Return the KV on rings that the conversation leaves; only turns placed by the router move this KV."""
        if not isinstance(self._policy, RingPlacer):
            return []
        rings: list[SimulatedPrefillRing | SimulatedDecodeRing] = []
        if wanted.prefill is not None and wanted.prefill.ring != choice.prefill.name:
            rings.append(self.cluster.prefill[wanted.prefill.ring])
        if wanted.decode is not None and wanted.decode.ring != choice.decode.name:
            rings.append(self.cluster.decode[wanted.decode.ring])
        return [
            RetainedPrefix(
                ring.entry.registration,
                min(wanted.retained_on(ring.entry), ring.kv.held(wanted.shares_on(ring.entry) or kv_id)),
            )
            for ring in rings
        ]

    def _prefill(self, turn: _Turn) -> None:
        ring = self.cluster.prefill[turn.choice.prefill.name]
        prefilling = PrefillingTurn(
            _turn_id(turn.conversation), turn.plan.chunks, lambda report, started: self._hand_off(turn, report, started)
        )
        turn.pull_seconds = self.cluster.pull_seconds(turn.moved_tokens)
        self._clock.after(turn.pull_seconds, lambda: ring.enter(prefilling))

    def _hand_off(self, turn: _Turn, report: PrefillReport, started: float) -> None:
        """Retain the prompt on the prefill ring and migrate the missing KV to the reserved decode ring."""
        turn.started = started
        ring = turn.choice.prefill
        ring.num_turns -= 1
        turn.placed.end_prefill()
        self._planner.note_prefill(ring.registration, report)
        conversation = turn.conversation
        prompt = conversation.tokens + conversation.turn.new_tokens
        is_spare = self._is_spare(conversation.kv_id, "prefill")
        self.cluster.prefill[ring.name].kv.unpin(conversation.kv_id, prompt, is_spare=is_spare)
        exposed = self.cluster.exposed_seconds(turn.lacking, report.prefill_seconds)
        self._clock.after(exposed, lambda: self._decode(turn, prompt))

    def _decode(self, turn: _Turn, prompt: int) -> None:
        turn.admitted = self._clock.now
        if self._shared is not None:
            kv_id, block_ids = turn.conversation.kv_id, turn.conversation.traced.block_ids
            self.cluster.decode[turn.choice.decode.name].kv.note_computed(kv_id, prompt)
            self._shared.note(kv_id, block_ids, turn.choice)
        output = turn.conversation.turn.output_tokens

        def first() -> None:
            turn.first_at = self._clock.now

        ring = self.cluster.decode[turn.choice.decode.name]
        ring.admit(DecodingTurn(prompt + output // 2, output, first, lambda: self._end(turn, prompt)))

    def _end(self, turn: _Turn, prompt: int) -> None:
        conversation, plan = turn.conversation, turn.plan
        output = conversation.turn.output_tokens
        turn.choice.decode.num_turns -= 1
        ring, is_spare = self.cluster.decode[turn.choice.decode.name], self._is_spare(conversation.kv_id, "decode")
        ring.kv.unpin(conversation.kv_id, prompt + output, is_spare=is_spare)
        # In a trace with block ids, all tokens that the plan computes are new, so none counts as computed again.
        new_tokens = plan.new_tokens if self._shared is not None else conversation.turn.new_tokens
        self._tally.note(
            TurnRecord(
                asked=turn.asked,
                queue_seconds=turn.started - turn.asked - turn.pull_seconds,
                ttft_seconds=turn.first_at - turn.asked,
                decode_seconds=self._clock.now - turn.admitted,
                prompt_tokens=prompt,
                new_tokens=new_tokens,
                moved_tokens=turn.moved_tokens,
                recomputed_tokens=plan.new_tokens - new_tokens,
                output_tokens=output,
                is_pass_q=plan.algorithm is Algorithm.PASS_Q,
            )
        )
        self._leave(conversation, turn.choice)
        conversation.prefill = location(turn.choice.prefill, prompt)
        conversation.decode = location(turn.choice.decode, prompt + output)
        conversation.tokens = prompt + output
        conversation.at += 1
        self._next_turn(conversation)

    def _is_spare(self, kv_id: str, role: str) -> bool:
        """Return whether the role's ring is to evict a request's KV before other KV, as real rings do.

        The other role's ring has a copy.
        """
        return isinstance(self._policy, RingPlacer) and self._shared is not None and spare_role(kv_id) == role

    def _leave(self, conversation: _Conversation, choice: Choice) -> None:
        """Free the conversation's KV on the rings that it has left."""
        if conversation.prefill is not None and conversation.prefill.ring != choice.prefill.name:
            self.cluster.prefill[conversation.prefill.ring].kv.drop(conversation.kv_id)
        if conversation.decode is not None and conversation.decode.ring != choice.decode.name:
            self.cluster.decode[conversation.decode.ring].kv.drop(conversation.kv_id)

    def _summary(self) -> SimulationResult:
        tally, seconds = self._tally, self._clock.now
        prefill, decode = self.cluster.prefill.values(), self.cluster.decode.values()
        busy = [ring.busy_seconds for ring in prefill]
        every = [value for values in tally.ttft.values() for value in values]
        places = sum(ring.entry.registration.max_batch for ring in decode)
        computed = sum(ring.computed_tokens for ring in prefill)
        return SimulationResult(
            placement=self._placement,
            scaling=self._way,
            num_turns=len(every),
            num_refusals=tally.num_refusals,
            num_retries=tally.num_retries,
            simulated_seconds=seconds,
            prompt_tokens=tally.prompt_tokens,
            new_tokens=tally.new_tokens,
            computed_tokens=computed,
            moved_tokens=tally.moved_tokens,
            recomputed_tokens=tally.recomputed_tokens,
            cached_share=1.0 - computed / max(1, tally.prompt_tokens),
            pass_q_share=tally.num_pass_q / max(1, len(every)),
            ttft=Summary.of(every),
            queue=Summary.of(tally.queue),
            ttft_of_size={name: Summary.of(values) for name, values in tally.ttft.items()},
            ttft_over_time=binned(tally.asked, tally.ttft_in_order),
            ttit_mean=tally.decode_seconds / max(1, tally.output_tokens),
            busy_share=sum(busy) / len(busy) / seconds if seconds else 0.0,
            busiest_share=max(busy) / seconds if seconds else 0.0,
            batch_share=sum(ring.sequence_seconds for ring in decode) / places / seconds if seconds else 0.0,
            largest_batch=max(ring.largest_batch for ring in decode),
            prefill_ring_seconds=self._scaling.pools["prefill"].ring_seconds,
            decode_ring_seconds=self._scaling.pools["decode"].ring_seconds,
        )


def _turn_id(conversation: _Conversation) -> str:
    return f"{conversation.kv_id}-{conversation.at}"
