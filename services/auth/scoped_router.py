"""Router as one tenant sees it. Router ids are `tenant/id`, so a tenant cannot name another tenant's ids.

Tenant names contain no slash, so ids of two tenants never coincide. Without tenants, the router uses the clients' ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from ringserve.cp_core.errors import RingserveError
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.orchestration.protocol.turns import KvQuota
from ringserve.services.auth.tenants import Tenant
from ringserve.views import ConversationInfo, ConversationPage, ConversationSummary

T = TypeVar("T")
TView = TypeVar("TView", ConversationInfo, ConversationSummary)
TError = TypeVar("TError", bound=RingserveError)


class ScopedRouter:
    """One tenant's router, for the servers that clients call. Errors and views show ids as the client gave them."""

    def __init__(self, router: RouterPort, tenant: Tenant) -> None:
        self._router = router
        self.tenant = tenant
        self._prefix = f"{tenant.name}/" if tenant.name else ""
        limit = tenant.max_kv_tokens
        self.kv_quota = KvQuota(tenant=tenant.name, max_tokens=limit) if limit else None

    def scope(self, name: str) -> str:
        """Return a client's id as the router knows it; an empty id stays empty. Example: "c" becomes "acme/c"."""
        return f"{self._prefix}{name}" if name else ""

    def unscope_error(self, error: TError) -> TError:
        """Return an error with its ids as the client gave them."""
        if self._prefix and error.args:
            message = str(error.args[0])
            for quote in ("'", '"'):
                message = message.replace(f"{quote}{self._prefix}", quote)
            error.args = (message, *error.args[1:])
        return error

    def unscope(self, name: str) -> str:
        """Return a router id as the client gave it."""
        return name.removeprefix(self._prefix)

    async def abort_requests(self, request_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Abort requests and return (aborted, unknown) ids; another tenant's requests are unknown."""
        # '' names no request: it is passed on unchanged and stays unknown.
        answer = await self._translate_errors(self._router.abort_requests([self.scope(name) for name in request_ids]))
        aborted, unknown = ([self.unscope(name) for name in names] for names in answer)
        return aborted, unknown

    async def get_conversation(self, conversation_id: str) -> ConversationInfo:
        return self._unscope_view(
            await self._translate_errors(self._router.get_conversation(self.scope(conversation_id)))
        )

    async def list_conversations(self, prefix: str, after: str, limit: int) -> ConversationPage:
        """List the tenant's own conversations: ids that begin with its name."""
        listing = self._router.list_conversations(f"{self._prefix}{prefix}", self.scope(after), limit)
        page = await self._translate_errors(listing)
        return replace(
            page,
            conversations=tuple(map(self._unscope_view, page.conversations)),
            next_page_token=self.unscope(page.next_page_token),
        )

    async def fork_conversation(self, source_id: str, new_id: str, at_token: int | None) -> ConversationInfo:
        fork = self._router.fork_conversation(self.scope(source_id), self.scope(new_id), at_token, self.kv_quota)
        return self._unscope_view(await self._translate_errors(fork))

    async def delete_conversation(self, conversation_id: str) -> None:
        await self._translate_errors(self._router.delete_conversation(self.scope(conversation_id)))

    def _unscope_view(self, view: TView) -> TView:
        """Return a view with its ids as the client gave them."""
        return replace(
            view,
            conversation_id=self.unscope(view.conversation_id),
            running_request_id=self.unscope(view.running_request_id),
        )

    async def _translate_errors(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RingserveError as error:
            raise self.unscope_error(error) from None
