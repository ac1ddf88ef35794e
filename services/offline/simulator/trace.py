"""Traces of simulated clients: conversations of turns, each sent some time after the answer before it.

`ringserve simulate` and `ringserve bench --divide` read or draw them.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ringserve.cp_core.errors import ConfigError

DAY = 86_400.0
MAX_TOKENS = 1_000_000_000
BLOCK_TOKENS = 512
"""Tokens that one block id stands for, in traces with block ids; the value of Mooncake's traces."""
SPREAD = 1.5
"""Factor by which first prompts of one size vary, up and down."""
REQUEST_FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
FIELDS = {"new_tokens", "output_tokens", "think_seconds"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedTurn:
    """Turn of `new_tokens` after the conversation so far, sent `think_seconds` after the last answer."""

    new_tokens: int
    output_tokens: int
    think_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedConversation:
    """Conversation that begins at `start_seconds` plus the first turn's think time.

    With `block_ids` it is a single request, outside any conversation, and has one turn. `block_ids[i]` stands for the
    i-th BLOCK_TOKENS tokens of the prompt; prompts whose first ids are equal begin with the same tokens.
    """

    start_seconds: float
    turns: tuple[TracedTurn, ...]
    block_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(turn.new_tokens + turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPrompts:
    """First prompts of conversations, of `least` to `most` tokens, log-uniformly distributed."""

    least: int
    most: int
    weight: float = 1.0


def around(tokens: int) -> FirstPrompts:
    """Return first prompts that differ from `tokens` by a factor of up to `SPREAD`."""
    return FirstPrompts(least=max(1, round(tokens / SPREAD)), most=round(tokens * SPREAD))


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceShape:
    """Parameters of a synthetic trace.

    A conversation has `mean_turns` turns on average; follow-ups add `follow_up_tokens` on average. The rate of starts
    is higher than its mean by the share `swing` in the middle of the time, and lower by as much at both ends.
    """

    num_conversations: int
    seconds: float = DAY
    first: tuple[FirstPrompts, ...] = (around(4_000), around(32_000), around(128_000))
    mean_turns: float = 4.0
    follow_up_tokens: int = 1_000
    mean_output_tokens: int = 300
    mean_think_seconds: float = 60.0
    swing: float = 0.5


class SyntheticTrace:
    """Conversations drawn from a shape, in the order in which they begin; a seed fixes them.

    Each iteration draws them anew: a day of a large cluster has millions of turns.
    """

    def __init__(self, shape: TraceShape, seed: int) -> None:
        self._shape = shape
        self._seed = seed

    def __len__(self) -> int:
        return self._shape.num_conversations

    def __iter__(self) -> Iterator[TracedConversation]:
        shape, draw = self._shape, random.Random(self._seed)
        starts = array("d", sorted(_start(shape, draw) for _ in range(shape.num_conversations)))
        weights = [kind.weight for kind in shape.first]
        for start in starts:
            (kind,) = draw.choices(shape.first, weights)
            yield TracedConversation(start_seconds=start, turns=_turns(shape, kind, draw))


def _start(shape: TraceShape, draw: random.Random) -> float:
    while True:
        part = draw.random()
        if draw.random() * (1.0 + shape.swing) <= 1.0 - shape.swing * math.cos(2.0 * math.pi * part):
            return part * shape.seconds


def _turns(shape: TraceShape, kind: FirstPrompts, draw: random.Random) -> tuple[TracedTurn, ...]:
    first = round(kind.least * math.pow(kind.most / kind.least, draw.random()))
    turns = [_turn(shape, draw, first, think=0.0)]
    while draw.random() > 1.0 / shape.mean_turns:
        new = 1 + round(draw.expovariate(1.0 / shape.follow_up_tokens))
        turns.append(_turn(shape, draw, new, draw.expovariate(1.0 / shape.mean_think_seconds)))
    return tuple(turns)


def _turn(shape: TraceShape, draw: random.Random, new: int, think: float) -> TracedTurn:
    output = 1 + round(draw.expovariate(1.0 / shape.mean_output_tokens))
    return TracedTurn(new_tokens=new, output_tokens=output, think_seconds=think)


def read_trace(path: Path) -> list[TracedConversation]:
    """Read one JSON object a line: {"start_seconds": s, "turns": [{"new_tokens", "output_tokens", "think_seconds"}]}.

    An object may also be a request in Mooncake's form: {"timestamp": milliseconds, "input_length", "output_length",
    "hash_ids"}. A file whose name ends in .gz is decompressed. Raises ConfigError, naming the line.
    """
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error}") from error
    trace = [_parse(line, f"--trace: {path} line {number}") for number, line in enumerate(lines, start=1) if line]
    if not trace:
        raise ConfigError(f"--trace: {path} has no conversation; a line with a JSON object is needed for each")
    return sorted(trace, key=lambda one: one.start_seconds)


def format_trace(trace: Iterable[TracedConversation]) -> Iterator[str]:
    """Format the lines that `read_trace` takes."""
    return (json.dumps(_fields(conversation)) + "\n" for conversation in trace)


def _fields(conversation: TracedConversation) -> dict[str, object]:
    if not conversation.block_ids:
        turns = [asdict(turn) for turn in conversation.turns]
        return {"start_seconds": conversation.start_seconds, "turns": turns}
    (turn,) = conversation.turns
    return {
        "timestamp": round(1e3 * conversation.start_seconds),
        "input_length": turn.new_tokens,
        "output_length": turn.output_tokens,
        "hash_ids": conversation.block_ids,
    }


def _parse(line: str, where: str) -> TracedConversation:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if isinstance(content, dict) and content.keys() == REQUEST_FIELDS:
        return _parse_request(content, where)
    if not isinstance(content, dict) or content.keys() != {"start_seconds", "turns"}:
        raise ConfigError(
            f"{where} is neither a conversation (start_seconds, turns) nor a request of Mooncake's form "
            "(timestamp, input_length, output_length, hash_ids)"
        )
    turns = content["turns"]
    if not isinstance(turns, Sequence) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{where} has turns={turns!r}; allowed is a list of objects, one at least")
    return TracedConversation(
        start_seconds=_number(content["start_seconds"], f"{where} start_seconds", 0.0),
        turns=tuple(_parse_turn(turn, where) for turn in turns),
    )


def _parse_request(content: dict[str, object], where: str) -> TracedConversation:
    """Parse a request of Mooncake's traces (kvcache-ai/Mooncake, FAST25-release/traces)."""
    ids = content["hash_ids"]
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise ConfigError(f"{where} has hash_ids={ids!r}; allowed is a list of whole numbers, one at least")
    turn = TracedTurn(
        new_tokens=round(_number(content["input_length"], f"{where} input_length", 1)),
        output_tokens=round(_number(content["output_length"], f"{where} output_length", 1)),
        think_seconds=0.0,
    )
    if len(ids) != -(-turn.new_tokens // BLOCK_TOKENS):
        raise ConfigError(
            f"{where} has {len(ids)} hash_ids for {turn.new_tokens} tokens; allowed is one for each {BLOCK_TOKENS}"
        )
    start = _number(content["timestamp"], f"{where} timestamp", 0.0) / 1e3
    return TracedConversation(start_seconds=start, turns=(turn,), block_ids=tuple(ids))


def _parse_turn(turn: dict[str, object], where: str) -> TracedTurn:
    if turn.keys() != FIELDS:
        fields, needed = ", ".join(sorted(turn)), ", ".join(sorted(FIELDS))
        raise ConfigError(f"{where} has a turn with the fields {fields}; needed are exactly {needed}")
    return TracedTurn(
        new_tokens=round(_number(turn["new_tokens"], f"{where} new_tokens", 1)),
        output_tokens=round(_number(turn["output_tokens"], f"{where} output_tokens", 1)),
        think_seconds=_number(turn["think_seconds"], f"{where} think_seconds", 0.0),
    )


def _number(value: object, where: str, least: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}; a number is needed")
    if not least <= value <= MAX_TOKENS:
        raise ConfigError(f"{where} is {value}; allowed are {least:g} to {MAX_TOKENS}")
    return float(value)
