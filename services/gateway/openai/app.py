"""HTTP routes of the gateway process. A thin translation: HTTP turns take the same path as gRPC turns.

Between requests it holds only the answers that clients may fetch again, and what is the same for all requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from ringserve.channels import MAX_MESSAGE_BYTES
from ringserve.cp_core.errors import InvalidRequest, NotFound, RingserveError
from ringserve.orchestration.tasks import fan_in
from ringserve.services.auth.authenticator import Authenticator
from ringserve.services.auth.tenants import Tenant
from ringserve.services.config.sections import HttpConfig
from ringserve.services.gateway.openai import anthropic, models
from ringserve.services.gateway.openai.errors import (
    BadHttpRequest,
    error_body,
    error_headers,
    http_status,
    make_route_error,
)
from ringserve.services.gateway.openai.item_answers import ItemAnswer
from ringserve.services.gateway.openai.openapi import ApiRoute, describe_api
from ringserve.services.gateway.openai.requests import HttpRequestReader, HttpTurn, Template
from ringserve.services.gateway.openai.responses import (
    Answer,
    ChatShape,
    CompletionShape,
    Echo,
    Placed,
    PromptAnswers,
    Shape,
    TurnAnswer,
    collect_answer,
    conversation_json,
    drop_answers,
    model_json,
    stream_events,
)
from ringserve.services.gateway.openai.server import (
    BrowserGuard,
    EventStream,
    HeaderLimit,
    cancel_on_hang_up,
    read_certificate,
)
from ringserve.services.gateway.openai.stored import KeptAnswers, LinkedTurn, ResponseName, make_not_held_error
from ringserve.services.gateway.openai.tools import END_OF_THOUGHTS, AnswerForm, find_call_form, find_thoughts
from ringserve.services.gateway.openai.views import ServiceViews, ViewedService
from ringserve.services.gateway.page.page import page_routes
from ringserve.services.gateway.requests import RequestReader, check_identifier
from ringserve.services.gateway.text import TextCodec
from ringserve.services.telemetry.metrics.endpoint import metrics_page
from ringserve.services.telemetry.metrics.registry import package_version
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.ranks import ModelInfo

T = TypeVar("T")
log = logging.getLogger(__name__)

AT_ONCE = 8
"""Prompts of one request served at a time."""
BODY_SECONDS = 60.0
"""Seconds a client has to send its request body."""


PROMPT_END = 16
"""Last tokens of a prompt that may open or close the model's thoughts."""
MAX_CONTAINERS = 200_000
"""Most lists and objects in a body: parsing that many takes about 0.1 s."""
MAX_VALUES = 4_000_000
"""Most values in a body, such as token ids."""
STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{,]', re.DOTALL)


class TurnService(ViewedService, Protocol):
    """Service behind the HTTP endpoint: the gateway."""

    def generate(
        self, request: inference_pb2.GenerateRequest, tenant: Tenant, seconds_left: float | None, trace_parent: str
    ) -> AbstractAsyncContextManager[AsyncIterator[inference_pb2.GenerateResponse]]:
        """Serve a turn: the context yields its responses, and leaving it ends the turn. Raises RingserveError."""

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer, for single tokens only: whole texts go through `read_tokens`."""

    def note_ignored(self, count: int) -> None:
        """Count fields of a request that were ignored."""

    def note_refused(self, endpoint: str, error: RingserveError) -> None:
        """Count a call refused for its credentials or rights."""

    async def read_tokens(self, tenant: Tenant, read: Callable[[RequestReader, TextCodec], T]) -> T:
        """Run `read` in a thread and return its result, within the tenant's limits. Raises RingserveError."""


class HttpApi:
    """HTTP API for one model under OpenAI's paths, plus the status page. `app` is the ASGI application."""

    def __init__(
        self,
        service: TurnService,
        model_name: str,
        model: ModelInfo,
        authenticator: Authenticator | None = None,
        *,
        has_page: bool = True,
        config: HttpConfig | None = None,
        metrics: Collector | None = None,
    ) -> None:
        """Serve `metrics` to operators at /metrics."""
        self._config = config or HttpConfig()
        self._metrics = metrics_page(metrics or CollectorRegistry())
        self._service = service
        self._authenticator = authenticator or Authenticator()
        self._model_name = model_name
        self._max_positions = model.max_positions
        self._reader = HttpRequestReader(
            model_name,
            lambda count: service.note_ignored(count),
            ignores_unknown=self._config.unknown_fields == "ignore",
        )
        self._created = int(time.time())
        self._plain_form: AnswerForm | None = None
        self._kept = KeptAnswers()
        self._has_told_unread = False
        self._views = ServiceViews(service, model_name, model, self._authenticator, self._caller)
        self._has_page = has_page

    @property
    def app(self) -> ASGIApp:
        api = self.routes
        document = self._constant(lambda: JSONResponse(describe_api(api, package_version())))
        routes = [*api, Route("/openapi.json", document), *(page_routes() if self._has_page else ())]
        return Starlette(
            routes=routes,
            middleware=[Middleware(HeaderLimit), *self._guard(), *self._cors()],
            exception_handlers={
                RingserveError: self._refuse,
                HTTPException: _refuse_route,
                ClientDisconnect: _answer_hang_up,
                Exception: _refuse_internal,
            },
        )

    @property
    def routes(self) -> list[ApiRoute]:
        """Routes that /openapi.json describes."""
        post, get, delete = (partial(ApiRoute, method) for method in ("POST", "GET", "DELETE"))
        version = self._constant(lambda: JSONResponse({"version": package_version()}))
        return [
            post("/v1/chat/completions", self._chat, "Answer a chat.", models.ChatRequest),
            post("/v1/completions", self._completion, "Continue a text or tokens.", models.CompletionRequest),
            post("/v1/responses", self._respond, "Answer with items.", models.ResponseRequest),
            get("/v1/responses/{name}", self._kept_response, "Show an answer with items again."),
            delete("/v1/responses/{name}", self._forget_response, "Delete the conversation of a response."),
            post(
                anthropic.PREFIX,
                self._message,
                "Answer messages in Anthropic's shape.",
                anthropic.MessagesRequest,
                error=anthropic.MessagesError,
            ),
            post(
                f"{anthropic.PREFIX}/count_tokens",
                self._count_tokens,
                "Count the tokens of messages in Anthropic's shape.",
                anthropic.CountRequest,
                anthropic.TokenCount,
                error=anthropic.MessagesError,
            ),
            get("/v1/models", self._models, "List the served model."),
            get("/v1/models/{name:path}", self._model, "Show the served model."),
            *self._views.routes(),
            post("/v1/conversations", self._fork, "Fork a conversation.", models.ForkRequest),
            get("/v1/conversations/{name:path}", self._conversation, "Show a conversation."),
            delete("/v1/conversations/{name:path}", self._forget, "Delete a conversation."),
            post("/tokenize", self._tokenize, "Tokenize a text or chat.", models.TokenizeRequest, models.TokensAnswer),
            get("/tokenizer_info", self._tokenizer_info, "Show the tokenizer's special tokens and chat template."),
            post("/detokenize", self._detokenize, "Detokenize.", models.DetokenizeRequest, models.TextAnswer),
            get(
                "/metrics", self._show_metrics, "Show this gateway's metrics for Prometheus.", content_type="text/plain"
            ),
            get("/version", version, "Return the version of ringserve.", answer=models.VersionAnswer),
        ]

    def _guard(self) -> list[Middleware]:
        if not self._authenticator.is_open:  # tokens are guard enough: a foreign page knows none
            return []
        return [Middleware(BrowserGuard, origins=self._config.origins.split(), hosts=self._config.hosts.split())]

    def _cors(self) -> list[Middleware]:
        origins = self._config.origins.split()
        if not origins:
            return []
        methods, exposed = ("GET", "POST", "DELETE"), ("retry-after", "x-should-retry")
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=methods,
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=exposed,
            )
        ]

    def _constant(self, make: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that sends every authenticated caller the same response, which the first call makes.

        The API's description takes 0.1 s to make, which must not delay the start of a gateway.
        """
        made = cache(make)

        async def answer(request: Request) -> Response:
            self._caller(request)
            return await asyncio.to_thread(made)

        return answer

    # --- turns -------------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> ASGIApp:
        return await self._turn(request, self._reader.chat, ChatShape())

    async def _respond(self, request: Request) -> ASGIApp:
        tenant = self._caller(request)
        body = await _read_body(request)
        given, turn = await asyncio.to_thread(lambda: (parsed := _parse_body(body), self._reader.response(parsed)))
        template, links, asked = turn.template, turn.links, turn.request
        assert links is not None, "a request for a response has links"
        form = await self._answer_form(tenant, turn)

        async def fill(last_token: int) -> None:
            assert template is not None, "the template writes the messages that follow an answer"
            tokens = await self._service.read_tokens(
                tenant, lambda reader, codec: template.following_tokens(reader, last_token)
            )
            asked.tokenized.CopyFrom(inference_pb2.TokenizedInput(input_ids=tokens.tolist()))
            asked.prompt_mode = inference_pb2.PROMPT_MODE_APPEND

        linked = LinkedTurn(links, self._service.router_for(tenant), asked, fill)
        keep = partial(self._kept.keep, tenant.name)
        answer = ItemAnswer(given, self._model_name, form, lambda: linked.response_id, keep)
        trace_parent = request.headers.get("traceparent", "")
        responses = linked.responses(lambda: self._service.generate(asked, tenant, None, trace_parent))
        return await self._send_answer(request, turn, fan_in([aclosing(responses)]), answer)

    async def _message(self, request: Request) -> ASGIApp:
        tenant = self._caller(request)
        body = await _read_body(request)
        turn = await asyncio.to_thread(lambda: self._message_turn(anthropic.MessagesRequest, body))
        form = await self._answer_form(tenant, turn)
        answer = anthropic.MessageAnswer(self._model_name, form)
        trace_parent = request.headers.get("traceparent", "")
        responses = fan_in([self._service.generate(turn.request, tenant, None, trace_parent)])
        return await self._send_answer(request, turn, responses, answer)

    async def _count_tokens(self, request: Request) -> Response:
        tenant, body = self._caller(request), await _read_body(request)

        def read(reader: RequestReader, codec: TextCodec) -> Response:
            turn = self._message_turn(anthropic.CountRequest, body)
            tokens = turn.template.tokens(reader) if turn.template else reader.tokenize(turn.request)
            return JSONResponse({"input_tokens": len(tokens)})

        return await self._service.read_tokens(tenant, read)

    def _message_turn(self, model: type[anthropic.CountRequest], body: bytes) -> HttpTurn:
        return self._reader.chat(anthropic.chat_body(self._reader.messages(model, _parse_body(body))))

    async def _completion(self, request: Request) -> ASGIApp:
        return await self._turn(request, self._reader.completion, CompletionShape())

    async def _turn(self, request: Request, read: Callable[[Any], HttpTurn], shape: Shape) -> ASGIApp:
        tenant = self._caller(request)  # before the body: unauthenticated callers' bodies are not read
        body = await _read_body(request)
        turn = await asyncio.to_thread(lambda: read(_parse_body(body)))
        form = await self._answer_form(tenant, turn)
        echoes = await self._echoes(tenant, turn) if turn.has_echo else [None] * len(turn.requests)
        answer = self._answer(turn, shape, echoes, form)
        trace_parent = request.headers.get("traceparent", "")
        turns = [self._service.generate(each, tenant, None, trace_parent) for each in turn.requests]
        responses = fan_in(turns, at_once=AT_ONCE)
        return await self._send_answer(
            request, turn, drop_answers(responses) if turn.scores_only else responses, answer
        )

    async def _send_answer(self, request: Request, turn: HttpTurn, responses: Placed, answer: Answer) -> ASGIApp:
        """Return the turns' answer, as one object or as a stream of events."""
        if not turn.stream:
            async with cancel_on_hang_up(request.receive):
                return JSONResponse(await collect_answer(responses, answer))
        events = stream_events(responses, answer)
        # Await the first event before the headers go out, so that a refusal has its own HTTP status.
        async with cancel_on_hang_up(request.receive):
            first = await anext(events)
        return EventStream(first, events)

    def _answer(self, turn: HttpTurn, shape: Shape, echoes: Sequence[Echo | None], form: AnswerForm) -> PromptAnswers:
        answers = [TurnAnswer(shape, self._model_name, self._service.codec, turn, echo, form) for echo in echoes]
        num_choices = max(turn.request.sampling_params.n, 1)
        return PromptAnswers(answers, num_choices, f"{shape.id_prefix}-{uuid.uuid4().hex[:16]}")

    async def _answer_form(self, tenant: Tenant, turn: HttpTurn) -> AnswerForm:
        """Return the form of a turn's answer. Raises InvalidRequest."""
        if turn.template is not None:
            return await self._apply_template(tenant, turn, turn.template)
        if turn.request.WhichOneof("input") != "chat" or not turn.may_think:
            return AnswerForm()
        if self._plain_form is None:
            self._plain_form = await self._service.read_tokens(tenant, lambda _, codec: _find_plain_form(codec))
        return self._plain_form

    async def _apply_template(self, tenant: Tenant, turn: HttpTurn, template: Template) -> AnswerForm:
        """Tokenize a chat with tools, calls or template variables: the gRPC contract has no fields for them.

        Return the form of the answer, and constrain the answer to tool calls if the request asks for it.
        Raises InvalidRequest.
        """

        def read(reader: RequestReader, codec: TextCodec) -> AnswerForm:
            may_think = turn.may_think
            reader.end_chat(turn.request.sampling_params)
            source = codec.chat_template(template.tools)
            calls = find_call_form(source) if turn.offer else None
            if turn.offer and calls and not calls.is_whole:
                turn.offer.hold(turn.request.sampling_params, calls, reader)
            elif turn.offer:
                turn.offer.check_unconstrained()
                if calls is None:
                    self._note_unread_calls()
            form = AnswerForm(calls=calls, schemas=turn.offer.schemas if turn.offer else {})
            if turn.links and turn.links.previous:  # `fill` writes the prompt later, from the last answer's end
                plain = _find_plain_form(codec) if may_think else AnswerForm()
                return replace(plain, calls=form.calls, schemas=form.schemas)
            tokens = template.tokens(reader).tolist()
            turn.request.tokenized.input_ids.extend(tokens)
            turn.request.prompt_mode = inference_pb2.PROMPT_MODE_WHOLE_HISTORY
            if not may_think:
                return form
            thoughts = find_thoughts(source, codec.decode_all(tokens[-PROMPT_END:]))
            return replace(thoughts, calls=form.calls, schemas=form.schemas)

        return await self._service.read_tokens(tenant, read)

    def _note_unread_calls(self) -> None:
        """Log once that calls of this model stay text."""
        if not self._has_told_unread:
            self._has_told_unread = True
            log.warning("tools: the chat template writes calls in a form that is not known here; calls stay text")

    async def _echoes(self, tenant: Tenant, turn: HttpTurn) -> list[Echo | None]:
        """Return the prompts to echo. Replace text prompts by their tokens, which log-probabilities refer to."""

        def read(reader: RequestReader, codec: TextCodec) -> list[Echo | None]:
            found: list[Echo | None] = []
            for each in turn.requests:
                text = "" if each.HasField("truncate_prompt_tokens") else each.text
                tokens = reader.prompt(each).tolist()
                each.ClearField("truncate_prompt_tokens")
                each.tokenized.CopyFrom(inference_pb2.TokenizedInput(input_ids=tokens))
                found.append(Echo(text=text or reader.detokenize(tokens), first=tokens[0]))
            return found

        return await self._service.read_tokens(tenant, read)

    # --- tokens ------------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        tenant, body = self._caller(request), await _read_body(request)

        def read(reader: RequestReader, codec: TextCodec) -> Response:
            asked = self._reader.tokenization(_parse_body(body))
            if asked.template:
                tokens = asked.template.tokens(reader)
            else:
                tokens = reader.tokenize(
                    asked.request, adds_special=asked.adds_special, opens_answer=asked.opens_answer
                )
            ids = tokens.tolist()
            names = codec.names(ids) if asked.has_names else None
            found = {"count": len(ids), "max_model_len": self._max_positions, "tokens": ids, "token_strs": names}
            return JSONResponse(found)

        return await self._service.read_tokens(tenant, read)

    async def _tokenizer_info(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse(self._service.codec.describe())

    async def _detokenize(self, request: Request) -> Response:
        tenant, body = self._caller(request), await _read_body(request)

        def read(reader: RequestReader, codec: TextCodec) -> Response:
            return JSONResponse({"prompt": reader.detokenize(self._reader.tokens(_parse_body(body)))})

        return await self._service.read_tokens(tenant, read)

    # --- views -------------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Request) -> Response:
        self._caller(request)
        self._reader.check_model(request.path_params["name"])
        return JSONResponse(self._model_json())

    async def _show_metrics(self, request: Request) -> Response:
        self._authenticator.check_operator(self._caller(request))
        reply = await asyncio.to_thread(self._metrics, request.headers.get("accept", ""))
        return Response(reply.body, headers={"content-type": reply.content_type})

    def _caller(self, request: Request) -> Tenant:
        """Return the calling tenant, by the token in `authorization` or `x-api-key` (Anthropic's header).

        Raises Unauthenticated.
        """
        shown, key = request.headers.get("authorization"), request.headers.get("x-api-key")
        if not shown and key:
            shown = f"Bearer {key}"
        return self._authenticator.find_tenant(shown, read_certificate(request.scope))

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, RingserveError):
            self._service.note_refused("http", error)
        return _error_response(error, request.url.path)

    def _model_json(self) -> dict[str, Any]:
        return model_json(self._model_name, self._created, self._max_positions)

    async def _fork(self, request: Request) -> Response:
        self._caller(request)  # before the body: unauthenticated callers' bodies are not read
        return await self._views.fork(request, _parse_body(await _read_body(request)))

    async def _conversation(self, request: Request) -> Response:
        router = self._service.router_for(self._caller(request))
        view = await router.get_conversation(check_identifier("conversation_id", request.path_params["name"]))
        return JSONResponse(conversation_json(view))

    async def _kept_response(self, request: Request) -> Response:
        tenant, name = self._caller(request), _response_name(request)
        if request.query_params.get("stream", "false") == "true":
            raise InvalidRequest("stream: a kept answer is sent only as a whole; leave it out")
        body = await self._kept.fetch(tenant.name, name, self._service.router_for(tenant))
        return Response(body, media_type="application/json")

    async def _forget_response(self, request: Request) -> Response:
        router, name = self._service.router_for(self._caller(request)), _response_name(request)
        try:
            await router.delete_conversation(name.conversation)
        except NotFound:
            raise make_not_held_error(name.response_id) from None
        return JSONResponse({"id": name.response_id, "object": "response.deleted", "deleted": True})

    async def _forget(self, request: Request) -> Response:
        router = self._service.router_for(self._caller(request))
        name = check_identifier("conversation_id", request.path_params["name"])
        await router.delete_conversation(name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


def _response_name(request: Request) -> ResponseName:
    """Return the response that a path names. Raises NotFound for an id that cannot name one."""
    name = ResponseName.read(request.path_params["name"])
    assert name is not None, "a route's name is not empty"
    return name


def _find_plain_form(codec: TextCodec) -> AnswerForm:
    """Return the form of an answer to a chat of plain texts."""
    source = codec.chat_template(())
    if END_OF_THOUGHTS not in source:
        return AnswerForm()
    prompt = codec.encode_chat([("user", "x")]).tolist()
    return find_thoughts(source, codec.decode_all(prompt[-PROMPT_END:]))


async def _read_body(request: Request) -> bytes:
    """Read the request body. Raises BadHttpRequest with status 413 if it is too large, 408 if it is too slow."""
    too_large = BadHttpRequest(413, f"the body is larger than {MAX_MESSAGE_BYTES} bytes", "too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_MESSAGE_BYTES:
        raise too_large
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_MESSAGE_BYTES:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise BadHttpRequest(408, f"the body did not arrive within {BODY_SECONDS:.0f} s", "timeout") from None
    return b"".join(pieces)


def _parse_body(body: bytes) -> Any:
    """Parse a body. Raises BadHttpRequest for a body that is not JSON, or has more values than any request needs.

    The parser holds Python's global lock until it has finished, even in a thread: 24 MB of `[[]],` would stop every
    stream for 3 s.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS or body.count(b",") > MAX_VALUES:
        _check_values(body)
    try:
        return json.loads(body.decode())
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8 text: invalid byte {error.start + 1}"
        raise BadHttpRequest(400, message, "invalid_json") from None
    except (ValueError, RecursionError):
        raise BadHttpRequest(400, "the body is not valid JSON", "invalid_json") from None


def _check_values(body: bytes) -> None:
    """Raise BadHttpRequest if a body has too many values, not counting characters inside strings."""
    num_containers = num_values = 0
    for match in STRUCTURE.finditer(body):
        num_containers += match[0] in b"[{"
        num_values += match[0] == b","
        if num_containers > MAX_CONTAINERS or num_values > MAX_VALUES:
            raise BadHttpRequest(
                413,
                f"the body has more than {MAX_CONTAINERS} lists and objects, or more than {MAX_VALUES} values",
                "too_large",
            )


# --- errors ----------------------------------------------------------------------------------------------------------


def _error_response(error: BaseException, path: str = "") -> Response:
    is_anthropic = path.startswith(anthropic.PREFIX)
    told = anthropic.anthropic_error(error) if is_anthropic else error_body(error, path)
    return JSONResponse(told, http_status(error), error_headers(error))


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path (404) or method (405, with an Allow header)."""
    assert isinstance(error, HTTPException)
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    methods = sorted({method for route in routes for method in route.methods} - {"HEAD"})
    refusal = make_route_error(error.status_code, request.method, request.url.path, methods, error.detail)
    return JSONResponse(error_body(refusal), error.status_code, {"allow": ", ".join(methods)} if methods else None)


async def _refuse_internal(request: Request, error: Exception) -> Response:
    return _error_response(error, request.url.path)  # Starlette raises the error again, so the server logs it


async def _answer_hang_up(request: Request, error: Exception) -> Response:
    """Answer a client that has hung up. The response is never sent."""
    return Response(status_code=499)
