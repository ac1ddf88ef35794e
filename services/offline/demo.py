"""Demo: a long document and a follow-up, both checked against stock transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from cp_core.errors import RingserveError
from ringserve.v1 import inference_pb2
from services.client import Client
from services.config import Config, DecodeConfig, GatewayConfig, KvCacheConfig, LogConfig, PrefillConfig
from services.gateway.text import TextCodec
from services.rpc.answer import answer_dict, collect

CONVERSATION = "demo"
QUESTION = "\n\nQuestion: what does this text say about names?\nAnswer:"
FOLLOW_UP = "\nAnd in one short sentence?\n"


@dataclass(frozen=True, kw_only=True)
class DemoTurn:
    """Served turn: its whole prompt, and the object that `generate --json` prints."""

    title: str
    prompt: list[int]
    answer: dict[str, Any]
    tokens_per_rank: dict[str, list[int]]


def demo_config() -> Config:
    """Return the configuration of two rings of two ranks on loopback, on free ports."""
    return Config(
        prefill=PrefillConfig(cp=2, chunk_tokens=16384),
        decode=DecodeConfig(cp=2, max_batch=8),
        kv_cache=KvCacheConfig(tokens_per_rank=16384),
        gateway=GatewayConfig(listen="127.0.0.1:0", http="", metrics="127.0.0.1:0"),
        logs=LogConfig(level="warning"),
    )


def document(codec: TextCodec, num_tokens: int) -> str:
    """Return at least `num_tokens` tokens of real text from the reference that every Python carries."""
    text = ""
    for line in "".join(topics[name] for name in sorted(topics)).splitlines(keepends=True):
        text += line
        # A token is at least one byte: encode only when the text can be long enough.
        if len(text.encode()) >= num_tokens and len(codec.encode(text)) >= num_tokens:
            return text
    raise RingserveError(f"Python's topics have fewer than {num_tokens} tokens")


class DemoConversation:
    """Conversation of the demo with a gateway."""

    def __init__(self, client: Client, codec: TextCodec, max_tokens: int) -> None:
        self._client = client
        self._codec = codec
        self._max_tokens = max_tokens
        self._history: list[int] = []

    def ask(self, title: str, text: str, show: Callable[[str], None]) -> DemoTurn:
        """Send only the new text of a turn; `show` gets the answer's text as it streams."""
        new = self._codec.encode(text).tolist()
        request = inference_pb2.GenerateRequest(
            tokenized=inference_pb2.TokenizedInput(input_ids=new),
            conversation_id=CONVERSATION,
            prompt_mode=(
                inference_pb2.PROMPT_MODE_APPEND if self._history else inference_pb2.PROMPT_MODE_WHOLE_HISTORY
            ),
            sampling_params=inference_pb2.SamplingParams(max_tokens=self._max_tokens, temperature=0.0),
        )
        complete = collect(self._client.generate(request, timeout=300), show)
        prompt = self._history + new
        self._history = prompt + list(complete.output_ids)
        placements = self._client.conversation(CONVERSATION).placements
        return DemoTurn(
            title=title,
            prompt=prompt,
            answer=answer_dict(complete, CONVERSATION),
            tokens_per_rank={place.ring: [rank.num_tokens for rank in place.ranks] for place in placements},
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict of the check of one turn against transformers."""

    title: str
    is_equal: bool
    smallest_lead: float
    expected: list[int]


def check(turns: list[DemoTurn], model_path: Path, stop_token_ids: list[int]) -> list[Verdict]:
    """Recompute every turn from its whole prompt with stock transformers."""
    from services.offline.reference import StockModel  # here: torch and transformers take seconds to import

    stock = StockModel(model_path)
    verdicts = []
    for turn in turns:
        tokens = turn.answer["token_ids"]
        reference = stock.greedy(turn.prompt, len(tokens), stop_token_ids)
        verdicts.append(
            Verdict(
                title=turn.title,
                is_equal=reference.token_ids == tokens,
                smallest_lead=reference.smallest_lead,
                expected=reference.token_ids,
            )
        )
    return verdicts
