"""KV moves both ways between rings that divide tokens and heads differently, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.plans import PromptMode
from tests.orchestration.conftest import KINDS
from tests.orchestration.service import Service
from tests.workers.models import Oracle, random_tokens

MAX_TOKENS = 6
# (cp, tp) of the prefill ring, (cp, tp) of the decode ring.
SHAPES = (
    ((1, 1), (1, 2)),
    ((1, 2), (1, 1)),
    ((1, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((2, 2), (2, 2)),
    ((2, 2), (3, 1)),
    ((3, 1), (2, 2)),
)


async def converse(service: Service, oracle: Oracle, sizes: tuple[int, ...]) -> None:
    """Run a conversation; each turn's tokens must be those of transformers, and no token is computed twice."""
    history: list[int] = []
    for number, size in enumerate(sizes):
        new = random_tokens(size, seed=number)
        mode = PromptMode.APPEND if history else PromptMode.WHOLE_HISTORY
        request = service.request(new, conversation="c", mode=mode, max_tokens=MAX_TOKENS)
        answer = await service.answer(request)
        cached = max(0, len(history) - 1)
        assert answer.token_ids == oracle.greedy([*history, *new], MAX_TOKENS), f"turn {number + 1}"
        assert answer.begun.plan.cached_tokens == cached
        token_bytes = service.model.kv_bytes_per_token
        assert answer.finished.migrated_bytes == (len(history) + size - cached) * token_bytes, f"turn {number + 1}"
        # The decode ring has the KV of the last answer but for its newest token.
        assert answer.report.pulled_bytes == (MAX_TOKENS - 1 if number else 0) * token_bytes, f"turn {number + 1}"
        history += [*new, *answer.token_ids]


@pytest.mark.parametrize("selector", ["pass_kv", "pass_q"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
async def test_three_turns_over_rings_of_different_shape(
    prefill: tuple[int, int],
    decode: tuple[int, int],
    selector: str,
    model_paths: Mapping[str, Path],
    oracles: Mapping[str, Oracle],
) -> None:
    (prefill_cp, prefill_tp), (decode_cp, decode_tp) = prefill, decode
    path = model_paths["llama_gqa"]
    async with Service(path, prefill_cp, decode_cp, prefill_tp=prefill_tp, decode_tp=decode_tp) as service:
        service.select(selector)
        before = service.free_blocks()
        await converse(service, oracles["llama_gqa"], (65, 7, 1))
        service.check_integrity()
        await service.router.delete_conversation("c")
        assert service.free_blocks() == before


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_model_in_cp2_tp2(
    kind: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths[kind], 2, 2, prefill_tp=2, decode_tp=2, chunk_tokens=40) as service:
        await converse(service, oracles[kind], (101, 5))


async def test_four_shares_of_the_heads_become_two(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle]
) -> None:
    async with Service(model_paths["llama_mha"], 1, 2, prefill_tp=4, decode_tp=2) as service:
        await converse(service, oracles["llama_mha"], (33, 9))


async def test_a_ring_tells_how_many_processes_share_its_heads(model_paths: Mapping[str, Path]) -> None:
    async with Service(model_paths["llama_gqa"], 2, 1, decode_tp=2) as service:
        prefill, decode = (await service.router.get_server_info()).rings
        assert (prefill.num_ranks, prefill.tp, len(prefill.rank_pids), len(prefill.kv_usage)) == (2, 1, 2, 2)
        assert (decode.num_ranks, decode.tp, len(decode.rank_pids), len(decode.kv_usage)) == (1, 2, 2, 1)


async def test_a_ring_whose_heads_do_not_divide_does_not_start(model_paths: Mapping[str, Path]) -> None:
    service = Service(model_paths["llama_gqa"], 1, 1, prefill_tp=3)
    try:
        with pytest.raises(ConfigError, match=r"tp: 3 does not divide the 2 KV heads of \S+; allowed are 1, 2$"):
            await service.prefill.start("prefill-0")
    finally:
        await service.__aexit__(None, None, None)
