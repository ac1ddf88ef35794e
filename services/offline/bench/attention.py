"""`ringserve bench attention`: one layer's causal attention by ring size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

from cp_core.errors import ConfigError
from services.offline.bench.attention_station import (
    PASS_KV,
    PASS_Q,
    RINGS,
    SDPA,
    TORCH_RINGS,
    AttentionShape,
    AttentionStation,
    AttentionTask,
)
from services.offline.bench.figures import GEMM, Target, paired_ratio
from services.offline.bench.flops import attention_flops, gemm_flops
from services.offline.bench.report import Report, Row
from services.offline.bench.ring_processes import RingProcesses
from services.offline.bench.rounds import Contender, Series, alternate

# Targets on 2 cores, fp32, one thread a rank.
FASTER_THAN_TORCH = 1.1
FASTER_THAN_TORCH_TOKENS = 4096

# About a twentieth of a second on one core.
WORTH_TIMING_FLOPS = 2.5e9
# Where messages rule and not arithmetic.
MOST_REPEATS = 50

Measured = Mapping[tuple[str, int], Series]


def num_measurements(ranks: Sequence[int], tokens: Sequence[int], num_rounds: int, cached: int) -> int:
    return len(tokens) * (num_rounds + 1) * sum(len(_names(size, cached)) + (not cached) for size in ranks)


def num_repeats(flops: float, ranks: int) -> int:
    """How often to repeat something so short that a clock, or a waking thread, would weigh in it."""
    return min(MOST_REPEATS, max(1, round(WORTH_TIMING_FLOPS * ranks / flops)))


def measure_attention(
    shape: AttentionShape,
    ranks: Sequence[int],
    tokens: Sequence[int],
    num_rounds: int,
    cached: int = 0,
    transport: str = "auto",
    tell: Callable[[str], None] = lambda name: None,
) -> Report:
    """All contenders in turn for each number of new tokens, `num_rounds` times after one for practice.

    With `cached` tokens before the new ones there is nobody to compare with. Raises ConfigError for tokens that
    torch's own ring cannot cut, Unavailable if a rank fails.
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
        made = partial(AttentionStation, shape)
        rings = {size: stack.enter_context(RingProcesses(size, made, transport)) for size in ranks}
        alone = None if cached else stack.enter_context(RingProcesses(1, made))
        for count in tokens:
            contenders = _contenders(shape, rings, alone, count, cached)
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
    return Report(bench="attention", settings=settings, rows=tuple(rows), targets=tuple(targets))


def _names(size: int, cached: int) -> list[str]:
    return [GEMM, PASS_KV, PASS_Q, *(TORCH_RINGS if size > 1 and not cached else ())]


def _contenders(
    shape: AttentionShape, rings: Mapping[int, RingProcesses], alone: RingProcesses | None, tokens: int, cached: int
) -> list[Contender]:
    flops = attention_flops(tokens, shape.num_heads, shape.head_dim, cached)
    contenders = []
    for size, ring in rings.items():
        repeats = num_repeats(flops, size)
        for name in _names(size, cached):
            task = AttentionTask(name, tokens, cached, repeats)
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
        name=name,
        ranks=ranks,
        tokens=tokens,
        seconds=series.figures,
        cpu_seconds=median(series.cpu_seconds),
        # torch's own ring waits where nobody counts.
        wait_seconds=max(series.wait_seconds) if name in RINGS else None,
        speedup=None if compared is None else paired_ratio(compared.seconds, series.seconds),
        cpu_speedup=None if compared is None else paired_ratio(compared.cpu_seconds, series.cpu_seconds),
        share_of_gemm_rate=share,
    )


def _targets(ranks: Sequence[int], tokens: int, measured: Measured) -> list[Target]:
    """Against whichever way of torch's own ring is the faster here."""
    targets = []
    for size in ranks:
        if size == 1:
            continue
        own = measured[PASS_KV, size].seconds
        theirs = min((measured[name, size] for name in TORCH_RINGS), key=lambda series: series.figures.median).seconds
        limit = FASTER_THAN_TORCH if tokens == FASTER_THAN_TORCH_TOKENS else 1.0
        text = f"speed of pass-KV over torch's own ring, {size} ranks, {tokens} tokens"
        targets.append(Target(text, paired_ratio(theirs, own), limit, is_at_least=True))
    return targets
