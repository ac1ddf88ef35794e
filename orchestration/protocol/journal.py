"""Port to the router's journal: running turns and conversations, across restarts.

`orchestration.journal` implements it over SQLite. `NoJournal` is for a router that remembers nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.protocol.plans import SparsePlan, TurnPlan
from ringserve.orchestration.protocol.turns import BegunTurn, TurnRequest
from ringserve.workers.protocol.steps import FinishReason, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class RingIncarnation:
    """One life of a ring."""

    ring: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunRecord:
    """Turn that has begun. Its prompt is the first `base_tokens` tokens of its conversation, then `request.token_ids`.

    Without a `prefill` ring the decode ring computes the prompt. `begun_at` is in seconds since 1970. With `sparse` the
    turn's KV is approximate.
    """

    turn_id: str
    request: TurnRequest
    base_tokens: int
    prefill: RingIncarnation | None
    decode: RingIncarnation
    attempt: int
    begun_at: float
    sparse: SparsePlan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedRecord:
    """Good end of a turn. The decode ring retains `kv_tokens` tokens of its sequence.

    Without `plan` a client that asks again does not get the answer again.
    """

    turn_id: str
    answer: TokenIds
    finish_reason: FinishReason | None
    kv_tokens: int
    ended_at: float
    plan: TurnPlan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConversation:
    """Conversation in the journal. `last_turn` made its newest tokens; `last_used` is in seconds since 1970.

    All KV of its tokens, on any ring, was computed with `sparsity`; None: the KV is exact.
    """

    conversation_id: str
    num_tokens: int
    num_turns: int
    forked_from: str
    ttl_seconds: float
    last_used: float
    last_turn: str
    sparsity: Sparsity | None = None


class JournalPort(Protocol):
    """Router journal. `epoch` grows with every start of a router on it; 0: the router remembers nothing.

    Records become durable in the order of the calls. The awaitable of a call ends when its record is durable, and
    raises Unavailable if the record could not be written.
    """

    epoch: int

    def begun(self, record: BegunRecord) -> Awaitable[None]: ...

    def committed(self, record: CommittedRecord) -> Awaitable[None]:
        """End a turn well: its conversation has its prompt and answer from now on. Idempotent."""

    def failed(self, turn_id: str) -> Awaitable[None]:
        """End a turn that leaves its conversation as it was. Idempotent."""

    def forked(self, source_id: str, new: StoredConversation) -> Awaitable[None]:
        """Begin a conversation with the first `new.num_tokens` tokens of another."""

    def deleted(self, conversation_ids: Sequence[str]) -> Awaitable[None]: ...

    def conversations(self) -> Iterable[StoredConversation]:
        """Return the conversations of earlier epochs, the least recently used first."""

    def turns(self) -> Iterable[BegunRecord]:
        """Return the turns of earlier epochs whose end is not in the journal."""

    def ended(self) -> Iterable[tuple[str, int]]:
        """Return recent turns that ended well, and how many tokens their decode rings retain."""

    def answer_of(self, request_id: str) -> BegunTurn | None:
        """Return the answer of a request, if its turn ended well and recently."""

    def tokens_of(self, conversation_id: str) -> TokenIds:
        """Return the tokens of a conversation."""

    def num_agreeing(self, conversation_id: str, turn_id: str) -> int:
        """Return how many leading tokens of a turn's prompt and answer the conversation's present history has."""

    def close(self) -> None: ...


class NoJournal:
    """Journal of a router that remembers nothing."""

    epoch = 0

    def begun(self, record: BegunRecord) -> Awaitable[None]:
        return _Done()

    def committed(self, record: CommittedRecord) -> Awaitable[None]:
        return _Done()

    def failed(self, turn_id: str) -> Awaitable[None]:
        return _Done()

    def forked(self, source_id: str, new: StoredConversation) -> Awaitable[None]:
        return _Done()

    def deleted(self, conversation_ids: Sequence[str]) -> Awaitable[None]:
        return _Done()

    def conversations(self) -> Iterable[StoredConversation]:
        return ()

    def turns(self) -> Iterable[BegunRecord]:
        return ()

    def ended(self) -> Iterable[tuple[str, int]]:
        return ()

    def answer_of(self, request_id: str) -> BegunTurn | None:
        return None

    def tokens_of(self, conversation_id: str) -> TokenIds:
        raise AssertionError(f"nothing is stored of {conversation_id!r}")

    def num_agreeing(self, conversation_id: str, turn_id: str) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""


class _Done:
    """Awaitable that is done."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield
