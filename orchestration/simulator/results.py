"""What came of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """One finished turn. Seconds; `ttft_seconds` since it was first asked, `decode_seconds` until its last token."""

    asked: float
    ttft_seconds: float
    decode_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    algorithm: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Of all turns of one placement. `cached_share` is of all prompt tokens, `busy_share` of the prefill rings' time.

    `pass_q_share` is of the turns; `num_retries` counts how often a turn found no room and asked again.
    """

    placement: str
    num_turns: int
    num_retries: int
    simulated_seconds: float
    cached_share: float
    pass_q_share: float
    ttft_mean: float
    ttft_median: float
    ttft_p90: float
    ttft_p99: float
    ttit_mean: float
    busy_share: float
    busiest_share: float
    largest_batch: int


def summarise(
    placement: str,
    records: Sequence[TurnRecord],
    *,
    num_retries: int,
    seconds: float,
    busy_seconds: Sequence[float],
    largest_batch: int,
) -> SimulationResult:
    """`records` of one turn at least; `seconds` is the whole run, `busy_seconds` are those of each prefill ring."""
    waits = sorted(record.ttft_seconds for record in records)
    return SimulationResult(
        placement=placement,
        num_turns=len(records),
        num_retries=num_retries,
        simulated_seconds=seconds,
        cached_share=sum(each.cached_tokens for each in records) / sum(each.prompt_tokens for each in records),
        pass_q_share=sum(each.algorithm == "pass_q" for each in records) / len(records),
        ttft_mean=sum(waits) / len(waits),
        ttft_median=percentile(waits, 0.5),
        ttft_p90=percentile(waits, 0.9),
        ttft_p99=percentile(waits, 0.99),
        ttit_mean=sum(each.decode_seconds for each in records) / sum(each.output_tokens for each in records),
        busy_share=sum(busy_seconds) / len(busy_seconds) / seconds,
        busiest_share=max(busy_seconds) / seconds,
        largest_batch=largest_batch,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the values, in ascending order, that `share` of them do not exceed."""
    place = max(0, -(-int(share * len(ordered) * 1_000_000) // 1_000_000) - 1)
    return ordered[place]
