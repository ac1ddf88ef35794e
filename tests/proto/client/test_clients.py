"""Both Python clients against a whole service, and against gateways that fail."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from ringserve.client import AsyncClient, Client, Message, Sampling
from ringserve.client.retries import NO_RETRIES
from ringserve.client.sync_client import _LoopThread
from ringserve.cp_core.errors import (
    CapacityExceeded,
    ConfigError,
    ConversationLost,
    DeadlineExceeded,
    InvalidRequest,
    NotBegun,
    NotFound,
    RingserveError,
    Stopping,
    Unavailable,
)
from ringserve.services.gateway.text import TextCodec
from ringserve.services.rpc.errors import abort_on_error
from ringserve.services.rpc.server import GrpcServer
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.proto.client.both import QUICK, client
from tests.services.e2e.cluster import wait_until
from tests.services.local_gateway import LocalGateway
from tests.waiting import WAIT_SECONDS
from tests.workers.models import Oracle, random_tokens

__all__ = ["client"]

FIVE = Sampling(max_tokens=5, temperature=0.0)
LONG = Sampling(max_tokens=4000)


async def test_an_answer_is_exact_typed_and_accounted_for(client: AsyncClient, oracle: Oracle) -> None:
    prompt = random_tokens(50)
    answer = await client.ask(prompt, sampling=FIVE, request_id="mine")
    assert list(answer.token_ids) == oracle.greedy(prompt, 5)
    assert (answer.request_id, answer.conversation_id, answer.finish_reason) == ("mine", "", "length")
    assert answer.matched_stop is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (50, 0, 5)
    plan = answer.plan
    assert (plan.new_tokens, plan.prefill_ranks, plan.decode_ranks, plan.prompt_mode) == (50, 2, 1, "new")
    assert plan.reason
    assert plan.migrated_bytes > 0
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(0, 50)]
    assert {item.algorithm for item in plan.alternatives} >= {"pass_kv", "pass_q"}


async def test_of_several_gateways_the_next_is_called_where_one_has_ended(gateway: LocalGateway) -> None:
    first = GrpcServer()
    register = inference_pb2_grpc.add_InferenceServicer_to_server
    first.add("ringserve.v1.Inference", lambda target: register(gateway.servicer, target))
    target = f"ipv4:{await first.start('127.0.0.1:0')},{gateway.target}"
    async with AsyncClient(target, retry=NO_RETRIES) as client:
        stream = client.stream("x", conversation_id="c", sampling=Sampling(max_tokens=100, ignore_eos=True))
        await anext(stream)
        stopping = asyncio.create_task(first.stop(60.0))
        answer = await stream.answer()
        assert len(answer.token_ids) == 100, "a turn that runs ends where it began"
        await stopping
        again = await client.ask("x", conversation_id="c", mode="append", sampling=FIVE)
        assert again.usage.cached_tokens > 0


async def test_pieces_make_up_the_answer_and_the_plan_comes_first(client: AsyncClient) -> None:
    async with client.stream("Once upon a time", sampling=FIVE) as stream:
        first = await anext(stream)
        assert stream.plan is not None
        assert stream.plan.new_tokens == 16
        pieces = [first] + [piece async for piece in stream]
        answer = await stream.answer()
    assert "".join(piece.text for piece in pieces) == answer.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == answer.token_ids


async def test_a_chat_is_templated_by_the_service(client: AsyncClient, codec: TextCodec, oracle: Oracle) -> None:
    answer = await client.ask([Message(role="user", content="Hello")], sampling=FIVE)
    assert list(answer.token_ids) == oracle.greedy(codec.encode_chat([("user", "Hello")]).tolist(), 5)


async def test_a_conversation_sends_only_what_is_new(client: AsyncClient, oracle: Oracle) -> None:
    talk = client.talk()
    first = await talk.ask(random_tokens(60), sampling=FIVE)
    second = await talk.ask([1, 2, 3], sampling=FIVE)
    history = [*random_tokens(60), *first.token_ids, 1, 2, 3]
    assert list(second.token_ids) == oracle.greedy(history, 5)
    assert (second.plan.cached_tokens, second.plan.prompt_mode) == (64, "append")
    assert (await talk.info()).num_turns == 2
    quoting = [*history, *second.token_ids, 4]
    third = await talk.ask(quoting, sampling=FIVE)
    assert third.usage.prompt_tokens == 2 * len(quoting) - 1, "what repeats the history does not replace it"
    await talk.delete()
    with pytest.raises(NotFound, match=talk.conversation_id):
        await talk.info()


async def test_a_conversation_that_was_lost_is_not_begun_anew_in_silence(client: AsyncClient) -> None:
    talk = client.talk()
    for number in range(2):
        await talk.ask(random_tokens(20, seed=number), sampling=FIVE)
        assert talk.remembered_tokens == (await talk.info()).num_tokens
    await client.delete_conversation(talk.conversation_id)
    for _ in range(2):
        with pytest.raises(ConversationLost, match="was to remember 50 tokens, and it has 0: it was deleted"):
            await talk.ask([1, 2, 3], sampling=FIVE)
    whole = await talk.ask([1, 2, 3], mode="whole_history", sampling=FIVE)
    assert whole.plan.prompt_mode == "new"
    assert (await talk.ask([4], sampling=FIVE)).plan.prompt_mode == "append"


async def test_a_conversation_does_not_say_what_it_cannot_know(gateway: LocalGateway, client: AsyncClient) -> None:
    talk = client.talk()
    await talk.ask(random_tokens(20), sampling=FIVE)
    async with talk.stream([5, 6]) as pieces:
        await anext(pieces)
    assert talk.remembered_tokens is None, "the turn was left, and may have been kept or not"
    await gateway.wait_idle()
    await client.delete_conversation(talk.conversation_id)
    with pytest.raises(NotFound, match=r"there is no conversation .* to append to: it was deleted"):
        await talk.ask([5, 6], sampling=FIVE)


async def test_leaving_a_stream_ends_its_turn(gateway: LocalGateway, client: AsyncClient) -> None:
    free = gateway.service.free_blocks()
    async with client.stream("x", sampling=LONG) as stream:
        await anext(stream)
    await gateway.wait_idle()
    assert gateway.service.free_blocks() == free


async def test_a_timeout_ends_the_turn_and_says_so(gateway: LocalGateway, client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.ask("x", sampling=LONG, timeout=0.4)
    await gateway.wait_idle()


async def test_closing_a_client_ends_its_turns(gateway: LocalGateway) -> None:
    client = Client(gateway.target)
    stream = client.stream("x", sampling=LONG)
    await asyncio.to_thread(next, stream)
    reading = asyncio.create_task(asyncio.to_thread(stream.answer))
    await asyncio.sleep(0)
    await asyncio.to_thread(client.close)
    with pytest.raises(RingserveError, match=r"client (is|was) closed"):
        await reading
    await gateway.wait_idle()
    stream.close()
    client.close()
    with pytest.raises(RingserveError, match="the client is closed"):
        client.model_info()


@pytest.mark.parametrize("closings", [1, 2])
async def test_a_stream_may_be_closed_while_another_task_reads_it(client: AsyncClient, closings: int) -> None:
    stream = client.stream("x", sampling=LONG)
    await anext(stream)
    reading = asyncio.create_task(stream.answer())
    await asyncio.sleep(0)
    await asyncio.gather(*(stream.close() for _ in range(closings)))
    with pytest.raises(RingserveError, match="CANCELLED: the stream was closed before its answer ended"):
        await reading
    assert reading.cancelling() == 0
    assert (await client.ask("x", sampling=FIVE)).token_ids, "the client goes on"


async def test_a_reader_that_is_cancelled_itself_is_cancelled(gateway: LocalGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        stream = client.stream("x", sampling=LONG)
        await anext(stream)
        reading = asyncio.create_task(stream.answer())
        await asyncio.sleep(0)
        reading.cancel()
        await stream.close()
        with pytest.raises(asyncio.CancelledError):
            await reading


def test_ctrl_c_cancels_what_a_thread_waits_for() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Python leaves SIGINT ignored in a shell's background job
    loop, ended, began = _LoopThread(), [], threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def caller_waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return frame.f_code is threading.Condition.wait.__code__

    def interrupt() -> None:
        began.wait(WAIT_SECONDS)
        wait_until(caller_waits, "the caller waits", WAIT_SECONDS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait())
    assert ended
    loop.close(asyncio.sleep(0))


Step = RingserveError | str
"""Next act of a failing gateway: it raises an error, or sends a text. An error may follow a text."""


class Failing(inference_pb2_grpc.InferenceServicer):
    """Gateway with a prescribed act for each attempt. Later ones go on with the text of the earlier."""

    def __init__(self, *attempts: Sequence[Step]) -> None:
        self._attempts = list(attempts)
        self.requests: list[inference_pb2.GenerateRequest] = []
        self._text = ""

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        async with abort_on_error(context):
            async for response in self._attempt(self._attempts.pop(0)):
                yield response

    async def _attempt(self, steps: Sequence[Step]) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(start=inference_pb2.GenerateStart(prompt_tokens=7))
        for step in steps:
            if isinstance(step, RingserveError):
                raise step
            self._text += step
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.GenerateStreamChunk(text=step, token_ids=[1]))
        yield inference_pb2.GenerateResponse(complete=inference_pb2.GenerateComplete(text=self._text))


async def answered(gateway: Failing, ask: Callable[[AsyncClient, Client], Any]) -> Any:
    """Return the answer that a client gets of a failing gateway."""
    server = GrpcServer()
    server.add(
        "ringserve.v1.Inference", lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(gateway, target)
    )
    address = await server.start("127.0.0.1:0")
    try:
        with Client(address, retry=QUICK) as sync:
            async with AsyncClient(address, retry=QUICK) as client:
                return await ask(client, sync)
    finally:
        await server.stop(0)


def by_threads(**options: Any) -> Callable[[AsyncClient, Client], Any]:
    return lambda client, sync: asyncio.to_thread(sync.ask, "x", **options)


def by_asyncio(**options: Any) -> Callable[[AsyncClient, Client], Any]:
    return lambda client, sync: client.ask("x", **options)


BOTH = pytest.mark.parametrize("by", [by_threads, by_asyncio], ids=["threads", "asyncio"])


@BOTH
@pytest.mark.parametrize("conversation", ["", "c"])
async def test_a_turn_whose_gateway_is_lost_goes_on_behind_the_tokens_that_came(
    by: Callable[..., Any], conversation: str
) -> None:
    """Also one that adds to its conversation: by its request id the service knows it."""
    stopping = Stopping("the gateway is stopping")
    gateway = Failing([stopping], ["ha", "lf", stopping], [NotBegun("no ring")], [" done"])  # type: ignore[abstract]
    answer = await answered(gateway, by(conversation_id=conversation))
    assert answer.text == "half done"
    assert [list(each.resume.received) for each in gateway.requests] == [[], [], [1, 1], [1, 1]]
    assert [each.resume.prompt_tokens for each in gateway.requests] == [0, 7, 7, 7]
    assert [each.HasField("resume") for each in gateway.requests] == [False, True, True, True]
    for request in gateway.requests:
        request.ClearField("resume")
    assert all(request == gateway.requests[0] for request in gateway.requests)


@BOTH
async def test_what_its_gateway_gave_up_is_not_tried_again(by: Callable[..., Any]) -> None:
    gateway = Failing([Unavailable("the turn lost a ring 3 times")])  # type: ignore[abstract]
    with pytest.raises(Unavailable, match="lost a ring 3 times"):
        await answered(gateway, by())
    assert len(gateway.requests) == 1


@BOTH
async def test_a_refusal_for_want_of_room_is_tried_again_when_the_server_says(by: Callable[..., Any]) -> None:
    gateway = Failing([CapacityExceeded("full", 1.0)], ["fine"])  # type: ignore[abstract]
    began = asyncio.get_running_loop().time()
    assert (await answered(gateway, by(conversation_id="c"))).text == "fine"
    assert asyncio.get_running_loop().time() - began >= 1.0  # the trailing metadata of the refusal


@BOTH
async def test_attempts_end_and_the_last_error_is_raised(by: Callable[..., Any]) -> None:
    gateway = Failing(*([NotBegun(f"attempt {number}")] for number in range(3)))  # type: ignore[abstract]
    with pytest.raises(NotBegun, match="attempt 2"):
        await answered(gateway, by())


async def test_a_gateway_that_is_not_there_is_named() -> None:
    server = GrpcServer()
    address = await server.start("127.0.0.1:0")
    await server.stop(0)
    async with AsyncClient(address, retry=NO_RETRIES) as client:
        with pytest.raises(Unavailable, match=f"the gateway at {address} cannot be reached"):
            await client.ask("x")
        with pytest.raises(Unavailable, match=address):
            await client.server_info()


@pytest.mark.parametrize("token", ["two words", "line\n", "ümlaut"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Client("127.0.0.1:1", token=token)
    assert token not in str(caught.value)


async def test_an_unknown_option_is_an_error_and_not_ignored(client: Any) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        await client.ask([1], max_tokens=5)
    with pytest.raises(TypeError, match="temperature"):
        client.stream([1], temperature=0.0)
    with pytest.raises(TypeError, match="max_tokens"):
        await client.talk("options").ask([1], max_tokens=5)


def test_a_generator_that_is_left_early_closes_its_source_in_the_loop() -> None:
    loop, ended = _LoopThread(), threading.Event()

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.set()

    items = loop.items(source())
    assert next(items) == 1
    items.close()
    assert ended.wait(WAIT_SECONDS)
    loop.close(asyncio.sleep(0))


@pytest.mark.parametrize("stop", ["The end", ["The end"], ("The end",)])
def test_a_stop_string_may_stand_alone_or_in_any_sequence(stop: str | list[str]) -> None:
    assert list(Sampling(stop=stop).to_message().stop) == ["The end"]


def test_a_stop_that_is_no_text_is_refused_in_one_sentence() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_params\.stop: 3 is not allowed"):
        Sampling(stop=3).to_message()  # type: ignore[arg-type]
