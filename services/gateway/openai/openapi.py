"""OpenAPI document, which the HTTP application makes from its routes and their body and answer models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ringserve.services.gateway.openai.models import ErrorAnswer, SchemaMaker

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
REF = "#/components/schemas/{model}"


class ApiRoute(Route):
    """API route with its OpenAPI description.

    `body`, `query` and `answer` are pydantic models. `is_open` routes need no token.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[[Request], Awaitable[ASGIApp]],
        summary: str,
        body: type[BaseModel] | None = None,
        answer: type[BaseModel] | None = None,
        *,
        query: type[BaseModel] | None = None,
        content_type: str = "application/json",
        is_open: bool = False,
        error: type[BaseModel] = ErrorAnswer,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method = method.lower()
        self.summary = summary
        self.body = body
        self.query = query
        self.answer = answer
        self.content_type = content_type
        self.is_open = is_open
        self.error = error

    @property
    def models(self) -> Iterator[type[BaseModel]]:
        return (model for model in (self.body, self.answer, self.error) if model is not None)

    def describe(self) -> Json:
        """Return the route's OpenAPI operation."""
        found: Json = {
            "summary": self.summary,
            "responses": {
                "200": {"description": "Done.", "content": {self.content_type: {"schema": self._answer_schema()}}},
                "default": {
                    "description": "Refused or failed.",
                    "content": {"application/json": {"schema": _ref(self.error)}},
                },
            },
        }
        if self.is_open:
            found["security"] = [{}]
        if "{name" in self.path:
            found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
        if self.query is not None:
            fields = self.query.model_json_schema(schema_generator=SchemaMaker)["properties"]
            found["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(self.body)}}}
        return found

    def _answer_schema(self) -> Json:
        if self.answer is not None:
            return _ref(self.answer)
        return {"type": "object"} if self.content_type == "application/json" else TEXT


def describe_api(routes: Sequence[ApiRoute], version: str) -> Json:
    """Return the OpenAPI 3.1 document for the routes."""
    models: dict[type[BaseModel], None] = dict.fromkeys(model for route in routes for model in route.models)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=REF, schema_generator=SchemaMaker
    )
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(route.path.replace(":path}", "}"), {})[route.method] = route.describe()
    return {
        "openapi": "3.1.0",
        "info": {"title": "ringserve", "version": version},
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": REF.format(model=model.__name__)}
