"""Static pages at `/` and `/docs`, which the HTTP application mounts. Their scripts read its JSON views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/docs": ("docs.html", "text/html"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("page", "base", "turns", "docs")},
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of every page: with them a page loads nothing from other hosts, and no other page may frame it."""


def page_routes() -> list[Route]:
    """Return the routes of the static files. They show nothing of the service and need no token."""
    return [Route(path, _file(name, kind), methods=["GET"]) for path, (name, kind) in FILES.items()]


def _file(name: str, kind: str) -> Callable[[Request], Any]:
    content = (Path(__file__).parent / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer
