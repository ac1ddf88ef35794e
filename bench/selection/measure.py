"""`python -m bench selection`: rings on links of several rates, calibrated, then measured by all algorithms.

The measurement runs in a process of its own network namespace, which holds only the rings' bridges. That process is
this module run as a program; it reads pickled settings from standard input and writes pickled messages to standard
output. The selection bench and the systems bench start it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import IO

from bench.namespaces import isolation
from bench.papers.selectors import comparisons, fit_empirical
from bench.rings.model_rank import even_cuts
from bench.rings.ring_processes import RingProcesses
from bench.rings.rounds import Contender, Series, alternate
from bench.selection.links import LinkRate, Links, ShapedLinks
from bench.selection.rank import (
    Compare,
    Difference,
    Prefill,
    Prefilled,
    Probe,
    SelectionRank,
    Shape,
    TensorPrefill,
)
from bench.selection.results import (
    RingResult,
    SelectionReport,
    TensorCell,
    judge,
    noise_loss,
    score_policies,
)
from ringserve.cp_core.cost.chain import Cuts, chain_rates, quick_cuts
from ringserve.cp_core.cost.fit import PrefillSample
from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.services.offline.calibration.fitting import Calibration, calibrate, profile_from_rates
from ringserve.services.offline.calibration.measurement import Cell, Measurement
from ringserve.services.offline.reports import paired_ratio
from ringserve.services.offline.terminal import Tell
from ringserve.views import RingRates
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import CALIBRATED_ALGORITHMS, RING_ALGORITHMS, Algorithm

Show = Callable[[SelectionReport], None]
"""Callback that gets the report of what is measured so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionSettings:
    """Settings. Costs are fitted to `fit_cells` and judged on `cells`; each is measured `rounds` times per algorithm.

    With `has_tensor`, `cells` without cached tokens are also measured with the weights cut over the ranks.
    """

    model: str
    ranks: tuple[int, ...]
    rates: tuple[LinkRate, ...]
    cells: tuple[Cell, ...]
    fit_cells: tuple[Cell, ...]
    rounds: int
    has_tensor: bool = False

    @property
    def first_cells(self) -> tuple[Cell, ...]:
        """Judged cells that are measured with the weights cut over the ranks."""
        return tuple(cell for cell in self.cells if not cell.cached_tokens) if self.has_tensor else ()

    @property
    def num_measurements(self) -> int:
        fitted = len(CALIBRATED_ALGORITHMS) * len(self.fit_cells)
        beside = (1 + len(BESIDE_TENSOR)) * len(self.first_cells)
        prefills = self.rounds * (fitted + len(RING_ALGORITHMS) * len(self.cells) + beside)
        return len(self.ranks) * (len(self.all_cells) + len(self.rates) * prefills)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sequence."""
        return max(cell.cached_tokens + cell.new_tokens for cell in self.all_cells)

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        return self.cells + self.fit_cells


def measure_selection(
    settings: SelectionSettings,
    links_of: Callable[[int], Links],
    tell: Tell = lambda what: None,
    show: Show = lambda report: None,
) -> SelectionReport:
    """Measure the rings one after the other, each at every rate; `links_of(num_ranks)` makes a ring's links.

    `show` gets the report so far after each rate, the last time the whole one. Raises ModelRefused, Unavailable,
    ConfigError for too few cells to fit a profile.
    """
    info = read_model_info(resolve_model_path(settings.model), "float32", settings.model)
    about = f"{info.name}, {info.num_layers} layers, H{info.num_heads}/K{info.num_kv_heads}/D{info.head_dim}, "
    about += f"{info.dtype}, one thread a rank, medians of {settings.rounds} rounds"
    report = SelectionReport(settings=about, rings=(), disagreements=())
    for size in settings.ranks:
        links = links_of(size)
        cached = tuple(sorted({cell.cached_tokens for cell in settings.all_cells}))
        most_new = max(cell.new_tokens for cell in settings.all_cells)
        tensor_tokens = max((cell.new_tokens for cell in settings.first_cells), default=0)
        made = partial(SelectionRank, settings.model, cached, most_new, links, tensor_tokens)
        with RingProcesses(size, made, network=links) as ring:
            # Outputs do not depend on the links, which are not shaped yet. The comparison warms up the ranks too.
            for cell in settings.all_cells:
                cuts = even_cuts(info.shape, size, cell.new_tokens, cell.cached_tokens)
                report = report.and_disagreements(_compare(ring, size, cell, cuts))
                tell(f"{size} ranks: comparing outputs")
            for rate in settings.rates:
                ring.ask(Shape(rate))
                result, wrong = _measure_ring(settings, info, ring, size, rate, tell)
                report = replace(report.and_disagreements(wrong), rings=(*report.rings, result))
                show(report)
    return report


def _compare(ring: RingProcesses, size: int, cell: Cell, cuts: Cuts) -> list[str]:
    answers: list[Difference] = ring.ask(Compare(cell, cuts))
    return [
        f"{_name(size, cell)}: on rank {rank} logits of the algorithms differ by {answer.most:.3g}, "
        f"the largest is {answer.largest:.3g}"
        for rank, answer in enumerate(answers)
        if not answer.is_rounding
    ]


def _measure_ring(
    settings: SelectionSettings, info: ModelInfo, ring: RingProcesses, size: int, rate: LinkRate, tell: Tell
) -> tuple[RingResult, list[str]]:
    """Probe, calibrate and judge one ring; return its result, and lines on cells with different tokens."""
    where = f"{size} ranks, {rate}"
    # The rates of the first rank, as in a ring that serves.
    measured: RingRates = ring.ask(Probe())[0]
    before = profile_from_rates(
        measured, name=where, element_bytes=info.element_bytes, processes_per_host=1, memory_bytes=1.0
    )
    tell_fit, tell_judged = (lambda _, what=what: tell(f"{where}: {what}") for what in ("calibrating", "measuring"))
    # Cells to fit are cut by the probed rates, as in a ring without calibration; judged cells by calibrated rates.
    forms = {cell: _form(info.shape, before, size, cell) for cell in settings.fit_cells}
    fit_series = _alternate(ring, size, settings.fit_cells, CALIBRATED_ALGORITHMS, settings.rounds, tell_fit, forms)
    calibration: Calibration = calibrate(info.shape, before, _measurements(where, size, fit_series), ())
    compared = comparisons([row.measurement.sample for row in calibration.rows])
    fit = fit_empirical(compared) if len(compared) > 1 else None
    forms = {cell: _form(info.shape, calibration.profile, size, cell) for cell in settings.cells}
    series = _alternate(ring, size, settings.cells, RING_ALGORITHMS, settings.rounds, tell_judged, forms)
    cells = tuple(
        judge(
            info.shape,
            before,
            calibration.profile,
            size,
            cell,
            {name.value: series[cell, name].seconds for name in RING_ALGORITHMS},
            fit,
        )
        for cell in settings.cells
    )
    result = RingResult(
        ranks=size,
        rate=rate,
        measured=measured,
        profile=calibration.profile,
        rows=calibration.rows,
        fitted=calibration.fitted,
        held_out=calibration.held_out,
        cells=cells,
        scores=score_policies(cells),
        noise=noise_loss(cells),
        tensor=_beside_tensor(settings, ring, size, forms, tell_judged),
    )
    return result, [text for found in (fit_series, series) for text in _different_tokens(size, found)]


BESIDE_TENSOR = (Algorithm.PASS_KV, Algorithm.SP_NTP)


def _beside_tensor(
    settings: SelectionSettings,
    ring: RingProcesses,
    size: int,
    forms: Mapping[Cell, tuple[Cuts, int]],
    tell: Tell,
) -> tuple[TensorCell, ...]:
    """Measure prefills with a share of the weights on each rank, in alternation with pass-KV and SP-NTP."""
    found = []
    for cell in settings.first_cells:
        tasks: list[object] = [TensorPrefill(cell.new_tokens)]
        tasks += [Prefill(cell, name, *forms[cell]) for name in BESIDE_TENSOR]
        contenders = [Contender(str(place), size, partial(ring.measure, task)) for place, task in enumerate(tasks)]
        tensor, kv, ntp = alternate(contenders, settings.rounds, tell).values()
        found.append(
            TensorCell(
                new_tokens=cell.new_tokens,
                over_pass_kv=paired_ratio(tensor.seconds, kv.seconds),
                waits=paired_ratio(tensor.wait_seconds, tensor.seconds),
                ntp_waits=paired_ratio(ntp.wait_seconds, ntp.seconds),
            )
        )
    return tuple(found)


def _form(shape: ModelShape, profile: HardwareProfile, size: int, cell: Cell) -> tuple[Cuts, int]:
    """Return the cuts of a chain and the segments of SP-NTP by a profile's rates."""
    rates = profile.prefill.rates(size, is_cached=cell.cached_tokens > 0)
    cuts = quick_cuts(cell.new_tokens, cell.cached_tokens, chain_rates(shape, rates, size))
    return cuts, StepPredictor(shape, rates, size).segments(cell.new_tokens, cell.cached_tokens)


MeasuredCells = dict[tuple[Cell, Algorithm], Series]


def _alternate(
    ring: RingProcesses,
    size: int,
    cells: Sequence[Cell],
    algorithms: Sequence[Algorithm],
    num_rounds: int,
    tell: Tell,
    forms: Mapping[Cell, tuple[Cuts, int]],
) -> MeasuredCells:
    """Measure all cells once a round, each by the algorithms in succession."""
    contenders = {
        (cell, name): Contender(
            f"{name} of {_name(size, cell)}",
            size,
            partial(ring.measure, Prefill(cell, name, *forms[cell])),
        )
        for cell, name in product(cells, algorithms)
    }
    found = alternate(list(contenders.values()), num_rounds, tell)
    return {key: found[contender.name, size] for key, contender in contenders.items()}


def _measurements(where: str, size: int, series: MeasuredCells) -> list[Measurement]:
    return [
        Measurement(
            ring=where,
            sample=PrefillSample(
                cp=size,
                tp=1,
                algorithm=name.value,
                new_tokens=cell.new_tokens,
                cached_tokens=cell.cached_tokens,
                seconds=median(found.seconds),
            ),
            seconds=tuple(found.seconds),
        )
        for (cell, name), found in series.items()
    ]


def _different_tokens(size: int, series: MeasuredCells) -> list[str]:
    """Return the cells whose runs sampled different tokens."""
    tokens: dict[Cell, set[int]] = {}
    for (cell, _), found in series.items():
        tokens.setdefault(cell, set()).update(
            sample.token
            for samples in found.rounds
            for sample in samples
            if isinstance(sample, Prefilled) and sample.token is not None
        )
    return [
        f"{_name(size, cell)}: tokens {sorted(sampled)} were sampled after the same prompt"
        for cell, sampled in tokens.items()
        if len(sampled) != 1
    ]


def _name(size: int, cell: Cell) -> str:
    return f"{size} ranks, {cell.new_tokens} after {cell.cached_tokens}"


# Time that the measuring process and its ranks have to end before it is killed.
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Message after each measurement."""

    what: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Message with the error that ended the measurement."""

    why: str


def measured_in_namespaces(
    settings: SelectionSettings, tell: Tell, show: Show = lambda report: None
) -> SelectionReport:
    """Measure in a process with its own network, as `measure_selection`.

    Raises Unavailable if the process ends without a report.
    """
    num_rings = len(settings.ranks) * len(settings.rates)
    command = [*isolation(), sys.executable, "-m", "bench.selection.measure"]
    # In the new network no address has a name, which torch warns of.
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with _ended(started) as hub:
        assert hub.stdin is not None and hub.stdout is not None
        with suppress(BrokenPipeError):  # a process that has ended sends nothing either
            pickle.dump(settings, hub.stdin)
            hub.stdin.close()
        while True:
            match _received(hub.stdout):
                case Progress(what):
                    tell(what)
                case Failed(why):
                    raise Unavailable(why)
                case SelectionReport() as report:
                    show(report)
                    if len(report.rings) == num_rings:
                        return report


def _received(pipe: IO[bytes]) -> object:
    try:
        return pickle.load(pipe)
    except (EOFError, pickle.UnpicklingError) as error:
        raise Unavailable("the measuring process ended unexpectedly") from error


@contextmanager
def _ended(hub: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the measuring process and its ranks with the context; on an error it gets SIGTERM first."""
    try:
        yield hub
    except BaseException:
        hub.terminate()
        raise
    finally:
        try:
            hub.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            hub.kill()
            hub.wait()
        for pipe in (hub.stdin, hub.stdout):
            if pipe is not None:
                pipe.close()


def _shaped(num_ranks: int) -> ShapedLinks:
    links = ShapedLinks(num_ranks)
    links.make_bridge()
    return links


def main() -> int:
    # The parent sends SIGTERM: SIGINT may be ignored here.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Output of libraries must not mix with the messages.
    out: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(news: object) -> None:
        pickle.dump(news, out)
        out.flush()

    try:
        settings = pickle.load(sys.stdin.buffer)
        measure_selection(settings, _shaped, lambda what: send(Progress(what)), send)
    except RingserveError as error:
        send(Failed(str(error)))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        # The parent has interrupted the measurement, or has ended.
        return 1
    return 0


if __name__ == "__main__":
    # Imported by its own name: the parent cannot unpickle classes of `__main__`.
    from bench.selection.measure import main as named_main

    raise SystemExit(named_main())
