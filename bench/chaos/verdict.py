"""Verdict on one cell of the matrix: what clients saw of a fault, and whether that is what the service promises.

The chaos experiment asks `judge`. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from bench.chaos.faults import Cell
from bench.chaos.load import Stream

MAX_DETECT_SECONDS = 5.0
MAX_LATE_SECONDS = 10.0
"""Time that a fault may add to a stream's wait for its next token. The time that the load's prompts take anyway does
not count: on two slow cores that alone is up to 9 s."""
MAX_GAP_RATIO = 2.0
"""Limit on a running stream's longest gap over the usual p99: up to it the stream has not seen a fault of the
router."""


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

    The p99 of the gaps between two pieces, the longest of them, and each stream's time to its first token by the name
    of its script.
    """

    gap_p99: float = 0.0
    longest_gap: float = 0.0
    first_tokens: Mapping[str, float] = field(default_factory=dict)

    @property
    def last_first_token(self) -> float:
        """Longest time to a stream's first token."""
        return max(self.first_tokens.values(), default=0.0)

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> Usual:
        """Measure streams that have ended."""
        gaps = [gap.seconds for stream in streams for gap in stream.gaps()] or [0.0]
        firsts = {each.expected.script.name: each.arrivals[0] - each.began for each in streams if each.arrivals}
        return cls(gap_p99=float(np.percentile(gaps, 99)), longest_gap=max(gaps), first_tokens=firsts)

    def wait_left(self, stream: Stream, moment: float) -> float:
        """Return how long, from a moment on, a stream would have waited for its next token if nothing had been hit.

        A stream with a token has none to wait for: gaps are short beside what is judged.
        """
        first_token = self.first_tokens.get(stream.expected.script.name)
        if first_token is None or (stream.arrivals and stream.arrivals[0] <= moment):
            return 0.0
        return max(0.0, stream.began + first_token - moment)


UNKNOWN = Usual()
"""Record before anything was measured: every wait counts in full."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Record of all that was seen of a fault. Times in seconds from the fault; None: never, or nothing to measure.

    `streams` ran when the fault came or began at once after it, `follow_ups` after it. `affected` are those streams
    that had not ended and used a ring that was hit; all, if what was hit is in no ring. `sign` is the first sign that
    the service has noticed, `lost` names conversations whose history is gone. Blocks are the KV blocks of all ranks.
    `usual` is the same load without a fault.
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
    usual: Usual = UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Result:
    """Line of the report.

    The longest gap is the longest between two pieces of one stream, if it ended after the fault; its `at` is when it
    began, counted from the fault. `late_seconds` is how much longer than without a fault a stream waited for its next
    token, at most. Example: a token that came 9 s after the fault, and would have come 6 s after it anyway, was 3 s
    late.
    """

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
    late_seconds: float | None = None
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
        """Longest gap over the usual p99: at most MAX_GAP_RATIO if no stream has seen the fault."""
        if self.longest_gap_seconds is None or not self.usual_gap_seconds:
            return None
        return self.longest_gap_seconds / self.usual_gap_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self) | {"gap_ratio": self.gap_ratio}


def nothing_hit(cell: Cell, outcome: Outcome, reason: str) -> Result:
    """Return the result of a cell in which nothing was hit."""
    return Result(process=cell.kind, phase=cell.phase, how=cell.how, outcome=outcome, reasons=(reason,))


def judge(cell: Cell, seen: Observation) -> Result:
    """Return the result of a cell, which held if all was as docs/operating.md promises."""
    everything = [*seen.streams, *seen.follow_ups]
    next_token, late = _next_token(seen, UNKNOWN), _next_token(seen, seen.usual)
    longest = max((gap for stream in seen.streams for gap in stream.gaps(seen.hit_at)), default=None)
    reasons = [*_stream_reasons("stream", seen.streams), *_stream_reasons("follow-up", seen.follow_ups)]
    if seen.detect_seconds is None or seen.detect_seconds > MAX_DETECT_SECONDS:
        when = (
            ""
            if seen.detect_seconds is None
            else f" within {MAX_DETECT_SECONDS:g} s, but after {seen.detect_seconds:.1f}"
        )
        reasons.append(f"the service did not notice the fault{when}")
    if late > MAX_LATE_SECONDS and not seen.is_alone and not math.isinf(late):
        reasons.append(f"the next token of a stream came {late:.1f} s later than without a fault")
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
        late_seconds=late if 0 < late < math.inf else None,
        longest_gap_seconds=longest.seconds if longest else None,
        longest_gap_at_seconds=longest.began - seen.hit_at if longest else None,
        longest_gap_after_pieces=longest.num_pieces if longest else None,
        usual_gap_seconds=seen.usual.gap_p99 or None,
        recover_seconds=seen.recover_seconds,
        free_blocks_before=seen.free_before,
        free_blocks_after=seen.free_after,
        lost_conversations=tuple(seen.lost),
        reasons=tuple(reasons),
    )


def _next_token(seen: Observation, usual: Usual) -> float:
    """Return the longest time from the fault to the next token of an affected stream; infinite if none came.

    The time that a stream would have waited without the fault, by `usual`, does not count.
    """
    firsts = [(stream, stream.first_after(seen.hit_at)) for stream in seen.affected]
    return max(
        (
            math.inf if first is None else first - seen.hit_at - usual.wait_left(stream, seen.hit_at)
            for stream, first in firsts
        ),
        default=0.0,
    )


def _stream_reasons(what: str, streams: Sequence[Stream]) -> list[str]:
    """Return a sentence for each kind of failure."""
    wrong: dict[str, int] = {}
    for stream in streams:
        if not stream.is_exact:
            reason = stream.error or stream.difference or "it was cut off"
            wrong[reason] = wrong.get(reason, 0) + 1
    return [f"{count} of {len(streams)} {what}s: {reason}" for reason, count in wrong.items()]
