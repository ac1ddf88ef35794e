"""Decode loop of a ring: rank 0 leads, the other ranks follow its headers.

In each step rank 0 sends a header, all ranks compute the batch, and rank 0 reports the sampled tokens: one of each
sequence, and one more for each of its drafts that was right. A header may also carry one prompt, which is computed
before the batch. So a sequence waits for at most one prompt between two of its tokens. While the batch is empty rank 0
sends a heartbeat about once a second: a follower without one knows that its leader is gone.

If a step's tokens can stay on the devices, rank 0 sends a second header after the step is issued and before any rank
waits for it. It says whether all ranks issue the next step of the same batch at once, or read this step's tokens first.

The ring's leader puts commands into rank 0's mailbox and takes events out of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ringserve.cp_core.errors import Unavailable
from ringserve.views import RingRates
from ringserve.workers.decode.batch import BatchState
from ringserve.workers.decode.drafts import Acceptance, DraftCosts, TextDrafter
from ringserve.workers.decode.messages import (
    HEARTBEAT_SECONDS,
    UNCHANGED,
    BatchChange,
    Header,
    HeaderChannel,
    HeaderKind,
)
from ringserve.workers.decode.prompts import DecodePrompts
from ringserve.workers.decode.step import DRAFTS, DecodePass, DoneStep, VariantChoice
from ringserve.workers.progress import Progress
from ringserve.workers.protocol.steps import (
    NO_TEXT,
    AdmitSequence,
    ComputePrompt,
    DecodeCommand,
    DecodeEvent,
    DecodeEvents,
    FinishReason,
    GrowSequence,
    RemoveSequence,
)
from ringserve.workers.sampling.parameters import SamplingParameters

if TYPE_CHECKING:
    from ringserve.workers.decode.draft_model import DraftModel

# Reasons to read a step's tokens first although they could stay on the device; DRAFTS is a third.
# `DecodePass.reason_to_wait` has the others.
BATCH_CHANGES = "batch_changes"
VARIANT_CHANGES = "variant_changes"


class DecodeMailbox:
    """Queue of commands for the next step boundary, and of events for the leader.

    Events are numbered from 0. `poll(after)` returns the events from `after` on and drops earlier ones, so a poll whose
    answer was lost may be repeated.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._changed = threading.Condition()
        self._commands: list[DecodeCommand] = []
        self._admitted: set[str] = set()
        self._events: list[DecodeEvent] = []
        self._first_event = 0
        self._wants_rates = False
        self._rates: list[RingRates] = []
        self._closed: str | None = None

    def submit(self, commands: Sequence[DecodeCommand]) -> None:
        """Queue commands for the next step boundary. Raises Unavailable once the loop has ended.

        Removing or growing a sequence that has just finished is no error. Admissions are checked here, so that a wrong
        one fails its caller and not the ring.
        """
        with self._changed:
            self._check_open()
            expected = set(self._admitted)
            for command in commands:
                if isinstance(command, RemoveSequence):
                    expected.discard(command.sequence_id)
                if isinstance(command, ComputePrompt):
                    assert len(command.token_ids), f"{command.sequence_id!r} has no new token"
                if not isinstance(command, AdmitSequence):
                    continue
                _check_admission(command)
                assert command.sequence_id not in expected, f"{command.sequence_id!r} is in the batch already"
                expected.add(command.sequence_id)
            assert len(expected) <= self._max_batch, f"{len(expected)} sequences exceed a batch of {self._max_batch}"
            self._admitted = expected
            self._commands.extend(commands)
            self._changed.notify_all()

    def poll(self, after: int, timeout: float) -> DecodeEvents:
        """Return events from cursor `after` on, waiting up to `timeout` seconds for the first one.

        Raises Unavailable once the loop has ended and every event was fetched.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            assert self._first_event <= after <= self._last_event, f"cursor {after} was never given or is forgotten"
            del self._events[: after - self._first_event]
            self._first_event = after
            while not self._events:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return DecodeEvents(start=after, stop=self._last_event, events=tuple(self._events))

    def take(self, timeout: float) -> list[DecodeCommand]:
        """Take all commands; wait up to `timeout` seconds for one, for the end, or for `ask_rates`.

        Tables that grow do not end the wait: only a step has use for them.
        """
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(self._has_news, timeout)
            taken, self._commands = self._commands, []
            return taken

    def _has_news(self) -> bool:
        has_other = any(not isinstance(command, GrowSequence) for command in self._commands)
        return has_other or self._closed is not None or self._wants_rates

    def take_growth(self) -> list[GrowSequence] | None:
        """Take all commands if each lets a table grow; None if a step boundary has anything else to do."""
        with self._changed:
            growth = [command for command in self._commands if isinstance(command, GrowSequence)]
            if len(growth) < len(self._commands) or self._wants_rates or self._closed is not None:
                return None
            self._commands = []
            return growth

    def post(self, events: Sequence[DecodeEvent]) -> None:
        """Queue events for the leader."""
        with self._changed:
            self._events.extend(events)
            self._admitted.difference_update(event.sequence_id for event in events if event.has_left)
            self._changed.notify_all()

    def ask_rates(self, timeout: float) -> RingRates:
        """Let the loop measure the ring between two steps, and wait `timeout` seconds for it. Raises Unavailable."""
        with self._changed:
            self._check_open()
            self._wants_rates = True
            self._rates.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rates or self._closed is not None, timeout)
            if not self._rates:
                self._check_open()
                raise Unavailable(f"the decode loop measured nothing within {timeout:.1f} s")
            return self._rates[0]

    @property
    def wants_rates(self) -> bool:
        """True from `ask_rates` until it is answered."""
        with self._changed:
            return self._wants_rates

    def answer_rates(self, rates: RingRates) -> None:
        """Answer `ask_rates`."""
        with self._changed:
            self._wants_rates = False
            self._rates.append(rates)
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """End the queue: later calls raise Unavailable with this reason, or with an earlier one."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def _last_event(self) -> int:
        return self._first_event + len(self._events)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Unavailable(self._closed)


def _check_admission(command: AdmitSequence) -> None:
    sampling = command.sampling
    assert command.history.num_generated < sampling.max_tokens, f"{command.sequence_id!r} has all its tokens already"
    assert command.token_id not in sampling.stop_token_ids, f"{command.sequence_id!r} has stopped already"
    assert sum(command.held) == command.position, f"{command.sequence_id!r} lacks KV before its newest token"


@dataclass(frozen=True, slots=True)
class LoopWork:
    """Work that every rank of a loop does in the same order: decode steps, prompts and measurements of the ring.

    `rest` is called by each rank for itself while it has no sequence.
    """

    batch: BatchState
    step: DecodePass
    prompts: DecodePrompts
    measurement: Measurement
    rest: Callable[[], None]


class Measurement:
    """Measurement of the ring in parts, of which each PROBE header asks every rank to do one; collective.

    `begin` returns a generator that yields between two parts, and returns the rates.
    """

    def __init__(self, begin: Callable[[], Generator[None, None, RingRates]]) -> None:
        self._begin = begin
        self._parts: Generator[None, None, RingRates] | None = None

    def go_on(self) -> RingRates | None:
        """Do the next part. Return the rates after the last one. Raises Unavailable if the ring breaks."""
        if self._parts is None:
            self._parts = self._begin()
        try:
            next(self._parts)
        except StopIteration as end:
            self._parts = None
            rates: RingRates = end.value
            return rates
        return None


@dataclass(slots=True)
class Generation:
    """State of a running sequence that rank 0 alone has. `room[r]` tokens fit into rank r's table.

    `drafter` has its text; None if no drafts of it are checked. `guesses` counts how many of a draft model's drafts
    were right, and `is_guessed` says that the drafts of the step under way are that model's.
    """

    sampling: SamplingParameters
    num_generated: int
    room: list[int]
    drafter: TextDrafter | None = None
    guesses: Acceptance = field(default_factory=Acceptance)
    is_guessed: bool = False

    def is_full(self, held: Sequence[int]) -> bool:
        """Return True if the next token has no slot on any rank."""
        return all(count >= slots for count, slots in zip(held, self.room, strict=True))


class FollowingLoop:
    """Decode loop of every rank but the first."""

    def __init__(self, channel: HeaderChannel, work: LoopWork, progress: Progress) -> None:
        self._channel = channel
        self._work = work
        self._batch = work.batch
        self._progress = progress

    def run(self) -> None:
        """Follow headers until one stops the loop. Raises Unavailable if the ring breaks."""
        while (header := self._channel.receive()).kind is not HeaderKind.STOP:
            if header.kind is HeaderKind.PROBE:
                self._work.measurement.go_on()
                self._progress.alive(len(self._batch))
                continue
            if header.kind is HeaderKind.STEP:
                self._batch.advance(header.token_ids, header.change, header.accepted)
            if header.drafts:
                self._batch.draft(header.drafts)
            if header.change.prompt is not None:
                self._work.prompts.run(header.change.prompt)
                self._progress.stepped(len(self._batch))
            is_followed = partial(self._agree_on_next, header.variant)
            for _ in self._work.step.run(header.variant, is_followed) if len(self._batch) else ():
                self._progress.decoded(len(self._batch), header.variant)
            if not len(self._batch):
                self._progress.alive(running=0)
                self._work.rest()

    def _agree_on_next(self, variant: str) -> bool:
        """Receive the step's second header, if it has one, and grow tables as it says.

        Return True if the next step is issued before the tokens of this one are read.
        """
        if self._work.step.reason_to_wait(variant) is not None:
            return False
        header = self._channel.receive()
        self._batch.advance((), header.change)
        return header.kind is HeaderKind.FOLLOW


class LeadingLoop:
    """Decode loop of the first rank: commands come from `mailbox`, events go there."""

    def __init__(
        self,
        channel: HeaderChannel,
        work: LoopWork,
        progress: Progress,
        choose_variant: VariantChoice,
        mailbox: DecodeMailbox,
        *,
        pause_after: Callable[[float], float] | None = None,
        drafts: bool = False,
        draft_model: DraftModel | None = None,
    ) -> None:
        """With `drafts`, steps check drafts of sequences whose text is known, if that is worth its time.

        Drafts come from the text; if it gives none, from `draft_model`. `pause_after(s)` returns for how many seconds
        to leave the cores to others after a step that took s seconds.
        """
        self._pause_after = pause_after
        self._step_seconds = 0.0
        self._drafts = drafts
        self._draft_model = draft_model
        self._costs = DraftCosts()
        self._accepted: tuple[int, ...] = ()
        self._measures = False
        self._channel = channel
        self._work = work
        self._batch = work.batch
        self._progress = progress
        self._choose_variant = choose_variant
        self._mailbox = mailbox
        self._waiting: deque[ComputePrompt] = deque()
        self._generations: dict[str, Generation] = {}
        self._sampled: tuple[int, ...] = ()
        self._finished: list[str] = []
        # Ends to report when the step under way is done.
        self._ended: list[DecodeEvent] = []

    def run(self) -> None:
        """Lead steps until the mailbox is closed. Raises Unavailable if the ring breaks."""
        while (header := self._next_header()).kind is not HeaderKind.STOP:
            if header.kind is HeaderKind.STEP:
                self._batch.advance(header.token_ids, header.change)
                self._sampled = self._accepted = ()
                header = self._drafted(header)
            self._channel.send(header)
            if header.kind is HeaderKind.PROBE:
                if (rates := self._work.measurement.go_on()) is not None:
                    self._mailbox.answer_rates(rates)
                self._progress.alive(len(self._batch))
                continue
            if header.change.prompt is not None:
                self._compute(header.change.prompt)
                self._progress.stepped(len(self._batch))
            is_followed = partial(self._agree_on_next, header.variant)
            started = began = time.perf_counter()
            recordings = self._work.step.num_recordings
            for done in self._work.step.run(header.variant, is_followed) if len(self._batch) else ():
                if recordings == self._work.step.num_recordings:
                    self._costs.note(len(self._batch), len(done.rows) - len(self._batch), time.perf_counter() - began)
                self._commit(done)
                self._progress.decoded(len(self._batch), header.variant)
                began, recordings = time.perf_counter(), self._work.step.num_recordings
            self._step_seconds = began - started
            if not len(self._batch):
                self._progress.alive(running=0)
                self._work.rest()
        self._channel.send(header)

    def _drafted(self, header: Header) -> Header:
        """Let the next step check drafts. Return the header that says so."""
        if not self._drafts:
            return header
        drafts = self._drafts_in_texts()
        if self._draft_model is not None:
            drafts = self._guess(self._draft_model, drafts)
        self._batch.draft(drafts)
        return replace(header, drafts=drafts) if any(drafts) else header

    def _drafts_in_texts(self) -> tuple[tuple[int, ...], ...]:
        """Find drafts for each row in its known text, as many as are worth their time."""
        least_share = self._costs.least_share(len(self._batch))
        running = (self._generations[row.sequence_id] for row in self._batch.rows)
        return tuple(
            each.drafter.propose(self._limit(each, each.drafter, least_share)) if each.drafter is not None else ()
            for each in running
        )

    def _guess(self, draft_model: DraftModel, drafts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Return the drafts of all rows. A row without any gets a model's guesses, if they pay."""
        limits = self._limits_of_guesses(drafts)
        for row in self._batch.rows:
            self._generations[row.sequence_id].is_guessed = row.sequence_id in limits
        if not limits:
            return drafts
        texts = {name: drafter.text for name in limits if (drafter := self._generations[name].drafter) is not None}
        guesses = draft_model.guess(texts, limits)
        if count := sum(map(len, guesses.drafts.values())):
            self._costs.note_guesses(count, guesses.seconds)
        return tuple(
            own or guesses.drafts.get(row.sequence_id, ()) for row, own in zip(self._batch.rows, drafts, strict=True)
        )

    def _limits_of_guesses(self, drafts: tuple[tuple[int, ...], ...]) -> dict[str, int]:
        """Return how many of a model's drafts are worth their time, for each sequence without other ones."""
        least_share = self._costs.least_share(len(self._batch), is_guessed=True)
        limits = {}
        for row, own in zip(self._batch.rows, drafts, strict=True):
            each = self._generations[row.sequence_id]
            if not own and each.drafter is not None and (limit := self._limit(each, each.guesses, least_share)) > 0:
                limits[row.sequence_id] = limit
        return limits

    def _limit(self, generation: Generation, source: TextDrafter | Acceptance, least_share: float) -> int:
        """Return how many drafts are worth their time: no more than the answer may have after the next token."""
        sampling = generation.sampling
        left = sampling.max_tokens - generation.num_generated - 1
        most = left if sampling.max_drafts is None else min(left, sampling.max_drafts)
        return min(source.limit(least_share), most) if most > 0 else 0

    def _has_drafts(self) -> bool:
        """Return True if the next step has drafts worth checking, as far as is known without asking a model."""
        drafts = self._drafts_in_texts()
        return any(drafts) or (self._draft_model is not None and bool(self._limits_of_guesses(drafts)))

    def _next_header(self) -> Header:
        """Take commands and make the next header; wait for them if nothing is to be computed, or a pause is due."""
        is_idle = not len(self._batch)
        # Between two parts of a measurement comes a step, which includes sequences that have come meanwhile.
        self._measures = self._mailbox.wants_rates and not self._measures
        if self._measures:
            return Header(HeaderKind.PROBE)
        seconds = 0.0
        if is_idle and not self._waiting:
            seconds = HEARTBEAT_SECONDS
        elif self._pause_after is not None and not self._waiting:
            seconds = self._pause_after(self._step_seconds)
        commands = self._mailbox.take(seconds)
        if self._mailbox.is_closed:
            return Header(HeaderKind.STOP)
        change = self._change(commands)
        if is_idle and not change:
            return Header(HeaderKind.IDLE)
        variant = self._choose_variant(*self._load(change))
        return Header(HeaderKind.STEP, self._sampled, change, variant, self._accepted)

    def _load(self, change: BatchChange) -> tuple[int, int]:
        """Return (sequences, stored tokens) of the next step, after `change`."""
        stored = [row.position + 1 for row in self._batch.rows if row.sequence_id not in change.removed]
        stored += [admission.position for admission in change.admitted]
        return len(stored), sum(stored)

    def _change(self, commands: Sequence[DecodeCommand]) -> BatchChange:
        """Remove finished sequences, follow the commands in order, then remove sequences without a free slot."""
        removed, self._finished = self._finished, []
        joining: dict[str, AdmitSequence] = {}
        growing: list[GrowSequence] = []
        left: list[DecodeEvent] = []
        for command in commands:
            name = command.sequence_id
            if isinstance(command, AdmitSequence):
                # The text stays here: the other ranks are told the drafts.
                joining[name] = replace(command, text=NO_TEXT)
                room = [self._batch.block_tokens * len(blocks) for blocks in command.blocks]
                drafter = TextDrafter(command.text) if self._drafts and len(command.text) else None
                self._generations[name] = Generation(command.sampling, command.history.num_generated, room, drafter)
                if self._draft_model is not None and drafter is not None:
                    shift = command.position + 1 - len(drafter.text)
                    self._draft_model.begin(name, command.sampling, shift)
            elif isinstance(command, ComputePrompt):
                self._waiting.append(command)
            elif name not in self._generations:
                # The sequence has just left, or it is a waiting prompt.
                left += self._drop_prompt(name)
            elif isinstance(command, GrowSequence):
                growing.append(command)
                self._grow(command)
            else:
                left.append(self._take_out(name, FinishReason.ABORT, joining, removed))
        for name in self._full(joining):
            left.append(self._take_out(name, None, joining, removed))
        if left:
            self._mailbox.post(left)
        return BatchChange(
            tuple(removed),
            tuple(joining.values()),
            tuple(growth for growth in growing if growth.sequence_id in self._generations),
            self._waiting.popleft() if self._waiting else None,
        )

    def _grow(self, command: GrowSequence) -> None:
        room = self._generations[command.sequence_id].room
        for rank, blocks in enumerate(command.blocks):
            room[rank] += self._batch.block_tokens * len(blocks)

    def _drop_prompt(self, name: str) -> list[DecodeEvent]:
        """Drop a waiting prompt -> its event; none if the prompt was computed already."""
        dropped = [prompt for prompt in self._waiting if prompt.sequence_id == name]
        for prompt in dropped:
            self._waiting.remove(prompt)
        return [_left(name, FinishReason.ABORT, sum(prompt.held)) for prompt in dropped]

    def _full(self, joining: dict[str, AdmitSequence]) -> list[str]:
        """Return the sequences without a free slot for the next step's token."""
        held: list[tuple[str, Sequence[int]]] = [(row.sequence_id, row.held) for row in self._batch.rows]
        held += [(name, command.held) for name, command in joining.items()]
        generations = self._generations
        return [name for name, tokens in held if name in generations and generations[name].is_full(tokens)]

    def _take_out(
        self, name: str, reason: FinishReason | None, joining: dict[str, AdmitSequence], removed: list[str]
    ) -> DecodeEvent:
        """Remove a sequence from the batch -> its event. Without a reason the sequence is starved."""
        self._forget(name)
        if name in joining:
            return _left(name, reason, joining.pop(name).position)
        removed.append(name)
        # The row's newest token is sampled but not in the batch yet: the next header brings it.
        position = next(row.position for row in self._batch.rows if row.sequence_id == name)
        return _left(name, reason, position + 1)

    def _forget(self, name: str) -> None:
        del self._generations[name]
        if self._draft_model is not None:
            self._draft_model.end(name)

    def _compute(self, prompt: ComputePrompt) -> None:
        """Compute a prompt and report the token after it."""
        began = time.perf_counter()
        drawn = self._work.prompts.run(prompt)
        assert drawn is not None, "the first rank gathers sampled tokens"
        event = DecodeEvent(
            sequence_id=prompt.sequence_id,
            token_id=drawn.token_id,
            finish_reason=None,
            kv_tokens=sum(prompt.held) + len(prompt.token_ids),
            is_broken=drawn.token_id is None,
            is_outside_grammar=drawn.is_outside_grammar,
            logprobs=drawn.logprobs,
            prompt_seconds=time.perf_counter() - began,
        )
        self._mailbox.post([event])

    def _agree_on_next(self, variant: str) -> bool:
        """Return True if the next step is issued before the tokens of this one are read; tell the other ranks.

        Tables grow at once: the step under way has a copy of them.
        """
        reason = self._work.step.reason_to_wait(variant)
        if reason is None:
            growth = None if self._finished or self._waiting else self._mailbox.take_growth()
            growing = tuple(each for each in growth or () if each.sequence_id in self._generations)
            for command in growing:
                self._grow(command)
            change = BatchChange(grown=growing)
            self._batch.advance((), change)
            if growth is None or not self._stays():
                reason = BATCH_CHANGES
            elif self._choose_variant(*self._load(UNCHANGED)) != variant:
                reason = VARIANT_CHANGES
            elif self._drafts and self._has_drafts():
                # The drafts follow the text before the step under way. With its tokens, drafts for the next step are
                # likely.
                reason = DRAFTS
            self._channel.send(Header(HeaderKind.FOLLOW if reason is None else HeaderKind.READ, change=change))
        if reason:
            self._progress.waited_steps[reason] += 1
        return reason is None

    def _stays(self) -> bool:
        """Return True if the next step has the same rows, as far as is known before the tokens of the last are read."""
        running = [(row, self._generations[row.sequence_id]) for row in self._batch.rows]
        return all(
            each.num_generated + 1 < each.sampling.max_tokens and not each.is_full(row.held) for row, each in running
        )

    def _commit(self, done: DoneStep) -> None:
        """Report the tokens of all rows, and end the sequences that finish with their token or have none.

        If the next step is under way, an ending sequence is in it. Its end is reported when that step is done, so that
        nothing writes to its blocks any more, and the token of that step is dropped.
        """
        events = []
        self._settle(done)
        for row, drawn in zip(done.rows, done.sampled, strict=True):
            token_id = drawn.token_id
            if not drawn.is_reached or (generation := self._generations.get(row.sequence_id)) is None:
                continue
            generation.num_generated += 1
            if generation.drafter is not None and token_id is not None:
                generation.drafter.push(token_id)
                generation.guesses.pushed()
            reason = None if token_id is None else _finish_reason(token_id, generation)
            if reason is not None or token_id is None:
                self._finished.append(row.sequence_id)
                self._forget(row.sequence_id)
            events.append(
                DecodeEvent(
                    sequence_id=row.sequence_id,
                    token_id=token_id,
                    finish_reason=reason,
                    kv_tokens=row.kv_tokens,
                    owner=row.owner,
                    is_draft=row.is_draft,
                    is_broken=token_id is None,
                    is_outside_grammar=drawn.is_outside_grammar,
                    logprobs=drawn.logprobs,
                )
            )
        if not done.is_last:
            self._ended += [event for event in events if event.has_left]
            self._mailbox.post([event for event in events if not event.has_left])
            return
        self._mailbox.post([*self._ended, *events])
        self._ended.clear()

    def _settle(self, done: DoneStep) -> None:
        """Note the newest token of each row, and take back the KV of drafts that are wrong."""
        newest: dict[str, int] = {}
        sampled = dict.fromkeys((row.sequence_id for row in done.rows), 0)
        for row, drawn in zip(done.rows, done.sampled, strict=True):
            if drawn.is_reached:
                # A row without a token leaves with the next header, so any number stands for its token.
                newest[row.sequence_id] = drawn.token_id or 0
                sampled[row.sequence_id] += 1
        self._sampled = tuple(newest.values())
        if len(done.rows) == len(sampled):
            return
        self._accepted = tuple(count - 1 for count in sampled.values())
        for checked, accepted in zip(self._batch.rows, self._accepted, strict=True):
            generation = self._generations[checked.sequence_id]
            if generation.drafter is not None and checked.drafts:
                source = generation.guesses if generation.is_guessed else generation.drafter
                source.checked(len(checked.drafts), accepted)
                self._progress.checked(len(checked.drafts), accepted)
        self._batch.settle(self._accepted)


def _finish_reason(token_id: int, generation: Generation) -> FinishReason | None:
    if token_id in generation.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if generation.num_generated >= generation.sampling.max_tokens else None


def _left(name: str, reason: FinishReason | None, kv_tokens: int) -> DecodeEvent:
    return DecodeEvent(
        sequence_id=name, token_id=None, finish_reason=reason, kv_tokens=kv_tokens, is_starved=reason is None
    )
