"""Rings of many sizes in one service: turns of one conversation go from one to another, and stay exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from ringserve.orchestration.placement.kv_locations import Choice, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.views import ConversationInfo
from tests.orchestration.conftest import KINDS
from tests.orchestration.service import Answer, Service, Shape, is_idle, read_tokens
from tests.waiting import eventually
from tests.workers.models import ALL_WINDOWED, Oracle, random_tokens

MAX_TOKENS = 5
# The first of each role is of one rank: prefill-0 and decode-0.
PREFILL: tuple[Shape, ...] = (2, 3, (1, 2), (2, 2))
DECODE: tuple[Shape, ...] = (3, 2, (2, 2))
PREFILL_RINGS = tuple(f"prefill-{number}" for number in range(1 + len(PREFILL)))
DECODE_RINGS = tuple(f"decode-{number}" for number in range(1 + len(DECODE)))
Pin = Callable[..., None]


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Pin:
    """Return a function that sends later turns to the named rings, as if all others had refused."""
    choose = RingPlacer.choose
    service: Service
    wanted: tuple[str, ...] = ()

    def chosen(self: RingPlacer, turn: WantedTurn, refused: Collection[RegisteredRing] = ()) -> Choice:
        others = [ring for ring in service.router.rings if ring.name not in wanted]
        return choose(self, turn, [*refused, *others])

    def set_pin(of: Service, *names: str) -> None:
        nonlocal service, wanted
        service, wanted = of, names
        monkeypatch.setattr(RingPlacer, "choose", chosen)

    return set_pin


def pools(path: Path, **settings: object) -> Service:
    return Service(path, 1, 1, other_prefill=PREFILL, other_decode=DECODE, **settings)  # type: ignore[arg-type]


class Talk:
    """One conversation: every answer is compared with that of transformers."""

    def __init__(self, service: Service, oracle: Oracle, name: str = "c") -> None:
        self.service = service
        self.history: list[int] = []
        self._oracle = oracle
        self._name = name

    async def say(self, new: list[int]) -> Answer:
        """Append `new` to the conversation."""
        return await self.tell([*self.history, *new])

    async def tell(self, whole: list[int]) -> Answer:
        """Send the whole history, which may differ from the conversation so far."""
        request = self.service.request(whole, conversation=self._name, max_tokens=MAX_TOKENS)
        answer = await self.service.answer(request)
        plan = answer.begun.plan
        rings = f"on {plan.prefill_ring} and {plan.decode_ring}"
        assert answer.token_ids == self._oracle.greedy(whole, MAX_TOKENS), f"turn of {len(whole)} tokens {rings}"
        self.history = [*whole, *answer.token_ids]
        return answer

    async def view(self) -> ConversationInfo:
        return await self.service.router.get_conversation(self._name)


@pytest.mark.parametrize(("decode", "selector"), list(zip(DECODE_RINGS, 2 * ("pass_kv", "pass_q"), strict=True)))
async def test_turns_that_alternate_between_prefill_rings_of_all_sizes_give_the_tokens_of_transformers(
    selector: str, decode: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], pin: Pin
) -> None:
    """Check that no prefill ring computes what another has computed: the decode ring retains the conversation."""
    async with pools(model_paths["llama_gqa"], selector=selector) as service:
        free = service.free_blocks()
        talk = Talk(service, oracles["llama_gqa"])
        sizes = (65, 7, 1, 30, 2, 11)
        for number, prefill in enumerate((*PREFILL_RINGS, PREFILL_RINGS[0])):
            pin(service, prefill, decode)
            cached = max(0, len(talk.history) - 1)
            answer = await talk.say(random_tokens(sizes[number], seed=number))
            plan = answer.begun.plan
            assert (plan.prefill_ring, plan.decode_ring) == (prefill, decode)
            assert plan.cached_tokens == cached
            # A ring that the conversation comes to has none of it, and fetches all.
            assert answer.report.pulled_bytes == cached * service.model.kv_bytes_per_token
            view = await talk.view()
            assert {(place.ring, place.num_tokens) for place in view.placements} == {
                (prefill, len(talk.history) - MAX_TOKENS),
                (decode, len(talk.history) - 1),
            }
        await service.router.delete_conversation("c")
        await is_idle(service, free)


@pytest.mark.parametrize("kind", [*KINDS, ALL_WINDOWED])
async def test_conversations_that_wander_over_all_rings_are_exact_whatever_is_edited(
    kind: str, model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], pin: Pin
) -> None:
    """Leave ranks empty by prompts of one token, and cut longer ones by steps of 24 tokens."""
    dice = random.Random(sum(map(ord, kind)))
    async with pools(model_paths[kind], chunk_tokens=24, missing_kv="auto") as service:
        free = service.free_blocks()
        talks = [Talk(service, oracles[kind], name) for name in ("a", "b")]
        met = set()
        for turn in range(16):
            talk = talks[turn % 2]
            prefill, decode = PREFILL_RINGS[turn % len(PREFILL_RINGS)], dice.choice(DECODE_RINGS)
            pin(service, prefill, decode)
            met.add((prefill, decode))
            new = random_tokens(dice.choice((1, 2, 3, 17, 64)), seed=turn)
            if dice.random() < 0.25 and len(talk.history) > 2:
                answer = await talk.tell([*talk.history[: dice.randrange(1, len(talk.history))], *new])
            else:
                answer = await talk.say(new)
            assert (answer.begun.plan.prefill_ring, answer.begun.plan.decode_ring) == (prefill, decode)
            service.check_integrity()
        assert len(met) > 8
        for name in ("a", "b"):
            await service.router.delete_conversation(name)
        await is_idle(service, free)


async def test_a_fork_may_go_on_at_other_rings_than_what_it_was_forked_from(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], pin: Pin
) -> None:
    oracle = oracles["llama_gqa"]
    async with pools(model_paths["llama_gqa"]) as service:
        talk = Talk(service, oracle, "c")
        pin(service, "prefill-2", "decode-1")
        await talk.say(random_tokens(70))
        await service.router.fork_conversation("c", "fork", 60)
        fork = Talk(service, oracle, "fork")
        fork.history = talk.history[:60]
        for prefill, decode in (("prefill-3", "decode-1"), ("prefill-2", "decode-3"), ("prefill-0", "decode-0")):
            pin(service, prefill, decode)
            await fork.say(random_tokens(9, seed=3))
        pin(service, "prefill-4", "decode-1")
        answer = await talk.say([7])
        assert answer.begun.plan.cached_tokens == len(talk.history) - MAX_TOKENS - 2, "the fork took nothing from it"
        service.check_integrity()


async def test_a_turn_that_is_cut_off_on_a_new_ring_leaves_the_conversation_exact(
    model_paths: Mapping[str, Path], oracles: Mapping[str, Oracle], pin: Pin
) -> None:
    async with pools(model_paths["llama_gqa"]) as service:
        talk = Talk(service, oracles["llama_gqa"])
        pin(service, "prefill-1", "decode-1")
        await talk.say(random_tokens(50))
        for prefill, decode in (("prefill-4", "decode-1"), ("prefill-1", "decode-2"), ("prefill-2", "decode-3")):
            pin(service, prefill, decode)
            cut = service.request([1, 2, 3], conversation="c", mode=PromptMode.APPEND, max_tokens=400)
            await read_tokens(service, cut, 3)
            await eventually(lambda: service.router.num_running == 0)
        pin(service, "prefill-1", "decode-1")
        answer = await talk.say([9])
        assert answer.begun.plan.cached_tokens == 54, "the rings that it has not left still have it"
        service.check_integrity()


async def test_the_plan_lists_rings_of_each_size_and_says_which_was_taken(model_paths: Mapping[str, Path]) -> None:
    async with pools(model_paths["llama_gqa"]) as service:
        plan = (await service.answer(service.request(random_tokens(40)))).begun.plan
        listed = {each.ring: (each.num_ranks, each.tp) for each in plan.ring_alternatives}
        assert listed == dict(zip(PREFILL_RINGS, ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)), strict=True))
        assert plan.prefill_ring in listed
