"""Python client for threads: the methods of `async_client`, run in a background event loop that each client owns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import TypeVar, Unpack

from ringserve.client.async_client import AsyncAnswerStream, AsyncClient, AsyncConversation
from ringserve.client.channel import TlsFiles
from ringserve.client.requests import Prompt, RequestOptions, TurnOptions
from ringserve.client.results import Answer, Piece, Plan
from ringserve.client.retries import RetryPolicy
from ringserve.errors import RingserveError
from ringserve.views import Aborted, ConversationInfo, ConversationSummary, ModelInfo, ServerInfo

T = TypeVar("T")

CANCEL_SECONDS = 5.0
"""Longest wait for the end of a call that its caller has interrupted."""


class _LoopThread:
    """Event loop in a daemon thread. A forked child has no such thread: make a client after the fork."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(target=self._serve, name="ringserve-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Awaitable[T]) -> T:
        """Await `work` in the loop. Ctrl-C in the caller cancels it; a closed client raises RingserveError."""
        ended = threading.Event()

        async def bounded() -> T:
            try:
                return await work
            finally:
                ended.set()

        future: Future[T] | None = None
        try:
            with self._lock:
                if self.is_closed:
                    _discard(work)
                    raise RingserveError("the client is closed")
                future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
            return future.result()
        except CancelledError:
            raise RingserveError("CANCELLED: the client was closed during the call") from None
        except BaseException:
            if future is not None and future.cancel():
                ended.wait(CANCEL_SECONDS)
            raise

    def items(self, source: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield the items of an asynchronous iterator. If the generator is closed, the loop closes it soon."""

        async def following() -> T:  # an asynchronous iterator that starts in the loop is closed by this loop
            return await anext(source)

        while True:
            try:
                item = self.run(following())
            except StopAsyncIteration:
                return
            yield item

    def close(self, last: Awaitable[None]) -> None:
        """Await `last`, cancel running tasks, and end the thread. Idempotent."""
        with self._lock:
            if self.is_closed:
                return _discard(last)
            self.is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self, last: Awaitable[None]) -> None:
        try:
            await last
        finally:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._loop.shutdown_asyncgens()


def _discard(work: Awaitable[object]) -> None:
    if asyncio.iscoroutine(work):
        work.close()


class AnswerStream(Iterator[Piece]):
    """Pieces of one turn as they come. A context: leaving it early ends the turn everywhere."""

    def __init__(self, stream: AsyncAnswerStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    def __next__(self) -> Piece:
        try:
            return self._loop.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the turn, if it still runs. Any thread may call; a thread that reads the stream gets a RingserveError."""
        if not self._loop.is_closed:  # a closed client has ended its turns
            self._loop.run(self._stream.close())

    @property
    def plan(self) -> Plan | None:
        """Plan of the turn, None before the first piece; its measured fields are final with the answer."""
        return self._stream.plan

    def answer(self) -> Answer:
        """Read the rest of the pieces, and return the whole answer."""
        return self._loop.run(self._stream.answer())


class Client:
    """Client of one gateway, HOST:PORT, or of several, ipv4:HOST:PORT,HOST:PORT: when one is lost, the next is tried.

    Threads may share a client. A process that forks makes its clients afterwards.
    """

    def __init__(
        self, target: str, *, token: str = "", tls: TlsFiles | None = None, retry: RetryPolicy | None = None
    ) -> None:
        """Send `token` with every call. Raises ConfigError."""

        async def opened() -> AsyncClient:
            return AsyncClient(target, token=token, tls=tls, retry=retry)

        self._loop = _LoopThread()
        try:
            self._client = self._loop.run(opened())
        except BaseException:
            self._loop.close(asyncio.sleep(0))
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled. Idempotent."""
        self._loop.close(self._client.close())

    def ask(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Answer:
        """Run one turn to its end."""
        return self._loop.run(self._client.ask(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AnswerStream:
        """Run one turn piece by piece. Nothing is sent before the first piece is asked for."""
        return AnswerStream(self._client.stream(prompt, **options), self._loop)

    def talk(self, conversation_id: str = "") -> Conversation:
        """Return the conversation of this id, or a new one with a generated id."""
        return Conversation(self._client.talk(conversation_id), self._loop)

    def abort(self, request_ids: str | Sequence[str]) -> Aborted:
        """End running turns by request id, wherever they are; an unknown id is reported."""
        return self._loop.run(self._client.abort(request_ids))

    def count_tokens(self, prompt: Prompt, *, model: str = "") -> int:
        """Return the number of prompt tokens, including the chat template's."""
        return self._loop.run(self._client.count_tokens(prompt, model=model))

    def model_info(self) -> ModelInfo:
        """Return the model's sizes."""
        return self._loop.run(self._client.model_info())

    def server_info(self) -> ServerInfo:
        """Return the state of the service. Raises Forbidden for a tenant that is no operator."""
        return self._loop.run(self._client.server_info())

    def conversation(self, conversation_id: str) -> ConversationInfo:
        """Return the state of a conversation and the locations of its KV. Raises NotFound."""
        return self._loop.run(self._client.conversation(conversation_id))

    def list_conversations(self, prefix: str = "", page_size: int = 100) -> Iterator[ConversationSummary]:
        """Yield every conversation whose id begins with `prefix`, fetched page by page."""
        return self._loop.items(self._client.list_conversations(prefix, page_size))

    def fork_conversation(self, source_id: str, new_id: str, at_token: int | None = None) -> ConversationInfo:
        """Begin a conversation with another's tokens, or with the first `at_token` of them. Raises NotFound."""
        return self._loop.run(self._client.fork_conversation(source_id, new_id, at_token))

    def delete_conversation(self, conversation_id: str) -> None:
        """Delete a conversation and free its KV. Raises NotFound, and Busy while a turn runs."""
        self._loop.run(self._client.delete_conversation(conversation_id))


class Conversation:
    """Turns that follow each other. Each prompt holds only new text; the service stores the turns before it."""

    def __init__(self, conversation: AsyncConversation, loop: _LoopThread) -> None:
        self._conversation = conversation
        self._loop = loop
        self.conversation_id = conversation.conversation_id

    @property
    def remembered_tokens(self) -> int | None:
        """Tokens that the next turn expects the service to remember; None if that is not known here."""
        return self._conversation.remembered_tokens

    def ask(self, prompt: Prompt, **options: Unpack[TurnOptions]) -> Answer:
        """Run the next turn to its end."""
        return self._loop.run(self._conversation.ask(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[TurnOptions]) -> AnswerStream:
        """Run the next turn piece by piece."""
        return AnswerStream(self._conversation.stream(prompt, **options), self._loop)

    def info(self) -> ConversationInfo:
        """Return the state of the conversation and the locations of its KV.

        Raises NotFound if no turn of it has ended yet.
        """
        return self._loop.run(self._conversation.info())

    def delete(self) -> None:
        """Delete the conversation and free its KV. Raises NotFound, and Busy while a turn runs."""
        self._loop.run(self._conversation.delete())
