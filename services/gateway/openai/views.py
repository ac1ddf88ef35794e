"""JSON views of the service and of conversations: the status page reads them, and other programs may.

An operator sees the whole service; another tenant sees its own conversations and whether the service serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ringserve.cp_core.errors import Forbidden, Unavailable
from ringserve.orchestration.protocol.views import service_fault
from ringserve.services.auth.authenticator import Authenticator, ScopedRouter
from ringserve.services.auth.tenants import Tenant
from ringserve.services.gateway.openai.models import ConversationsQuery, ForkRequest
from ringserve.services.gateway.openai.openapi import ApiRoute
from ringserve.services.gateway.openai.responses import Json, conversation_json
from ringserve.services.gateway.requests import check_identifier, check_name
from ringserve.services.rpc.answer import message_dict
from ringserve.services.rpc.wire.contract import to_message
from ringserve.services.telemetry.metrics.registry import package_version
from ringserve.v1 import inference_pb2
from ringserve.views import ConversationInfo, RingInfo, ServerInfo
from ringserve.workers.protocol.ranks import ModelInfo

VIEW_TIMEOUT_SECONDS = 5.0
"""Seconds the router has to return the service's state."""
MAX_VIEW_AGE_SECONDS = 1.0
"""Seconds for which all callers get the same state: any number of probes and pages cost one router call a second."""


class ViewedService(Protocol):
    """Service behind the views: the gateway."""

    def router_for(self, tenant: Tenant) -> ScopedRouter:
        """Return the router as a tenant sees it."""

    async def server_view(self) -> ServerInfo:
        """Return the state of the service as the router sees it. Raises Unavailable."""

    def load_view(self) -> dict[str, object]:
        """Return this gateway's uptime in seconds and its recent load."""

    async def fork_conversation(
        self, tenant: Tenant, source_id: str, new_id: str, at_token: int | None
    ) -> ConversationInfo:
        """Begin a conversation with the tokens of another of the tenant, within its limits. Raises RingserveError."""


class ServiceViews:
    """JSON views of the service and of conversations. `caller` returns a request's tenant."""

    def __init__(
        self,
        service: ViewedService,
        model_name: str,
        model: ModelInfo,
        authenticator: Authenticator,
        caller: Callable[[Request], Tenant],
    ) -> None:
        self._service = service
        self._model_name = model_name
        self._model = model
        self._authenticator = authenticator
        self._caller = caller
        self._looking = asyncio.Lock()
        self._seen: ServerInfo | None = None
        self._seen_at = 0.0

    def routes(self) -> list[ApiRoute]:
        get = partial(ApiRoute, "GET")
        return [
            get("/health", self._health, "Answer 200 if turns can be served.", is_open=True),
            get("/ping", self._health, "Same as /health, for other servers' probes.", is_open=True),
            get("/v1/service", self._show_service, "Show the service: rings, drains, queues."),
            get("/v1/conversations", self._list, "List the caller's conversations.", query=ConversationsQuery),
        ]

    async def fork(self, request: Request, body: Any) -> Response:
        """Answer POST /v1/conversations: begin a conversation with the tokens of another of the tenant."""
        asked = ForkRequest.read(body)
        source, new = check_name("forked_from", asked.forked_from), check_name("id", asked.id)
        view = await self._service.fork_conversation(self._caller(request), source, new, asked.at_token)
        return JSONResponse(conversation_json(view))

    async def _health(self, request: Request) -> Response:
        """Answer 200 if a turn can be served: the router answers, and each role has a ring that serves or restarts."""
        if fault := service_fault(await self._view()):
            raise Unavailable(fault)
        return JSONResponse({"status": "ok"})

    async def _show_service(self, request: Request) -> Response:
        tenant = self._caller(request)
        answer: Json = {"object": "service", "model": self._model_name, "version": package_version()}
        try:
            view = await self._view()
        except Unavailable as error:
            return JSONResponse(answer | {"serves": False, "fault": str(error)})
        fault = service_fault(view)
        answer |= {"serves": not fault, "fault": fault}
        try:
            self._authenticator.check_operator(tenant)
        except Forbidden:
            return JSONResponse(answer)
        known = message_dict(to_message(inference_pb2.GetServerInfoResponse, view))
        for status, ring in zip(view.rings, known["rings"], strict=True):
            ring["queue_seconds"] = queue_seconds(status, self._model)
        del known["version"]  # the router leaves it empty; the gateway's stays
        return JSONResponse(answer | known | self._service.load_view())

    async def _list(self, request: Request) -> Response:
        router = self._service.router_for(self._caller(request))
        asked = ConversationsQuery.read(dict(request.query_params))
        prefix, after = check_identifier("prefix", asked.prefix), check_identifier("after", asked.after)
        listing = await router.list_conversations(prefix, after, asked.limit)
        known = message_dict(to_message(inference_pb2.ListConversationsResponse, listing))
        data = [
            {"id": each["conversation_id"], "object": "conversation", "ringserve": each}
            for each in known["conversations"]
        ]
        more = known["next_page_token"]
        return JSONResponse({"object": "list", "data": data, "has_more": bool(more), "next_after": more})

    async def _view(self) -> ServerInfo:
        """Return the service's state, at most MAX_VIEW_AGE_SECONDS old. Raises Unavailable."""
        try:
            async with asyncio.timeout(VIEW_TIMEOUT_SECONDS), self._looking:
                if self._seen is None or time.monotonic() - self._seen_at >= MAX_VIEW_AGE_SECONDS:
                    self._seen = await self._service.server_view()
                    self._seen_at = time.monotonic()
                return self._seen
        except TimeoutError:
            raise Unavailable(f"the router did not answer within {VIEW_TIMEOUT_SECONDS:.0f} s") from None


def queue_seconds(ring: RingInfo, model: ModelInfo) -> float | None:
    """Return the seconds of work that wait at a prefill ring; None before the ring has measured its speed."""
    if ring.rates is None or ring.rates.gemm_flops <= 0:
        return None
    work_per_second = ring.num_ranks * ring.rates.gemm_flops / model.shape.share(ring.tp).linear_flops_per_token
    return ring.waiting_work / work_per_second
