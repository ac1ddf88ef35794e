"""Demo: three questions about a document, in a conversation and its fork, checked against stock transformers.

`ringserve demo` runs it, and starts the service that it talks to. Calibration and benchmarks use its document, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringserve.client import Client, Message, Sampling
from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import Config, config_from
from ringserve.services.gateway.text import TextCodec
from ringserve.services.rpc.answer import answer_dict

DOCUMENT: Final = Path(__file__).with_name("demo_document.txt")
"""Log of an invented weather station, which no model has read. Blank lines end its paragraphs."""
CONVERSATION: Final = "demo"
FORK: Final = "demo-fork"
MAX_RANK_TOKENS: Final = 16384


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question about the document, and the words of the document that a right answer repeats."""

    title: str
    text: str
    fact: str


FIRST: Final = Question(title="1: document", text="What is the name of the dog?", fact="Marzipan")
FOLLOW_UP: Final = Question(title="2: follow-up", text="What is the code of the boathouse lock?", fact="7319")
FORKED: Final = Question(title="3: fork of 1", text="What is the password for the radio?", fact="copper lantern")


@dataclass(frozen=True, kw_only=True)
class DemoTurn:
    """Served turn. `prompt` has the tokens of the whole chat so far; `answer` is what `generate --json` prints.

    `tokens_per_rank` has the KV tokens of each rank, by ring, after the turn.
    """

    question: Question
    prompt: list[int]
    answer: dict[str, Any]
    tokens_per_rank: dict[str, list[int]]


def demo_config(model: str, max_positions: int, device: str = "cpu") -> Config:
    """Return the configuration of two rings of two ranks on loopback, on free ports; on "cuda" they share one GPU."""
    on_gpu = {"device": "cuda", "gpus_per_rank": 0.25, "dtype": "float32", "attention_backend": "reference"}
    return config_from(
        {
            # float32, since its tokens are compared with transformers'.
            "model": {"path": model} | (on_gpu if device == "cuda" else {}),
            "prefill": {"cp": 2, "chunk_tokens": 16384},
            "decode": {"cp": 2, "max_batch": 8},
            "kv_cache": {"tokens_per_rank": min(MAX_RANK_TOKENS, max_positions // 2)},
            "gateway": {"listen": "127.0.0.1:0", "http": "", "metrics": "127.0.0.1:0"},
            "logs": {"level": "warning"},
            # The demo kills no process. On a busy machine the short default limits would take live ones for lost.
            "timeouts": {"start": 600.0, "control": 120.0, "stuck": 300.0, "lost": 60.0},
        }
    )


def document(codec: TextCodec, num_tokens: int = 0) -> str:
    """Return the document, or its first `num_tokens` tokens; each paragraph is one line. Raises ConfigError."""
    paragraphs = DOCUMENT.read_text(encoding="utf-8").strip().split("\n\n")
    whole = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    tokens = codec.encode(whole).tolist()
    if not 0 <= num_tokens <= len(tokens):
        raise ConfigError(f"--tokens: {num_tokens} is not allowed; the document has {len(tokens)} tokens")
    return codec.decode(tokens[:num_tokens]) if num_tokens else whole


def passage(text: str, fact: str) -> str:
    """Return the sentence of a text that holds a fact, or nothing."""
    sentences = text.replace("\n", " ").split(". ")
    return next((sentence.strip().rstrip(".") + "." for sentence in sentences if fact in sentence), "")


class DemoConversation:
    """Conversation of the demo with a gateway, in messages of a chat."""

    def __init__(self, client: Client, codec: TextCodec, max_tokens: int) -> None:
        self._client = client
        self._codec = codec
        self._max_tokens = max_tokens
        self._conversation_id = CONVERSATION
        self._messages: list[tuple[str, str]] = []

    def ask(self, question: Question, text: str, show: Callable[[str], None]) -> DemoTurn:
        """Send the chat so far and `text`; `show` gets the answer's text as it streams."""
        self._messages.append(("user", text))
        prompt = self._codec.encode_chat(self._messages).tolist()
        stream = self._client.stream(
            [Message(role=role, content=content) for role, content in self._messages],
            conversation_id=self._conversation_id,
            sampling=Sampling(max_tokens=self._max_tokens, temperature=0.0),
            timeout=300,
        )
        for piece in stream:
            show(piece.text)
        answer = stream.answer()
        self._messages.append(("assistant", answer.text))
        placements = self._client.conversation(self._conversation_id).placements
        return DemoTurn(
            question=question,
            prompt=prompt,
            answer=answer_dict(answer),
            tokens_per_rank={place.ring: [rank.num_tokens for rank in place.ranks] for place in placements},
        )

    def fork(self, turn: DemoTurn) -> DemoConversation:
        """Fork the conversation after `turn`, which must be its first. The fork shares that turn's KV."""
        tokens = len(turn.prompt) + len(turn.answer["token_ids"])
        self._client.fork_conversation(self._conversation_id, FORK, tokens)
        fork = DemoConversation(self._client, self._codec, self._max_tokens)
        fork._conversation_id, fork._messages = FORK, self._messages[:2]
        return fork


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict of the check of one turn against transformers.

    `is_right` says whether the answer has the fact; None if the model is random or the document was cut before it.
    `smallest_lead` is the smallest difference, in logits, between transformers' chosen token and its second-best one.
    """

    title: str
    is_equal: bool
    is_right: bool | None
    smallest_lead: float
    expected: list[int]


def check(
    turns: Sequence[DemoTurn], model_path: Path, stop_token_ids: Sequence[int], max_tokens: int, facts: str
) -> list[Verdict]:
    """Compare every token of every answer with stock transformers' choice at its place.

    `facts` is the text whose facts a right answer has: the document that was sent, or nothing for a random model.
    """
    from ringserve.services.offline.reference import StockModel  # here: torch and transformers take seconds to import

    stock = StockModel(model_path)
    verdicts = []
    for turn in turns:
        tokens, fact = turn.answer["token_ids"], turn.question.fact
        reference = stock.follow(turn.prompt, tokens)
        is_ended = tokens[-1] in stop_token_ids or len(tokens) == max_tokens
        verdicts.append(
            Verdict(
                title=turn.question.title,
                is_equal=is_ended and reference.token_ids == tokens,
                is_right=fact in turn.answer["text"] if fact in facts else None,
                smallest_lead=reference.smallest_lead,
                expected=reference.token_ids,
            )
        )
    return verdicts
