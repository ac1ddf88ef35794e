"""The conversations a router knows: their tokens, and which ring holds how much of their KV."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cp_core.errors import Busy, NotFound
from cp_core.layout import ShardMap
from orchestration.turn import ConversationView, PlacementView
from workers.steps import TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Tokens [0, num_tokens) have their KV on one incarnation of one ring. Rings may have evicted it since."""

    group: str
    incarnation: str
    shards: ShardMap

    @property
    def num_tokens(self) -> int:
        return self.shards.num_tokens

    def cut(self, num_tokens: int) -> Placement:
        return Placement(group=self.group, incarnation=self.incarnation, shards=self.shards.truncate(num_tokens))


@dataclass(slots=True)
class Conversation:
    """`tokens` are those of all finished turns. `epoch` grows with every change of placement."""

    conversation_id: str
    tokens: TokenIds | None = None
    num_turns: int = 0
    epoch: int = 0
    running_request: str = ""
    prefill: Placement | None = None
    decode: Placement | None = None

    def view(self) -> ConversationView:
        sides = (("prefill", self.prefill), ("decode", self.decode))
        return ConversationView(
            conversation_id=self.conversation_id,
            num_tokens=0 if self.tokens is None else len(self.tokens),
            num_turns=self.num_turns,
            running_request_id=self.running_request,
            epoch=self.epoch,
            placements=tuple(
                PlacementView(
                    role=role,
                    group=side.group,
                    incarnation=side.incarnation,
                    num_tokens=side.num_tokens,
                    shards=side.shards,
                )
                for role, side in sides
                if side is not None
            ),
        )


class ConversationStore:
    """At most `limit` conversations; an idle one that was used least recently makes place for a new one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, conversation_id: str) -> Conversation:
        """Raises NotFound."""
        conversation = self._known.get(conversation_id)
        if conversation is None or (conversation.tokens is None and not conversation.running_request):
            raise NotFound(f"conversation_id: there is no conversation {conversation_id!r}")
        return conversation

    def open(self, conversation_id: str, request_id: str) -> tuple[Conversation, list[Conversation]]:
        """Begin a turn of a conversation, new or old. Returns it and those that had to go to make place.

        Raises Busy while another turn of it runs.
        """
        conversation = self._known.get(conversation_id)
        if conversation is None:
            conversation = self._known[conversation_id] = Conversation(conversation_id)
        if conversation.running_request:
            raise Busy(
                f"conversation_id: {conversation_id!r} is busy with request {conversation.running_request!r}; "
                f"one turn at a time is allowed"
            )
        conversation.running_request = request_id
        self._known.move_to_end(conversation_id)
        idle = [item for item in self._known.values() if not item.running_request]
        dropped = idle[: max(0, len(self._known) - self._limit)]
        for item in dropped:
            del self._known[item.conversation_id]
        return conversation, dropped

    def close(self, conversation: Conversation) -> None:
        """End the running turn; a conversation that never finished a turn is forgotten."""
        conversation.running_request = ""
        if conversation.tokens is None:
            self._known.pop(conversation.conversation_id, None)

    def remove(self, conversation_id: str) -> Conversation:
        """Raises NotFound, or Busy while a turn runs."""
        conversation = self.get(conversation_id)
        if conversation.running_request:
            raise Busy(
                f"conversation_id: {conversation_id!r} is busy with request {conversation.running_request!r} "
                f"and cannot be deleted until that ends"
            )
        return self._known.pop(conversation_id)
