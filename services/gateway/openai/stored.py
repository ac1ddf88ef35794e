"""Responses that later requests can follow. A response id names a conversation and one of its turns.

    resp_<conversation>_<turn>

A request that follows a conversation's latest response becomes its next turn; a request that follows an earlier
response begins a fork. The router has the tokens, so any gateway can serve the next request. The answer itself can be
fetched again from the gateway that gave it, as long as that one has room for it. The HTTP application runs such
requests as `LinkedTurn`s.

The model has read the instructions and tools of the conversation's first request, so they cannot change afterwards: the
conversation's name holds digests of both, and requests with different ones are refused.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ringserve.cp_core.errors import Busy, ConversationLost, InvalidRequest, NotFound, RingserveError
from ringserve.services.auth.authenticator import ScopedRouter
from ringserve.v1 import inference_pb2
from ringserve.views import ConversationInfo

ID = re.compile(
    r"resp_(?P<conversation>[0-9a-f]{12}(?P<instructions>[0-9a-f]{8})(?P<tools>[0-9a-f]{8}))_(?P<turn>\d{1,9})"
)
NO_DIGEST = "0" * 8
UNSTORED_SECONDS = 3600.0
"""Time to live of a fork for an unstored response, in case its gateway dies before deleting it."""

MAX_KEPT_BYTES = 32 << 20
"""Room of a gateway for answers that clients may fetch again, as JSON."""

Responses = AsyncIterator[inference_pb2.GenerateResponse]


def digest(text: str) -> str:
    """Return eight hexadecimal digits that identify a text."""
    return blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ResponseName:
    """Conversation turn, with digests of its first request's instructions and tools; empty if it had none."""

    conversation: str
    turn: int
    instructions: str
    tools: str

    @staticmethod
    def read(response_id: str) -> ResponseName | None:
        """Parse a response id; None if it is empty. Raises NotFound for an id that cannot name a conversation."""
        if not response_id:
            return None
        found = ID.fullmatch(response_id)
        if found is None:
            raise make_not_held_error(response_id)
        digests = {name: found[name].removeprefix(NO_DIGEST) for name in ("instructions", "tools")}
        return ResponseName(conversation=f"resp-{found['conversation']}", turn=int(found["turn"]), **digests)

    @staticmethod
    def new(instructions: str, tools: str) -> ResponseName:
        """Return the name of a new conversation's first response."""
        name = secrets.token_hex(6) + (instructions or NO_DIGEST) + (tools or NO_DIGEST)
        return ResponseName(conversation=f"resp-{name}", turn=1, instructions=instructions, tools=tools)

    @property
    def response_id(self) -> str:
        """Id that clients see."""
        return f"{self.conversation.replace('-', '_')}_{self.turn}"


@dataclass(frozen=True, kw_only=True)
class Links:
    """The response that a request follows, and whether later requests may follow its own."""

    previous: ResponseName | None
    is_stored: bool
    instructions: str
    tools: str

    def check(self) -> None:
        """Check that the conversation began with the request's instructions and tools. Raises InvalidRequest."""
        before = self.previous
        if before is None:
            return
        for name, told, known in (
            ("instructions", self.instructions, before.instructions),
            ("tools", self.tools, before.tools),
        ):
            if told and told != known:
                raise InvalidRequest(
                    f"{name}: differ from the {name} that the conversation of previous_response_id began with; repeat "
                    f"them, or send the history in input"
                )


class KeptAnswers:
    """Answers of one gateway by tenant and response id; the oldest make room for new ones."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def keep(self, tenant: str, answer: Mapping[str, Any]) -> None:
        """Keep a stored answer, unless it is larger than the whole room."""
        if not answer["store"]:
            return
        body = json.dumps(answer).encode()
        if len(body) > self._max_bytes:
            return
        self._num_bytes += len(body) - len(self._answers.pop((tenant, answer["id"]), b""))
        self._answers[tenant, answer["id"]] = body
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._answers.popitem(last=False)[1])

    async def fetch(self, tenant: str, name: ResponseName, router: ScopedRouter) -> bytes:
        """Return an answer as JSON. Raises NotFound if it, or its conversation, is no longer held."""
        try:
            view = await router.get_conversation(name.conversation)
        except NotFound as error:
            raise make_not_held_error(name.response_id) from error
        body = self._answers.get((tenant, name.response_id))
        if view.num_turns < name.turn:
            raise make_not_held_error(name.response_id)
        if body is None:
            raise NotFound(
                f"response {name.response_id!r} can be followed, but its answer is no longer kept; use "
                f"previous_response_id. The gateway that gave an answer keeps it only for a while"
            )
        return body


Fill = Callable[[int], Awaitable[None]]
"""Function that writes a request's prompt, given the last token of the previous answer."""


class LinkedTurn:
    """Turn for one request, in the conversation that its links name."""

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
        """Yield the turn's responses. Raises RingserveError; NotFound if the previous response is no longer held.

        If another running turn already follows the same response, this turn begins in a fork.
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
            # Keep a fork only if a later request can follow it: a stored answer that ended well.
            if self._fork and not (is_whole and self._links.is_stored):
                with suppress(RingserveError):  # a cut answer may still be ending; its fork then expires
                    await self._router.delete_conversation(self._fork)

    async def _place(self, *, is_forked: bool) -> bool:
        """Set the request's conversation and `response_id`. Return whether the conversation is a fork."""
        links, request, previous = self._links, self._request, self._links.previous
        if previous is None:
            if links.is_stored:
                name = ResponseName.new(links.instructions, links.tools)
                request.conversation_id, self.response_id = name.conversation, name.response_id
            return False
        try:
            view = await self._router.get_conversation(previous.conversation)
        except NotFound as error:
            raise make_not_held_error(previous.response_id) from error
        if view.num_turns < previous.turn:  # the previous answer did not end well
            raise make_not_held_error(previous.response_id)
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
            end = _find_turn_end(view, previous)
            view = await self._router.fork_conversation(previous.conversation, name.conversation, end)
            self._fork = name.conversation
            if not links.is_stored:
                request.conversation_ttl_seconds = UNSTORED_SECONDS
        if view.last_token is None:
            raise make_not_held_error(previous.response_id)
        await self._fill(view.last_token)
        request.conversation_id, request.expected_tokens = name.conversation, view.num_tokens
        self.response_id = name.response_id if links.is_stored else ""
        return is_forked


def _find_turn_end(view: ConversationInfo, name: ResponseName) -> int:
    """Return a conversation's number of tokens after a turn. Raises NotFound if the router no longer knows it."""
    place = name.turn - 1 - (view.num_turns - len(view.turn_ends))
    if not 0 <= place < len(view.turn_ends):
        raise NotFound(
            f"response {name.response_id!r} is not the latest of its conversation, and its end is no longer held; "
            f"follow the latest, or send the history in input"
        )
    return view.turn_ends[place]


def make_not_held_error(response_id: str) -> NotFound:
    """Return the error for a response whose conversation is unknown."""
    return NotFound(f"response {response_id[:80]!r} is not stored, or is no longer stored; send the history in input")
