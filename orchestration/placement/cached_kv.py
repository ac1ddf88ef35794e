"""Source of a turn's cached KV: the prefill ring's own, or KV that it lacks and is worth pulling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cp_core.layout.shards import TokenRange
from orchestration.protocol.turns import CachedSource, RingRegistration

AUTO, PULL, RECOMPUTE = "auto", "pull", "recompute"
MISSING_KV = (AUTO, PULL, RECOMPUTE)
"""Policies for KV that another ring retains and the prefill ring lacks."""
RETAINED, PULLED, PULLED_FROM_OTHER = "kept_on_prefill", "pulled_from_decode", "pulled_from_other"
"""Sources of cached KV: values of `CachedSource.source`."""


@dataclass(frozen=True, slots=True)
class RetainedPrefix:
    """Ring that retains the KV of the first `num_tokens` tokens of a turn's prompt."""

    ring: RingRegistration
    num_tokens: int


def retaining_most(decode: RetainedPrefix, left: Iterable[RetainedPrefix]) -> RetainedPrefix:
    """Return the turn's decode ring, unless a ring that its conversation leaves retains more."""
    most = decode
    for other in left:
        if other.num_tokens > most.num_tokens:
            most = other
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedKv:
    """Decision that the first `cached_tokens` tokens are not computed.

    `reason` continues a plan's reason. `alternatives` are (policy, predicted seconds until the prefill has ended), the
    chosen one included. Both may be empty.
    """

    cached_tokens: int
    sources: tuple[CachedSource, ...]
    reason: str = ""
    alternatives: tuple[tuple[str, float], ...] = ()


def is_worth_pulling(policy: str, *, pull_seconds: float, recompute_seconds: float) -> bool:
    """Return whether the prefill ring pulls KV that it lacks; equal costs go to the pull. See `choose_source`."""
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
    """Choose between pulling KV that the prefill ring lacks and computing it again.

    `policy` is one of MISSING_KV. The seconds are predicted for pull and prefill together, and for the longer prefill
    alone. With `other_ring` that ring retains `retained_on_decode` tokens, and not the turn's decode ring. KV that the
    prefill ring retains is always used.
    """
    retained = CachedSource(source=RETAINED, tokens=TokenRange(0, retained_on_prefill))
    if retained_on_decode <= retained_on_prefill:
        return CachedKv(cached_tokens=retained_on_prefill, sources=(retained,) if retained_on_prefill else ())
    missing = TokenRange(retained_on_prefill, retained_on_decode)
    is_pulled = is_worth_pulling(policy, pull_seconds=pull_seconds, recompute_seconds=recompute_seconds)
    verb, other = ("pulled", "computing them again") if is_pulled else ("computed again", "pulling them")
    chosen, instead = (pull_seconds, recompute_seconds) if is_pulled else (recompute_seconds, pull_seconds)
    why = "as configured" if policy != AUTO else f"{1e3 * chosen:.3g} ms predicted, {other} {1e3 * instead:.3g} ms"
    name = PULLED_FROM_OTHER if other_ring else PULLED
    sources = (retained, CachedSource(source=name, tokens=missing, ring=other_ring)) if is_pulled else (retained,)
    source = f"ring {other_ring}" if other_ring else "the decode ring"
    return CachedKv(
        cached_tokens=missing.stop if is_pulled else missing.start,
        sources=tuple(source for source in sources if len(source.tokens)),
        reason=f"; tokens [{missing.start}, {missing.stop}), which only {source} retains, are {verb}: {why}",
        alternatives=((PULL, pull_seconds), (RECOMPUTE, recompute_seconds)),
    )
