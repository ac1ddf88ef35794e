"""Verdict on one cell of the matrix: what clients saw of a fault, and whether that is what the service promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from bench.chaos.faults import Cell
from bench.chaos.load import Stream

MAX_DETECT_SECONDS = 5.0
MAX_NEXT_TOKEN_SECONDS = 10.0
MAX_GAP_RATIO = 2.0
"""Longest gap of a running stream, in p99s of the usual gaps, up to which it has not seen a fault of the router."""


class Outcome(StrEnum):
    """Outcome of a cell. Only BROKEN is a failure of the service.

    UNSEEN: the phase was not observed while the load ran, so nothing was hit. FORBIDDEN: this machine does not permit
    what the cell needs, and the reason says what that is.
    """

    HELD = "held"
    BROKEN = "BROKEN"
    UNSEEN = "not observed"
    FORBIDDEN = "not permitted here"


@dataclass(frozen=True, kw_only=True)
class Usual:
    """Record of second turns without a fault, in seconds.

    The p99 of the gaps between two pieces, the longest of them, and the longest time to a stream's first token.
    """

    gap_p99: float = 0.0
    longest_gap: float = 0.0
    last_first_token: float = 0.0

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Usual:
        """Measure streams that have ended."""
        gaps = [gap.seconds for stream in streams for gap in stream.gaps()] or [0.0]
        firsts = [stream.arrivals[0] - stream.began for stream in streams if stream.arrivals]
        return cls(
            gap_p99=float(np.percentile(gaps, 99)), longest_gap=max(gaps), last_first_token=max(firsts, default=0.0)
        )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Record of all that was seen of a fault. Times in seconds from the fault; None: never, or nothing to measure.

    `streams` ran when the fault came or began at once after it, `follow_ups` after it. `affected` are those streams
    that had to do with the process. `sign` is the first sign that the service has noticed, `lost` names conversations
    whose history is gone. Blocks are the KV blocks of all ranks. `usual_gap_seconds` is the p99 of the times between
    two pieces under the same load without a fault.
    """

    victim: str
    streams: Sequence[Stream]
    affected: Sequence[Stream]
    follow_ups: Sequence[Stream]
    hit_at: float
    detect_seconds: float | None
    sign: str
    recover_seconds: float | None
    free_before: int
    free_after: int
    lost: Sequence[str]
    is_alone: bool
    usual_gap_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """Line of the report. The longest gap is that of a stream after the fault; it began at a time from the fault."""

    process: str
    phase: str
    how: str
    outcome: Outcome
    round: int = 1
    victim: str = ""
    streams: int = 0
    exact: int = 0
    errors: tuple[str, ...] = ()
    detect_seconds: float | None = None
    sign: str = ""
    next_token_seconds: float | None = None
    longest_gap_seconds: float | None = None
    longest_gap_at_seconds: float | None = None
    longest_gap_after_pieces: int | None = None
    usual_gap_seconds: float | None = None
    recover_seconds: float | None = None
    free_blocks_before: int = 0
    free_blocks_after: int = 0
    lost_conversations: tuple[str, ...] = ()
    reasons: tuple[str, ...] = field(default=())

    @property
    def gap_ratio(self) -> float | None:
        """Longest gap over the usual p99: at most MAX_GAP_RATIO where no stream has seen the fault."""
        if self.longest_gap_seconds is None or not self.usual_gap_seconds:
            return None
        return self.longest_gap_seconds / self.usual_gap_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self) | {"gap_ratio": self.gap_ratio}


def nothing_hit(cell: Cell, outcome: Outcome, reason: str) -> Result:
    """Return the line of a cell in which nothing was hit."""
    return Result(process=cell.kind, phase=cell.phase, how=cell.how, outcome=outcome, reasons=(reason,))


def judge(cell: Cell, seen: Observation) -> Result:
    """Return the line of a cell: the promise is that of docs/operating.md."""
    everything = [*seen.streams, *seen.follow_ups]
    next_token = _next_token(seen)
    longest = max((gap for stream in seen.streams for gap in stream.gaps(seen.hit_at)), default=None)
    reasons = [*_stream_reasons("stream", seen.streams), *_stream_reasons("follow-up", seen.follow_ups)]
    if seen.detect_seconds is None or seen.detect_seconds > MAX_DETECT_SECONDS:
        late = (
            ""
            if seen.detect_seconds is None
            else f" within {MAX_DETECT_SECONDS:g} s, but after {seen.detect_seconds:.1f}"
        )
        reasons.append(f"the service did not notice the fault{late}")
    if next_token > MAX_NEXT_TOKEN_SECONDS and not seen.is_alone and not math.isinf(next_token):
        reasons.append(f"the next token of a stream came only after {next_token:.1f} s")
    if seen.recover_seconds is None:
        reasons.append("the cluster did not become whole and idle again")
    elif seen.free_after != seen.free_before:
        reasons.append(f"{seen.free_before - seen.free_after} KV blocks are not free again")
    if seen.lost:
        reasons.append(f"the history of {', '.join(seen.lost)} is lost")
    return Result(
        process=cell.kind,
        phase=cell.phase,
        how=cell.how,
        outcome=Outcome.BROKEN if reasons else Outcome.HELD,
        victim=seen.victim,
        streams=len(everything),
        exact=sum(stream.is_exact for stream in everything),
        errors=tuple(stream.error for stream in everything if stream.error),
        detect_seconds=seen.detect_seconds,
        sign=seen.sign,
        next_token_seconds=next_token if 0 < next_token < math.inf else None,
        longest_gap_seconds=longest.seconds if longest else None,
        longest_gap_at_seconds=longest.began - seen.hit_at if longest else None,
        longest_gap_after_pieces=longest.num_pieces if longest else None,
        usual_gap_seconds=seen.usual_gap_seconds,
        recover_seconds=seen.recover_seconds,
        free_blocks_before=seen.free_before,
        free_blocks_after=seen.free_after,
        lost_conversations=tuple(seen.lost),
        reasons=tuple(reasons),
    )


def _next_token(seen: Observation) -> float:
    """Return the longest time from the fault to the next token of an affected stream; infinite where none came."""
    firsts = [stream.first_after(seen.hit_at) for stream in seen.affected]
    return max((math.inf if first is None else first - seen.hit_at for first in firsts), default=0.0)


def _stream_reasons(what: str, streams: Sequence[Stream]) -> list[str]:
    """Return a sentence for each kind of failure."""
    wrong: dict[str, int] = {}
    for stream in streams:
        if not stream.is_exact:
            reason = stream.error or stream.difference or "it was cut off"
            wrong[reason] = wrong.get(reason, 0) + 1
    return [f"{count} of {len(streams)} {what}s: {reason}" for reason, count in wrong.items()]
