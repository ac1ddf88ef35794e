"""Streams of a small script, as a client may have seen them."""

from __future__ import annotations

from bench.chaos.load import Expected, Script, ScriptedTurn, Stream
from ringserve.client import Sampling
from ringserve.client.results import MAPPER, Answer, Plan, Usage
from ringserve.v1 import inference_pb2

PLAN: Plan = MAPPER.from_message(Plan, inference_pb2.Plan(prefill_ring="prefill-0", decode_ring="decode-1"))


def expected() -> Expected:
    """Return a script of two turns with their answers."""
    turn = ScriptedTurn(prompt=(1, 2, 3), sampling=Sampling(max_tokens=2))
    script = Script(name="talk-0", turns=(turn, turn), is_greedy=True, repeats_history=False)
    return Expected(script=script, answers=((4, 5), (6, 7, 8)), texts=("de", "fgh"))


def answered(*token_ids: int, text: str = "fgh", prompt_tokens: int = 8, at: tuple[float, ...] = ()) -> Stream:
    """Return a second turn that has ended with this answer, and whose tokens came at these times."""
    answer = Answer(
        request_id="r",
        conversation_id="talk-0",
        text=text,
        token_ids=token_ids,
        finish_reason="length",
        matched_stop=None,
        usage=Usage(prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=len(token_ids)),
        plan=PLAN,
        ttft_seconds=0.0,
        ttit_seconds=0.0,
        seed=0,
    )
    times = at or tuple(101.0 + place for place in range(len(token_ids)))
    return Stream(
        expected=expected(),
        number=1,
        began=100.0,
        ended=times[-1] + 0.1,
        plan=PLAN,
        arrivals=list(times),
        token_ids=list(token_ids),
        answer=answer,
    )


def failed(error: str) -> Stream:
    """Return a second turn that has ended with an error."""
    return Stream(expected=expected(), number=1, began=100.0, ended=101.0, plan=PLAN, error=error)
