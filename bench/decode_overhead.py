"""Where the time of a decode step goes, on the first rank of a ring that runs its real loop.

    python bench/decode_overhead.py --ranks 1,2 --batch 1,8,16 --context 1024

One process a rank, one thread a process, fp32, random KV; rank 0 takes its commands and posts its events as in service.
Prints one JSON object for each case: medians, with the 10th and 90th percentile, in ms of a step and its parts:

    model        layers and head, without what they wait for or do in the hook
    attention    the kernel over this rank's shards
    collectives  the messages of the layers
    merge        storing the new KV, views of the shards, packing and merging partials
    sampling     from logits to tokens, with what brings them to rank 0
    control      header, batch bookkeeping, preparing the step, events: what is left

`beside_model` is sampling and control together: the target is at most 10% of the step or 0.5 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_core.attention.backends import select_backend
from cp_core.attention.interface import AttentionBackend
from cp_core.attention.partial import Partial
from cp_core.cost.model import RingRates
from cp_core.layout.shards import level_counts
from cp_core.layout.step_plans import KvRun
from cp_core.transport.interface import RingTransport, TransportStats, Work
from services.offline.bench.model_rank import BLOCK_TOKENS
from services.offline.bench.ring_processes import RingProcesses, Seat
from workers.decode.batch import BatchState
from workers.decode.loop import FollowingLoop, LeadingLoop, LoopWork
from workers.decode.mailbox import DecodeMailbox
from workers.decode.messages import Header, HeaderChannel
from workers.decode.step import DecodePass, DecodePrompts
from workers.kv.cache import KvCache
from workers.model.builtin import resolve_model_path
from workers.model.loading import LoadedModel, load_model
from workers.progress import Progress
from workers.protocol.decode_commands import AdmitSequence
from workers.sampling.parameters import Sampled, SamplingParameters

WARM_UP_STEPS = 3
LIMIT_SHARE, LIMIT_MILLISECONDS = 0.10, 0.5


@dataclass(slots=True)
class Clock:
    """Seconds by part of the step under way, and those of all steps before."""

    now: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[dict[str, float]] = field(default_factory=list)
    began: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.now[name] += time.perf_counter() - start

    def step(self) -> None:
        """A step border: what came since the last one was one step."""
        now = time.perf_counter()
        if self.now:
            self.now["step"] = now - self.began
            self.steps.append(dict(self.now))
        self.now.clear()
        self.began = now


@dataclass(frozen=True, slots=True)
class TimedWork:
    work: Work
    clock: Clock

    def wait(self, timeout_seconds: float | None = None) -> None:
        with self.clock.part("collectives"):
            self.work.wait(timeout_seconds)


class TimedRing:
    """A transport whose every operation is on the clock."""

    def __init__(self, ring: RingTransport, clock: Clock) -> None:
        self._ring = ring
        self._clock = clock

    @property
    def rank(self) -> int:
        return self._ring.rank

    @property
    def size(self) -> int:
        return self._ring.size

    @property
    def stats(self) -> TransportStats:
        return self._ring.stats

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> Work:
        return self._start(lambda: self._ring.exchange(send, dst, recv, src))

    def all_to_all(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> Work:
        return self._start(lambda: self._ring.all_to_all(send, recv))

    def gather_all(self, send: Tensor, recv: Sequence[Tensor]) -> Work:
        return self._start(lambda: self._ring.gather_all(send, recv))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start(lambda: self._ring.broadcast(tensor, source))

    def close(self) -> None:
        self._ring.close()

    def _start(self, begin: Callable[[], Work]) -> Work:
        with self._clock.part("collectives"):
            return TimedWork(begin(), self._clock)


class TimedBackend:
    """The backend of a rank on the clock; what it can beside the protocol stays within reach."""

    name = "timed"

    def __init__(self, backend: AttentionBackend, clock: Clock) -> None:
        self._backend: Any = backend
        self._clock = clock

    def partial_attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Partial:
        with self._clock.part("attention"):
            answer: Partial = self._backend.partial_attention(q, k, v, causal=causal, scale=scale)
            return answer

    def attend_rows(self, q: Tensor, runs: Sequence[KvRun], *, scale: float) -> Partial:
        with self._clock.part("attention"):
            answer: Partial = self._backend.attend_rows(q, runs, scale=scale)
            return answer


class TimedPass(DecodePass):
    """A decode pass whose layers, hook and sampling are on the clock."""

    def __init__(self, *parts: Any, clock: Clock) -> None:
        super().__init__(*parts)
        self._parts = clock

    def run(self, variant: str) -> list[Sampled]:
        sampled = super().run(variant)
        self._parts.now["sampling"] = time.perf_counter() - self._parts.now["computed at"]
        return sampled

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with self._parts.part("hook"):
            return super().attend(layer, q, k, v, scale)


class TimedModel:
    """A loaded model on the clock. What a pass does after the last of it is sampling."""

    def __init__(self, model: LoadedModel, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self.tensor = model.tensor

    def hidden_states(self, *inputs: Any) -> Tensor:
        with self._clock.part("layers"):
            states = self._model.hidden_states(*inputs)
        return self._computed(states)

    def attend_without_tokens(self, step: Any) -> Tensor:
        with self._clock.part("layers"):
            states = self._model.attend_without_tokens(step)
        return self._computed(states)

    def logits(self, states: Tensor) -> Tensor:
        with self._clock.part("head"):
            logits = self._model.logits(states)
        return self._computed(logits)

    def _computed(self, result: Tensor) -> Tensor:
        self._clock.now["computed at"] = time.perf_counter()
        self._clock.now["collectives of layers"] = self._clock.now["collectives"]
        return result


class TimedChannel(HeaderChannel):
    """Headers begin steps."""

    def __init__(self, *parts: Any, clock: Clock) -> None:
        super().__init__(*parts)
        self._clock = clock

    def send(self, header: Header) -> None:
        self._clock.step()
        with self._clock.part("header"):
            super().send(header)


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured once."""

    batch: int
    context: int
    steps: int
    variant: str


class OverheadStation:
    """One rank: the case's loop from its first header to its last."""

    def __init__(self, model: str, cases: tuple[Case, ...], seat: Seat) -> None:
        self._seat = seat
        self._model = load_model(resolve_model_path(model), "float32", "cpu")
        info = self._model.info
        self._backend = select_backend("auto", "cpu", torch.float32)
        self._cache = KvCache(
            num_layers=info.num_layers,
            num_blocks=max(case.batch * self._blocks_each(case) for case in cases),
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
        )
        self._cache.fill_random(seat.rank)

    def _blocks_each(self, case: Case) -> int:
        return (case.context // self._seat.num_ranks + case.steps) // BLOCK_TOKENS + 2

    def measure(self, case: Case) -> Any:
        """By rank 0 the parts of each step, by the others nothing."""
        clock, seat = Clock(), self._seat
        ring = TimedRing(seat.transport, clock)
        batch = BatchState(seat.rank, seat.num_ranks, BLOCK_TOKENS)
        parts = (TimedModel(self._model, clock), ring, self._cache, TimedBackend(self._backend, clock), batch)
        step = TimedPass(*parts, clock=clock)
        prompts = DecodePrompts(self._model, ring, self._cache, self._backend)
        work = LoopWork(batch, step, prompts, _nobody_asks)
        device = torch.device("cpu")
        with torch.inference_mode():
            if seat.rank:
                channel = HeaderChannel((seat.transport,), case.batch, device)
                FollowingLoop(channel, work, Progress()).run()
                return None
            mailbox = DecodeMailbox(case.batch)
            mailbox.submit([self._admission(case, row) for row in range(case.batch)])
            timed = TimedChannel((seat.transport,), case.batch, device, clock=clock)
            leader = LeadingLoop(timed, work, Progress(), lambda *_: case.variant, mailbox)
            end_after(mailbox, case.batch * case.steps)
            leader.run()
        return [milliseconds(parts) for parts in clock.steps[WARM_UP_STEPS : case.steps]]

    def _admission(self, case: Case, row: int) -> AdmitSequence:
        ranks, each = self._seat.num_ranks, self._blocks_each(case)
        return AdmitSequence(
            sequence_id=f"bench-{row}",
            token_id=row,
            position=case.context + row % ranks,
            held=level_counts((0,) * ranks, case.context + row % ranks),
            blocks=(tuple(range(row * each, (row + 1) * each)),) * ranks,
            sampling=SamplingParameters(max_tokens=case.steps + 1),
        )

    def close(self) -> None:
        """Nothing runs between two measurements."""


def _nobody_asks() -> RingRates:
    raise AssertionError("no bench measures rates here")


def end_after(mailbox: DecodeMailbox, num_tokens: int) -> None:
    """Close the mailbox behind its last event, so that the loop ends by itself."""
    post, seen = mailbox.post, 0

    def counted(events: Any) -> None:
        nonlocal seen
        post(events)
        seen += len(events)
        if seen >= num_tokens:
            mailbox.close("all is measured")

    mailbox.post = counted  # type: ignore[method-assign]


def milliseconds(parts: dict[str, float]) -> dict[str, float]:
    """The parts that are told, from those on the clock."""
    step, hook = parts["step"], parts.get("hook", 0.0)
    attention, collectives = (
        parts.get("attention", 0.0),
        parts["collectives of layers"],
    )
    compute = parts["layers"] + parts.get("head", 0.0)
    sampling = parts.get("sampling", 0.0)
    told = {
        "step": step,
        "model": compute - hook,
        "attention": attention,
        "collectives": collectives,
        "merge": hook - attention - collectives,
        "sampling": sampling,
        "control": step - compute - sampling,
        "beside_model": step - compute,
        "header": parts.get("header", 0.0),
    }
    return {name: value * 1e3 for name, value in told.items()}


def record(case: Case, ranks: int, steps: list[dict[str, float]]) -> dict[str, object]:
    def figures(name: str) -> list[float]:
        values = sorted(step[name] for step in steps)
        tenth = len(values) // 10
        return [round(value, 3) for value in (statistics.median(values), values[tenth], values[-1 - tenth])]

    told = {name: figures(name) for name in steps[0]}
    beside, step = told["beside_model"][0], told["step"][0]
    return {
        "ranks": ranks,
        "batch": case.batch,
        "context": case.context,
        "variant": case.variant,
        "steps": len(steps),
        "milliseconds": told,
        "tokens_per_second": round(case.batch / step * 1e3, 1),
        "beside_model_share": round(beside / step, 3),
        "is_met": beside <= max(LIMIT_SHARE * step, LIMIT_MILLISECONDS),
    }


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Every case on every ring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=[1, 2])
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--batch", type=_numbers, default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--variant", default="gather", choices=["gather", "pass_q"])
    given = parser.parse_args()
    steps = given.steps + WARM_UP_STEPS
    cases = tuple(Case(batch, given.context, steps, given.variant) for batch in given.batch)
    for ranks in given.ranks:
        with RingProcesses(ranks, partial(OverheadStation, given.model, cases)) as ring:
            for case in cases:
                answers: list[Any] = ring.measure(case)
                print(json.dumps(record(case, ranks, answers[0])), flush=True)


if __name__ == "__main__":
    main()
