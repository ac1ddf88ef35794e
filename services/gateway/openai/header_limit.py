"""How much a request may say before its body. h11 bounds only headers that come in pieces."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.openai.errors import BadHttpRequest, error_body

MAX_HEADER_BYTES = 32 * 1024
"""Of one request, its path included."""


class HeaderLimit:
    """Middleware that refuses larger ones, before anything of theirs is looked at."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and _size(scope) > MAX_HEADER_BYTES:
            refusal = BadHttpRequest(431, f"path and headers are larger than {MAX_HEADER_BYTES} bytes", "too_large")
            answer = JSONResponse(error_body(refusal), refusal.status)
        await answer(scope, receive, send)


def _size(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])
