"""Calibration of ranks that share cores: four on two, simulated task by task, without the cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from ringserve.cp_core.cost.chain import ChainPredictor, Cuts, chain_rates, quick_cuts
from ringserve.cp_core.cost.fit import PrefillSample
from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PASS_Q, ModelShape, PrefillRates
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.selector import least
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.services.offline.calibration.fitting import calibrate, profile_from_rates
from ringserve.services.offline.calibration.measurement import Cell, Measurement
from ringserve.views import RingRates

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=512,
    intermediate_size=1408,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=259,
    element_bytes=4,
)
RANKS, LAYERS = 4, SHAPE.num_layers
GEMM, ATTENTION = 100e9, 75e9
"""FLOP/s of a rank that has a core."""
OVERHEAD = 1.5e-3
"""Seconds of a layer that depend on no length, of a rank that has a core."""
START = 1e-4
KV_BYTES = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4
QUERY_BYTES = SHAPE.num_heads * SHAPE.head_dim * 4
PARTIAL_BYTES = SHAPE.num_heads * (SHAPE.head_dim + 1) * 4
TOKEN = SHAPE.linear_flops_per_token / LAYERS / GEMM
PROJECTION = 2 * SHAPE.hidden_size * (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim / GEMM
PAIR = SHAPE.attention_flops(1, 0) / ATTENTION

LINKS = {megabits: 0.93e6 / 8 * megabits for megabits in (50, 200, 1000)}
"""Bytes/s of links by their rate in Mbit/s, which counts the headers of frames."""

FIT_CELLS = [Cell(cached_tokens=cached, new_tokens=new) for cached in (0, 1000, 3000) for new in (32, 160, 512)]
JUDGED_CELLS = [Cell(cached_tokens=cached, new_tokens=new) for cached in (0, 512, 2000, 4000) for new in (64, 256, 768)]

Wait = list[tuple[int, int, int]]
"""Messages (from, to, layer) that a rank waits for; cached KV has layers from LAYERS on."""


@dataclass
class Machine:
    """Ranks that share `cores`, with one outgoing link of `link` bytes/s each."""

    cores: int
    link: float
    now: float = 0.0
    free: dict[int, float] = field(default_factory=dict)
    arrivals: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def send(self, rank: int, to: int, layer: int, num_bytes: float) -> None:
        self.free[rank] = max(self.free.get(rank, 0.0), self.now) + num_bytes / self.link
        self.arrivals[rank, to, layer] = self.free[rank] + START

    def run(self, ranks: Sequence[Iterator[float | Wait]]) -> float:
        """Return when all ranks have ended; each yields seconds of computation on a core, or messages to wait for."""
        states = {rank: next(steps, None) for rank, steps in enumerate(ranks)}
        while any(state is not None for state in states.values()):
            busy = {rank: state for rank, state in states.items() if isinstance(state, float)}
            speed = min(1.0, self.cores / len(busy)) if busy else 1.0
            ends = {rank: left / speed for rank, left in busy.items()}
            for rank, state in states.items():
                if isinstance(state, list) and all(message in self.arrivals for message in state):
                    ends[rank] = max([0.0, *(self.arrivals[message] - self.now for message in state)])
            passed = min(ends.values())
            self.now += passed
            for rank, end in ends.items():
                if end <= passed:
                    states[rank] = next(ranks[rank], None)
                elif rank in busy:
                    states[rank] = busy[rank] - passed * speed
        return self.now

    def chain_rank(self, rank: int, cuts: Cuts, cached: int) -> Iterator[float | Wait]:
        start, stop = cuts[rank], cuts[rank + 1]
        count, readers = stop - start, [each for each in range(RANKS) if each != rank and cuts[each] < cuts[each + 1]]
        others = [each for each in range(RANKS) if each != rank] if cached and count else []

        def send_cached(layer: int) -> None:
            for reader in readers if cached and layer < LAYERS else ():
                self.send(rank, reader, LAYERS + layer, cached / RANKS * KV_BYTES)

        send_cached(0)
        send_cached(1)
        for layer in range(LAYERS):
            yield count * PROJECTION + (OVERHEAD if count else 0.0)
            onward = rank + 1 if stop and rank + 1 < RANKS else None
            if onward is not None and count:
                self.send(rank, onward, 2 * LAYERS + layer, count * KV_BYTES)
            yield count * count / 2 * PAIR
            if start:
                first = [(rank - 1, rank, 2 * LAYERS + layer)] if cuts[rank] > cuts[rank - 1] else []
                yield first + ([(rank - 1, rank, layer)] if cuts[rank - 1] else [])
            if onward is not None and start:
                self.send(rank, onward, layer, start * KV_BYTES)
            send_cached(layer + 2)
            yield [(each, rank, LAYERS + layer) for each in others]
            yield count * (cached + start) * PAIR + count * (TOKEN - PROJECTION)

    def seconds(self, algorithm: str, cell: Cell, cuts: Cuts) -> float:
        """Return the seconds of a step on this machine."""
        new, cached = cell.new_tokens, cell.cached_tokens
        head = SHAPE.head_flops / GEMM
        if algorithm == CHAIN:
            return self.run([self.chain_rank(rank, cuts, cached) for rank in range(RANKS)]) + head
        # All ranks compute at the same time.
        together = max(1.0, RANKS / self.cores)
        attention = (new * cached + new * new / 2) * PAIR / RANKS**2 * together
        num_bytes = (new + cached) / RANKS * KV_BYTES if algorithm == PASS_KV else new / RANKS * QUERY_BYTES
        message = START + num_bytes / self.link
        layer = new / RANKS * TOKEN * together + RANKS * attention + (RANKS - 1) * max(0.0, message - attention)
        if algorithm == PASS_Q:
            layer += START + (RANKS - 1) * new / RANKS * PARTIAL_BYTES / self.link
        return LAYERS * (layer + OVERHEAD * together) + head


def machine_rates(cores: int, link: float) -> PrefillRates:
    """Return the machine's rates as they are, of ranks that compute together."""
    share = RANKS / cores
    ring = RingRates(
        gemm_flops=GEMM / share,
        attention_flops=ATTENTION / share,
        link_bytes_per_second=link,
        link_latency_seconds=START,
        lone_speed=share,
    )
    return PrefillRates(ring=ring, layer_overhead_seconds=OVERHEAD * share)


def cuts_of(rates: PrefillRates, cell: Cell) -> Cuts:
    return quick_cuts(cell.new_tokens, cell.cached_tokens, chain_rates(SHAPE, rates, RANKS))


def fitted(cores: int, link: float) -> HardwareProfile:
    """Return the profile that a calibration fits to the machine, whose ranks have cut chains by their own rates."""
    share = RANKS / cores
    rates = RingRates(
        gemm_flops=0.8 * GEMM / share,
        attention_flops=0.8 * ATTENTION / share,
        link_bytes_per_second=link,
        link_latency_seconds=START,
        lone_speed=0.9 * share,
    )
    own = profile_from_rates(rates, name="own", element_bytes=4, processes_per_host=1, memory_bytes=1.0)
    measured = [
        Measurement(
            ring="ring",
            sample=PrefillSample(
                cp=RANKS,
                tp=1,
                algorithm=algorithm,
                new_tokens=cell.new_tokens,
                cached_tokens=cell.cached_tokens,
                seconds=seconds,
            ),
            seconds=(seconds,),
        )
        for cell, algorithm in product(FIT_CELLS, (PASS_KV, PASS_Q, CHAIN))
        for seconds in [Machine(cores, link).seconds(algorithm, cell, cuts_of(rates_of(own, cell), cell))]
    ]
    return calibrate(SHAPE, own, measured, ()).profile


def rates_of(profile: HardwareProfile, cell: Cell) -> PrefillRates:
    return profile.prefill.rates(RANKS, is_cached=cell.cached_tokens > 0)


def loss_of(choose_by: Callable[[Cell], PrefillRates], cores: int, link: float) -> float:
    """Return the loss of choices and cuts by rates over the best of each judged cell."""
    taken = best = 0.0
    for cell in JUDGED_CELLS:
        rates = choose_by(cell)
        predicted = StepPredictor(SHAPE, rates, RANKS).seconds(cell.new_tokens, cell.cached_tokens)
        names = (PASS_KV, PASS_Q, CHAIN)
        real = {name: Machine(cores, link).seconds(name, cell, cuts_of(rates, cell)) for name in names}
        best_chain = Machine(cores, link).seconds(CHAIN, cell, cuts_of(machine_rates(cores, link), cell))
        taken += real[least({name: predicted[name] for name in names}, cell.new_tokens + cell.cached_tokens)]
        best += min(*real.values(), best_chain)
    return taken / best - 1.0


@pytest.mark.parametrize("cores", [2, RANKS])
def test_a_chain_takes_what_is_predicted_whatever_number_of_ranks_takes_part(cores: int) -> None:
    """Predictions are careful: no message hides behind overhead."""
    link = LINKS[200]
    predictor = ChainPredictor(SHAPE, machine_rates(cores, link), RANKS)
    for cell in JUDGED_CELLS:
        new, cached = cell.new_tokens, cell.cached_tokens
        for cuts in ((0, 0, 0, 0, new), (0, 0, 0, new // 2, new), (0, new // 4, new // 2, 3 * new // 4, new)):
            seconds = Machine(cores, link).seconds(CHAIN, cell, cuts)
            predicted = predictor.of_cuts(cuts, cached)
            assert -0.05 <= predicted / seconds - 1.0 <= 0.25, (cell, cuts)


@pytest.mark.parametrize("megabits", LINKS)
def test_a_calibration_chooses_for_four_ranks_on_two_cores_as_they_are(megabits: int) -> None:
    link = LINKS[megabits]
    profile = fitted(2, link)
    assert loss_of(lambda cell: rates_of(profile, cell), 2, link) <= 0.03


@pytest.mark.parametrize("megabits", LINKS)
def test_one_rate_for_all_algorithms_chooses_wrongly(megabits: int) -> None:
    rates = machine_rates(2, LINKS[megabits])
    one_rate = replace(rates, ring=replace(rates.ring, lone_speed=1.0))
    assert loss_of(lambda cell: rates, 2, LINKS[megabits]) <= 0.03
    assert loss_of(lambda cell: one_rate, 2, LINKS[megabits]) > 0.05


def test_ranks_with_cores_of_their_own_are_as_fast_alone_as_together() -> None:
    link = LINKS[200]
    profile = fitted(RANKS, link)
    assert loss_of(lambda cell: rates_of(profile, cell), RANKS, link) <= 0.03
