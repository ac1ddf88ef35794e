"""Rings whose ranks are threads of the test, with a leader that only hands out blocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ringserve.cp_core.layout.shards import (
    PrefillLayout,
    ShardMap,
    appended,
    balanced_layout,
    cut_layout,
    stored_on_chain,
)
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.cp_core.transport.staged import StagedRing
from ringserve.views import RingRates
from ringserve.workers.protocol.ranks import RankInfo, RankSettings, RankSpec, RingSpec
from ringserve.workers.protocol.steps import (
    AdmitSequence,
    Algorithm,
    ComputePrompt,
    DecodeEvent,
    PrefillOutput,
    PrefillStep,
    RemoveSequence,
    SequencePrefill,
)
from ringserve.workers.protocol.transfers import KvSend
from ringserve.workers.rank import probe
from ringserve.workers.rank.worker import RankWorker
from ringserve.workers.sampling.parameters import NO_HISTORY, SamplingParameters, TokenHistory
from tests.cp_core.staging import PoisonedStaging
from tests.waiting import WAIT_SECONDS

T = TypeVar("T")

BLOCK_TOKENS = 4
SHORT_PROBE: dict[str, Any] = {
    "CPU_SIZES": probe.ProbeSizes(gemm_tokens=64, query_tokens=64, stored_tokens=64, decode_tokens=64, decode_bytes=0),
    "WEIGHTS_BYTES": 1 << 20,
    **dict.fromkeys(("SECONDS_PER_RATE", "DECODE_SECONDS_PER_RATE", "SHARING_SECONDS", "LINK_SECONDS"), 0.002),
    **dict.fromkeys(("LATENCY_EXCHANGES", "OVERLAP_EXCHANGES", "BUSY_MESSAGES"), 4),
}
"""Constants of the probe for tests of what follows it: its rates are rough."""


@dataclass
class Conversation:
    """Sequence on one ring: its shards and every rank's block table."""

    name: str
    shards: ShardMap
    blocks: tuple[tuple[int, ...], ...]
    tokens: list[int] = field(default_factory=list)

    @property
    def held(self) -> tuple[int, ...]:
        return self.shards.held


@dataclass(frozen=True)
class Turn:
    """New tokens for a conversation in one prefill step; `sends[r]` leave rank r as layers are computed."""

    conversation: Conversation
    token_ids: Sequence[int]
    sample: SamplingParameters | None = None
    sends: tuple[tuple[KvSend, ...], ...] = ()


def front_loaded_chain(level: PrefillLayout, order: Sequence[int]) -> tuple[PrefillLayout, ShardMap]:
    """Return a layout whose earlier ranks compute more, and where its tokens lie: as many a rank as in `level`."""
    size, total = len(order), level.num_tokens
    cuts = [total - total * (size - place) ** 2 // size**2 for place in range(size + 1)]
    counts = [level.tokens_on(rank) for rank in range(size)]
    return cut_layout(level.start, cuts, order), stored_on_chain(level.start, cuts, counts, order)


class LocalRing:
    """Started rank workers over an in-process ring, or over a real one, of `ring_transport`, that they join.

    Caches are poisoned; blocks are handed out in random order.
    """

    def __init__(
        self,
        model_path: Path | str,
        num_ranks: int,
        *,
        num_blocks: int = 512,
        max_batch: int = 8,
        ring_transport: str | None = None,
        tp: int = 1,
        decode_variant: str = "auto",
        attention_backend: str = "auto",
        packs_weights: bool = False,
        dtype: str = "float32",
        is_staged: bool = False,
        kv_carrier: str = "auto",
        replicates_kv: bool = False,
        scatters_rows: bool = False,
        device: str = "cpu",
        compile: str = "off",
        is_on_stream: bool = False,
        drafts: bool = False,
        draft_model: Path | str = "",
        cores: str = "",
    ) -> None:
        """Start `num_ranks` ranks that share the tokens, each of `tp` workers that share the heads.

        If the ring `is_staged`, its messages are copied as those of ranks on a GPU are that go through host memory.
        If it `is_on_stream`, headers go by a ring of their own, as beside NCCL.
        """
        self.num_ranks = num_ranks
        self.tp = tp
        self.incarnation = f"test-0@{id(self)}"
        self.workers = [RankWorker() for _ in range(num_ranks * tp)]
        self._threads = ThreadPoolExecutor(num_ranks * tp, thread_name_prefix="rank")
        self._free = [random.Random(rank).sample(range(num_blocks), num_blocks) for rank in range(num_ranks)]
        self._decoding: list[Future[None]] = []
        self._cursor = 0
        rings = [InProcessRing(num_ranks, timeout_seconds=WAIT_SECONDS).transports for _ in range(tp)]
        heads = [InProcessRing(tp, timeout_seconds=WAIT_SECONDS).transports for _ in range(num_ranks)]
        self.transports: list[RingTransport] = [rings[rank % tp][rank // tp] for rank in range(num_ranks * tp)]
        controls: Sequence[RingTransport | None] = [None] * num_ranks
        if is_on_stream:
            controls = InProcessRing(num_ranks, timeout_seconds=WAIT_SECONDS).transports
            for transport in rings[0]:
                transport.is_on_stream = True
        if is_staged:
            self.transports = [StagedRing(transport, PoisonedStaging()) for transport in self.transports]

        def start(worker: RankWorker, rank: int) -> RankInfo:
            spec = RankSpec(
                ring="test-0",
                rank=rank,
                num_ranks=num_ranks * tp,
                incarnation=self.incarnation,
                settings=RankSettings(
                    tp=tp,
                    replicates_kv=replicates_kv,
                    scatters_rows=scatters_rows,
                    model_path=str(model_path),
                    dtype=dtype,
                    num_blocks=num_blocks,
                    block_tokens=BLOCK_TOKENS,
                    max_batch=max_batch,
                    drafts=drafts or bool(draft_model),
                    draft_model=str(draft_model),
                    draft_context=64,
                    ring_transport=ring_transport or "auto",
                    decode_variant=decode_variant,
                    attention_backend=attention_backend,
                    packs_weights=packs_weights,
                    packs_head=packs_weights,
                    kv_carrier=kv_carrier,
                    cores=cores,
                    least_share=0.25,
                    device=device,
                    compile=compile,
                ),
            )
            info = worker.start(spec, poisoned=True)
            if ring_transport is None:
                head = heads[rank // tp][rank % tp] if tp > 1 else None
                worker.attach(self.transports[rank], head, controls[rank // tp])
            return info

        self.infos = [start(worker, rank) for rank, worker in enumerate(self.workers)]
        if ring_transport is not None:
            endpoints = tuple(worker.open_endpoints() for worker in self.workers)
            spec = RingSpec(name="test", endpoints=endpoints, secret="of a test", timeout_seconds=WAIT_SECONDS)
            self.together(lambda worker, _: worker.join(spec))
        if packs_weights:
            self.probe()

    def rebuild(self, lost: int | None) -> None:
        """Replace the `lost` rank and form the ring again, as its leader does.

        With None the leader itself was lost: its successor keeps all ranks, and their measured rates.
        """
        place = self.workers[lost or 0].parts.spec
        if lost is not None:
            self.workers[lost].stop()
        kept = [worker.renew(worker.parts.spec) for rank, worker in enumerate(self.workers) if rank != lost]
        if lost is not None:
            place = place.with_helix() if any(info.is_helix for info in kept) else place
            self.workers[lost] = RankWorker()
            self.workers[lost].start(place, poisoned=True)
        self.transports = list(InProcessRing(self.num_ranks, timeout_seconds=WAIT_SECONDS).transports)
        for worker, transport in zip(self.workers, self.transports, strict=True):
            worker.attach(transport)
        if lost is not None:
            self.probe()
        self._cursor = 0

    def __enter__(self) -> LocalRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.beside(lambda worker, _: worker.stop())
        self._threads.shutdown()

    def together(self, call: Callable[[RankWorker, int], T]) -> list[T]:
        """Run a call on the compute threads of all ranks at the same time; raises the first failure."""
        futures = [self._threads.submit(call, worker, rank) for rank, worker in enumerate(self.workers)]
        return [future.result(WAIT_SECONDS) for future in futures]

    def probe(self) -> list[RingRates]:
        """Let all ranks measure themselves, pack and share weights as at a start, but in a tenth of the time."""
        with mock.patch.multiple(probe, **SHORT_PROBE):
            return self.together(lambda worker, _: worker.probe())

    def beside(self, call: Callable[[RankWorker, int], T]) -> list[T]:
        """Run a call on every rank in another thread than the compute thread."""
        futures = [run_in_thread(partial(call, worker, rank)) for rank, worker in enumerate(self.workers)]
        return [future.result(WAIT_SECONDS) for future in futures]

    def open(self, name: str, max_tokens: int) -> Conversation:
        """Open a conversation with room for `max_tokens` on every rank."""
        count = -(-max_tokens // BLOCK_TOKENS)
        blocks = tuple(tuple(free.pop() for _ in range(count)) for free in self._free)
        return Conversation(name, ShardMap.empty(self.num_ranks), blocks)

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, turns: Sequence[Turn], algorithm: Algorithm = Algorithm.PASS_KV) -> dict[str, int]:
        """Run one step -> the sampled tokens by conversation."""
        steps = self.steps(turns, algorithm)
        outputs: list[PrefillOutput] = self.together(lambda worker, rank: worker.prefill(steps[rank]))
        return {name: token for output in outputs for name, token in output.tokens.items() if token is not None}

    def asked_within(self, steps: Sequence[PrefillStep], outer: int) -> list[Future[PrefillOutput | None]]:
        """Let a step wait at the first ranks, to be computed within the one of number `outer`."""
        return [
            worker._inbox.enter(replace(step, within=outer)) for worker, step in zip(self.workers, steps, strict=False)
        ]

    def prefill_logits(self, turns: Sequence[Turn], algorithm: Algorithm = Algorithm.PASS_KV) -> list[Tensor]:
        """Run one step -> per turn the logits of its new tokens [T, vocab_size] in the order of their positions."""
        steps = self.steps(turns, algorithm)
        outputs: list[Tensor] = self.together(lambda worker, rank: worker.prefill_logits(steps[rank]))
        gathered = []
        # All tensor parallel ranks of one cp rank have its logits.
        for outputs_of_rank in zip(*[iter(outputs)] * self.tp, strict=True):
            assert all(torch.equal(output, outputs_of_rank[0]) for output in outputs_of_rank)
        outputs = outputs[:: self.tp]
        begins = [0] * self.num_ranks
        for sequence in steps[0].sequences:
            layout = sequence.layout
            logits = torch.full((layout.num_tokens, outputs[0].shape[1]), torch.nan)
            for rank, output in enumerate(outputs):
                for chunk in layout.ranges[rank]:
                    end = begins[rank] + len(chunk)
                    logits[chunk.start - layout.start : chunk.stop - layout.start] = output[begins[rank] : end]
                    begins[rank] = end
            gathered.append(logits)
        return gathered

    def steps(self, turns: Sequence[Turn], algorithm: Algorithm) -> list[PrefillStep]:
        """Make every rank's copy of one step, and note the new tokens in the conversations."""
        sequences: list[list[SequencePrefill]] = [[] for _ in self.workers]
        for turn in turns:
            conversation = turn.conversation
            held = conversation.held
            layout, stored = balanced_layout(sum(held), len(turn.token_ids), held), None
            if algorithm is Algorithm.CHAIN:
                layout, stored = front_loaded_chain(layout, self.order)
            for rank, mine in enumerate(sequences):
                mine.append(
                    SequencePrefill(
                        sequence_id=conversation.name,
                        token_ids=np.array(turn.token_ids, dtype=np.int64),
                        layout=layout,
                        cached=held,
                        blocks=conversation.blocks[rank // self.tp],
                        sample=turn.sample,
                        sends=turn.sends[rank] if turn.sends else (),
                        stored=stored,
                        tail=conversation.shards,
                    )
                )
            conversation.shards = conversation.shards.extend(stored or layout.shard_map())
            conversation.tokens += turn.token_ids
        return [PrefillStep(algorithm=algorithm, sequences=tuple(mine), order=self.order) for mine in sequences]

    @property
    def order(self) -> tuple[int, ...]:
        """Ranks along a chain: not as they are numbered."""
        return (*range(1, self.num_ranks), 0)

    # --- decode ------------------------------------------------------------------------------------------------------

    def start_decode(self) -> None:
        self._decoding = [self._threads.submit(worker.run_decode) for worker in self.workers]

    def admit(
        self,
        conversation: Conversation,
        token_id: int,
        sampling: SamplingParameters,
        num_generated: int = 1,
        history: TokenHistory = NO_HISTORY,
    ) -> AdmitSequence:
        command = AdmitSequence(
            sequence_id=conversation.name,
            token_id=token_id,
            position=sum(conversation.held),
            held=conversation.held,
            blocks=conversation.blocks,
            sampling=sampling,
            history=replace(history, num_generated=num_generated),
            text=np.array([*conversation.tokens, token_id]),
            tail=conversation.shards,
        )
        self.workers[0].submit([command])
        return command

    def compute(
        self,
        conversation: Conversation,
        token_ids: Sequence[int],
        sampling: SamplingParameters,
        history: TokenHistory = NO_HISTORY,
    ) -> None:
        """Submit a prompt to the decode loop, and note its tokens in the conversation."""
        held = conversation.held
        command = ComputePrompt(
            sequence_id=conversation.name,
            token_ids=np.asarray(token_ids, dtype=np.int64),
            held=held,
            blocks=conversation.blocks,
            sampling=sampling,
            history=history,
            tail=conversation.shards,
        )
        layout = balanced_layout(sum(held), len(token_ids), held)
        conversation.shards = conversation.shards.extend(layout.shard_map())
        conversation.tokens += token_ids
        self.workers[0].submit([command])

    def remove(self, name: str) -> None:
        self.workers[0].submit([RemoveSequence(sequence_id=name)])

    def next_events(self) -> tuple[DecodeEvent, ...]:
        """Wait for new events."""
        answer = self.workers[0].poll(self._cursor, WAIT_SECONDS)
        assert answer.events, f"no event in {WAIT_SECONDS} s"
        self._cursor = answer.stop
        return answer.events

    def events_until_finished(self, names: Sequence[str]) -> dict[str, list[DecodeEvent]]:
        """Return all events of these sequences up to their last."""
        events: dict[str, list[DecodeEvent]] = {name: [] for name in names}
        left = set(names)
        while left:
            for event in self.next_events():
                events.setdefault(event.sequence_id, []).append(event)
                if event.finish_reason is not None:
                    left.discard(event.sequence_id)
        return events

    def decode(self, conversation: Conversation, token_id: int, sampling: SamplingParameters) -> list[int]:
        """Decode one conversation to its end -> the tokens after `token_id`; all but the last have KV."""
        self.admit(conversation, token_id, sampling)
        events = self.events_until_finished([conversation.name])[conversation.name]
        tokens = [event.token_id for event in events if event.token_id is not None]
        self.note_decoded(conversation, token_id, events)
        return tokens

    def note_decoded(self, conversation: Conversation, token_id: int, events: Sequence[DecodeEvent]) -> None:
        """Note the KV of decoded tokens in the conversation, by the events of its time in the batch."""
        start, kv_tokens = sum(conversation.held), events[-1].kv_tokens
        tokens = [event.token_id for event in events if event.token_id is not None]
        owners = [event.owner for event in events if event.owner is not None]
        conversation.shards = conversation.shards.extend(appended(start, owners, len(conversation.held)))
        conversation.tokens = [*conversation.tokens, token_id, *tokens][:kv_tokens]
        assert sum(conversation.held) == kv_tokens, "every step tells the owner of the KV that it added"

    def stop_decode(self) -> None:
        """End the loop on every rank, so that prefill steps may run again."""
        self.workers[0].parts.mailbox.close("the test ended the loop")
        assert self.decode_ended() == [None] * len(self.workers)

    def decode_ended(self) -> list[BaseException | None]:
        """Wait for every rank's decode loop -> the error of each, or None."""
        return [future.exception(WAIT_SECONDS) for future in self._decoding]

    def leave(self, rank: int) -> None:
        """Close a rank's end of the ring, as its death does."""
        self.transports[rank].close()


def run_in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a blocking call in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
