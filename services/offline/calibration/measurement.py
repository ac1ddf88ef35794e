"""Measurements of serving rings: real prefills of a grid of cells by CALIBRATED_ALGORITHMS, and some decode steps.

Used by `ringserve calibrate` and, in parts, by `python -m bench selection`. Rings are reached by a gateway's client.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import median

import numpy as np

from ringserve.client import Answer, Client, ModelInfo, Sampling, ServerInfo
from ringserve.cp_core.cost.fit import PrefillSample, StepPart, StepSample
from ringserve.cp_core.cost.selector import GATHERED_TOKENS
from ringserve.cp_core.errors import Busy, ConfigError, NotFound, Unavailable
from ringserve.workers.protocol.steps import CALIBRATED_ALGORITHMS, Algorithm

NEW_TOKENS = (32, 128, 512, 2048)
CACHED_TOKENS = (0, 1024, 4096)
ANSWER_TOKENS = 17
"""Tokens of an answer whose decode steps are measured; every other answer has one token."""
MAX_TRIES = 3
"""Attempts at one undisturbed run."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """Grid cell: T new tokens after P cached ones."""

    cached_tokens: int
    new_tokens: int


def max_sequence_tokens(model: ModelInfo, server: ServerInfo) -> int:
    """Return the longest sequence that the model and every serving ring can hold."""
    capacities = [ring.capacity_tokens for ring in server.rings if ring.capacity_tokens]
    return min([model.max_context_length, *capacities])


def grid(new_tokens: Sequence[int] | None, cached_tokens: Sequence[int] | None, limit: int) -> list[Cell]:
    """Return a cell of every T after every P that has at most `limit` tokens with the answer.

    None stands for the default T or P. Raises ConfigError if an explicit cell does not fit, or if no cell fits.
    """
    cells = []
    for cached in cached_tokens or CACHED_TOKENS:
        for new in new_tokens or NEW_TOKENS:
            if cached + new + ANSWER_TOKENS <= limit:
                cells.append(Cell(cached_tokens=cached, new_tokens=new))
            elif new_tokens and cached_tokens:
                raise ConfigError(
                    f"--tokens {new} with --cached {cached}: {cached + new + ANSWER_TOKENS} tokens with the answer are "
                    f"too long; these rings allow at most {limit}"
                )
    if not cells:
        raise ConfigError(f"--tokens, --cached: nothing fits rings of {limit} tokens; give smaller ones")
    return sorted(cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Runs of one cell by one algorithm on one ring; `sample` has the median of their `seconds`."""

    ring: str
    sample: PrefillSample
    seconds: tuple[float, ...]

    @property
    def cell(self) -> Cell:
        return Cell(cached_tokens=self.sample.cached_tokens, new_tokens=self.sample.new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One prefill; `cuts` are the starts of its steps after the first."""

    ring: str
    ranks: int
    seconds: float
    cuts: tuple[int, ...]


def _ways(cell: Cell) -> tuple[Algorithm, ...]:
    """Return the algorithms by which a cell is measured."""
    has_chain = cell.cached_tokens + cell.new_tokens <= GATHERED_TOKENS
    return tuple(name for name in CALIBRATED_ALGORITHMS if has_chain or name is not Algorithm.CHAIN)


class Calibrator:
    """Measurer of the rings behind one gateway.

    Prompts are random tokens fixed by `seed`; `timeout` bounds each turn, in seconds.
    """

    def __init__(self, client: Client, *, repeats: int, timeout: float, seed: int) -> None:
        self._client = client
        self._repeats = repeats
        self._timeout = timeout
        self._draw = np.random.default_rng(seed)
        self._vocabulary = client.model_info().vocab_size
        rings = client.server_info().rings
        self._tp = {ring.name: ring.tp or 1 for ring in rings}
        self._rates = {ring.name: ring.rates for ring in rings if ring.rates is not None}

    def prefills(self, cells: Sequence[Cell], tell: Callable[[str], None] = lambda name: None) -> list[Measurement]:
        """Measure every cell in rounds, so that a slow machine slows all algorithms; `tell` is called for each run.

        A ring of one rank is measured by pass-KV alone. The chain is left out of cells that are too long for `auto` to
        choose it. Raises Busy if no run of a cell was undisturbed.
        """
        runs: dict[tuple[Cell, Algorithm], list[_Run]] = {(cell, name): [] for cell in cells for name in _ways(cell)}
        for cached in sorted({cell.cached_tokens for cell in cells}):
            with self._conversation(cached) as (conversation, prefix):
                cells_of_prefix = [cell for cell in cells if cell.cached_tokens == cached]
                # The first run of a process takes longer.
                self._run(conversation, prefix, cells_of_prefix[0], Algorithm.PASS_KV)
                for round_number in range(self._repeats):
                    for cell in cells_of_prefix:
                        for name in _ways(cell)[:: 1 if round_number % 2 else -1]:
                            runs[cell, name].append(self._run_alone(conversation, prefix, cell, name))
                            tell(f"{name}, {cell.new_tokens} after {cell.cached_tokens}")
        return [found for (cell, name), taken in runs.items() for found in self._by_ring(cell, name, taken)]

    def steps(self, contexts: Sequence[int]) -> list[StepSample]:
        """Measure the TTIT of short answers after prompts of these lengths, alone in their batch."""
        samples = []
        for context in contexts:
            complete = self._generate(self._tokens(context), "", ANSWER_TOKENS, "")
            if complete.ttit_seconds > 0.0:
                samples.append(
                    StepSample(
                        cp=complete.plan.decode_ranks,
                        tp=self._tp.get(complete.plan.decode_ring, 1),
                        batch=1,
                        context_tokens=context + ANSWER_TOKENS // 2,
                        part=StepPart.STEP,
                        seconds=complete.ttit_seconds,
                    )
                )
        return samples

    @contextmanager
    def _conversation(self, cached: int) -> Iterator[tuple[str, list[int]]]:
        """Make a conversation of `cached` tokens on the prefill ring, and delete it afterwards."""
        if not cached:
            yield "", []
            return
        name, prefix = f"calibrate-{uuid.uuid4().hex[:12]}", self._tokens(cached)
        try:
            self._generate(prefix, name, 1, "")
            yield name, prefix
        finally:
            # A failed turn may have left no conversation, or ended it.
            with suppress(NotFound, Busy, Unavailable):
                self._client.delete_conversation(name)

    def _run_alone(self, conversation: str, prefix: list[int], cell: Cell, algorithm: Algorithm) -> _Run:
        """Repeat a run until it is undisturbed. Raises Busy after MAX_TRIES."""
        for _ in range(MAX_TRIES):
            if (run := self._run(conversation, prefix, cell, algorithm)) is not None:
                return run
        raise Busy(
            f"{MAX_TRIES} prefills of {cell.new_tokens} tokens after {cell.cached_tokens} cached ones shared their "
            f"steps with other turns, lost their cache, or had no room for {algorithm}; calibrate while nothing else "
            f"is served, or give smaller --tokens and --cached"
        )

    def _run(self, conversation: str, prefix: list[int], cell: Cell, algorithm: Algorithm) -> _Run | None:
        """Run one prefill; return None if it shared its steps, lost its cache, or had no room for its layout."""
        prompt = prefix + self._tokens(cell.new_tokens)
        plan = self._generate(prompt, conversation, 1, algorithm).plan
        is_alone = all(
            chunk.num_turns == 1 and chunk.algorithm == algorithm and not chunk.fallback for chunk in plan.chunks
        )
        if not is_alone or (plan.new_tokens, plan.cached_tokens) != (cell.new_tokens, cell.cached_tokens):
            return None
        return _Run(
            ring=plan.prefill_ring,
            ranks=plan.prefill_ranks,
            seconds=plan.prefill_seconds,
            cuts=tuple(chunk.start for chunk in plan.chunks[1:]),
        )

    def _by_ring(self, cell: Cell, algorithm: Algorithm, runs: Sequence[_Run]) -> Iterator[Measurement]:
        """Yield for each ring a measurement of its runs with the most frequent cuts."""
        for ring in sorted({run.ring for run in runs}):
            of_ring = [run for run in runs if run.ring == ring]
            ranks = of_ring[0].ranks
            if ranks == 1 and algorithm is not Algorithm.PASS_KV:
                continue
            all_cuts = [run.cuts for run in of_ring]
            cuts = max(all_cuts, key=all_cuts.count)
            seconds, rates = tuple(run.seconds for run in of_ring if run.cuts == cuts), self._rates.get(ring)
            sample = PrefillSample(
                cp=ranks,
                tp=self._tp.get(ring, 1),
                algorithm=algorithm.value,
                new_tokens=cell.new_tokens,
                cached_tokens=cell.cached_tokens,
                seconds=median(seconds),
                cuts=cuts,
                speeds=() if rates is None else rates.speeds,
                lateness=() if rates is None else rates.lateness,
            )
            yield Measurement(ring=ring, sample=sample, seconds=seconds)

    def _generate(self, prompt: list[int], conversation: str, max_tokens: int, algorithm: str) -> Answer:
        return self._client.ask(
            prompt,
            conversation_id=conversation,
            mode="whole_history",
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            algorithm=algorithm,
            timeout=self._timeout,
        )

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._draw.integers(self._vocabulary, size=count).tolist()
        return tokens
