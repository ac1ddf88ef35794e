"""Turns whose gateway is lost: the typed client goes on at another, and gets what it would have got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ringserve.client import Answer, AsyncClient, RetryPolicy, Sampling
from ringserve.cp_core.errors import TurnCancelled
from ringserve.orchestration.protocol.turns import TurnRequest
from ringserve.services.gateway.servicer import InferenceServicer
from ringserve.services.gateway.text import REPLACEMENT, TextCodec
from ringserve.services.rpc.server import GrpcServer
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.orchestration.service import Service, is_idle
from tests.services.local_gateway import CALL_SECONDS, LocalGateway
from tests.waiting import eventually

POLICY = RetryPolicy(first_delay_seconds=0.02, max_delay_seconds=0.1)
PROMPT = "Once upon a time " * 6
PROCESSED = Sampling(
    max_tokens=60,
    temperature=0.9,
    top_p=0.95,
    seed=7,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    min_tokens=30,
    ignore_eos=True,
)


class Gateways(LocalGateway):
    """Two gateways before one service of 2 prefill and 3 decode ranks. `kill` ends the first as a kill does."""

    def __init__(self, model_path: Path, codec: TextCodec) -> None:
        super().__init__(model_path, codec, service=Service(model_path, 2, 3, orphan_timeout=30.0))
        first, second = self.servicer, self
        self.dying = InferenceServicer(
            self.service.model, "m", "m", codec, first._reader, self.service.router, self.service.peers, first._metrics
        )
        self._first = GrpcServer()
        register = inference_pb2_grpc.add_InferenceServicer_to_server
        self._first.add("ringserve.v1.Inference", lambda target: register(self.dying, target))
        assert second.service is self.service
        self.first_target = ""

    async def __aenter__(self) -> Gateways:
        await super().__aenter__()
        self.first_target = await self._first.start("127.0.0.1:0")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._first.stop(0)
        await super().__aexit__(None, None, None)

    @property
    def both(self) -> str:
        return f"ipv4:{self.first_target},{self.target}"

    async def kill(self) -> None:
        """End the first gateway, which says nothing to anybody."""

        def say_nothing(request_id: str, reader: str = "") -> None:
            return None

        self.dying._abort_soon = say_nothing  # type: ignore[assignment,method-assign]
        await self._first.stop(0)


@pytest.fixture
async def gateways(model_path: Path, codec: TextCodec) -> AsyncIterator[Gateways]:
    async with Gateways(model_path, codec) as gateways:
        free = gateways.service.free_blocks()
        yield gateways
        await gateways.wait_idle()
        gateways.service.check_integrity()
        await is_idle(gateways.service, free)


async def told(client: AsyncClient, sampling: Sampling, act: Callable[[int], object] = lambda count: None) -> Answer:
    """Run a turn; `act` is called with the number of tokens after each piece. What came in pieces is the answer."""
    tokens: list[int] = []
    text = ""
    async with client.stream(PROMPT, sampling=sampling) as stream:
        async for piece in stream:
            tokens.extend(piece.token_ids)
            text += piece.text
            waits = act(len(tokens))
            if asyncio.iscoroutine(waits):
                await waits
        answer = await stream.answer()
    assert tokens == list(answer.token_ids), "no token is lost, and none comes twice"
    assert text == answer.text
    return answer


def at(count: int, act: Callable[[], object]) -> Callable[[int], object]:
    has_acted: list[bool] = []

    def check(num_tokens: int) -> object:
        if num_tokens < count or has_acted:
            return None
        has_acted.append(True)
        return act()

    return check


async def test_a_gateways_death_is_not_seen_by_the_typed_client(gateways: Gateways) -> None:
    """While it decodes, with penalties; then with a stop string that lies behind the tokens that came."""
    async with AsyncClient(gateways.target) as client:
        wanted = await told(client, PROCESSED)
        pairs = (wanted.text[place : place + 2] for place in range(len(wanted.text) // 2, len(wanted.text) - 1))
        stop = next(pair for pair in pairs if REPLACEMENT not in pair)
        stopped_by = Sampling(**{**PROCESSED.__dict__, "stop": (stop,), "min_tokens": 0})
        stopped = await told(client, stopped_by)
    assert stopped.matched_stop == stop
    async with AsyncClient(gateways.both, retry=POLICY) as client:
        answer = await told(client, PROCESSED, at(20, gateways.kill))
    assert (answer.token_ids, answer.text, answer.finish_reason) == (
        wanted.token_ids,
        wanted.text,
        wanted.finish_reason,
    )
    assert (answer.usage, answer.seed) == (wanted.usage, wanted.seed)
    (failover,) = answer.plan.failovers
    assert failover.role == "gateway"
    assert failover.after_tokens >= 20
    assert failover.new_tokens == 0
    async with grpc.aio.insecure_channel(gateways.target) as channel:
        request = inference_pb2.GenerateRequest(request_id="r", text=PROMPT, sampling_params=stopped_by.to_message())
        received = stopped.token_ids[: len(stopped.token_ids) - 1]
        request.resume.received.extend(received)
        request.resume.prompt_tokens = stopped.usage.prompt_tokens
        # Nobody knows the turn any more: it goes on behind what came.
        *_, last = [response async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    assert (last.complete.text, last.complete.matched_stop_str) == (stopped.text, stop)
    assert list(last.complete.output_ids) == list(stopped.token_ids)


async def test_an_answer_that_ended_without_its_gateway_is_told_and_counts_once(gateways: Gateways) -> None:
    router = gateways.service.router
    async with AsyncClient(gateways.both, retry=POLICY) as client:
        tale = client.talk("tale")
        first = await tale.ask(PROMPT, sampling=Sampling(max_tokens=6, ignore_eos=True))
        stream = tale.stream(" And then?", sampling=Sampling(max_tokens=12, ignore_eos=True))
        piece = await anext(stream)
        await gateways.kill()
        await eventually(lambda: router.num_running == 0)
        answer = await stream.answer()
        view = await client.conversation("tale")
        assert view.num_turns == 2
        assert view.num_tokens == answer.usage.prompt_tokens + 12
        assert answer.token_ids[: len(piece.token_ids)] == piece.token_ids
        assert first.usage.prompt_tokens + 6 < answer.usage.prompt_tokens
        await client.delete_conversation("tale")


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_gateway_may_die_before_its_client_knows_whether_the_turn_began(
    gateways: Gateways, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request adds to a conversation: it must not do so twice, and not be refused."""
    router, asked = gateways.service.router, asyncio.Event()
    begin_turn = router.begin_turn

    async def begin(request: TurnRequest) -> object:
        if asked.is_set():
            return await begin_turn(request)
        if is_begun:
            await begin_turn(request)
        asked.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(router, "begin_turn", begin)
    async with AsyncClient(gateways.both, retry=POLICY) as client:
        asking = asyncio.create_task(client.ask(PROMPT, conversation_id="c", sampling=PROCESSED))
        await asked.wait()
        await gateways.kill()
        answer = await asking
        assert (await client.conversation("c")).num_turns == 1
        alone = await client.ask(PROMPT, sampling=PROCESSED)
        assert answer.token_ids == alone.token_ids
        await client.delete_conversation("c")


async def test_a_gateway_whose_client_went_elsewhere_does_not_end_the_turn(gateways: Gateways) -> None:
    """Only the link between client and gateway was cut. The gateway notices late, and lets the turn be."""
    aborts: list[str] = []
    late = gateways.dying._abort_soon

    def note(request_id: str, reader: str = "") -> None:
        aborts.append(reader)

    gateways.dying._abort_soon = note  # type: ignore[assignment,method-assign]

    async def cut() -> None:
        await gateways._first.stop(0)

    async def abort_late() -> None:
        (reader,) = aborts
        await late("r", reader)

    def act(count: int) -> object:
        return cut_at(count) or (abort_at(count) if aborts else None)

    cut_at, abort_at = at(10, cut), at(30, abort_late)
    async with AsyncClient(gateways.both, retry=POLICY) as client:
        stream = client.stream(PROMPT, sampling=PROCESSED, request_id="r")
        num_tokens = 0
        async for piece in stream:
            num_tokens += len(piece.token_ids)
            waits = act(num_tokens)
            if asyncio.iscoroutine(waits):
                await waits
        assert num_tokens == 60
    assert len(aborts) == 1


async def test_a_resumed_turn_has_all_log_probabilities(gateways: Gateways) -> None:
    """Those of tokens that came before are in the last message too."""
    request = inference_pb2.GenerateRequest(text=PROMPT, sampling_params=PROCESSED.to_message())
    request.sampling_params.logprobs, request.sampling_params.prompt_logprobs = 2, 1
    async with gateways.channel() as whole, grpc.aio.insecure_channel(gateways.first_target) as first:
        stub = inference_pb2_grpc.InferenceStub(whole)
        *_, wanted = [response async for response in stub.Generate(request, timeout=CALL_SECONDS)]
        request.request_id = "r"
        received: list[int] = []
        call = inference_pb2_grpc.InferenceStub(first).Generate(request, timeout=CALL_SECONDS)
        opened: Any = await call.read()
        start = opened.start
        while len(received) < 10:
            response: Any = await call.read()
            received.extend(response.chunk.token_ids)
        await gateways.kill()
        assert start.seed == 7
        request.resume.received.extend(received)
        request.resume.prompt_tokens = start.prompt_tokens
        *others, last = [each async for each in stub.Generate(request, timeout=CALL_SECONDS)]
    rest = [token for each in others for token in each.chunk.token_ids]
    assert received + rest == list(wanted.complete.output_ids)
    for name in ("output_logprobs", "prompt_logprobs"):
        assert getattr(last.complete, name) == getattr(wanted.complete, name), name
    assert [each.token_id for response in others for each in response.chunk.logprobs] == rest


async def test_what_cannot_be_resumed_is_refused_in_one_sentence(gateways: Gateways) -> None:
    async with gateways.channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def refusal(request_id: str = "r", n: int = 1, seed: int | None = 1) -> str:
            sampling = inference_pb2.SamplingParams(n=n, seed=seed)
            request = inference_pb2.GenerateRequest(request_id=request_id, text="x", sampling_params=sampling)
            request.resume.SetInParent()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, timeout=CALL_SECONDS).read()
            return f"{caught.value.code().name} {caught.value.details()}"

        assert await refusal(request_id="") == "INVALID_ARGUMENT request_id: '' is not allowed; name a request"
        assert "2 answers cannot be resumed" in await refusal(n=2)
        assert "sampling_params.seed is not given" in await refusal(seed=None)
        async with AsyncClient(gateways.target) as client:
            stream = client.stream(PROMPT, sampling=Sampling(max_tokens=4000, seed=2), request_id="r")
            await anext(stream)
            assert "running already for another request" in await refusal()
            await client.abort(["r"])
            with pytest.raises(TurnCancelled):
                await stream.answer()
