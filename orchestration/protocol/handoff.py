"""The hand-off of a turn from prefill ring to decode ring.

RESERVED ──first frame / admit──> STREAMING ──every token, layer, head once──> SEALED ──first token known──> ADMITTED
    │                                 │                                          │                             │
    └─────────────────────────────────┴──────────────> ABORTED <─────────────────┴─────────────────────────────┘
                                                                                                    ADMITTED ──> DONE
    ADMITTED ──its blocks go to an older turn──> PREEMPTED ──room again: a new attempt──> RESERVED
    RESERVED, STREAMING ──a new attempt could not begin──> PREEMPTED
    RESERVED ──the decode ring has computed the prompt itself──> SEALED

Who owns the decode ring's blocks: the decode leader from RESERVED on, always. Until SEALED the ranks' receivers may
write to them, or the decode loop where the ring computes the prompt itself, and in ADMITTED the decode loop may;
ABORTED, DONE and PREEMPTED are reached only after both have let go, so that only then the blocks go back to the pool.
Until the prefill leader's `finish_sends` returns, its ranks may read their own blocks of the sequence, and its pool
keeps them pinned.
"""

from __future__ import annotations

from enum import Enum, auto

ALLOWED = {
    "RESERVED": {"STREAMING", "SEALED", "ABORTED", "PREEMPTED"},
    "STREAMING": {"SEALED", "ABORTED", "PREEMPTED"},
    "SEALED": {"ADMITTED", "DONE", "ABORTED"},
    "ADMITTED": {"DONE", "ABORTED", "PREEMPTED"},
    "PREEMPTED": {"RESERVED", "DONE", "ABORTED"},
    "ABORTED": set(),
    "DONE": set(),
}


class HandoffState(Enum):
    """See the module's diagram. A turn whose first token already ends it goes from SEALED to DONE."""

    RESERVED = auto()
    STREAMING = auto()
    SEALED = auto()
    ADMITTED = auto()
    PREEMPTED = auto()
    ABORTED = auto()
    DONE = auto()

    def to(self, following: HandoffState) -> HandoffState:
        """The next state; an arrow that the diagram lacks is a bug."""
        assert following.name in ALLOWED[self.name], f"no hand-off goes from {self.name} to {following.name}"
        return following

    @property
    def is_over(self) -> bool:
        return self in (HandoffState.ABORTED, HandoffState.DONE)
