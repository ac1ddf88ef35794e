"""Rank of a ring: one model, one share of the KV, one place in the ring. A ring leader calls its methods by name.

The methods are synchronous. `prefill`, `run_decode` and `probe` are collective and run on one thread at a time, the
compute thread. The KV methods, `submit`, `poll`, `status` and `stop` may be called from any thread meanwhile.

Shapes: T tokens of this rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ringserve.cp_core.cost.decode import MAX_DRAFTS
from ringserve.cp_core.errors import Unavailable
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.views import RingRates
from ringserve.workers.decode.batch import BatchState
from ringserve.workers.decode.graphs import GraphRunner, PromptRunner
from ringserve.workers.decode.loop import FollowingLoop, LeadingLoop, LoopWork, Measurement
from ringserve.workers.decode.messages import LEADER, HeaderChannel
from ringserve.workers.decode.prompts import DecodePrompts
from ringserve.workers.decode.step import DecodePass
from ringserve.workers.kv.sender import CarrierCounts
from ringserve.workers.model.weights import find_trim
from ringserve.workers.prefill.step import (
    PrefillPass,
    StepEnded,
    StepInbox,
    is_true_everywhere,
    run_prefill,
    score_rows,
)
from ringserve.workers.progress import Progress, StepClock
from ringserve.workers.protocol.ranks import GpuMemory, RankEndpoints, RankInfo, RankSpec, RankStatus, RingSpec
from ringserve.workers.protocol.steps import DecodeCommand, DecodeEvents, PrefillOutput, PrefillStep
from ringserve.workers.protocol.transfers import BlockPair, KvEnds, KvExpect, KvSend, TransferKey, TransferReport
from ringserve.workers.rank.joining import RankRings, RingJoining
from ringserve.workers.rank.parts import RankParts, load_parts, parts_of
from ringserve.workers.rank.probe import finished, probe_decode_rates, probe_rates
from ringserve.workers.sampling.sampler import sample_rows

# A decode loop sends its last header within a heartbeat of its stop; after this time it is ended from outside.
STOP_SECONDS = 3.0

TRIM_SECONDS = 10.0
"""Least time between two trims of the allocator, each of which takes 10 to 50 ms."""
BeforeLayer = Callable[[], None] | None


class FreedMemory:
    """Memory that the allocator keeps between tensors in use: work of many sizes leaves much of it."""

    def __init__(self, trim: Callable[[int], int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trim = trim or find_trim()
        self._clock = clock
        self._trimmed_at = clock()
        self._num_steps = 0

    def give_back(self, num_steps: int) -> None:
        """Give whole pages back, unless that was done a short while ago or the process has computed no step since."""
        now = self._clock()
        if self._trim is not None and num_steps != self._num_steps and now - self._trimmed_at >= TRIM_SECONDS:
            self._trim(0)
            self._trimmed_at, self._num_steps = self._clock(), num_steps


class RankWorker:
    """Rank in four stages: `start`, then `join` (or `attach`), then steps, then `stop`."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._clock = StepClock()
        self._computing = threading.Lock()
        self._inbox = StepInbox()
        self._freed = FreedMemory()
        self._started: RankParts | None = None
        self._rings: RankRings | None = None
        self._runner: GraphRunner | None = None
        self._prompts: PromptRunner | None = None

    @property
    def parts(self) -> RankParts:
        assert self._started is not None, "the rank was not started"
        return self._started

    def start(self, spec: RankSpec, *, poisoned: bool = False) -> RankInfo:
        """Load the model and open the KV receiver. `poisoned` fills the cache with NaN, for tests.

        Raises ModelRefused, ConfigError (dtype, attention backend, ring transport, decode variant, tp), Unavailable (no
        port to open).
        """
        self._started = load_parts(spec, poisoned=poisoned)
        return self._started.info

    def renew(self, spec: RankSpec) -> RankInfo:
        """Leave the ring, and begin another incarnation of it at the same place with the loaded model.

        Transfers of the old incarnation end, and later ones of it are refused. Its blocks are free to be written anew.
        Weights that were divided for helix stay divided, so the new incarnation decodes by helix, too. Raises
        Unavailable if a thread of the old incarnation does not end.
        """
        parts = self.parts
        assert (spec.rank, spec.num_ranks) == (parts.spec.rank, parts.spec.num_ranks), "a place in another ring"
        if parts.model.is_helix:
            spec = spec.with_helix()
        parts.mailbox.close("the ring is being rebuilt")
        parts.joining.close()
        for transport in self._transports:
            transport.close()  # calls that wait for a message fail
        if not self._computing.acquire(timeout=STOP_SECONDS):
            raise Unavailable(f"rank {spec.rank} still computes")
        self._computing.release()
        parts.cache.settle()  # a step may have been issued whose result nobody read
        parts.close()
        self._rings = self._runner = None
        self._progress, self._clock, self._inbox = Progress(), StepClock(), StepInbox()
        self._started = parts_of(
            spec, RingJoining(spec), parts.model, parts.backend, parts.cache, parts.compilation, parts.draft_model
        )
        self.parts.choose_variant.measured(parts.choose_variant.rates)  # the old rates hold until a probe
        return self._started.info

    def open_endpoints(self) -> RankEndpoints:
        """Open the endpoints for the ring's rendezvous; `join` takes all ranks' endpoints. Raises Unavailable."""
        return self.parts.joining.open()

    def join(self, ring: RingSpec) -> None:
        """Join the ring; collective. Raises Unavailable if other ranks do not connect within the ring's timeout."""
        self._use(self.parts.joining.join(ring))

    def attach(
        self, transport: RingTransport, tensor: RingTransport | None = None, control: RingTransport | None = None
    ) -> None:
        """Use connected rings, such as in-process ones. `tensor` joins the tp ranks of this cp rank.

        `control` carries headers if `transport` does not.
        """
        self._use(RankRings.of(transport, tensor, control))

    def _use(self, rings: RankRings) -> None:
        spec, model = self.parts.spec, self.parts.model
        assert (rings.tokens.rank, rings.tokens.size) == (spec.cp_rank, spec.cp), "a place in another ring"
        assert (rings.heads is None) == (spec.tp == 1), "a tensor-parallel ring is missing or not wanted"
        self._rings = rings
        if rings.heads is not None:
            model.tensor.connect(rings.heads)
        if model.is_helix:
            model.helix.connect(rings.tokens)
        self._clock.watch(*self._transports)

    def probe(self) -> RingRates:
        """Measure this rank and its link, about 0.5 s; then divide the weights if helix is chosen, and pack them.

        On a GPU, compile the model last: that takes seconds, or a minute if the disk has no compiled code of it yet.
        Collective.
        """
        with self._compute() as ring:
            rates, parts = finished(self._probe(ring)), self.parts
            settings, model = parts.spec.settings, parts.choose_variant.share_weights(parts.model, ring)
            self._started = replace(parts, model=model)
            if settings.packs_weights:
                model.pack_weights(with_head=settings.packs_head, quantization=settings.quantization, is_shared=True)
            if parts.compilation is not None:
                compiled = model.compiled(parts.compilation.backend)
                self._started = replace(self.parts, model=compiled)
                self._prompts = PromptRunner(compiled, parts.compilation.recorder, parts.cache.device)
            if parts.draft_model is not None:
                parts.draft_model.make_fast(packs_weights=settings.packs_weights)
            return rates

    def probe_between_steps(self, timeout: float) -> RingRates:
        """Measure as `probe` does, within the decode loops; called on the first rank. `timeout` is in seconds.

        Between the parts of the measurement the loops compute steps. Raises Unavailable.
        """
        return self.parts.mailbox.ask_rates(timeout)

    def _probe(self, ring: RingTransport) -> Generator[None, None, RingRates]:
        parts = self.parts
        share, device = parts.model.share, parts.cache.device
        rates = yield from probe_rates(share, device, parts.backend, ring)
        yield
        block_tokens = parts.cache.block_tokens
        of_decode = yield from probe_decode_rates(rates, share, device, parts.backend, ring, block_tokens)
        parts.choose_variant.measured(of_decode)
        return rates

    def follow_decode_variant(self, policy: str) -> None:
        """Choose decode variants by `policy` from the next step on; for the first rank. Raises ConfigError."""
        self.parts.choose_variant.follow(policy)

    def fill_kv(self, seed: int) -> None:
        """Fill the cache with random numbers: measurements of decode need KV, whatever its values."""
        self.parts.cache.fill_random(seed)

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, step: PrefillStep) -> PrefillOutput:
        """Compute the new tokens of a step, store their KV, and sample the sequences that end here. Collective.

        The output of a step that was ended is empty. Raises Unavailable if the ring breaks, TransferError if a transfer
        cannot begin.
        """
        self._give_back()
        self._begin_sends(step)
        cores = self.parts.cores
        taken = nullcontext() if cores is None else cores.computing()
        with self._compute() as ring, self._inbox.serving(step), taken:
            before_layer = partial(self._yield, step, ring) if step.yields else None
            with self._clock.step(), suppress(StepEnded):
                return self._prefill(step, ring, before_layer)
            return PrefillOutput()

    def _give_back(self) -> None:
        self._freed.give_back(self._progress.steps)

    def prefill_within(self, step: PrefillStep, timeout: float) -> PrefillOutput | None:
        """Let the compute thread compute a step between two layers of the enclosing step, and wait for the result.

        Returns None, at all ranks, if the enclosing step ends first. Raises TimeoutError.
        """
        return self._inbox.enter(step).result(timeout)

    def _yield(self, outer: PrefillStep, ring: RingTransport) -> None:
        """Compute the step that waits, if it waits at every rank. Collective."""

        def compute(step: PrefillStep) -> PrefillOutput:
            self._begin_sends(step)
            return self._prefill(step, ring)

        assert self._rings is not None, "the rank has joined no ring"
        controls = [each for each in (self._rings.control, self._rings.control_heads) if each is not None]
        if is_true_everywhere(self._inbox.is_waiting, controls):
            self._inbox.run(compute)
            self._progress.alive(running=len(outer.sequences))

    def _prefill(self, step: PrefillStep, ring: RingTransport, before_layer: BeforeLayer = None) -> PrefillOutput:
        model, began, waited = self.parts.model, time.perf_counter(), self._clock.seconds_waited
        forward, states = self._run_prefill(step, ring, before_layer)
        logits = model.logits(states[[last.row for last in forward.last_rows]])
        names = [last.sequence_id for last in forward.last_rows]
        samples = model.samples
        sampled = dict(zip(names, sample_rows(forward.last_rows, logits), strict=True)) if samples else {}
        scores = score_rows(model, forward.scored_rows, states)
        self._progress.stepped(running=0)
        self.parts.cache.settle()
        return PrefillOutput(
            tokens={name: drawn.token_id for name, drawn in sampled.items()},
            logprobs={name: drawn.logprobs for name, drawn in sampled.items() if drawn.logprobs is not None},
            scores=scores if samples else {},
            seconds=time.perf_counter() - began,
            wait_seconds=self._clock.seconds_waited - waited,
        )

    @property
    def _transports(self) -> tuple[RingTransport, ...]:
        return () if self._rings is None else self._rings.all

    def prefill_logits(self, step: PrefillStep) -> Tensor:
        """Run a prefill step without sampling -> logits[T, vocab_size] of all tokens here, for comparisons.

        They are in the order of the sequences, each with its low chunk, then its high chunk.
        """
        self._begin_sends(step)
        with self._compute() as ring:
            forward, states = self._run_prefill(step, ring)
            return self.parts.model.logits(states)[forward.stored_rows]

    def _begin_sends(self, step: PrefillStep) -> None:
        """Begin transfers before the ring computes: a transfer that cannot begin fails its step, not the ring."""
        for sequence in step.sequences:
            for send in sequence.sends:
                self.parts.sender.begin(send)

    def _run_prefill(
        self, step: PrefillStep, ring: RingTransport, before_layer: BeforeLayer = None
    ) -> tuple[PrefillPass, Tensor]:
        """Run the step -> (the pass, hidden states [T, hidden_size]) of this rank's tokens."""
        self._progress.alive(running=len(step.sequences))
        parts = self.parts
        return run_prefill(
            step,
            parts.model,
            ring,
            parts.cache,
            parts.backend,
            parts.sender.layer_ready,
            before_layer,
            None if self._prompts is None else self._prompts.hidden_states,
        )

    # --- decode ------------------------------------------------------------------------------------------------------

    def run_decode(self) -> None:
        """Run the decode loop until `stop`. All ranks of the ring call it; the first leads.

        Raises Unavailable if the ring breaks; then `submit` and `poll` of the first rank raise it as well.
        """
        parts, spec = self.parts, self.parts.spec
        with self._compute() as ring:
            assert self._rings is not None, "the rank has joined no ring"
            control = self._rings.control
            grammars = parts.model.grammars if parts.model.samples else None
            batch = BatchState(ring.rank, ring.size, spec.settings.block_tokens, grammars)
            if parts.compilation is not None:
                recorder, agrees = parts.compilation.recorder, partial(is_true_everywhere, transports=[control])
                self._runner = GraphRunner(parts.model, recorder, parts.cache.device, ring.stats, agrees)
            drafts, cores, least_share = spec.settings.drafts, parts.cores, spec.settings.least_share
            step = DecodePass(parts.model, ring, parts.cache, parts.backend, batch, self._clock, control, self._runner)
            prompts = DecodePrompts(parts.model, ring, parts.cache, parts.backend, self._clock, control, self._prompts)
            channel = HeaderChannel(self._rings.header_hops, spec.settings.max_batch, MAX_DRAFTS if drafts else 0)
            work = LoopWork(batch, step, prompts, Measurement(partial(self._probe, ring)), self._give_back)
            try:
                if spec.rank == LEADER:
                    lead = LeadingLoop(
                        channel,
                        work,
                        self._progress,
                        parts.choose_variant,
                        parts.mailbox,
                        pause_after=None if cores is None else partial(cores.pause_after, least_share=least_share),
                        drafts=drafts,
                        draft_model=parts.draft_model,
                    )
                    lead.run()
                else:
                    FollowingLoop(channel, work, self._progress).run()
            except Exception as error:
                parts.mailbox.close(f"the decode loop of {spec.ring} broke: {error}")
                raise
            finally:
                if self._runner is not None:
                    self._runner.forget()
                if parts.draft_model is not None:
                    parts.draft_model.end_all()

    def submit(self, commands: Sequence[DecodeCommand]) -> None:
        """Queue commands for the next step boundary; for the first rank. Raises Unavailable once the loop has ended."""
        self.parts.mailbox.submit(commands)

    def poll(self, after: int, timeout: float) -> DecodeEvents:
        """Return events from cursor `after` on; for the first rank. May be repeated.

        Waits up to `timeout` seconds for the first event. Raises Unavailable once the loop has ended and all its events
        were fetched.
        """
        return self.parts.mailbox.poll(after, timeout)

    def prepare_grammar(self, grammar: str) -> None:
        """Compile the grammar of a coming answer, so that no step waits for it."""
        if self.parts.model.samples:
            self.parts.model.grammars.prepare(grammar)

    # --- KV transfer -------------------------------------------------------------------------------------------------

    def expect_kv(self, expect: KvExpect) -> None:
        """Open blocks to an incoming transfer."""
        self.parts.receiver.expect(expect)

    def poll_kv(self, after: int, timeout: float) -> KvEnds:
        """Return the ends of incoming transfers from number `after` on; wait up to `timeout` seconds for the first."""
        return self.parts.receiver.poll_ended(after, timeout)

    def drop_kv(self, key: TransferKey) -> None:
        """End an incoming transfer: after the return none of its bytes is written. May be repeated."""
        self.parts.receiver.drop(key)

    def copy_blocks(self, pairs: Sequence[BlockPair]) -> None:
        """Copy whole blocks of this rank's cache, and wait for the copies. Meanwhile nothing else may write to them."""
        for pair in pairs:
            self.parts.cache.copy_block(pair.source, pair.destination)
        self.parts.cache.settle()

    def send_kv(self, send: KvSend, timeout: float) -> TransferReport:
        """Send KV that is complete in all layers, and wait until it has arrived. Raises TransferError, Unavailable."""
        return self.parts.sender.send_all(send, timeout)

    def finish_sends(self, key: TransferKey, timeout: float) -> TransferReport:
        """Wait until everything that prefill steps send under `key` has arrived. Raises TransferError, Unavailable."""
        return self.parts.sender.finish(key, timeout)

    def abandon_send(self, key: TransferKey) -> None:
        """Give up an outgoing transfer: after the return it reads no block. May be repeated."""
        self.parts.sender.abandon(key)

    # --- life --------------------------------------------------------------------------------------------------------

    def status(self) -> RankStatus:
        """Return the progress. Raises Unavailable if this process has to be replaced."""
        receiver = self._started.receiver if self._started else None
        counts = self._started.sender.counts if self._started else CarrierCounts()
        if self._started and self._started.agent is not None:
            self._started.agent.check_usable()
        return RankStatus(
            steps=self._progress.steps,
            seconds_since_step=self._progress.seconds_since_step,
            running=self._progress.running,
            open_transfers=receiver.num_open if receiver else 0,
            decode_variant=self._progress.decode_variant,
            decode_reason=self._started.choose_variant.reason if self._started else "",
            step_seconds=self._clock.step_seconds,
            wait_seconds=self._clock.wait_seconds,
            bytes_sent=sum(transport.stats.bytes_sent for transport in self._transports),
            stalled_seconds=receiver.stalled_seconds if receiver else 0.0,
            communication_seconds=self._clock.communication_seconds,
            step_counts=tuple(self._clock.step_counts),
            kv_nixl_bytes=counts.nixl_bytes,
            kv_socket_bytes=counts.socket_bytes,
            kv_fallbacks=counts.fallbacks,
            gpu=gpu_memory(self._started.cache.device) if self._started else None,
            eager_steps=tuple(sorted(self._runner.eager_steps.items())) if self._runner else (),
            waited_steps=tuple(sorted(self._progress.waited_steps.items())),
            checked_drafts=tuple(self._progress.checked_drafts),
            accepted_drafts=tuple(self._progress.accepted_drafts),
        )

    def stop(self) -> None:
        """End the decode loop, leave the ring, close receiver and sender. May be repeated.

        A rank that has not started, or not joined, may be stopped, too.

        All ranks of a ring are stopped at the same time. The first rank tells the others that the loop has ended; a
        rank that hears nothing within STOP_SECONDS ends its loop itself.
        """
        parts = self._started
        if parts is not None:
            parts.mailbox.close("the ring is being stopped")
            parts.joining.close()
        if self._computing.acquire(timeout=STOP_SECONDS):
            self._computing.release()
        for transport in self._transports:
            transport.close()
        if parts is not None:
            parts.close()

    @contextmanager
    def _compute(self) -> Iterator[RingTransport]:
        """Make the caller the compute thread. A rank that fails leaves the ring, so that its peers fail as well."""
        assert self._rings is not None, "the rank has joined no ring"
        assert self._computing.acquire(blocking=False), "the rank is computing in another thread"
        try:
            with torch.inference_mode():
                yield self._rings.tokens
        except BaseException:
            for transport in self._transports:
                transport.close()
            raise
        finally:
            self._computing.release()


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """Return the memory of a GPU as torch counts it; None for a CPU. It does not ask the driver, which may hang."""
    if device.type != "cuda":
        return None
    return GpuMemory(
        total=torch.cuda.get_device_properties(device).total_memory,
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
    )
