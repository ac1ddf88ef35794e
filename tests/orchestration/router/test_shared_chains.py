"""Chains of histories that share KV stay exact while every slot that holds none of their tokens is NaN.

Before each turn all rings are idle, and `poison` fills the slots that no sequence has tokens in: those of freed blocks
too, which otherwise still hold KV that is right by chance.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringserve.orchestration.conversations.prefixes import MIN_SHARED
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.workers.kv.cache import slots_of
from tests.orchestration.conversations.moving import Leader
from tests.orchestration.service import BLOCK_TOKENS, Service, read_tokens
from tests.waiting import eventually
from tests.workers.models import Oracle, random_tokens

MODEL = "llama_gqa"
MAX_TOKENS = 5
RINGS = [(1, 1), (2, 3)]

Models = Mapping[str, Path]
Oracles = Mapping[str, Oracle]


@asynccontextmanager
async def serving(model_paths: Models, rings: tuple[int, int], **settings: Any) -> AsyncIterator[Service]:
    async with Service(model_paths[MODEL], *rings, retain_prompts=True, **settings) as service:
        yield service
        await poison(service)


async def poison(service: Service) -> None:
    """Wait until all rings are idle, check who holds which block, and write NaN to every slot without a token."""
    pools = [leader.ring.pool for leader in service.peers.leaders.values()]
    await eventually(lambda: service.router.num_running == 0)
    await eventually(lambda: all(item.pinned_by is None for pool in pools for item in pool._sequences.values()))
    service.check_integrity()
    for leader in service.peers.leaders.values():
        fill_unused(leader)


def fill_unused(leader: Leader) -> None:
    pool, tp = leader.ring.pool, leader.settings.ranks.tp
    for rank in range(pool.num_ranks):
        tables = [(item.table(rank), item.shards.held[rank]) for item in pool._sequences.values()]
        used = [slots_of(table, np.arange(held), BLOCK_TOKENS) for table, held in tables]
        for port in leader.ring.ranks[rank * tp : (rank + 1) * tp]:
            cache = port.worker.parts.cache  # type: ignore[attr-defined]
            is_unused = torch.ones(len(cache.k_layers[0]), dtype=torch.bool)
            is_unused[np.concatenate([np.empty(0, dtype=np.int64), *used])] = False
            for layer in (*cache.k_layers, *cache.v_layers):
                layer[is_unused] = torch.nan


async def ask(
    service: Service, oracle: Oracle, prompt: Sequence[int], *, conversation: str = "", tenant: str = ""
) -> int:
    """Poison, run one turn, compare its tokens with the oracle's, and return how many were cached."""
    await poison(service)
    request = service.request(prompt, conversation=conversation)
    if tenant:
        request = replace(request, request_id=f"{tenant}/{request.request_id}")
    answer = await service.answer(request)
    assert answer.token_ids == oracle.greedy([*prompt], MAX_TOKENS)
    return answer.begun.plan.cached_tokens


@pytest.mark.parametrize("rings", RINGS)
async def test_prefixes_of_every_length_around_block_borders_are_shared(
    rings: tuple[int, int], model_paths: Models, oracles: Oracles
) -> None:
    longest = MIN_SHARED + 2 * BLOCK_TOKENS * max(rings)
    document = random_tokens(longest + 1, seed=1)
    async with serving(model_paths, rings) as service:
        assert await ask(service, oracles[MODEL], document) == 0
        for shared in range(MIN_SHARED - 1, longest + 1):
            differs = (document[shared] + 1) % 256
            prompt = [*document[:shared], differs, *random_tokens(shared % 7, seed=shared)]
            assert await ask(service, oracles[MODEL], prompt) == (shared if shared >= MIN_SHARED else 0)


@pytest.mark.parametrize("rings", RINGS)
async def test_the_middle_of_a_chain_that_is_evicted_takes_nothing_from_its_ends(
    rings: tuple[int, int], model_paths: Models, oracles: Oracles
) -> None:
    oracle = oracles[MODEL]
    parts = [random_tokens(length, seed=length) for length in (33, 41, 26)]
    chain = [parts[0], parts[0] + parts[1], parts[0] + parts[1] + parts[2]]
    async with serving(model_paths, rings, num_blocks=120) as service:
        for number, prompt in enumerate(chain):
            before = len(chain[number - 1]) if number else 0
            assert await ask(service, oracle, prompt, conversation=f"c{number}") == before
        pools = [leader.ring.pool for leader in service.peers.leaders.values()]
        filling = 0
        while any(pool.num_retained("c1") for pool in pools):
            for number in (0, 2):  # both ends are used again, the middle is not
                await ask(service, oracle, chain[number], conversation=f"c{number}")
            filling += 1
            assert filling < 30, "the middle of the chain is never evicted"
            await ask(service, oracle, random_tokens(60, seed=100 + filling), conversation=f"filling-{filling}")
        assert all(pool.num_retained(name) for pool in pools for name in ("c0", "c2"))
        for number, prompt in enumerate(chain):
            assert await ask(service, oracle, [*prompt, 7, number], conversation=f"late-{number}") >= len(prompt) - 1


@pytest.mark.parametrize("rings", RINGS)
async def test_forks_of_a_shared_chain_go_on_beside_it_and_after_it(
    rings: tuple[int, int], model_paths: Models, oracles: Oracles
) -> None:
    oracle = oracles[MODEL]
    document = random_tokens(38, seed=1)
    async with serving(model_paths, rings) as service:
        await ask(service, oracle, document)
        own = document + random_tokens(15, seed=2)
        assert await ask(service, oracle, own, conversation="own") == len(document)
        history = own + oracle.greedy(own, MAX_TOKENS)
        histories = {"own": history}
        for name, at_token in (("whole", len(history)), ("in its own part", 45), ("in the shared part", 22)):
            await service.router.fork_conversation("own", name, at_token)
            histories[name] = history[:at_token]
        await poison(service)
        new = {name: random_tokens(6 + number, seed=9 + number) for number, name in enumerate(histories)}
        requests = [service.request(new[name], conversation=name, mode=PromptMode.APPEND) for name in histories]
        beside = document + random_tokens(4, seed=8)
        answers = await asyncio.gather(*map(service.answer, [*requests, service.request(beside)]))
        prompts = [[*known, *new[name]] for name, known in histories.items()] + [beside]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle.greedy(prompt, MAX_TOKENS)
        await service.router.delete_conversation("own")
        for prompt in prompts[1:]:
            assert await ask(service, oracle, [*prompt, 3]) >= len(prompt) - 1
        assert await ask(service, oracle, prompts[0]) == len(history), "the whole fork has it all"


@pytest.mark.parametrize("rings", RINGS)
async def test_tenants_of_the_same_text_have_kv_of_their_own(
    rings: tuple[int, int], model_paths: Models, oracles: Oracles
) -> None:
    oracle, prompt = oracles[MODEL], random_tokens(43, seed=1)
    async with serving(model_paths, rings) as service:
        for tenant in ("ann", "bob"):
            assert await ask(service, oracle, prompt, conversation=f"{tenant}/c", tenant=tenant) == 0
        assert all(leader.ring.pool.shared_tokens == 0 for leader in service.peers.leaders.values())
        assert await ask(service, oracle, [*prompt, 1], tenant="ann") == len(prompt)
        await service.router.delete_conversation("ann/c")
        assert await ask(service, oracle, [*prompt, 2], tenant="bob") == len(prompt)
        assert await ask(service, oracle, [*prompt, 2], tenant="eve") == 0


@pytest.mark.parametrize("rings", RINGS)
async def test_tenants_share_prompts_where_they_are_named_together(
    rings: tuple[int, int], model_paths: Models, oracles: Oracles
) -> None:
    """The source's conversation is deleted while the other tenant's goes on; nobody else is found or continued."""
    oracle, prompt = oracles[MODEL], random_tokens(43, seed=1)
    async with serving(model_paths, rings, share_prompts=(("ann", "bob"), ("eve", "dan"))) as service:
        assert await ask(service, oracle, prompt, conversation="ann/c", tenant="ann") == 0
        assert await ask(service, oracle, [*prompt, 1], conversation="bob/c", tenant="bob") == len(prompt)
        for stranger in ("eve", "zoe"):
            assert await ask(service, oracle, [*prompt, 1], tenant=stranger) == 0
        assert await ask(service, oracle, [*prompt, 1], tenant="dan") == len(prompt)
        await service.router.delete_conversation("ann/c")
        assert await ask(service, oracle, [*prompt, 2], tenant="ann") == len(prompt)
        names = [
            each.conversation_id for each in (await service.router.list_conversations("bob/", "", 9)).conversations
        ]
        assert names == ["bob/c"]


async def test_a_prompt_without_a_conversation_continues_none_of_another_tenant(
    model_paths: Models, oracles: Oracles
) -> None:
    """Each tenant has a history of its own, though one begins with the whole of the other."""
    oracle, prompt = oracles[MODEL], random_tokens(43, seed=1)
    async with serving(model_paths, RINGS[0], share_prompts=(("ann", "bob"),)) as service:
        assert await ask(service, oracle, prompt, tenant="ann") == 0
        assert service.router.num_unnamed == 1
        answer = oracle.greedy([*prompt], MAX_TOKENS)
        longer = [*prompt, *answer, 5]
        assert await ask(service, oracle, longer, tenant="bob") > len(prompt)
        assert service.router.num_unnamed == 2


@pytest.mark.parametrize("rings", RINGS)
async def test_a_turn_that_is_cancelled_while_it_shares_takes_nothing_from_its_source(
    rings: tuple[int, int], model_paths: Models, oracles: Oracles
) -> None:
    oracle, document = oracles[MODEL], random_tokens(42, seed=1)
    async with serving(model_paths, rings) as service:
        await ask(service, oracle, document, conversation="source")
        for num_tokens in range(3):
            await poison(service)
            request = service.request([*document[: 30 + num_tokens], 5, 6, 7], max_tokens=2000)
            await read_tokens(service, request, num_tokens)
            await service.router.abort_requests([request.request_id])
            prompt = [*document, num_tokens]
            assert await ask(service, oracle, prompt) == len(document)
