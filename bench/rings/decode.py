"""`python -m bench decode`: TTIT by context, ring size and batch, over KV of random numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

import psutil

from bench.report import Report, Row, Target
from bench.rings.model_rank import BLOCK_TOKENS, blocks_for, start_worker, with_layers
from bench.rings.ring_processes import RankPlace, RingProcesses
from bench.rings.rounds import Contender, Sample, Series, alternate, peak_memory_bytes
from ringserve.cp_core.cost.decode import GATHER, HELIX, STEP_VARIANTS
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.shards import level_counts
from ringserve.services.offline.reports import paired_ratio
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import AdmitSequence
from ringserve.workers.sampling.parameters import SamplingParameters

EVENT_SECONDS = 120.0
LOOP_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Case of `batch` sequences of `context` tokens each, decoded for `steps` steps.

    If `short` is not 0, all sequences but the first have `short` tokens.
    """

    context: int
    batch: int
    steps: int
    short: int = 0

    def tables(self, num_ranks: int, *, is_whole: bool = False) -> list[list[range]]:
        """Return the blocks of each sequence on every rank, with room for the decoded tokens.

        With `is_whole` each short sequence lies whole on one rank, the ranks taking turns, and the other ranks have no
        block of it.
        """
        ends, tables = [0] * num_ranks, []
        for row in range(self.batch):
            tokens, on = self.tokens_of(row), self._rank_of(row, num_ranks) if is_whole else None
            each = blocks_for((tokens if on is not None else tokens // num_ranks + 1) + self.steps + 1)
            counts = [each if on in (None, rank) else 0 for rank in range(num_ranks)]
            tables.append([range(end, end + count) for end, count in zip(ends, counts, strict=True)])
            ends = [end + count for end, count in zip(ends, counts, strict=True)]
        return tables

    def held(self, row: int, num_ranks: int, *, is_whole: bool = False) -> tuple[int, ...]:
        """Return the tokens of a sequence on every rank."""
        on = self._rank_of(row, num_ranks) if is_whole else None
        if on is None:
            return tuple(level_counts((0,) * num_ranks, self.tokens_of(row)))
        return tuple(self.tokens_of(row) if rank == on else 0 for rank in range(num_ranks))

    def tokens_of(self, row: int) -> int:
        """Return the tokens of a sequence."""
        return self.short if self.short and row else self.context

    def _rank_of(self, row: int, num_ranks: int) -> int | None:
        return row % num_ranks if self.short and row else None

    def num_blocks(self, num_ranks: int) -> int:
        """Return the blocks of a rank for all its tables."""
        layouts = [self.tables(num_ranks, is_whole=is_whole) for is_whole in (False, bool(self.short))]
        return max(table.stop for tables in layouts for row in tables for table in row)

    def kv_tokens(self) -> int:
        """Return the KV slots of the whole ring, in tokens."""
        return BLOCK_TOKENS * self.num_blocks(1)


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Case decoded by one policy: a variant, or the variant that the ring's rule chooses for a step (`auto`).

    `is_whole` puts each short sequence whole on one rank.
    """

    case: DecodeCase
    policy: str
    is_whole: bool = False


class DecodeRank:
    """Rank of the decode bench: a worker with a running decode loop.

    The first rank submits the batch, and counts a step as ended when the step's tokens arrive.
    """

    def __init__(self, model: str, cases: tuple[DecodeCase, ...], variant: str, place: RankPlace) -> None:
        self._place = place
        num_blocks = max(case.num_blocks(place.num_ranks) for case in cases)
        self._worker = start_worker(place, "decode", model, num_blocks, max(case.batch for case in cases), variant)
        self._worker.fill_kv(place.rank)
        self._cursor = 0
        self._burst = 0
        self._loop = threading.Thread(target=self._worker.run_decode, name="decode", daemon=True)
        self._loop.start()

    def measure(self, task: DecodeTask) -> Sample:
        """Measure TTIT as the mean over the case's steps, in seconds; other ranks than the first answer 0."""
        if self._place.rank:
            return Sample(seconds=0.0, peak_memory_bytes=peak_memory_bytes())
        case = task.case
        self._burst += 1
        self._worker.follow_decode_variant(task.policy)
        self._worker.submit(self._admissions(task))
        times: list[float] = []
        cpu_seconds: list[float] = []
        first_steps = 0
        num_running = case.batch
        while num_running:
            events = self._worker.poll(self._cursor, EVENT_SECONDS)
            assert events.events, f"no token in {EVENT_SECONDS:g} s"
            times.append(time.perf_counter())
            cpu_seconds.append(time.process_time())
            self._cursor = events.stop
            num_running -= sum(event.finish_reason is not None for event in events.events)
            if len(times) == 1:
                first_steps = len(events.events) // case.batch
        assert first_steps < case.steps, f"all {case.steps} tokens came at once"
        num_steps = case.steps - first_steps
        return Sample(
            seconds=(times[-1] - times[0]) / num_steps,
            cpu_seconds=(cpu_seconds[-1] - cpu_seconds[0]) / num_steps,
            peak_memory_bytes=peak_memory_bytes(),
        )

    def close(self) -> None:
        self._worker.stop()
        self._loop.join(LOOP_END_SECONDS)

    def _admissions(self, task: DecodeTask) -> list[AdmitSequence]:
        """Return the admission of every sequence; its blocks are contiguous."""
        case, ranks = task.case, self._place.num_ranks
        return [
            AdmitSequence(
                sequence_id=f"bench-{self._burst}-{row}",
                token_id=row,
                position=case.tokens_of(row),
                held=case.held(row, ranks, is_whole=task.is_whole),
                blocks=tuple(map(tuple, tables)),
                sampling=SamplingParameters(max_tokens=case.steps + 1),
            )
            for row, tables in enumerate(case.tables(ranks, is_whole=task.is_whole))
        ]


# The KV of all rings is in memory at once, and swapping would measure the disk.
SHARE_OF_MEMORY = 0.8

# Targets on 2 cores, fp32, one thread a rank, one sequence.
LONG_CONTEXT = 65536
LONG_OVER_ONE = 0.65
SHORT_CONTEXT = 2048
SHORT_OVER_ONE = 1.2
SHORT_LAYERS = 16
AUTO = "auto"
# Largest accepted ratio of the time with `auto` to that with the better variant.
AUTO_OVER_BEST = 1.05

WHOLE = ", whole"
"""End of the name of a contender whose short sequences lie whole on one rank each."""
WHOLE_OVER_SPREAD = 0.95

Measured = Mapping[tuple[str, int], Series]


def num_measurements(ranks: Sequence[int], cases: Sequence[DecodeCase], num_rounds: int) -> int:
    return (num_rounds + 1) * sum(len(_ways(case, size)) for case in cases for size in ranks)


def _ways(case: DecodeCase, num_ranks: int) -> Sequence[tuple[str, bool]]:
    """Return the policies of a case; if it has short sequences, each with these spread and with these whole."""
    if not case.short:
        return [(policy, False) for policy in _policies(num_ranks)]
    policies = [policy for policy in _policies(num_ranks) if policy != HELIX]  # in helix all ranks attend to all rows
    return [(policy, is_whole) for policy in policies for is_whole in ((False, True) if num_ranks > 1 else (False,))]


def _policies(num_ranks: int) -> Sequence[str]:
    """Return the policies of the rings of one size; one rank has no choice."""
    return (AUTO, *STEP_VARIANTS, HELIX) if num_ranks > 1 else (GATHER,)


def _weights_of(policy: str) -> str:
    """Return the variant with which a ring that follows a policy starts: helix cuts the weights at the start."""
    return HELIX if policy == HELIX else GATHER


def measure_decode(
    model: str,
    num_layers: int | None,
    ranks: Sequence[int],
    cases: Sequence[DecodeCase],
    num_rounds: int,
    transport: str = "auto",
    tell: Callable[[str], None] = lambda name: None,
) -> Report:
    """Measure all rings in alternation for each case; the notes name cases whose KV does not fit in memory.

    Raises ModelRefused, Unavailable, ConfigError if no case fits.
    """
    rows: list[Row] = []
    targets: list[Target] = []
    with with_layers(model, num_layers) as path, ExitStack() as stack:
        info = read_model_info(path, "float32", model)
        fitting = fitting_cases(info, ranks, cases, psutil.virtual_memory().available)
        if not fitting:
            raise ConfigError(f"--context: the KV of no case fits in {SHARE_OF_MEMORY:.0%} of the free memory")
        made = partial(DecodeRank, str(path), tuple(fitting))
        started = _rings_of(ranks, fitting)
        rings = {
            (size, weights): stack.enter_context(RingProcesses(size, partial(made, weights), transport))
            for size, weights in started
        }
        for case in fitting:
            contenders = [
                Contender(
                    policy + (WHOLE if is_whole else ""),
                    size,
                    partial(rings[size, _weights_of(policy)].measure, DecodeTask(case, policy, is_whole)),
                )
                for size in ranks
                for policy, is_whole in _ways(case, size)
            ]
            alternate(contenders, 1, tell)
            measured = alternate(contenders, num_rounds, tell)
            rows += [_row(case, series, measured) for series in measured.values()]
            targets += _targets(info, case, measured)
    settings = f"{info.name}, {info.num_layers} layers, H{info.num_heads}/K{info.num_kv_heads}/D{info.head_dim}, "
    settings += f"{info.dtype}, KV of random numbers, one thread a rank, transport {transport}"
    notes = tuple(_exclusion_note(info, ranks, case) for case in cases if case not in fitting)
    return Report(bench="decode", settings=settings, rows=tuple(rows), targets=tuple(targets), notes=notes)


def _rings_of(ranks: Sequence[int], cases: Sequence[DecodeCase]) -> list[tuple[int, str]]:
    """Return the size of every ring and the variant that it starts with."""
    ways = ((size, policy) for case in cases for size in ranks for policy, _ in _ways(case, size))
    return list(dict.fromkeys((size, _weights_of(policy)) for size, policy in ways))


def fitting_cases(
    info: ModelInfo, ranks: Sequence[int], cases: Sequence[DecodeCase], free_bytes: int
) -> list[DecodeCase]:
    return [case for case in cases if _kv_bytes(info, ranks, case) <= SHARE_OF_MEMORY * free_bytes]


def _kv_bytes(info: ModelInfo, ranks: Sequence[int], case: DecodeCase) -> int:
    return len(_rings_of(ranks, [case])) * case.kv_tokens() * info.kv_bytes_per_token


def _exclusion_note(info: ModelInfo, ranks: Sequence[int], case: DecodeCase) -> str:
    size = _kv_bytes(info, ranks, case) / 1e9
    return f"skipped: context {case.context}, batch {case.batch} takes {size:.1f} GB of KV over all rings"


def _row(case: DecodeCase, series: Series, measured: Measured) -> Row:
    ranks = series.contender.ranks
    one = measured.get((GATHER, 1)) if ranks > 1 else None
    return Row(
        keys={"tokens": case.context, "batch": case.batch, "what": series.contender.name, "ranks": ranks},
        figures={
            "seconds": series.figures,
            "cpu_seconds": median(series.cpu_seconds),
            "speedup": None if one is None else paired_ratio(one.seconds, series.seconds),
        },
    )


def _targets(info: ModelInfo, case: DecodeCase, measured: Measured) -> list[Target]:
    return [*_rule_targets(case, measured), *_scaling_targets(info, case, measured), *_whole_targets(case, measured)]


def _whole_targets(case: DecodeCase, measured: Measured) -> list[Target]:
    """Return targets of the time of short sequences that lie whole on one rank each, over that of spread ones."""
    return [
        Target(
            f"{name} over spread, {ranks} ranks, {case.context} tokens and {case.batch - 1} times {case.short}",
            paired_ratio(series.seconds, measured[name.removesuffix(WHOLE), ranks].seconds),
            WHOLE_OVER_SPREAD,
            is_at_least=False,
        )
        for (name, ranks), series in measured.items()
        if name.endswith(WHOLE)
    ]


def _rule_targets(case: DecodeCase, measured: Measured) -> list[Target]:
    """Return targets of the time with `auto` over that of the better variant, for each ring that has a choice."""
    targets = []
    for ranks in (ranks for name, ranks in measured if name == AUTO):
        best = min(
            (series for (name, size), series in measured.items() if size == ranks and name in STEP_VARIANTS),
            key=lambda series: series.figures.p50,
        )
        loss = paired_ratio(measured[AUTO, ranks].seconds, best.seconds)
        text = f"auto over {best.contender.name}, {ranks} ranks, {case.context} tokens, batch {case.batch}"
        targets.append(Target(text, loss, AUTO_OVER_BEST, is_at_least=False))
    return targets


def _scaling_targets(info: ModelInfo, case: DecodeCase, measured: Measured) -> list[Target]:
    if case.batch != 1 or not {(GATHER, 1), (AUTO, 2)} <= measured.keys():
        return []
    over_one = paired_ratio(measured[AUTO, 2].seconds, measured[GATHER, 1].seconds)
    text = f"TTIT of 2 ranks over one, {case.context} tokens"
    if case.context == LONG_CONTEXT:
        return [Target(text, over_one, LONG_OVER_ONE, is_at_least=False)]
    if case.context == SHORT_CONTEXT and info.num_layers == SHORT_LAYERS:
        return [Target(text, over_one, SHORT_OVER_ONE, is_at_least=False)]
    return []
