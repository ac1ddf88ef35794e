"""Sparse turns, and every way in which approximate KV might reach an exact turn, or exact KV one that is sparse.

The model's answers to a sparse prefill differ from transformers': a leak shows in the tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringserve import views
from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses
from ringserve.cp_core.errors import InvalidRequest, Unavailable
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.protocol.plans import MAX_LOSS, MAX_TTFT, Bound
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.orchestration.protocol.turns import LostTurn
from ringserve.orchestration.router import recovery
from ringserve.workers.protocol.steps import Algorithm
from tests.orchestration.service import Answer, Service
from tests.waiting import eventually
from tests.workers.models import SHAPE, Oracle, random_tokens
from tests.workers.thread_ranks import RATES

SPARSE = Sparsity(keep=0.05, sinks=1, window=2)
LOSS = Bound(name=MAX_LOSS, limit=0.5)
SLOW_LINK = replace(RATES, link_bytes_per_second=1e5)
"""Rates by which turns are planned: messages of other ranks' keys take longest."""


def loss(num_tokens: int, keep: float, value: float) -> MeasuredLoss:
    return MeasuredLoss(
        num_tokens=num_tokens,
        num_ranks=2,
        keep=keep,
        loss=value,
        accuracy=0.5,
        exact_accuracy=1.0,
        num_questions=8,
    )


LOSSES = SparseLosses(
    model="six-layers",
    sinks=SPARSE.sinks,
    window=SPARSE.window,
    measured=(loss(600, 0.05, 0.3), loss(2000, 0.05, 0.4), loss(600, 0.5, 0.1), loss(2000, 0.5, 0.2)),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with layers between the first and the last, which are exact."""
    directory = tmp_path_factory.mktemp("six-layers")
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 6})).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


def service_of(path: Path, **options: object) -> Service:
    # A chain would leave the prompt to one rank at such a rate.
    defaults = {"selector": "pass_kv", "max_direct_tokens": 64, "sparse_losses": LOSSES}
    values = {"rates": SLOW_LINK, **defaults, **options}
    # A short prompt whole on one rank would be exact.
    values["scheduling"] = PrefillScheduling(whole_tokens=0)
    return Service(path, 2, 2, **values)  # type: ignore[arg-type]


def prompt_of(seed: int = 0) -> list[int]:
    return random_tokens(440, seed=seed)


async def ask(
    service: Service, prompt: list[int], bound: Bound | None = None, conversation: str = "c", max_tokens: int = 5
) -> Answer:
    return await service.answer(service.request(prompt, conversation=conversation, bound=bound, max_tokens=max_tokens))


def cached(answer: Answer) -> int:
    return answer.begun.plan.cached_tokens


async def sparsity_of(service: Service, name: str = "c") -> views.Sparsity | None:
    return (await service.router.get_conversation(name)).sparsity


async def test_a_turn_within_a_loss_is_sparse_says_so_and_stays_apart_in_its_conversation(
    path: Path, oracle: Oracle
) -> None:
    async with service_of(path) as service:
        prompt = prompt_of()
        first = await ask(service, prompt, LOSS)
        plan = first.begun.plan
        assert plan.sparse is not None
        assert plan.sparse.sparsity == SPARSE
        assert (plan.sparse.bound, plan.sparse.limit, plan.algorithm) == (MAX_LOSS, 0.5, Algorithm.PASS_KV)
        assert (plan.sparse.predicted_loss, plan.sparse.measured_loss, plan.sparse.measured_tokens) == (0.3, 0.3, 600)
        assert plan.reason.endswith(": max_loss 0.5 allows 0.05 of other ranks' keys")
        assert plan.predicted_prefill_seconds == dict(plan.alternatives)["sparse"] < dict(plan.alternatives)["pass_kv"]
        assert {chunk.algorithm for chunk in first.report.chunks} == {Algorithm.PASS_KV}
        assert first.token_ids != oracle.greedy(prompt, 5)
        assert await sparsity_of(service) == SPARSE
        # A follow-up of the same sparsity uses the KV, on the prefill ring, which alone can be sparse.
        history = [*prompt, *first.token_ids, 7]
        second = await ask(service, history, LOSS)
        assert second.begun.plan.algorithm is Algorithm.PASS_KV
        assert cached(second) == len(history) - 2
        # An exact one uses none of it, and makes the conversation exact.
        history = [*history, *second.token_ids, 8]
        third = await ask(service, history)
        assert third.begun.plan.sparse is None
        assert cached(third) == 0
        assert third.token_ids == oracle.greedy(history, 5)
        assert await sparsity_of(service) is None
        # Nor does a sparse turn use exact KV.
        fourth = await ask(service, [*history, *third.token_ids, 9], LOSS)
        assert fourth.begun.plan.sparse is not None
        assert cached(fourth) == 0
        assert await sparsity_of(service) == SPARSE
        service.check_integrity()


async def test_prompts_share_no_kv_with_sparse_ones_neither_running_nor_ended(path: Path, oracle: Oracle) -> None:
    async with service_of(path, retain_prompts=True) as service:
        prompt = prompt_of()
        right = oracle.greedy(prompt, 5)
        sparse, *exact = await asyncio.gather(
            ask(service, prompt, LOSS, "sparse"), ask(service, prompt, None, "exact"), ask(service, prompt, None, "")
        )
        assert sparse.token_ids != right
        assert [each.token_ids for each in exact] == [right, right]
        later = [*prompt, *sparse.token_ids]
        answer = await ask(service, later, None, "other")
        assert cached(answer) == len(prompt)  # of the exact prompts
        assert answer.token_ids == oracle.greedy(later, 5)
        for name in ("third", ""):
            assert cached(await ask(service, prompt, LOSS, name)) == 0
        service.check_integrity()


async def test_of_sparse_turns_alone_nothing_is_shared(path: Path, oracle: Oracle) -> None:
    async with service_of(path, retain_prompts=True) as service:
        prompt = prompt_of()
        free = service.free_blocks()
        assert (await ask(service, prompt, LOSS, "")).begun.plan.sparse is not None
        await eventually(lambda: service.free_blocks() == free)
        await ask(service, prompt, LOSS, "c")
        for name in ("", "d"):
            answer = await ask(service, [*prompt, 5], None, name)
            assert cached(answer) == 0 if name == "" else cached(answer) == len(prompt)
            assert answer.token_ids == oracle.greedy([*prompt, 5], 5)


async def test_a_conversation_that_became_sparse_leaves_the_prefixes(path: Path, oracle: Oracle) -> None:
    async with service_of(path, retain_prompts=True) as service:
        prompt = prompt_of()
        await ask(service, prompt)
        assert cached(await ask(service, prompt, None, "shares")) == len(prompt) - 1
        await service.router.delete_conversation("shares")
        assert (await ask(service, [*prompt[:50], *prompt_of(2)], LOSS)).begun.plan.sparse is not None
        answer = await ask(service, prompt, None, "d")
        assert cached(answer) == 0
        assert answer.token_ids == oracle.greedy(prompt, 5)


async def test_forks_of_a_sparse_conversation_are_sparse(path: Path, oracle: Oracle) -> None:
    async with service_of(path) as service:
        prompt = prompt_of()
        first = await ask(service, prompt, LOSS)
        for name in ("e", "s"):
            assert (await service.router.fork_conversation("c", name, None)).sparsity == SPARSE
        history = [*prompt, *first.token_ids, 7]
        exact = await ask(service, history, None, "e")
        assert cached(exact) == 0
        assert exact.token_ids == oracle.greedy(history, 5)
        sparse = await ask(service, history, LOSS, "s")
        assert cached(sparse) == len(history) - 2
        assert [await sparsity_of(service, name) for name in ("c", "e", "s")] == [SPARSE, None, SPARSE]
        service.check_integrity()


async def test_a_router_that_is_started_again_knows_what_is_sparse(
    path: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "RELEASE_SECONDS", 0.01)
    async with service_of(path, journal=tmp_path) as service:
        prompt = prompt_of()
        ended = await ask(service, prompt, LOSS, "ended")
        running = await service.router.begin_turn(
            service.request(prompt, conversation="running", bound=LOSS, max_tokens=60)
        )
        turn = service.router._turns.of_turn(running.turn_id)
        assert turn is not None
        await eventually(lambda: turn.attempt.prefilling is not None and turn.attempt.prefilling.done())
        await service.crash_router()
        service.start_router()
        for leader in service.peers.leaders.values():
            await leader.announce()
        tokens: list[int] = []
        async for event in service.peers.decode(running.decode_endpoint).stream_turn(running.turn_id):
            tokens += getattr(event, "token_ids", ())
        assert [await sparsity_of(service, name) for name in ("ended", "running")] == [SPARSE, SPARSE]
        follow_up = await ask(service, [*prompt, *ended.token_ids, 7], LOSS, "ended")
        assert cached(follow_up) == len(prompt) + 4
        for name, answer in (("ended", [*ended.token_ids, 7, *follow_up.token_ids]), ("running", tokens)):
            history = [*prompt, *answer, 9]
            exact = await ask(service, history, None, name)
            assert cached(exact) == 0
            assert exact.token_ids == oracle.greedy(history, 5)
        service.check_integrity()


async def test_kv_of_a_sparse_past_is_not_taken_for_an_exact_conversations(
    path: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact turn goes over other rings, which die with the router; the old ones tell of what they still hold."""
    monkeypatch.setattr(recovery, "RELEASE_SECONDS", 0.01)
    async with service_of(path, journal=tmp_path, other_prefill=[2], other_decode=[2]) as service:
        prompt = prompt_of()
        await ask(service, prompt, LOSS)
        for name in ("prefill-0", "decode-0"):
            ring = service.router._rings.find(name)
            assert ring is not None
            ring.is_ready = False
        exact = await ask(service, prompt)
        assert exact.token_ids == oracle.greedy(prompt, 5)
        await service.crash_router()
        service.start_router()
        for name in ("prefill-0", "decode-0"):
            await service.peers.leaders[name].announce()
        view = await service.router.get_conversation("c")
        assert (view.sparsity, view.placements) == (None, ())


async def test_a_sparse_turn_that_loses_its_ring_goes_on_sparse(path: Path, oracle: Oracle) -> None:
    async with service_of(path, other_decode=[2]) as service:
        prompt = prompt_of()
        request = service.request(prompt, conversation="c", bound=LOSS, max_tokens=12)
        begun = await service.router.begin_turn(request)
        lost = begun.plan.decode_ring
        turn = service.router._turns.of_turn(begun.turn_id)
        assert turn is not None
        await eventually(lambda: turn.attempt.prefilling is not None and turn.attempt.prefilling.done())
        ring = service.router._rings.find(lost)
        assert ring is not None
        ring.is_ready = False
        service.router._turns.lose(ring, Unavailable("it was unplugged"))
        again = await service.answer(replace(request, resume=LostTurn(turn_id=begun.turn_id)))
        assert again.begun.plan.decode_ring != lost
        assert again.begun.plan.sparse == begun.plan.sparse
        assert again.begun.plan.algorithm is Algorithm.PASS_KV
        assert await sparsity_of(service) == SPARSE
        history = [*prompt, *again.token_ids, 9]
        exact = await ask(service, history)
        assert cached(exact) == 0
        assert exact.token_ids == oracle.greedy(history, 5)


async def test_a_sparse_turn_that_fails_leaves_its_conversation_exact(path: Path, oracle: Oracle) -> None:
    async with service_of(path) as service:
        prompt = prompt_of()
        first = await ask(service, prompt)
        history = [*prompt[:50], *prompt_of(2)]
        begun = await service.router.begin_turn(service.request(history, conversation="c", bound=LOSS, max_tokens=200))
        assert begun.plan.sparse is not None
        turn = service.router._turns.of_turn(begun.turn_id)
        assert turn is not None
        await eventually(lambda: turn.attempt.prefilling is not None and turn.attempt.prefilling.done())
        await service.router.abort_requests([turn.request.request_id])
        await eventually(lambda: service.router.num_running == 0)
        assert await sparsity_of(service) is None
        history = [*prompt, *first.token_ids, 7]
        answer = await ask(service, history)
        assert cached(answer) == 0  # the sparse turn's tokens had taken the place of the conversation's
        assert answer.token_ids == oracle.greedy(history, 5)


async def test_an_exact_turn_in_a_step_with_a_sparse_one_is_exact(path: Path, oracle: Oracle) -> None:
    async with service_of(path, selector="pass_q") as service:
        prompts = [prompt_of(seed) for seed in range(4)]
        bounds = [None, LOSS, None, LOSS]
        answers = await asyncio.gather(
            *(ask(service, prompt, bound, "") for prompt, bound in zip(prompts, bounds, strict=True))
        )
        for prompt, bound, answer in zip(prompts, bounds, answers, strict=True):
            assert (answer.begun.plan.sparse is None) == (bound is None)
            assert (answer.token_ids == oracle.greedy(prompt, 5)) == (bound is None)
        assert any(chunk.num_turns > 1 for answer in answers for chunk in answer.report.chunks)


async def test_a_time_is_met_with_the_least_loss_and_exactly_where_that_is_in_time(path: Path, oracle: Oracle) -> None:
    async with service_of(path) as service:
        prompt = prompt_of()
        fastest = (await ask(service, prompt, LOSS, "")).begun.plan
        exact = dict(fastest.alternatives)[Algorithm.PASS_KV]
        plan = (await ask(service, prompt, Bound(name=MAX_TTFT, limit=10 * exact), "")).begun.plan
        assert plan.sparse is None
        plan = (await ask(service, prompt, Bound(name=MAX_TTFT, limit=0.95 * exact), "")).begun.plan
        assert plan.sparse is not None
        assert (plan.sparse.keep, plan.sparse.predicted_loss) == (0.5, 0.1)
        with pytest.raises(InvalidRequest, match=r"max_ttft: no measured share of keys meets 1e-06 s"):
            await ask(service, prompt, Bound(name=MAX_TTFT, limit=1e-6), "")


@pytest.mark.parametrize("limit", [0.0, 0.05])
async def test_a_loss_that_no_sparsity_meets_is_met_by_an_exact_turn(path: Path, oracle: Oracle, limit: float) -> None:
    async with service_of(path, bound=LOSS) as service:  # the request's own bound counts, and 0 is exact
        answer = await ask(service, prompt_of(), Bound(name=MAX_LOSS, limit=limit))
        assert answer.begun.plan.sparse is None
        assert answer.token_ids == oracle.greedy(prompt_of(), 5)
        assert (await ask(service, prompt_of(1), None, "d")).begun.plan.sparse is not None


async def test_without_a_bound_every_turn_is_exact_whatever_is_sooner(path: Path, oracle: Oracle) -> None:
    async with service_of(path) as service:
        answer = await ask(service, prompt_of())
        assert answer.begun.plan.sparse is None
        assert answer.token_ids == oracle.greedy(prompt_of(), 5)


async def test_what_was_not_measured_is_refused_by_the_name_of_the_bound(path: Path) -> None:
    async with service_of(path, sparse_losses=None) as service:
        with pytest.raises(InvalidRequest, match=r"max_loss: 0.5 is not allowed, since no losses are known here"):
            await ask(service, prompt_of(), LOSS)
    async with service_of(path, other_prefill=[3]) as service:
        with pytest.raises(InvalidRequest, match=r"max_loss: 0.5 is not allowed: .* up to 2 ranks; a ring has 3"):
            await ask(service, prompt_of(), LOSS)
    async with service_of(path) as service:
        with pytest.raises(InvalidRequest, match=r"max_loss: 0.5 is not allowed: .* up to 2000 tokens; the prompt has"):
            await ask(service, random_tokens(2001), LOSS)
