"""Ranks that compute nothing and answer as a test says, behind the control plane's ports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.views import RingRates
from ringserve.workers.protocol.ranks import ModelInfo, RankEndpoints, RankInfo, RankSpec, RankStatus, RingSpec
from ringserve.workers.protocol.steps import (
    AdmitSequence,
    DecodeCommand,
    DecodeEvent,
    DecodeEvents,
    PrefillOutput,
    PrefillStep,
)
from ringserve.workers.protocol.transfers import BlockPair, KvExpect, KvSend, TransferKey, TransferReport

MODEL = ModelInfo(
    name="fake",
    model_type="llama",
    dtype="float32",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_positions=4096,
    num_parameters=1000,
    element_bytes=4,
    kv_dtype="float32",
    kv_element_bytes=4,
    eos_token_ids=(2,),
)
RATES = RingRates(gemm_flops=1.0, attention_flops=2.0, link_bytes_per_second=3.0, link_latency_seconds=4.0)
REPORT = TransferReport(payload_bytes=0, seconds=0.0)


class FakeRank:
    """Fake of `RankPort`.

    `fail` makes every later call raise; `gate` holds `submit` and `drop_kv` back until it is set.
    """

    def __init__(self, number: int, start_error: Exception | None = None) -> None:
        self.number = number
        self.specs: list[RankSpec] = []
        self.rendezvous: RingSpec | None = None
        self.is_killed = False
        self.renews = False
        self.is_helix = False
        self.note: object = None
        self.num_probes = 0
        self.seconds_since_step = 0.0
        self.running = 0
        self.decode_variant = ""
        self.submitted: list[DecodeCommand] = []
        self.polled: list[int] = []
        self.copied: list[BlockPair] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._start_error = start_error
        self._error: RingserveError | None = None
        self._failed = asyncio.Event()
        self._events: asyncio.Queue[list[DecodeEvent]] = asyncio.Queue()

    def fail(self, error: RingserveError) -> None:
        self._error = error
        self._failed.set()

    def post(self, *events: DecodeEvent) -> None:
        """Answer the next poll with these."""
        self._events.put_nowait(list(events))

    @property
    def admitted(self) -> list[str]:
        return [command.sequence_id for command in self.submitted if isinstance(command, AdmitSequence)]

    @property
    def removed(self) -> list[str]:
        return [command.sequence_id for command in self.submitted if not isinstance(command, AdmitSequence)]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def start(self, spec: RankSpec, timeout: float) -> RankInfo:
        self.specs.append(spec)
        if self._start_error is not None:
            raise self._start_error
        return RankInfo(
            rank=spec.rank,
            kv_endpoint=f"kv:{self.number}",
            attention_backend="fake",
            ring_transport="fake",
            pid=self.number,
            model=MODEL,
            num_blocks=spec.settings.num_blocks + spec.rank,  # the smallest decides
            is_helix=self.is_helix,
        )

    async def renew(self, spec: RankSpec, timeout: float) -> RankInfo:
        self._check()
        if not self.renews:
            raise Unavailable(f"rank {self.number} does not answer")
        return await self.start(spec, timeout)

    async def open_endpoints(self, timeout: float) -> RankEndpoints:
        return RankEndpoints(tokens=f"tokens:{self.number}")

    async def join(self, ring: RingSpec, timeout: float) -> None:
        self.rendezvous = ring

    async def probe(self, timeout: float) -> RingRates:
        self.num_probes += 1
        return RATES

    async def probe_between_steps(self, timeout: float) -> RingRates:
        self._check()
        return RATES

    async def prefill(self, step: PrefillStep, timeout: float) -> PrefillOutput:
        self._check()
        return PrefillOutput()

    async def prefill_within(self, step: PrefillStep, timeout: float) -> PrefillOutput | None:
        self._check()
        return None

    async def finish_sends(self, key: TransferKey, timeout: float) -> TransferReport:
        self._check()
        return REPORT

    async def abandon_send(self, key: TransferKey, timeout: float) -> None:
        self._check()

    async def send_kv(self, send: KvSend, timeout: float) -> TransferReport:
        self._check()
        return REPORT

    async def expect_kv(self, expect: KvExpect, timeout: float) -> None:
        self._check()

    async def await_kv(self, key: TransferKey, timeout: float) -> TransferReport:
        self._check()
        return REPORT

    async def drop_kv(self, key: TransferKey, timeout: float) -> None:
        await self.gate.wait()
        self._check()

    async def copy_blocks(self, pairs: Sequence[BlockPair], timeout: float) -> None:
        self._check()
        self.copied += pairs

    async def prepare_grammar(self, grammar: str, timeout: float) -> None:
        self._check()

    async def submit(self, commands: Sequence[DecodeCommand], timeout: float) -> None:
        await self.gate.wait()
        self._check()
        self.submitted += commands

    async def poll(self, after: int, wait_seconds: float, timeout: float) -> DecodeEvents:
        self.polled.append(after)
        events = await self._events.get()
        self._check()
        return DecodeEvents(start=after, stop=after + len(events), events=tuple(events))

    async def status(self, timeout: float) -> RankStatus:
        self._check()
        return RankStatus(
            steps=0,
            seconds_since_step=self.seconds_since_step,
            running=self.running,
            open_transfers=0,
            decode_variant=self.decode_variant,
        )

    async def run_decode(self) -> None:
        await self._failed.wait()
        self._check()

    async def remember(self, note: object, timeout: float) -> None:
        self._check()
        self.note = note

    async def recall(self, timeout: float) -> object:
        self._check()
        return self.note

    async def kill(self) -> None:
        self.is_killed = True


class FakeRanks:
    """Fake of `RankFactory`. `errors` hit the next rings, one an attempt: in `create` or in the first rank's start."""

    def __init__(self) -> None:
        self.rings: list[list[FakeRank]] = []
        self.num_open = 0
        self.create_errors: list[Exception] = []
        self.start_errors: list[Exception] = []
        self.on_create: Callable[[], None] = lambda: None

    @property
    def latest(self) -> list[FakeRank]:
        return self.rings[-1]

    async def create(self, num_ranks: int, timeout: float) -> Sequence[FakeRank]:
        assert self.num_open == 0, "two rings at once"
        self.on_create()
        if self.create_errors:
            raise self.create_errors.pop(0)
        error = self.start_errors.pop(0) if self.start_errors else None
        first = 100 * len(self.rings)
        self.rings.append([FakeRank(first + rank, None if rank else error) for rank in range(num_ranks)])
        self.num_open = num_ranks
        return self.latest

    async def adopt(self, num_ranks: int) -> Sequence[FakeRank]:
        return self.latest if self.num_open == num_ranks else []

    async def replace(self, lost: Sequence[int], timeout: float) -> Sequence[FakeRank]:
        ranks = list(self.latest)
        for number in lost:
            await ranks[number].kill()
            ranks[number] = FakeRank(100 * len(self.rings) + number)
        self.rings.append(ranks)
        return ranks

    async def close(self) -> None:
        self.num_open = 0
