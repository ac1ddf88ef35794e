"""Limit of the KV that a tenant holds. The router checks it when it admits a turn or a fork.

A tenant's own idle conversations make room. `KvQuotas` chooses them; the caller releases their KV on the rings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ringserve.cp_core.errors import CapacityExceeded, InvalidRequest
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.protocol.turns import KvQuota

USUAL_ANSWER_TOKENS = 1024
"""Few answers are longer. An answer of no stated length takes no more than this from idle conversations' KV."""
BUSY_RETRY_SECONDS = 1.0
"""Seconds after which a refused client may retry. A guess: the end of the tenant's running turns is not known."""


class RunningTurnPort(Protocol):
    """Part of the router's `RunningTurn` that this package reads.

    `max_kv_tokens` is the most KV that it may need. `match_tokens` is how many leading tokens its prompt shares with
    the conversation so far.
    """

    @property
    def max_kv_tokens(self) -> int: ...
    @property
    def match_tokens(self) -> int: ...


class RunningTurnsPort(Protocol):
    """Part of the router's `TurnRegistry` that this package calls."""

    def __len__(self) -> int: ...
    def of_tenant(self, tenant: str) -> Iterable[RunningTurnPort]: ...
    def of_request(self, request_id: str) -> RunningTurnPort | None: ...
    async def free(self, conversation: Conversation) -> None: ...


class KvQuotas:
    """KV quotas of tenants, in tokens.

    Against a tenant's quota count the KV on rings of its conversations, and the KV that its running turns may need.
    While a turn runs, its whole prompt and longest possible answer count, and the KV of its conversation does not; so
    the quota is never exceeded. A token counts once in each conversation, however many rings store it, and even if a
    fork shares it. KV that a ring has evicted counts until it is released or used again.
    """

    def __init__(self, conversations: ConversationStore, turns: RunningTurnsPort) -> None:
        self._conversations = conversations
        self._turns = turns

    def admit(self, quota: KvQuota, conversation: Conversation, prompt: int, answer: int) -> list[Conversation]:
        """Make room for a turn of `prompt` prompt tokens and at most `answer` answer tokens.

        Return the KV that the caller must release on the rings. Only idle conversations of the tenant lose their KV,
        the least recently used first; their history is computed again when they continue. Raises CapacityExceeded
        if that is not enough now, InvalidRequest if it never is.
        """
        needed, limit = prompt + answer, quota.max_tokens
        if needed > limit:
            raise InvalidRequest(
                f"input: {prompt} prompt tokens and max_tokens {answer} make {needed}, and tenant {quota.tenant!r} may "
                f"hold at most {limit} KV tokens"
            )
        return self._make_room(quota, conversation, needed)

    def room_for_answer(self, quota: KvQuota, conversation: Conversation, prompt: int) -> int:
        """Return the most tokens of an answer of no stated length, perhaps none.

        It is half of what the tenant has left, so that the tenant's other turns find room too. For answers longer than
        `USUAL_ANSWER_TOKENS`, no idle conversation loses its KV.
        """
        others = self._others(quota, conversation)
        left = quota.max_tokens - prompt - self._held(quota, others)
        unused = left - sum(each.kv_tokens for each in others if each.is_idle)
        return max(min(left, 1), min(left // 2, USUAL_ANSWER_TOKENS), unused // 2)

    def admit_fork(self, quota: KvQuota, source: Conversation, num_tokens: int) -> list[Conversation]:
        """Make room for a fork of `num_tokens` tokens; the source keeps its KV. Return and raise as `admit` does."""
        needed, limit = source.kv_tokens + num_tokens, quota.max_tokens
        if needed > limit:
            raise InvalidRequest(
                f"source_id: the conversation and a fork of {num_tokens} tokens come to {needed} KV tokens, and tenant "
                f"{quota.tenant!r} may hold at most {limit}"
            )
        return self._make_room(quota, source, needed)

    def _make_room(self, quota: KvQuota, conversation: Conversation, needed: int) -> list[Conversation]:
        limit, others = quota.max_tokens, self._others(quota, conversation)
        idle = [each for each in others if each.is_idle and each.kv_tokens]
        held = self._held(quota, others)
        if held + needed > limit:
            raise CapacityExceeded(
                f"tenant {quota.tenant!r}: its running turns may need {held} KV tokens and this request {needed}, of "
                f"{limit} allowed; retry when a turn has ended",
                BUSY_RETRY_SECONDS,
            )
        surplus = held + needed + sum(each.kv_tokens for each in idle) - limit
        released = []
        for each in sorted(idle, key=lambda item: item.last_used):
            if surplus <= 0:
                break
            surplus -= each.kv_tokens
            released.append(each.release_kv())
        return released

    def _others(self, quota: KvQuota, conversation: Conversation) -> list[Conversation]:
        return [each for each in self._conversations.of_tenant(quota.tenant) if each is not conversation]

    def _held(self, quota: KvQuota, others: Iterable[Conversation]) -> int:
        """Return the KV tokens that running turns may need, plus those of other conversations that are being forked."""
        held = sum(turn.max_kv_tokens for turn in self._turns.of_tenant(quota.tenant))
        return held + sum(each.kv_tokens for each in others if each.num_forks and not each.running_request)
