"""Figures of the whole service on one GPU, which its rings share: through the gateway, beside transformers.

They are the parts `service` and `tokens` of `python -m bench gpu`. In `service` transformers runs first, and gives its
memory back before the rings start; both have a turn to warm up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Protocol

import numpy as np
import torch

from bench.gpu.table import (
    SECOND_OVER_TTIT,
    TTFT_SECONDS,
    TTIT_SECONDS,
    Line,
    Place,
    drawn_model,
)
from bench.service.served import TTFT_TOKENS, DrawnTurns, Turn, TurnTimes, served
from ringserve.services.config import Config, config_from
from ringserve.services.offline.reference import Reference, StockModel
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.loading import DTYPES

BLOCK_TOKENS = 16
# Room of each sequence for the tokens of its answers, after its context.
SPARE_TOKENS = 512
# Rounds of TTIT, and their steps as a multiple of `Place.steps`: many, because several tokens may come in one message,
# and the rows of a batch begin one after the other.
LONE_ROUNDS, LONE_STEPS = 3, 4
BATCH_ROUNDS, BATCH_STEPS = 1, 8
# Both rings compile the layers when they start, if the disk has no code of them yet.
START_SECONDS = 600.0


class Turns(Protocol):
    """Client of a service: `ServedTurns`."""

    def measure(self, turn: Turn) -> TurnTimes: ...
    def forget(self, name: str) -> None: ...


def service(place: Place) -> Iterator[Line]:
    """Measure TTFT, the second token and TTIT of rings of one rank each, cp=1 to cp=1."""
    with drawn_model(place) as path:
        theirs = stock_times(place, path)
        with served(config_of(place, place.dtype, ranks=1), str(path), 1) as turns:
            yield from service_lines(place, turns, theirs)


def config_of(place: Place, dtype: str, ranks: int) -> Config:
    """Return the configuration of two rings of `ranks` ranks each, which share the GPU if there is one."""
    rows, longest = max(place.contexts, key=lambda case: case[0] * case[1])
    tokens = max(rows * (longest + SPARE_TOKENS), max(place.prompts) + SPARE_TOKENS)
    gpus_per_rank = 0.5 / ranks if place.is_gpu else 1.0
    backend = "reference" if place.is_gpu and dtype == "float32" else "auto"
    return config_from(
        {
            "model": {"dtype": dtype, "device": place.device, "gpus_per_rank": gpus_per_rank}
            | {"attention_backend": backend},
            "prefill": {"cp": ranks, "chunk_tokens": max(place.prompts)},
            "decode": {"cp": ranks, "max_batch": max(8, *(batch for batch, _ in place.contexts))},
            "kv_cache": {"tokens_per_rank": -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS},
            "timeouts": {"start": START_SECONDS},
        }
    )


def stock_times(place: Place, path: Path) -> dict[int, tuple[float, float]]:
    """Return transformers' TTFT and TTIT by prompt, in seconds; its memory is free again afterwards."""
    stock = StockModel(path, DTYPES[place.dtype], place.device)
    times = {}
    for tokens in sorted({*place.prompts, *(held for rows, held in place.contexts if rows == 1)}):
        answers = [
            stock.greedy(prompt.tolist(), place.steps + TTFT_TOKENS).seconds
            for prompt in _prompts(place, tokens, 1 + place.rounds)
        ][1:]
        times[tokens] = (
            median(each[0] for each in answers),
            median(after - before for each in answers for before, after in pairwise(each)),
        )
    del stock
    if place.is_gpu:
        torch.cuda.empty_cache()
    return times


def _prompts(place: Place, tokens: int, count: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(tokens)
    return [drawn.integers(place.shape["vocab_size"], size=tokens) for _ in range(count)]


def service_lines(place: Place, turns: Turns, theirs: dict[int, tuple[float, float]]) -> Iterator[Line]:
    """Measure the turns of all cases -> their lines, with transformers' times beside them."""
    ttit: dict[int, float] = {}
    for rows, held in place.contexts:
        seconds = _ttit(place, turns, rows, held)
        beside = ""
        if rows == 1:
            ttit[held], beside = seconds, f"transformers {theirs[held][1]:.4g} s"
        limit = TTIT_SECONDS.get((rows, held))
        yield Line(
            part="service", text=f"TTIT, {rows} x {held:,} tokens", value=seconds, unit="s", limit=limit, beside=beside
        )
    for tokens in place.prompts:
        drawn, seen = DrawnTurns(place.shape["vocab_size"], f"p{tokens}"), list[TurnTimes]()
        for _ in range(1 + place.rounds):
            turn = drawn.turn(tokens, TTFT_TOKENS, is_new=True)
            seen.append(turns.measure(turn))
            turns.forget(turn.name)
        ours = median(each.ttft for each in seen[1:])
        second = median(each.tokens[1] - each.tokens[0] for each in seen[1:])
        nearest = min(ttit, key=lambda held: abs(held - tokens))
        yield Line(
            part="service",
            text=f"TTFT, {tokens:,} tokens",
            value=ours,
            unit="s",
            limit=TTFT_SECONDS.get(tokens),
            beside=f"transformers {theirs[tokens][0]:.4g} s",
        )
        yield Line(
            part="service",
            text="  second token after the first, over TTIT",
            value=second / ttit[nearest],
            limit=SECOND_OVER_TTIT if place.is_gpu else None,
            beside=f"{second:.4g} s, TTIT at {nearest:,} tokens",
        )


def _ttit(place: Place, turns: Turns, rows: int, held: int) -> float:
    """Return the mean time between tokens of a batch of conversations with `held` tokens each: median of the rounds.

    The first turn makes the context. The turns that are measured add one token each, so that all of them decode
    together.
    """
    drawn = [DrawnTurns(place.shape["vocab_size"], f"d{rows}x{held}-{row}") for row in range(rows)]
    rounds, more = (LONE_ROUNDS, LONE_STEPS) if rows == 1 else (BATCH_ROUNDS, BATCH_STEPS)

    def together(num_tokens: int, max_tokens: int) -> float:
        asked = [each.turn(num_tokens, max_tokens, is_new=False) for each in drawn]
        return mean(seen.ttit for seen in pool.map(turns.measure, asked))

    with ThreadPoolExecutor(rows) as pool:
        together(held, TTFT_TOKENS + 1)
        seconds = [together(1, TTFT_TOKENS + more * place.steps) for _ in range(1 + rounds)][1:]
    for row in range(rows):
        turns.forget(f"d{rows}x{held}-{row}")
    return median(seconds)


def tokens(place: Place) -> Iterator[Line]:
    """Compare rings of two ranks each, in float32, with transformers on the same device, token for token."""
    model = "builtin:tiny"
    stock = StockModel(resolve_model_path(model), device=place.device)
    with served(config_of(place, "float32", ranks=2), model, 2) as turns:
        yield tokens_line(place, turns, stock)


def tokens_line(place: Place, turns: Turns, stock: StockModel) -> Line:
    """Run a conversation of three turns on the service and on transformers -> the share of tokens that are equal."""
    told: list[int] = []
    pairs: list[tuple[int, int]] = []
    leads: list[float] = []
    for number, size in enumerate((max(place.prompts) // 8, 5, 33)):
        prompt = np.random.default_rng(number).integers(32, 127, size=size)
        turn = Turn(token_ids=prompt, max_tokens=place.answer_tokens, name="tokens", is_first=not number)
        answer: Sequence[int] = turns.measure(turn).token_ids
        told += prompt.tolist()
        right: Reference = stock.greedy(told, place.answer_tokens)
        assert len(answer) == len(right.token_ids), f"{len(answer)} tokens, and transformers has {right.token_ids}"
        pairs += zip(answer, right.token_ids, strict=True)
        leads.append(right.smallest_lead)
        told += answer
    turns.forget("tokens")
    return Line(
        part="tokens",
        text="equal to transformers in float32, rings of 2 and 2",
        value=mean(float(ours == theirs) for ours, theirs in pairs),
        limit=1.0,
        is_at_least=True,
        beside=f"{len(pairs)} tokens, smallest lead {min(leads):.3g}",
    )
