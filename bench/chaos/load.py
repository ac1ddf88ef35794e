"""Load of a chaos run: conversations of three turns, what their clients saw, and what they should have seen.

The first turn makes a history, the second is the one that is hit, the third asks whether the history is still there.
The experiment plays them through a client; nothing else is touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ringserve.client import Sampling
from ringserve.client.async_client import AsyncClient
from ringserve.client.results import Answer, Plan
from ringserve.cp_core.errors import RingserveError
from ringserve.services.gateway.text import REPLACEMENT

FIRST, HIT, LAST = 0, 1, 2
"""Numbers of the three turns."""
FIRST_TOKENS = (24, 130, 60, 300)
HIT_TOKENS = (16, 600, 40, 1000)
HIT_ANSWER_TOKENS = (64, 24, 64, 24)
LAST_TOKENS = 12
SHORT_ANSWER_TOKENS = 12
NUM_CONVERSATIONS = 8
STOPPED = (0, 5)
"""Conversations whose second turn has a stop string: a greedy and a seeded one."""
STOP_SHARE = 0.6
"""Share of the second answer's text before its stop string."""
STOP_LENGTH = 3


@dataclass(frozen=True, kw_only=True)
class ScriptedTurn:
    """Turn of a script: the new tokens of its prompt, and how its answer is sampled."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Script:
    """Conversation that a client plays. `repeats_history`: each prompt is the whole history, otherwise what is new."""

    name: str
    turns: tuple[ScriptedTurn, ...]
    is_greedy: bool
    repeats_history: bool


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Script with the answers that it has without a fault, one for each turn."""

    script: Script
    answers: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    def history(self, number: int) -> tuple[int, ...]:
        """Return the conversation's tokens before a turn."""
        turns = zip(self.script.turns[:number], self.answers[:number], strict=True)
        return tuple(token for turn, answer in turns for token in (*turn.prompt, *answer))

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the tokens that the client sends with a turn."""
        new = self.script.turns[number].prompt
        return (*self.history(number), *new) if self.script.repeats_history else new


@dataclass(frozen=True, order=True, slots=True)
class Gap:
    """Time between two pieces of a stream: its seconds, when it began, and the number of pieces before it."""

    seconds: float
    began: float
    num_pieces: int


@dataclass(slots=True)
class Stream:
    """Turn as its client sees it. Times are those of `time.monotonic`.

    `arrivals` are the times of pieces with tokens, `token_ids` the tokens of all pieces. `rings` are those of the
    latest plan that the client knows, and of earlier ones.
    """

    expected: Expected
    number: int
    began: float
    ended: float = 0.0
    plan: Plan | None = None
    rings: set[str] = field(default_factory=set)
    arrivals: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    answer: Answer | None = None
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.ended > 0.0

    @property
    def is_exact(self) -> bool:
        """True if the whole answer came with every token and character of the answer without a fault."""
        answer = self.answer
        return answer is not None and not self.difference

    @property
    def difference(self) -> str:
        """Say how an answer that came differs from the one without a fault; empty if it does not."""
        answer, expected = self.answer, self.expected
        if answer is None:
            return ""
        tokens = expected.answers[self.number]
        if answer.token_ids != tokens:
            pairs = enumerate(zip(answer.token_ids, tokens, strict=False))
            place = next(
                (place for place, pair in pairs if pair[0] != pair[1]), min(len(answer.token_ids), len(tokens))
            )
            return f"its tokens differ from place {place} of {len(tokens)}"
        if tuple(self.token_ids) != tokens[: len(self.token_ids)]:
            return "tokens were streamed that are not those of the answer"
        if answer.text != expected.texts[self.number]:
            return "its text differs"
        if answer.usage.prompt_tokens != (wanted := len(expected.history(self.number + 1)) - len(tokens)):
            return f"its prompt had {answer.usage.prompt_tokens} tokens instead of {wanted}: history is lost"
        return ""

    def note_plan(self, plan: Plan | None) -> None:
        """Note the plan of the stream; a failover gives it another."""
        self.plan = plan
        if plan is not None:
            self.rings |= {plan.prefill_ring, plan.decode_ring}

    def uses(self, rings: Collection[str]) -> bool:
        """Return True if a plan of the stream names one of the rings, or if the client knows no plan."""
        return self.plan is None or not self.rings.isdisjoint(rings)

    def first_after(self, moment: float) -> float | None:
        """Return when the first tokens after a moment came, or when the answer ended if none were left; None: never."""
        later = [at for at in self.arrivals if at > moment]
        return later[0] if later else self.ended if self.answer is not None and self.ended > moment else None

    def gaps(self, moment: float = 0.0) -> list[Gap]:
        """Return the gaps that ended after a moment."""
        pieces = enumerate(pairwise(self.arrivals), start=1)
        return [Gap(after - before, before, number) for number, (before, after) in pieces if after > moment]


Listener = Callable[[Stream], None]


async def play(
    client: AsyncClient, streams: Sequence[Stream], prefix: str, seconds: float, listener: Listener = lambda _: None
) -> None:
    """Run the turns at once, each in the conversation of its script's name after `prefix`, to their ends.

    `listener` is called after every piece. A turn that has not ended after `seconds` is cancelled.
    """
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(_play_one(client, stream, prefix, seconds, listener))


async def _play_one(client: AsyncClient, stream: Stream, prefix: str, seconds: float, listener: Listener) -> None:
    script, number = stream.expected.script, stream.number
    mode = "whole_history" if script.repeats_history or not number else "append"
    try:
        async with client.stream(
            stream.expected.prompt(number),
            conversation_id=prefix + script.name,
            mode=mode,
            sampling=script.turns[number].sampling,
            timeout=seconds,
        ) as pieces:
            plans = asyncio.create_task(_follow_plan(stream, lambda: pieces.plan))
            try:
                async for piece in pieces:
                    if piece.token_ids:
                        stream.note_plan(pieces.plan)
                        stream.arrivals.append(time.monotonic())
                        stream.token_ids.extend(piece.token_ids)
                    listener(stream)
                stream.answer = await pieces.answer()
                stream.note_plan(pieces.plan)
            finally:
                plans.cancel()
    except RingserveError as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.ended = time.monotonic()


PLAN_POLL_SECONDS = 0.005


async def _follow_plan(stream: Stream, plan: Callable[[], Plan | None]) -> None:
    """Note the plan of a stream before its first token: the client knows the plan before it passes on a piece."""
    while stream.plan is None:
        await asyncio.sleep(PLAN_POLL_SECONDS)
        stream.note_plan(plan())


def begin(expected: Sequence[Expected], number: int) -> list[Stream]:
    """Return a stream for each conversation's turn of a number; `play` runs them."""
    return [Stream(expected=each, number=number, began=time.monotonic()) for each in expected]


def write_scripts(document: Sequence[int]) -> list[Script]:
    """Return the scripts. Prompts are spans of a document's tokens, and no two begin alike."""
    scripts = []
    for place in range(NUM_CONVERSATIONS):
        kind = place % len(FIRST_TOKENS)
        seeded = Sampling(
            temperature=0.9,
            seed=1000 + place,
            top_p=0.95,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            ignore_eos=True,
        )
        sampling = Sampling(temperature=0.0, ignore_eos=True) if place % 2 == 0 else seeded
        sizes = (
            (FIRST_TOKENS[kind], SHORT_ANSWER_TOKENS),
            (HIT_TOKENS[kind], HIT_ANSWER_TOKENS[kind]),
            (LAST_TOKENS, SHORT_ANSWER_TOKENS),
        )
        turns = tuple(
            ScriptedTurn(
                prompt=_span(document, 997 * place + 131 * number, num_tokens),
                sampling=replace(sampling, max_tokens=max_tokens),
            )
            for number, (num_tokens, max_tokens) in enumerate(sizes)
        )
        scripts.append(
            Script(name=f"talk-{place}", turns=turns, is_greedy=place % 2 == 0, repeats_history=place % 4 > 1)
        )
    return scripts


def _span(document: Sequence[int], start: int, num_tokens: int) -> tuple[int, ...]:
    """Return tokens of a document from a place on; after its end follows its start."""
    return tuple(document[(start + place) % len(document)] for place in range(num_tokens))


async def answers_without_fault(client: AsyncClient, scripts: Sequence[Script], seconds: float) -> list[Expected]:
    """Play all scripts on an unharmed cluster and return them with their answers; some gain a stop string on the way.

    Raises the error of a turn that fails.
    """
    known = [Expected(script=script, answers=(), texts=()) for script in scripts]
    for number in (FIRST, HIT, LAST):
        if number == HIT:
            # The stop strings are taken from the answers without stop strings.
            probes = [known[place] for place in STOPPED]
            answers = await _answers(client, probes, number, "probe-", seconds)
            for place, answer in zip(STOPPED, answers, strict=True):
                known[place] = replace(known[place], script=_stopping(known[place].script, answer.text))
        answers = await _answers(client, known, number, "reference-", seconds)
        known = [
            replace(each, answers=(*each.answers, answer.token_ids), texts=(*each.texts, answer.text))
            for each, answer in zip(known, answers, strict=True)
        ]
    for script in scripts:
        await client.delete_conversation(f"reference-{script.name}")
    return known


async def _answers(
    client: AsyncClient, known: Sequence[Expected], number: int, prefix: str, seconds: float
) -> list[Answer]:
    is_probe = prefix == "probe-"

    async def ask(each: Expected) -> Answer:
        prompt = (*each.history(number), *each.script.turns[number].prompt) if is_probe else each.prompt(number)
        return await client.ask(
            prompt,
            conversation_id="" if is_probe else prefix + each.script.name,
            mode="whole_history" if is_probe or each.script.repeats_history or not number else "append",
            sampling=each.script.turns[number].sampling,
            timeout=seconds,
        )

    return await asyncio.gather(*(ask(each) for each in known))


def _stopping(script: Script, text: str) -> Script:
    """Return a script whose second answer ends at a string of its text; the same script if no string may stop it."""
    stop = stop_string(text, int(len(text) * STOP_SHARE))
    if not stop:
        return script
    turn = script.turns[HIT]
    stopped = replace(turn, sampling=replace(turn.sampling, stop=(stop,)))
    return replace(script, turns=(*script.turns[:HIT], stopped, *script.turns[HIT + 1 :]))


def stop_string(text: str, start: int) -> str:
    """Return a short string of a text, at or after a place if possible, that a request may name as a stop string."""
    places = (*range(start, len(text)), *reversed(range(start)))
    for length in range(STOP_LENGTH, 0, -1):
        for place in places:
            string = text[place : place + length]
            if len(string) == length and REPLACEMENT not in string:
                return string
    return ""
