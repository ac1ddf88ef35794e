"""Responses that later ones follow. The id of each names a conversation and a turn of it: its state after that turn.

    resp_<conversation>_<turn>

A response that follows the latest one of its conversation is the next turn of it. One that follows an earlier one
begins a fork. No gateway stores anything: the tokens are the router's, and any gateway serves what follows. The model
read the instructions and the tools of the first request, so the conversation's name has digests of both, and others are
refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b

from ringserve.cp_core.errors import Busy, ConversationLost, InvalidRequest, NotFound, RingserveError
from ringserve.services.auth.scoped_router import ScopedRouter
from ringserve.v1 import inference_pb2
from ringserve.views import ConversationInfo

ID = re.compile(
    r"resp_(?P<conversation>[0-9a-f]{12}(?P<instructions>[0-9a-f]{8})(?P<tools>[0-9a-f]{8}))_(?P<turn>\d{1,9})"
)
NO_DIGEST = "0" * 8
UNSTORED_SECONDS = 3600.0
"""Time to live of a fork for a response that is not stored, where its gateway is lost before it can delete it."""

Responses = AsyncIterator[inference_pb2.GenerateResponse]


def digest(text: str) -> str:
    """Return eight hexadecimal digits by which a text is known again."""
    return blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ResponseName:
    """Turn of a conversation, and digests of what its first request told the model; empty where it told nothing."""

    conversation: str
    turn: int
    instructions: str
    tools: str

    @staticmethod
    def read(response_id: str) -> ResponseName | None:
        """Read the id of a response; None for an empty one. Raises NotFound for one that never names a conversation."""
        if not response_id:
            return None
        found = ID.fullmatch(response_id)
        if found is None:
            raise not_held(response_id)
        digests = {name: found[name].removeprefix(NO_DIGEST) for name in ("instructions", "tools")}
        return ResponseName(conversation=f"resp-{found['conversation']}", turn=int(found["turn"]), **digests)

    @staticmethod
    def new(instructions: str, tools: str) -> ResponseName:
        """Return the name of the first response of a conversation."""
        name = secrets.token_hex(6) + (instructions or NO_DIGEST) + (tools or NO_DIGEST)
        return ResponseName(conversation=f"resp-{name}", turn=1, instructions=instructions, tools=tools)

    @property
    def response_id(self) -> str:
        """The id that clients see."""
        return f"{self.conversation.replace('-', '_')}_{self.turn}"


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links of a request for a response: the one that it follows, and whether others may follow it."""

    previous: ResponseName | None
    is_stored: bool
    instructions: str
    tools: str

    def check(self) -> None:
        """Check that the model has read what the request tells it. Raises InvalidRequest."""
        before = self.previous
        if before is None:
            return
        for name, told, known in (
            ("instructions", self.instructions, before.instructions),
            ("tools", self.tools, before.tools),
        ):
            if told and told != known:
                raise InvalidRequest(
                    f"{name}: not those that the conversation of previous_response_id began with; repeat these, or "
                    f"send the history in input"
                )


Fill = Callable[[int], Awaitable[None]]
"""Function that writes the prompt of a request behind an answer whose last token it is given."""


class LinkedTurn:
    """Turn of a request for a response, in the conversation that its links name."""

    def __init__(self, links: Links, router: ScopedRouter, request: inference_pb2.GenerateRequest, fill: Fill) -> None:
        links.check()
        self._links = links
        self._router = router
        self._request = request
        self._fill = fill
        self._fork = ""
        self.response_id = ""

    async def responses(
        self, generate: Callable[[], AbstractAsyncContextManager[Responses]]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yield the responses of the turn. Raises RingserveError, NotFound for a response that is not held any more.

        Another turn may follow the same response just now, and is in the way: then this one begins in a fork.
        """
        is_begun = is_whole = False
        try:
            for is_forked in (False, True):
                is_forked = await self._place(is_forked=is_forked)
                try:
                    async with generate() as responses:
                        async for response in responses:
                            is_begun = True
                            yield response
                    is_whole = True
                    return
                except (Busy, ConversationLost):
                    if is_begun or is_forked or self._links.previous is None:
                        raise
        finally:
            # A fork stays for those that follow its answer, and nobody follows one that did not end well.
            if self._fork and not (is_whole and self._links.is_stored):
                with suppress(RingserveError):  # an answer that was cut is still ending: it expires
                    await self._router.delete_conversation(self._fork)

    async def _place(self, *, is_forked: bool) -> bool:
        """Name the turn's conversation in its request, and in `response_id`. Return whether it is a fork."""
        links, request, previous = self._links, self._request, self._links.previous
        if previous is None:
            if links.is_stored:
                name = ResponseName.new(links.instructions, links.tools)
                request.conversation_id, self.response_id = name.conversation, name.response_id
            return False
        try:
            view = await self._router.get_conversation(previous.conversation)
        except NotFound as error:
            raise not_held(previous.response_id) from error
        if view.num_turns < previous.turn:  # that answer has not ended well
            raise not_held(previous.response_id)
        is_latest = view.num_turns == previous.turn and not view.running_request_id
        is_forked = is_forked or not links.is_stored or not is_latest
        name = ResponseName(
            conversation=previous.conversation,
            turn=previous.turn + 1,
            instructions=previous.instructions,
            tools=previous.tools,
        )
        if is_forked:
            name = ResponseName.new(previous.instructions, previous.tools)
            end = _end_of(view, previous)
            view = await self._router.fork_conversation(previous.conversation, name.conversation, end)
            self._fork = name.conversation
            if not links.is_stored:
                request.conversation_ttl_seconds = UNSTORED_SECONDS
        if view.last_token is None:
            raise not_held(previous.response_id)
        await self._fill(view.last_token)
        request.conversation_id, request.expected_tokens = name.conversation, view.num_tokens
        self.response_id = name.response_id if links.is_stored else ""
        return is_forked


def _end_of(view: ConversationInfo, name: ResponseName) -> int:
    """Return the tokens of a conversation after a turn. Raises NotFound where they are not known any more."""
    place = name.turn - 1 - (view.num_turns - len(view.turn_ends))
    if not 0 <= place < len(view.turn_ends):
        raise NotFound(
            f"response {name.response_id!r} is not the latest of its conversation, and where it ended is not held any "
            f"more; follow the latest, or send the history in input"
        )
    return view.turn_ends[place]


def not_held(response_id: str) -> NotFound:
    """Return the refusal of a response that no conversation is remembered of."""
    return NotFound(f"response {response_id[:80]!r} is not held, or not any more; send the history in input")
