"""How much KV a tenant may hold: checked when a turn begins, made room for at the tenant's own cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cp_core.errors import CapacityExceeded, InvalidRequest
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.protocol.turns import KvQuota

BUSY_RETRY_SECONDS = 1.0
"""How soon one of a tenant's turns may have ended; nobody knows."""


class RunningTurn(Protocol):
    """Turn that runs, as far as conversations look at it.

    `max_kv_tokens` is the KV that it may come to. `match_tokens` is how many tokens of its prompt begin the
    conversation so far.
    """

    @property
    def max_kv_tokens(self) -> int: ...
    @property
    def match_tokens(self) -> int: ...


class RunningTurns(Protocol):
    """Registry of the running turns, as far as conversations ask it."""

    def of_tenant(self, tenant: str) -> Iterable[RunningTurn]: ...
    def of_request(self, request_id: str) -> RunningTurn | None: ...
    async def free(self, conversation: Conversation) -> None: ...


class KvQuotas:
    """Counts tokens by the router's books: what `conversations` have on rings, and what running `turns` may come to.

    A running turn counts with its whole prompt and all that it may answer, and its conversation by nothing else: so the
    quota is never passed. Each token counts once for each conversation, whichever rings it is on, and whether or not a
    fork shares it. What rings have evicted meanwhile is not known here: it counts until it is let go or used again.
    """

    def __init__(self, conversations: ConversationStore, turns: RunningTurns) -> None:
        self._conversations = conversations
        self._turns = turns

    def admit(self, quota: KvQuota, conversation: Conversation, prompt: int, answer: int) -> list[Conversation]:
        """Make room for a turn of so many tokens. Returns what is to be freed on the rings.

        The tenant's idle conversations lose their KV, the least recently used first, and nothing else: they go on as
        before, at the price of computing their history again. Raises CapacityExceeded where that is not enough;
        InvalidRequest where nothing ever would be.
        """
        needed, limit = prompt + answer, quota.max_tokens
        if needed > limit:
            raise InvalidRequest(
                f"input: {prompt} prompt tokens and max_tokens {answer} make {needed}, and tenant {quota.tenant!r} may "
                f"hold at most {limit} KV tokens"
            )
        others = [each for each in self._conversations.of_tenant(quota.tenant) if each is not conversation]
        idle = [each for each in others if each.is_idle and each.kv_tokens]
        held = sum(turn.max_kv_tokens for turn in self._turns.of_tenant(quota.tenant))
        held += sum(each.kv_tokens for each in others if each.num_forks and not each.running_request)
        if held + needed > limit:
            raise CapacityExceeded(
                f"tenant {quota.tenant!r}: running turns may come to {held} KV tokens, this one to {needed}, and it "
                f"may hold at most {limit}; retry when one has ended",
                BUSY_RETRY_SECONDS,
            )
        surplus = held + needed + sum(each.kv_tokens for each in idle) - limit
        release_kv = []
        for each in sorted(idle, key=lambda item: item.last_used):
            if surplus <= 0:
                break
            surplus -= each.kv_tokens
            release_kv.append(each.release_kv())
        return release_kv
