"""A client that expects a conversation to be remembered is told where it is not, and nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConversationLost
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.turns import TurnRequest
from tests.orchestration.service import Service
from tests.workers.models import random_tokens

PROMPT = random_tokens(12)
Models = Mapping[str, Path]


def expecting(service: Service, expected: int | None, prompt: list[int] | None = None) -> TurnRequest:
    mode = PromptMode.APPEND if prompt else PromptMode.WHOLE_HISTORY
    return replace(service.request(prompt or PROMPT, conversation="c", mode=mode), expected_tokens=expected)


async def test_a_turn_runs_where_as_many_tokens_are_remembered_as_expected(model_paths: Models) -> None:
    async with Service(model_paths["llama_gqa"], 1, 1) as service:
        first = await service.answer(expecting(service, 0))
        assert first.begun.remembered_tokens == 0
        second = await service.answer(expecting(service, 17, [1, 2]))
        assert second.begun.remembered_tokens == 17
        assert (await service.router.get_conversation("c")).num_tokens == 24
        for expected in (0, 17, 25):
            with pytest.raises(ConversationLost, match=f"'c' was to remember {expected} tokens, and it has 24$"):
                await service.answer(expecting(service, expected, [3]))
        assert (await service.router.get_conversation("c")).num_turns == 2
        assert (await service.answer(expecting(service, 24, [3]))).begun.remembered_tokens == 24


async def test_the_error_says_why_a_conversation_is_gone(model_paths: Models) -> None:
    now = [0.0]
    async with Service(model_paths["llama_gqa"], 1, 1, clock=lambda: now[0], conversation_ttl=60.0) as service:
        with pytest.raises(ConversationLost, match="and it has 0: it is not known here; it never existed, or only be"):
            await service.answer(expecting(service, 17))
        await service.answer(expecting(service, None))
        await service.router.delete_conversation("c")
        with pytest.raises(ConversationLost, match="it has 0: it was deleted"):
            await service.answer(expecting(service, 17))
        await service.answer(expecting(service, None))
        now[0] += 61.0
        with pytest.raises(ConversationLost, match="it has 0: it was not used for 60 s, and expired"):
            await service.answer(expecting(service, 17))
        assert not service.router._conversations.is_known("c")
