"""Router as one tenant sees it. Ids at the router are `tenant/id`, so a tenant cannot name the ids of another.

A tenant's name holds no slash: the first slash ends it, and ids of two tenants never coincide. Without tenants, ids are
as the client gives them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from ringserve.cp_core.errors import RingserveError
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.orchestration.protocol.turns import BegunTurn, KvQuota, TurnRequest
from ringserve.services.auth.tenants import Tenant
from ringserve.views import ConversationInfo, ConversationPage, ConversationSummary, ServerInfo

T = TypeVar("T")
TView = TypeVar("TView", ConversationInfo, ConversationSummary)
TError = TypeVar("TError", bound=RingserveError)


class ScopedRouter:
    """Router of one tenant, for the servers that clients call."""

    def __init__(self, router: RouterPort, tenant: Tenant) -> None:
        self._router = router
        self.tenant = tenant
        self._prefix = f"{tenant.name}/" if tenant.name else ""
        limit = tenant.max_kv_tokens
        self.kv_quota = KvQuota(tenant=tenant.name, max_tokens=limit) if limit else None

    def scoped(self, name: str) -> str:
        """Return a client's id as the router knows it; an empty id stays empty."""
        return f"{self._prefix}{name}" if name else ""

    def shown(self, error: TError) -> TError:
        """Return an error with its ids as the client gave them."""
        if self._prefix and error.args:
            message = str(error.args[0])
            for quote in ("'", '"'):
                message = message.replace(f"{quote}{self._prefix}", quote)
            error.args = (message, *error.args[1:])
        return error

    def unscoped(self, name: str) -> str:
        """Return an id of the router as the client gave it."""
        return name.removeprefix(self._prefix)

    async def begin_turn(self, request: TurnRequest) -> BegunTurn:
        """Begin a turn from `RequestReader`, whose ids and quota are already the tenant's; errors have them too."""
        assert request.request_id.startswith(self._prefix), "the request is another tenant's"
        return await self._router.begin_turn(request)

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Abort requests and return (aborted, unknown) ids; those of another tenant are unknown."""
        # '' names no request; passed on as it is, it stays unknown.
        answer = await self._shown(self._router.abort_requests([self.scoped(name) for name in request_ids]))
        aborted, unknown = ([self.unscoped(name) for name in names] for names in answer)
        return aborted, unknown

    async def get_conversation(self, conversation_id: str) -> ConversationInfo:
        return self._own(await self._shown(self._router.get_conversation(self.scoped(conversation_id))))

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationPage:
        """List the tenant's own conversations: the router is asked for ids that begin with its name."""
        listing = self._router.list_conversations(f"{self._prefix}{prefix}", self.scoped(after), limit)
        page = await self._shown(listing)
        return replace(
            page,
            conversations=tuple(map(self._own, page.conversations)),
            next_page_token=self.unscoped(page.next_page_token),
        )

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationInfo:
        fork = self._router.fork_conversation(self.scoped(source_id), self.scoped(new_id), at_token, self.kv_quota)
        return self._own(await self._shown(fork))

    async def delete_conversation(self, conversation_id: str) -> None:
        await self._shown(self._router.delete_conversation(self.scoped(conversation_id)))

    async def get_server_info(self) -> ServerInfo:
        """Return the state of the whole service; the server decides who may ask."""
        return await self._shown(self._router.get_server_info())

    def _own(self, view: TView) -> TView:
        """Return a view with its ids as the client gave them."""
        return replace(
            view,
            conversation_id=self.unscoped(view.conversation_id),
            running_request_id=self.unscoped(view.running_request_id),
        )

    async def _shown(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RingserveError as error:
            raise self.shown(error) from None
