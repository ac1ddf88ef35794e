"""Loop of one incarnation of a prefill ring: schedule, run, commit. The prefill leader runs it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringserve.cp_core.errors import NotFinite, RingserveError, Unavailable
from ringserve.cp_core.layout.shards import ranks_of_whole
from ringserve.orchestration.prefill.run import PrefillRun, PreparedPiece
from ringserve.orchestration.prefill.scheduler import PrefillScheduler, ScheduledStep, StepForm
from ringserve.orchestration.ring.life import Ring
from ringserve.orchestration.tasks import gather_first_error
from ringserve.workers.protocol.steps import Algorithm, PrefillStep

PATIENCE = 5.0
"""A step counts as stuck after this many times its predicted seconds."""


@dataclass(frozen=True, slots=True)
class _Done:
    """Computed step: its sampled tokens by sequence, and the seconds in which the ranks computed it."""

    tokens: dict[str, int | None]
    seconds: float


class PrefillLoop:
    """Ring steps, one after another, until the ring is lost or `end` is called; waiting turns then fail.

    `at_work` is locked while the ranks compute a step: the holder of the lock has the ring to itself. `fallbacks`
    counts the computed pieces that had no room for the layout of their algorithm, by the layout used instead.
    """

    def __init__(self, ring: Ring, scheduler: PrefillScheduler, fallbacks: Counter[str]) -> None:
        self.scheduler = scheduler
        self._fallbacks = fallbacks
        self.at_work = asyncio.Lock()  # fair: a waiter gets it after the present step
        self._ring = ring
        self._incarnation = ring.incarnation
        self._waiting: dict[str, tuple[PrefillRun, asyncio.Future[int]]] = {}
        self._wakeup = asyncio.Event()
        self._seconds_within = 0.0
        self._is_over = False

    async def compute(self, run: PrefillRun) -> int:
        """Queue a reserved turn until its last new token is computed; return the token that follows.

        Raises the error that stopped the turn or the ring. If the caller is cancelled, the turn leaves the queue at
        once; this is not allowed while `run.is_computing`.
        """
        if self._is_over:
            raise self._lost()
        computed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[run.turn_id] = run, computed
        self.scheduler.ready(run.turn_id, run.planned_chunks)
        self._wakeup.set()
        try:
            return await computed
        finally:
            self._waiting.pop(run.turn_id, None)
            self.scheduler.remove(run.turn_id)

    async def run(self) -> None:
        """Compute steps, and wait for a turn if none is ready."""
        try:
            while not self._is_over:
                self._wakeup.clear()
                async with self.at_work:
                    step = self.scheduler.next_step()
                    if step is not None:
                        await self._step(step)
                if step is None:
                    await self._wakeup.wait()
        except Exception as error:  # a bug: without its loop the ring would take turns and never compute them
            self._ring.report_lost(error, self._incarnation)
            raise
        finally:
            self._is_over = True
            for run, _ in list(self._waiting.values()):
                self._fail(run, run.stop_error or self._lost())

    def wake(self) -> None:
        """Wake the loop, so that it notices that a turn has been stopped."""
        self._wakeup.set()

    def end(self) -> None:
        """Make `run` return after the present step. On a lost ring, that step fails as soon as its ranks are dead."""
        self._is_over = True
        self._wakeup.set()

    async def _step(self, step: ScheduledStep, within: int = 0) -> bool:
        """Compute a step by itself or, if `within` is not 0, between two layers of the step of that number.

        Returns False if it was not computed to its end, but True if none of its turns could take part.
        """
        if any(self._waiting[piece.turn_id][0].is_sparse for piece in step.pieces):
            step = replace(step, algorithm=Algorithm.PASS_KV)  # no other algorithm can send a selection of the keys
        form = self._form(step)
        prepared = self._prepare(step, form)
        if not prepared:
            return True
        for piece in prepared:
            piece.run.is_computing = True
        try:
            if step.yields:
                done = await self._run_yielding(step, prepared, form)
            else:
                done = await self._run_on_ranks(step, prepared, within, form)
        except RingserveError as error:
            # The other ranks now wait for a message that never comes.
            self._ring.report_lost(error, self._incarnation)
            self._is_over = True
            for piece in prepared:
                name = self._ring.settings.name
                self._fail(piece.run, Unavailable(f"prefill ring {name} failed in a step: {error}"))
            return False
        finally:
            for piece in prepared:
                piece.run.is_computing = False
        if done is not None:
            self._seconds_within += done.seconds if within else 0.0
            self._commit(step, prepared, done.tokens, done.seconds)
        elif within:
            self.scheduler.take_back(step)
        else:  # all its turns were stopped
            for piece in prepared:
                self._fail(piece.run, piece.run.stop_error or self._lost())
        return done is not None

    async def _run_yielding(
        self, step: ScheduledStep, prepared: Sequence[PreparedPiece], form: StepForm
    ) -> _Done | None:
        """Compute a step and, between its layers, steps of turns that may overtake. Return None if it ended early."""
        self._seconds_within = 0.0
        is_over = asyncio.Event()

        async def outer() -> _Done | None:
            try:
                return await self._run_on_ranks(step, prepared, 0, form)
            finally:
                is_over.set()
                self._wakeup.set()

        is_ended = False

        async def inner() -> None:
            nonlocal is_ended
            while not is_over.is_set():
                if not is_ended and all(piece.run.stop_error is not None for piece in prepared):
                    is_ended = await self._end_on_ranks(step)
                is_taken = not (self._is_over or is_ended)
                while is_taken and (overtaking := self.scheduler.next_step_within(step)) is not None:
                    is_taken = await self._step(overtaking, step.number) and not self._is_over
                await self._wakeup.wait()
                self._wakeup.clear()

        done, _ = await gather_first_error((outer(), inner()))
        if is_ended or done is None:
            return None
        return replace(done, seconds=done.seconds - self._seconds_within)

    async def _end_on_ranks(self, step: ScheduledStep) -> bool:
        """End a yielding step early. Return False if the ranks have already computed all of it."""
        timeout = self._ring.settings.step_timeout
        end = PrefillStep(algorithm=step.algorithm, sequences=(), within=step.number)
        answers = await gather_first_error(port.prefill_within(end, timeout) for port in self._ring.ranks)
        return answers[0] is not None

    def _prepare(self, step: ScheduledStep, form: StepForm) -> list[PreparedPiece]:
        """Return the pieces of the turns that can take part, and fail the other turns."""
        prepared: list[PreparedPiece] = []
        load = [0] * self._ring.settings.num_ranks
        whole_on = self._ranks_of_whole(step)
        for piece in step.pieces:
            run, _ = self._waiting[piece.turn_id]
            try:
                self._ring.require_ready(self._incarnation)
                prepared.append(run.prepare(piece.tokens, load, whole_on.get(piece.turn_id), form))
            except Exception as error:  # of any kind: it ends its own turn and no other
                self._fail(run, error)
                continue
            layout = prepared[-1].sequences[0].layout
            load = [own + layout.tokens_on(rank) for rank, own in enumerate(load)]
        return prepared

    def _form(self, step: ScheduledStep) -> StepForm:
        """Return the form that the step's algorithm needs for its longest piece."""
        ring, tp = self._ring, self._ring.settings.ranks.tp
        longest = max(step.pieces, key=lambda piece: len(piece.tokens))
        if step.algorithm is Algorithm.CHAIN:
            run, _ = self._waiting[longest.turn_id]
            # By rank: its tokens of the longest piece's sequence, and for ties its free blocks, negated.
            held = [(own, -usage.free_blocks) for own, usage in zip(run.held, ring.pool.usage(), strict=True)]
            return StepForm.of_chain(ring.model, tp, ring.rates, held)
        if step.algorithm is Algorithm.SP_NTP:
            return StepForm.of_segments(ring.model, tp, ring.rates, ring.settings.num_ranks, longest.tokens)
        return StepForm()

    def _ranks_of_whole(self, step: ScheduledStep) -> dict[str, int]:
        """Return, by turn, the rank that computes its whole prompt; empty unless the step has several short prompts."""
        settings = self._ring.settings
        short = {
            piece.turn_id: len(piece.tokens)
            for piece in step.pieces
            if len(piece.tokens) <= settings.prefill_scheduling.whole_tokens
            and self._waiting[piece.turn_id][0].is_whole_prompt(piece.tokens)
        }
        if settings.num_ranks == 1 or len(short) < 2:
            return {}
        return dict(zip(short, ranks_of_whole(list(short.values()), settings.num_ranks) or (), strict=False))

    async def _run_on_ranks(
        self, step: ScheduledStep, prepared: Sequence[PreparedPiece], within: int, form: StepForm
    ) -> _Done | None:
        """Compute the step. Return None if the step that it is within ended before. Raises the error of a rank."""
        by_process = zip(*(piece.sequences for piece in prepared), strict=True)
        steps = [
            PrefillStep(
                algorithm=step.algorithm,
                sequences=sequences,
                number=step.number,
                yields=step.yields,
                within=within,
                order=form.order,
                num_segments=form.num_segments,
            )
            for sequences in by_process
        ]
        timeout, began = self._patience(step, within), time.monotonic()
        calls = zip(self._ring.ranks, steps, strict=True)
        if within:
            answers = await gather_first_error(port.prefill_within(step, timeout) for port, step in calls)
        else:
            answers = await gather_first_error(port.prefill(step, timeout) for port, step in calls)
        outputs = [answer for answer in answers if answer is not None]
        if not outputs:
            return None
        for piece in prepared:
            piece.run.note_logprobs(outputs)
        tokens = {name: token for output in outputs for name, token in output.tokens.items()}
        # A step within another one first waits for the end of a layer of that one. This wait does not count.
        seconds = max(output.seconds for output in outputs) if within else time.monotonic() - began
        return _Done(tokens, seconds)

    def _patience(self, step: ScheduledStep, within: int) -> float:
        """Return the seconds that a step may take: five times the prediction, once a step has been measured.

        A step that yields, or is within another one, also takes the time of that one: only the step timeout bounds it.
        """
        timeout = self._ring.settings.step_timeout
        if within or step.yields or not self.scheduler.is_measured:
            return timeout
        return min(timeout, max(self._ring.least_patience, PATIENCE * step.work / self.scheduler.rate))

    def _commit(
        self, step: ScheduledStep, prepared: Sequence[PreparedPiece], tokens: dict[str, int | None], seconds: float
    ) -> None:
        taken = {piece.run.turn_id for piece in prepared}
        left_out = [piece.turn_id for piece in step.pieces if piece.turn_id not in taken]
        self.scheduler.commit(self.scheduler.without(step, left_out), seconds)
        for piece in prepared:
            run = piece.run
            run.commit(piece, step.algorithm, len(prepared), seconds)
            if piece.fallback is not None:
                self._fallbacks[piece.fallback] += 1
            if run.stop_error is not None:
                self._fail(run, run.stop_error)
            elif run.is_complete:
                self._finish(run, tokens[run.turn_id])

    def _finish(self, run: PrefillRun, token: int | None) -> None:
        if token is None:
            self._fail(run, NotFinite.of_turn(run.turn_id, run.planned_chunks[-1].tokens.stop))
            return
        _, computed = self._waiting.pop(run.turn_id)
        if not computed.done():
            computed.set_result(token)

    def _fail(self, run: PrefillRun, error: Exception) -> None:
        self.scheduler.remove(run.turn_id)
        _, computed = self._waiting.pop(run.turn_id)
        if not computed.done():
            computed.set_exception(error)

    def _lost(self) -> RingserveError:
        return Unavailable(f"ring {self._ring.settings.name} stopped before the turn was computed; retry")
