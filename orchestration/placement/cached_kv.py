"""Where a turn's cached KV comes from, and whether what its prefill ring lacks is worth fetching."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cp_core.layout.shards import TokenRange
from orchestration.protocol.turns import CachedSource, RingRegistration

AUTO, PULL, RECOMPUTE = "auto", "pull", "recompute"
MISSING_KV = (AUTO, PULL, RECOMPUTE)
"""What is done with KV that another ring keeps and the prefill ring lacks."""
RETAINED, PULLED, PULLED_FROM_OTHER = "kept_on_prefill", "pulled_from_decode", "pulled_from_other"
"""Where cached KV comes from: a `CachedSource.source`."""


@dataclass(frozen=True, slots=True)
class RetainedPrefix:
    """A ring that keeps the first `num_tokens` tokens of a turn's prompt."""

    ring: RingRegistration
    num_tokens: int


def retaining_most(decode: RetainedPrefix, left: Iterable[RetainedPrefix]) -> RetainedPrefix:
    """The turn's decode ring, unless a ring that its conversation leaves keeps more."""
    most = decode
    for other in left:
        if other.num_tokens > most.num_tokens:
            most = other
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedKv:
    """The first `cached_tokens` tokens are not computed. `reason` goes on where a plan's reason ends; `alternatives`
    are (what to do, predicted seconds until the prefill has ended), the chosen one included; both may be empty.
    """

    cached_tokens: int
    sources: tuple[CachedSource, ...]
    reason: str = ""
    alternatives: tuple[tuple[str, float], ...] = ()


def is_worth_pulling(policy: str, *, pull_seconds: float, recompute_seconds: float) -> bool:
    """Whether what the prefill ring lacks is fetched; equal costs go to the pull. See `choose_source`."""
    return policy == PULL or (policy == AUTO and pull_seconds <= recompute_seconds)


def choose_source(
    policy: str,
    *,
    retained_on_prefill: int,
    retained_on_decode: int,
    pull_seconds: float,
    recompute_seconds: float,
    other_ring: str = "",
) -> CachedKv:
    """`policy` is one of MISSING_KV; the seconds are predicted for pull and prefill, and for the longer prefill alone.

    With `other_ring` it is that one which keeps so much, and not the turn's decode ring.
    What the prefill ring keeps is always used.
    """
    kept = CachedSource(source=RETAINED, tokens=TokenRange(0, retained_on_prefill))
    if retained_on_decode <= retained_on_prefill:
        return CachedKv(cached_tokens=retained_on_prefill, sources=(kept,) if retained_on_prefill else ())
    missing = TokenRange(retained_on_prefill, retained_on_decode)
    is_pulled = is_worth_pulling(policy, pull_seconds=pull_seconds, recompute_seconds=recompute_seconds)
    verb, other = ("pulled", "computing them again") if is_pulled else ("computed again", "pulling them")
    chosen, instead = (pull_seconds, recompute_seconds) if is_pulled else (recompute_seconds, pull_seconds)
    why = "as configured" if policy != AUTO else f"{1e3 * chosen:.3g} ms predicted, {other} {1e3 * instead:.3g} ms"
    name = PULLED_FROM_OTHER if other_ring else PULLED
    sources = (kept, CachedSource(source=name, tokens=missing, ring=other_ring)) if is_pulled else (kept,)
    keeper = f"ring {other_ring}" if other_ring else "the decode ring"
    return CachedKv(
        cached_tokens=missing.stop if is_pulled else missing.start,
        sources=tuple(source for source in sources if len(source.tokens)),
        reason=f"; tokens [{missing.start}, {missing.stop}), which only {keeper} keeps, are {verb}: {why}",
        alternatives=((PULL, pull_seconds), (RECOMPUTE, recompute_seconds)),
    )
