"""A rank: one model, one share of the KV, one place in a ring. What a ring leader calls by name.

Plain and synchronous. `prefill`, `run_decode` and `probe` are collective and belong to one thread at a time, the
compute thread; the KV methods, `submit`, `poll`, `status` and `stop` may be called from any thread meanwhile.

T this rank's tokens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cp_core.attention.interface import AttentionBackend, select_backend
from cp_core.transport.interface import RingTransport
from workers.decode.batch import DecodeBatch
from workers.decode.choice import DecodeChoice
from workers.decode.header import LEADER, HeaderChannel
from workers.decode.loop import DecodeFollower, DecodeLeader, LoopWork
from workers.decode.mailbox import DecodeMailbox
from workers.decode.probe import probe_decode_rates
from workers.decode.prompt import DecodePrompts
from workers.decode.step import DecodePass
from workers.kv.cache import KvCache
from workers.kv.receiver import KvReceiver
from workers.kv.sender import KvSender
from workers.model.builtin import resolve_model_path
from workers.model.loading import DTYPES, LoadedModel, load_model
from workers.prefill.step import PrefillPass, ScoredRows, run_prefill
from workers.progress import Progress
from workers.protocol.decode_commands import DecodeCommand, DecodeEvents
from workers.protocol.steps import (
    BlockPair,
    KvExpect,
    KvSend,
    PrefillOutput,
    PrefillStep,
    RankDoors,
    RankInfo,
    RankSpec,
    RankStatus,
    RingRates,
    RingSpec,
    TokenLogprobs,
    TransferKey,
    TransferReport,
)
from workers.rank.joining import RingJoining
from workers.rank.probe import probe_rates
from workers.sampling.logprobs import logprobs_of
from workers.sampling.rows import sample_rows
from workers.step_clock import StepClock

# A decode loop that was asked to end sends its last header within a heartbeat; after this it is ended from outside.
STOP_SECONDS = 3.0
# Logits of at most so many prompt tokens are held at a time where the prompt's log-probabilities are asked for.
SCORED_ROWS = 256


class RankWorker:
    """`start`, then `join` (or `attach`), then steps, then `stop`."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._clock = StepClock()
        self._computing = threading.Lock()
        self._spec: RankSpec
        self._model: LoadedModel
        self._backend: AttentionBackend
        self._joining: RingJoining
        self._cache: KvCache
        self._receiver: KvReceiver | None = None
        self._sender: KvSender | None = None
        self._mailbox: DecodeMailbox
        self._choose_variant: DecodeChoice
        self._transport: RingTransport | None = None
        self._tensor: RingTransport | None = None

    def start(self, spec: RankSpec, *, poisoned: bool = False) -> RankInfo:
        """Load the model and open the KV receiver. `poisoned` fills the cache with NaN, for tests.

        Raises ModelRefused, ConfigError (dtype, attention backend, ring transport, decode variant, tp), Unavailable (no
        port to open).
        """
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._joining = RingJoining(spec)
        self._model = load_model(
            resolve_model_path(spec.model_path),
            spec.dtype,
            spec.device,
            Path(spec.model_path).name,
            tp_rank=spec.tp_rank,
            tp=spec.tp,
        )
        info = self._model.info
        self._backend = select_backend(spec.attention_backend, spec.device, DTYPES[info.dtype])
        self._choose_variant = DecodeChoice(spec.decode_variant, self._model.share.shape, spec.cp)
        self._cache = KvCache(
            num_layers=info.num_layers,
            num_blocks=spec.num_blocks,
            block_tokens=spec.block_tokens,
            num_kv_heads=self._model.share.num_kv_heads,
            head_dim=info.head_dim,
            dtype=DTYPES[info.dtype],
            device=spec.device,
            head_start=self._model.head_start,
            poisoned=poisoned,
        )
        self._receiver = KvReceiver(self._cache, spec.incarnation, listen_host=spec.listen_host, tls=spec.tls)
        self._sender = KvSender(self._cache, spec.incarnation, checksums=spec.kv_checksums, tls=spec.tls)
        self._mailbox = DecodeMailbox(spec.max_batch)
        return RankInfo(
            rank=spec.rank,
            kv_endpoint=self._receiver.endpoint,
            attention_backend=self._backend.name,
            ring_transport=self._joining.backend,
            pid=os.getpid(),
            model=info,
        )

    def open_doors(self) -> RankDoors:
        """Open the places where the ring will meet; every rank is told those of all. Raises Unavailable."""
        return self._joining.open()

    def join(self, ring: RingSpec) -> None:
        """Meet the other ranks; collective. Raises Unavailable if they do not come within the ring's timeout."""
        self.attach(*self._joining.join(ring))

    def attach(self, transport: RingTransport, tensor: RingTransport | None = None) -> None:
        """Use rings that stand already: the in-process ones of tests. `tensor` joins the tp ranks of this cp rank."""
        assert (transport.rank, transport.size) == (self._spec.cp_rank, self._spec.cp), "a place in another ring"
        assert (tensor is None) == (self._spec.tp == 1), "a tensor parallel group where there is one"
        self._transport = transport
        if tensor is not None:
            self._model.tensor.connect(tensor)
            self._tensor = tensor

    def probe(self) -> RingRates:
        """Measure this rank and its link; collective, about 0.5 s."""
        with self._compute() as ring:
            return self._probe(ring)

    def probe_between_steps(self, timeout: float) -> RingRates:
        """First rank: as `probe`, by the decode loop of all ranks, which computes nothing else meanwhile.

        Seconds. Raises Unavailable.
        """
        return self._mailbox.ask_rates(timeout)

    def _probe(self, ring: RingTransport) -> RingRates:
        share, device = self._model.share, self._cache.device
        rates = probe_rates(share, device, self._backend, ring)
        self._choose_variant.measured(probe_decode_rates(rates, share, device, self._backend, ring))
        return rates

    def follow_decode_variant(self, policy: str) -> None:
        """First rank: decode as `policy` says, from the next step on. Raises ConfigError for an unknown one."""
        self._choose_variant.follow(policy)

    def fill_kv(self, seed: int) -> None:
        """Random numbers in every slot of the cache: measurements of decode need KV, whatever it says."""
        self._cache.fill_random(seed)

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, step: PrefillStep) -> PrefillOutput:
        """Compute the new tokens of a step, store their KV, sample what is to be sampled here. Collective.

        Raises Unavailable if the ring breaks, TransferError if a hand-off cannot be begun.
        """
        self._begin_sends(step)
        with self._compute() as ring:
            began, waited = time.perf_counter(), self._seconds_waited(ring)
            with self._clock.step(*self._transports):
                forward, states = self._run_prefill(step, ring)
            logits = self._model.logits(states[[last.row for last in forward.last_rows]])
            names = [last.sequence_id for last in forward.last_rows]
            draws = self._spec.tp_rank == 0
            sampled = dict(zip(names, sample_rows(forward.last_rows, logits), strict=True)) if draws else {}
            scores = self._score(forward.scored_rows, states)
            self._progress.stepped(running=0)
            return PrefillOutput(
                tokens={name: drawn.token_id for name, drawn in sampled.items()},
                logprobs={name: drawn.logprobs for name, drawn in sampled.items() if drawn.logprobs is not None},
                scores=scores if draws else {},
                seconds=time.perf_counter() - began,
                wait_seconds=self._seconds_waited(ring) - waited,
            )

    @property
    def _transports(self) -> tuple[RingTransport, ...]:
        return tuple(each for each in (self._transport, self._tensor) if each is not None)

    def _score(self, scored: Sequence[ScoredRows], states: Tensor) -> dict[str, dict[int, TokenLogprobs]]:
        """By sequence and position, a few rows at a time: logits of a whole step would take as much memory as its KV.

        The tensor parallel ranks of one rank of the ring make the logits together.
        """
        scores: dict[str, dict[int, TokenLogprobs]] = {}
        for each in scored:
            own = scores.setdefault(each.sequence_id, {})
            for begin in range(0, len(each.rows), SCORED_ROWS):
                part = slice(begin, begin + SCORED_ROWS)
                found = logprobs_of(
                    self._model.logits(states[list(each.rows[part])]), each.token_ids[part], each.num_top
                )
                own.update(zip(each.positions[part], found, strict=True))
        return scores

    def _seconds_waited(self, ring: RingTransport) -> float:
        return ring.stats.seconds_waited + (self._tensor.stats.seconds_waited if self._tensor else 0.0)

    def prefill_logits(self, step: PrefillStep) -> Tensor:
        """As `prefill`, but nothing is sampled: logits[T, vocab_size] of all tokens here, low chunk then high chunk of
        each sequence. For comparisons with other implementations.
        """
        self._begin_sends(step)
        with self._compute() as ring:
            _, states = self._run_prefill(step, ring)
            return self._model.logits(states)

    def _begin_sends(self, step: PrefillStep) -> None:
        """Before the ring computes: a transfer that cannot be begun must fail its step and not the ring."""
        for sequence in step.sequences:
            for send in sequence.sends:
                self._kv_sender.begin(send)

    def _run_prefill(self, step: PrefillStep, ring: RingTransport) -> tuple[PrefillPass, Tensor]:
        """(the pass, hidden states [T, hidden_size]) of this rank's tokens."""
        self._progress.alive(running=len(step.sequences))
        return run_prefill(step, self._model, ring, self._cache, self._backend, self._kv_sender.layer_ready)

    # --- decode ------------------------------------------------------------------------------------------------------

    def run_decode(self) -> None:
        """Step the decode batch until `stop`. All ranks of the ring call it; the first leads.

        Raises Unavailable if the ring breaks; then `submit` and `poll` of the first rank raise it as well.
        """
        with self._compute() as ring:
            batch = DecodeBatch(ring.rank, ring.size, self._spec.block_tokens)
            step = DecodePass(self._model, ring, self._cache, self._backend, batch)
            prompts = DecodePrompts(self._model, ring, self._cache, self._backend)
            step.clock = prompts.clock = self._clock
            step.timed = prompts.timed = self._transports
            channel = HeaderChannel(self._header_hops(ring), self._spec.max_batch, self._cache.device)
            work = LoopWork(batch, step, prompts, partial(self._probe, ring))
            if self._spec.rank != LEADER:
                DecodeFollower(channel, work, self._progress).run()
                return
            try:
                DecodeLeader(channel, work, self._progress, self._choose_variant, self._mailbox).run()
            except Exception as error:
                self._mailbox.close(f"the decode loop of {self._spec.ring} broke: {error}")
                raise

    def _header_hops(self, ring: RingTransport) -> tuple[RingTransport, ...]:
        """Headers go round the ring of the first heads, and from each of its ranks to the others of its group."""
        if self._tensor is None:
            return (ring,)
        return (ring, self._tensor) if self._spec.tp_rank == 0 else (self._tensor,)

    def submit(self, commands: Sequence[DecodeCommand]) -> None:
        """First rank: hand commands to the next step border. Raises Unavailable once the loop has ended."""
        self._mailbox.submit(commands)

    def poll(self, after: int, timeout: float) -> DecodeEvents:
        """First rank: events from cursor `after` on, waiting up to `timeout` seconds for the first. May be repeated.

        Raises Unavailable once the loop has ended and all its events were fetched.
        """
        return self._mailbox.poll(after, timeout)

    # --- KV transfer -------------------------------------------------------------------------------------------------

    def expect_kv(self, expect: KvExpect) -> None:
        """Open blocks to a transfer."""
        self._kv_receiver.expect(expect)

    def await_kv(self, key: TransferKey, timeout: float) -> TransferReport:
        """Wait until all of it arrived. Raises TransferError, Unavailable."""
        return self._kv_receiver.wait_sealed(key, timeout)

    def drop_kv(self, key: TransferKey) -> None:
        """After this returns no byte of the transfer is written any more. May be repeated."""
        self._kv_receiver.drop(key)

    def copy_blocks(self, pairs: Sequence[BlockPair]) -> None:
        """Copy whole blocks of this rank's cache; they are done when this returns. Nobody writes to them meanwhile."""
        for pair in pairs:
            self._cache.copy_block(pair.source, pair.destination)
        done = self._cache.fence()
        if done is not None:
            done.synchronize()

    def send_kv(self, send: KvSend, timeout: float) -> TransferReport:
        """Send KV that is complete in all layers, and wait until it arrived. Raises TransferError, Unavailable."""
        return self._kv_sender.send_all(send, timeout)

    def finish_sends(self, key: TransferKey, timeout: float) -> TransferReport:
        """Wait until all that prefill steps began to send under `key` arrived. Raises TransferError, Unavailable."""
        return self._kv_sender.finish(key, timeout)

    def abandon_send(self, key: TransferKey) -> None:
        """After this returns the transfer reads no block any more. May be repeated."""
        self._kv_sender.abandon(key)

    # --- life --------------------------------------------------------------------------------------------------------

    def status(self) -> RankStatus:
        return RankStatus(
            steps=self._progress.steps,
            seconds_since_step=self._progress.seconds_since_step,
            running=self._progress.running,
            open_transfers=self._receiver.num_open if self._receiver else 0,
            decode_variant=self._progress.decode_variant,
            step_seconds=self._clock.step_seconds,
            wait_seconds=self._clock.wait_seconds,
            bytes_sent=sum(transport.stats.bytes_sent for transport in self._transports),
            stalled_seconds=self._receiver.stalled_seconds if self._receiver else 0.0,
            communication_seconds=self._clock.communication_seconds,
            step_counts=tuple(self._clock.step_counts),
        )

    def stop(self) -> None:
        """End the decode loop, leave the ring, close receiver and sender. May be repeated, and called half started.

        Of a ring all ranks are to be stopped at the same time: the first tells the others that the loop has ended, and
        one that hears nothing of it in STOP_SECONDS breaks off.
        """
        if hasattr(self, "_mailbox"):
            self._mailbox.close("the ring is being stopped")
        if hasattr(self, "_joining"):
            self._joining.close()
        if self._computing.acquire(timeout=STOP_SECONDS):
            self._computing.release()
        for part in (self._transport, self._tensor, self._sender, self._receiver):
            if part is not None:
                part.close()

    @contextmanager
    def _compute(self) -> Iterator[RingTransport]:
        """Be the compute thread. A rank that fails leaves the ring, so that its peers fail too instead of waiting."""
        assert self._transport is not None, "the rank has joined no ring"
        assert self._computing.acquire(blocking=False), "the rank is computing in another thread"
        try:
            with torch.inference_mode():
                yield self._transport
        except BaseException:
            self._transport.close()
            if self._tensor is not None:
                self._tensor.close()
            raise
        finally:
            self._computing.release()

    @property
    def _kv_receiver(self) -> KvReceiver:
        assert self._receiver is not None, "the rank was not started"
        return self._receiver

    @property
    def _kv_sender(self) -> KvSender:
        assert self._sender is not None, "the rank was not started"
        return self._sender
