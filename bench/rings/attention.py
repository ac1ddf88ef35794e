"""`python -m bench attention`: one layer's causal attention by ring size, beside torch's own ring and one plain call.

The parent process runs `measure_attention`; every rank process holds an `AttentionRank`.
Shapes: T tokens of a rank, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor.experimental import _attention as torch_attention

from bench.report import GEMM, Report, Row, Target
from bench.rings.operations import attention_flops, gemm_flops
from bench.rings.ring_processes import RING_TIMEOUT_SECONDS, RankPlace, RingProcesses
from bench.rings.rounds import Contender, Sample, Series, alternate, timed, timed_gemm
from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.shards import balanced_layout, spread
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, SequencePlan
from ringserve.cp_core.ring.prefill import ring_prefill
from ringserve.cp_core.transport.connect import find_store
from ringserve.services.offline.reports import paired_ratio

PASS_KV = "pass-KV"
PASS_Q = "pass-Q"
TORCH_GATHER = "torch all-gather"
TORCH_SHIFT = "torch all-to-all"
SDPA = "SDPA"
RINGS = {PASS_KV: "pass_kv", PASS_Q: "pass_q"}
WINDOWED_RINGS = {"pass-KV, window": "pass_kv", "pass-Q, window": "pass_q"}
TORCH_RINGS = {TORCH_GATHER: "allgather", TORCH_SHIFT: "alltoall"}

# Largest allowed difference between two outputs: float32 on the same inputs, summed in another order.
MAX_DIFFERENCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """Attention by the contender `name` over `tokens` new tokens of the ring after `cached` ones, `repeats` times.

    Only ringserve's rings take cached tokens, and the windowed ones a `window`; `threads` matter only to SDPA.
    """

    name: str
    tokens: int
    cached: int = 0
    repeats: int = 1
    threads: int = 1
    window: int = 0


class AttentionRank:
    """Rank of the attention bench, with its own inputs. All contenders of one window must give the same output."""

    def __init__(self, shape: AttentionShape, place: RankPlace) -> None:
        self._shape = shape
        self._place = place
        self._backend = select_backend("auto", "cpu", torch.float32)
        self._prepared: tuple[int, int] | None = None
        self._plan: PrefillPlan
        self._q: Tensor
        self._k: Tensor
        self._v: Tensor
        self._cached: list[KvRun]
        self._expected: dict[int, Tensor] = {}
        if place.num_ranks > 1:
            store = PrefixStore("torch", find_store(place.host, place.port, RING_TIMEOUT_SECONDS))
            distributed.init_process_group("gloo", store=store, rank=place.rank, world_size=place.num_ranks)

    def measure(self, task: AttentionTask) -> Sample:
        if task.name == GEMM:
            return timed_gemm(self._place.transport)
        self._prepare(task.tokens, task.cached)
        outs: list[Tensor] = []

        def attend() -> None:
            outs[:] = [self._attend(task.name, task.window)]

        torch.set_num_threads(task.threads)
        sample = timed(self._place.transport, attend, task.repeats)
        torch.set_num_threads(1)
        self._check(task.name, task.window, outs[0])
        return sample

    def close(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _prepare(self, tokens: int, cached: int) -> None:
        """Draw q[T,H,D], k and v[T,K,D] of this rank and its cached KV, the same for all contenders of a size."""
        if self._prepared == (tokens, cached):
            return
        size, rank, shape = self._place.num_ranks, self._place.rank, self._shape
        before = spread(0, cached, (0,) * size)
        held = before.held
        layout = balanced_layout(cached, tokens, held)
        self._plan = PrefillPlan((SequencePlan(layout, held, tail=before),))
        generator = torch.Generator().manual_seed(rank)

        def draw(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, shape.head_dim, generator=generator)

        num_new = layout.tokens_on(rank)
        self._q = draw(num_new, shape.num_heads)
        self._k, self._v = (draw(num_new, shape.num_kv_heads) for _ in range(2))
        self._cached = [KvRun(*(draw(held[rank], shape.num_kv_heads) for _ in range(2)))]
        self._prepared, self._expected = (tokens, cached), {}

    def _attend(self, name: str, window: int) -> Tensor:
        """Return the attention output [T,H,D] of one contender."""
        own = RINGS | WINDOWED_RINGS
        if name in own:
            return ring_prefill(
                self._q,
                self._k,
                self._v,
                [self._cached],
                self._plan,
                self._place.transport,
                self._backend,
                self._shape.head_dim**-0.5,
                own[name],
                window,
            )
        # torch's layout is [1, heads, tokens, D].
        q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (self._q, self._k, self._v))
        if name == SDPA:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self._torch_ring(TORCH_RINGS[name], q, k, v)
        return out.squeeze(0).transpose(0, 1)

    def _torch_ring(self, rotation: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Call the private function behind torch's `context_parallel`, without its dispatcher."""
        private: Any = torch_attention
        private.set_rotate_method(rotation)
        out: Tensor = private._templated_ring_attention(
            distributed.group.WORLD, 2, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, True
        )[0]
        return out

    def _check(self, name: str, window: int, out: Tensor) -> None:
        difference = float((out - self._expected.setdefault(window, out)).abs().max())
        assert difference <= MAX_DIFFERENCE, f"{name} differs from the others by {difference:g}"


# Targets on 2 cores, fp32, one thread a rank.
FASTER_THAN_TORCH = 1.1
FASTER_THAN_TORCH_TOKENS = 4096

# Operations of each rank in one measurement: about a twentieth of a second on one core.
WORTH_TIMING_FLOPS = 2.5e9
# Limit on repeats for small tasks, whose messages take longer than their arithmetic.
MAX_REPEATS = 50

Measured = Mapping[tuple[str, int], Series]


def num_measurements(ranks: Sequence[int], tokens: Sequence[int], num_rounds: int, cached: int, window: int = 0) -> int:
    each = sum(len(_names(size, cached, window)) + (not cached) for size in ranks)
    return len(tokens) * (num_rounds + 1) * each


def num_repeats(flops: float, ranks: int) -> int:
    """Return how often a measurement repeats its task, so that clock and thread wakeups do not weigh in it."""
    return min(MAX_REPEATS, max(1, round(WORTH_TIMING_FLOPS * ranks / flops)))


def measure_attention(
    shape: AttentionShape,
    ranks: Sequence[int],
    tokens: Sequence[int],
    num_rounds: int,
    cached: int = 0,
    transport: str = "auto",
    tell: Callable[[str], None] = lambda name: None,
    window: int = 0,
) -> Report:
    """Measure all contenders in alternation for each number of new tokens, in `num_rounds` rounds after a warm-up.

    With `cached` tokens only ringserve's rings are measured. With a `window` they are measured with and without. Raises
    ConfigError for tokens that torch's ring cannot cut, Unavailable if a rank fails.
    """
    for count in tokens if not cached else ():
        for size in ranks:
            if count % (2 * size):
                raise ConfigError(
                    f"--tokens: {count} is no multiple of {2 * size}, as torch's own ring of {size} needs it to be"
                )
    rows: list[Row] = []
    targets: list[Target] = []
    with ExitStack() as stack:
        made = partial(AttentionRank, shape)
        rings = {size: stack.enter_context(RingProcesses(size, made, transport)) for size in ranks}
        alone = None if cached else stack.enter_context(RingProcesses(1, made))
        for count in tokens:
            contenders = _contenders(shape, rings, alone, count, cached, window)
            alternate(contenders, 1, tell)
            measured = alternate(contenders, num_rounds, tell)
            rows += [
                _row(attention_flops(count, shape.num_heads, shape.head_dim, cached), count, series, measured)
                for series in measured.values()
            ]
            targets += _targets(ranks, count, measured) if not cached else []
    settings = (
        f"H{shape.num_heads}/K{shape.num_kv_heads}/D{shape.head_dim}, float32, one thread a rank, transport {transport}"
    )
    settings += f", {cached} cached tokens" if cached else ""
    settings += f", window of {window}" if window else ""
    return Report(bench="attention", settings=settings, rows=tuple(rows), targets=tuple(targets))


def _names(size: int, cached: int, window: int) -> list[str]:
    torch_rings = TORCH_RINGS if size > 1 and not cached else ()
    return [GEMM, PASS_KV, PASS_Q, *(WINDOWED_RINGS if window else ()), *torch_rings]


def _contenders(
    shape: AttentionShape,
    rings: Mapping[int, RingProcesses],
    alone: RingProcesses | None,
    tokens: int,
    cached: int,
    window: int,
) -> list[Contender]:
    flops = attention_flops(tokens, shape.num_heads, shape.head_dim, cached)
    contenders = []
    for size, ring in rings.items():
        repeats = num_repeats(flops, size)
        for name in _names(size, cached, window):
            task = AttentionTask(name, tokens, cached, repeats, window=window if name in WINDOWED_RINGS else 0)
            contenders.append(Contender(name, size, partial(ring.measure, task)))
        if alone is not None:
            task = AttentionTask(SDPA, tokens, repeats=repeats, threads=size)
            contenders.append(Contender(SDPA, size, partial(alone.measure, task)))
    return contenders


def _row(flops: float, tokens: int, series: Series, measured: Measured) -> Row:
    name, ranks = series.contender.name, series.contender.ranks
    is_ring = name in RINGS or name in TORCH_RINGS
    share = None
    if is_ring:
        share = flops / ranks / gemm_flops() * paired_ratio(measured[GEMM, ranks].seconds, series.seconds)
    one = measured.get((name, 1))
    compared = one if one is not None and ranks > 1 and name in RINGS else None
    return Row(
        keys={"tokens": tokens, "what": name, "ranks": ranks},
        figures={
            "seconds": series.figures,
            "cpu_seconds": median(series.cpu_seconds),
            # The waits of torch's ring are not counted.
            "wait_seconds": max(series.wait_seconds) if name in RINGS else None,
            "speedup": None if compared is None else paired_ratio(compared.seconds, series.seconds),
            "cpu_speedup": None if compared is None else paired_ratio(compared.cpu_seconds, series.cpu_seconds),
            "share_of_gemm_rate": share,
        },
    )


def _targets(ranks: Sequence[int], tokens: int, measured: Measured) -> list[Target]:
    """Compare pass-KV with the faster variant of torch's own ring."""
    targets = []
    for size in ranks:
        if size == 1:
            continue
        own = measured[PASS_KV, size].seconds
        theirs = min((measured[name, size] for name in TORCH_RINGS), key=lambda series: series.figures.p50).seconds
        limit = FASTER_THAN_TORCH if tokens == FASTER_THAN_TORCH_TOKENS else 1.0
        text = f"speed of pass-KV over torch's own ring, {size} ranks, {tokens} tokens"
        targets.append(Target(text, paired_ratio(theirs, own), limit, is_at_least=True))
    return targets
