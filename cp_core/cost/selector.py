"""Choice of the ring algorithm of a prefill, with its reason. Pure functions, no torch.

The router's planner and placer call it, `ringserve explain` too.

T new tokens, P cached ones, N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringserve.cp_core.cost.model import (
    CHAIN,
    GATHER_KV,
    PASS_KV,
    PASS_Q,
    PREFILL_ALGORITHMS,
    SP_NTP,
    ModelShape,
    PrefillRates,
)
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError, InvalidRequest

POLICIES = ("auto", *PREFILL_ALGORITHMS)

TIE = 0.02
"""A later one of PREFILL_ALGORITHMS is chosen only if its predicted time is less by more than this share."""
PROBED_TIE = 0.1
"""The same share for rates that nobody calibrated: a ring that starts measures only pass-KV steps."""
GATHERED_TOKENS = 1 << 17
"""Maximum tokens of a sequence for which "auto" chooses gather_kv or chain: each rank gets the KV of all tokens and
holds a layer or more of it at a time."""
NAMES = {PASS_KV: "pass-KV", PASS_Q: "pass-Q", GATHER_KV: "gather-KV", CHAIN: "chain", SP_NTP: "SP-NTP"}
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}
"""Number of algorithms that may be chosen, in words."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen algorithm, one of PREFILL_ALGORITHMS, and the reason."""

    algorithm: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Prefill of T >= 1 new tokens after P >= 0 cached ones, on N ranks. Raises InvalidRequest."""

    new_tokens: int
    cached_tokens: int
    num_ranks: int

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 1), ("cached_tokens", 0), ("num_ranks", 1)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; allowed is {least} or more")

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence after the turn's prefill."""
        return self.new_tokens + self.cached_tokens

    @property
    def miss_rate(self) -> float:
        """Share of new tokens: T / (T + P)."""
        return self.new_tokens / (self.new_tokens + self.cached_tokens)


def fastest(turn: Turn, model: ModelShape, rates: PrefillRates, tie: float = TIE) -> Selection:
    """Select the least predicted time; a tie goes to the earlier one of PREFILL_ALGORITHMS."""
    predictor = StepPredictor(model, rates, turn.num_ranks)
    return choose_fastest(turn, predictor.seconds(turn.new_tokens, turn.cached_tokens), tie)


def choose_fastest(turn: Turn, seconds: Mapping[str, float], tie: float = TIE) -> Selection:
    """Select as `fastest` does, by predicted seconds that the caller has, in the order of PREFILL_ALGORITHMS."""
    if turn.num_ranks == 1:
        return alone()
    chosen = least(seconds, turn.num_tokens, tie)
    return Selection(chosen, why_fastest(seconds, chosen, turn.num_tokens, tie))


def why_fastest(seconds: Mapping[str, float], chosen: str, num_tokens: int, tie: float = TIE) -> str:
    """Say that `chosen` is fastest. Examples: "fastest of five, a tie with chain", "all five tie"."""
    compared = {name: each for name, each in seconds.items() if is_open(name, num_tokens)}
    ties = [
        NAMES[name]
        for name, each in compared.items()
        if name != chosen and not is_clearly_less(seconds[chosen], each, tie)
    ]
    if len(ties) == len(compared) - 1 > 1:
        return f"all {COUNTS[len(compared)]} tie"
    fastest = f"fastest of {COUNTS[len(compared)]}"
    return fastest + (f", a tie with {' and '.join(ties)}" if ties else "")


def least(seconds: Mapping[str, float], num_tokens: int, tie: float = TIE) -> str:
    """Return the algorithm of least time for a sequence of so many tokens; of a tie the first."""
    compared = {name: each for name, each in seconds.items() if is_open(name, num_tokens)}
    best = min(compared.values())
    return next(name for name, each in compared.items() if not is_clearly_less(best, each, tie))


def is_open(name: str, num_tokens: int) -> bool:
    """Return whether "auto" may choose an algorithm for a sequence of `num_tokens` tokens."""
    return name not in (GATHER_KV, CHAIN) or num_tokens <= GATHERED_TOKENS


def is_clearly_less(seconds: float, other: float, tie: float = TIE) -> bool:
    """Return whether `seconds` is less than `other` by more than a tie."""
    return seconds < (1.0 - tie) * other


def forced(algorithm: str) -> Selection:
    """Select the algorithm that the configuration or the caller names. Raises ConfigError if it is no algorithm."""
    if algorithm not in PREFILL_ALGORITHMS:
        raise ConfigError(f"algorithm is {algorithm!r}; allowed are {', '.join(PREFILL_ALGORITHMS)}")
    return Selection(algorithm, "the configuration sets it")


def select(policy: str, turn: Turn, model: ModelShape, rates: PrefillRates) -> Selection:
    """Select by a policy, one of POLICIES. Raises ConfigError for another one."""
    if policy == "auto":
        return fastest(turn, model, rates)
    if policy in PREFILL_ALGORITHMS:
        return forced(policy)
    raise ConfigError(f"selector is {policy!r}; allowed are {', '.join(POLICIES)}")


def alone() -> Selection:
    """Select for a ring of one rank."""
    return Selection(PASS_KV, "a ring of one rank sends no messages")


def duration(seconds: float) -> str:
    """Format seconds for a plan's reason: milliseconds below one second."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
