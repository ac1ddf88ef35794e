"""Losses of sparse prefills, measured by questions about sentences that are hidden in a text.

`ringserve calibrate --sparse` calls it. Each text holds several sentences of one form, at given depths: "The access
code of the cellar is 8430." One of them is asked for. The prompt is prefilled on a ring of ranks in this process,
exactly and with each sparsity; the answer's tokens are then given one after another, as decoding would, over the KV
that the prefill has left. At each answer token the model's distribution is compared with the one after the exact
prefill: the loss is the mean KL divergence, in nats per token. A question counts as answered if each token of the code
is the most likely one at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.cost.sparse import MeasuredLoss, SparseLosses
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.shards import PrefillLayout, ShardMap, balanced_layout, whole_layout
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.services.gateway.text import TextCodec
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.model.loading import DTYPES, load_model
from ringserve.workers.prefill.step import run_prefill
from ringserve.workers.protocol.steps import Algorithm, PrefillStep, SequencePrefill, TokenIds
from ringserve.workers.protocol.transfers import TransferKey

PLACES = ("boathouse", "cellar", "greenhouse", "lamp room", "chapel", "garage", "attic", "engine room")
FIRST_CODE, CODE_STEP = 7319, 1117
"""Codes of four digits: FIRST_CODE + i CODE_STEP for PLACES[i]."""
BLOCK_TOKENS = 16
RING_SECONDS = 600.0
"""Deadline of one message between the ranks, which are threads of one process."""
CHAT_TOKENS = 64
"""Tokens of a prompt for the question and the chat template; the text fills the rest."""


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt and its right answer, whose code begins at index `code`; the hidden sentence stands at `depth`, 0 to 1."""

    depth: float
    prompt: TokenIds
    answer: TokenIds
    code: int


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one question with one sparsity. `keep` is None for exact attention."""

    num_tokens: int
    depth: float
    keep: float | None
    loss: float
    is_answered: bool


def make_questions(codec: TextCodec, text: str, num_tokens: int, depths: Sequence[float]) -> list[Question]:
    """Return a question for each depth, with prompts of at most `num_tokens` tokens. Raises ConfigError."""
    if not 1 <= len(depths) <= len(PLACES):
        raise ConfigError(f"--depths: {len(depths)} are given; allowed are 1 to {len(PLACES)}")
    facts = [f"The access code of the {place} is" for place in PLACES[: len(depths)]]
    codes = [f"{(FIRST_CODE + index * CODE_STEP) % 10_000:04d}" for index in range(len(depths))]
    sentences = [each.strip() + "." for each in " ".join(text.split()).split(". ") if each.strip(" .")]
    needles = [f"{fact} {code}." for fact, code in zip(facts, codes, strict=True)]
    room = num_tokens - CHAT_TOKENS - sum(len(codec.encode(each, adds_special=False)) for each in needles)
    chosen: list[str] = []
    for sentence in cycle(sentences):
        room -= len(codec.encode(" " + sentence, adds_special=False))
        if room < 0:
            break
        chosen.append(sentence)
    if len(chosen) < len(depths):
        raise ConfigError(f"--tokens: {num_tokens} are too few for {len(depths)} hidden sentences between others")
    positions = [round(depth * len(chosen)) for depth in depths]
    for position, needle in sorted(zip(positions, needles, strict=True), reverse=True):
        chosen.insert(position, needle)
    whole = " ".join(chosen)
    return [
        _question(codec, depth, whole, place, fact, code)
        for depth, place, fact, code in zip(depths, PLACES, facts, codes, strict=False)
    ]


def _question(codec: TextCodec, depth: float, text: str, place: str, fact: str, code: str) -> Question:
    prompt = codec.encode_chat([("user", f"{text}\n\nWhat is the access code of the {place}?")])
    beginning, answer = (codec.encode(each, adds_special=False) for each in (fact, f"{fact} {code}"))
    return Question(depth, prompt, answer, len(beginning))


class LossMeter:
    """Model on a ring of `num_ranks` threads, which answers questions by any sparsity."""

    def __init__(self, path: Path, dtype: str, num_ranks: int) -> None:
        """Load the model. Raises ModelRefused, ConfigError."""
        self._model = load_model(path, dtype, "cpu")
        self._model.pack_weights(with_head=True)
        self._info = self._model.info
        self._num_ranks = num_ranks
        self._dtype = DTYPES[self._info.kv_dtype]

    @property
    def max_tokens(self) -> int:
        """Positions of the model."""
        return self._info.max_positions

    def measure(
        self, num_tokens: int, question: Question, sparsities: Sequence[Sparsity], tell: Callable[[str], None]
    ) -> list[Result]:
        """Answer a question exactly, then with each sparsity; `tell` gets a line before each.

        `num_tokens` is the length that the results stand for.
        """
        answer, results = question.answer, list[Result]()
        exact = torch.empty(0)
        for sparsity in (None, *sparsities):
            tell(f"{num_tokens} tokens, {'exact' if sparsity is None else f'keep {sparsity.keep:g}'}")
            logprobs = self._logprobs(question, sparsity)
            exact = logprobs if sparsity is None else exact
            loss = float((exact.exp() * (exact - logprobs)).sum(dim=-1).mean())
            best = logprobs.argmax(dim=-1).numpy()
            is_answered = bool((best[question.code :] == answer[question.code :]).all())
            keep = None if sparsity is None else sparsity.keep
            results.append(Result(num_tokens, question.depth, keep, max(0.0, loss), is_answered))
        return results

    def _logprobs(self, question: Question, sparsity: Sparsity | None) -> torch.Tensor:
        """Return log-probabilities [answer, vocabulary] of each answer token's place."""
        ring = InProcessRing(self._num_ranks, RING_SECONDS)
        prompt = balanced_layout(0, len(question.prompt), [0] * self._num_ranks)
        answer = whole_layout(len(question.prompt), len(question.answer) - 1, 0, self._num_ranks)
        with ThreadPoolExecutor(self._num_ranks) as pool:
            futures = [
                pool.submit(self._run_rank, transport, question, prompt, answer, sparsity)
                for transport in ring.transports
            ]
            try:
                parts = [future.result() for future in futures]
            except BaseException:
                for transport in ring.transports:
                    transport.close()
                raise
        owner, _ = prompt.owner_of(len(question.prompt) - 1)
        with torch.inference_mode():
            states = torch.cat([parts[owner][0], parts[0][1]])
            return self._model.logits(states).double().log_softmax(dim=-1)

    @torch.inference_mode()
    def _run_rank(
        self,
        transport: RingTransport,
        question: Question,
        prompt: PrefillLayout,
        answer: PrefillLayout,
        sparsity: Sparsity | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's hidden states: its last row of the prompt, and its rows of the answer."""
        held = tuple(prompt.tokens_on(rank) for rank in range(self._num_ranks))
        num_stored = held[transport.rank] + answer.tokens_on(transport.rank)
        blocks = tuple(range(-(-num_stored // BLOCK_TOKENS)))
        cache = KvCache(
            num_layers=self._info.num_layers,
            num_blocks=len(blocks),
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=self._info.num_kv_heads,
            head_dim=self._info.head_dim,
            dtype=self._dtype,
        )
        backend = select_backend("auto", cache.device, cache.dtype)

        def run(
            token_ids: TokenIds, layout: PrefillLayout, cached: ShardMap, sparsity: Sparsity | None
        ) -> torch.Tensor:
            sequence = SequencePrefill(
                sequence_id="question",
                token_ids=token_ids,
                layout=layout,
                cached=cached.held,
                blocks=blocks,
                sparsity=sparsity,
                tail=cached.newest(self._info.tail_tokens),
            )
            step = PrefillStep(algorithm=Algorithm.PASS_KV, sequences=(sequence,))
            _, states = run_prefill(step, self._model, transport, cache, backend, _send_nothing)
            return states

        last = run(question.prompt, prompt, ShardMap.empty(self._num_ranks), sparsity)[-1:].clone()
        # The answer's tokens but the last are computed over what the prompt has left, exactly, as decoding does.
        return last, run(np.asarray(question.answer[:-1]), answer, prompt.shard_map(), None)


def _send_nothing(key: TransferKey, layer: int) -> None:
    raise AssertionError("nothing is sent")


def losses_of(model: str, num_ranks: int, sinks: int, window: int, results: Sequence[Result]) -> SparseLosses:
    """Return loss and accuracies by length and share of keys, averaged over the questions."""
    measured = []
    lengths = sorted({each.num_tokens for each in results})
    for num_tokens in lengths:
        exact = [each for each in results if each.num_tokens == num_tokens and each.keep is None]
        for keep in sorted({each.keep for each in results if each.keep is not None}, reverse=True):
            sparse = [each for each in results if each.num_tokens == num_tokens and each.keep == keep]
            measured.append(
                MeasuredLoss(
                    num_tokens=num_tokens,
                    num_ranks=num_ranks,
                    keep=keep,
                    loss=fmean(each.loss for each in sparse),
                    accuracy=fmean(each.is_answered for each in sparse),
                    exact_accuracy=fmean(each.is_answered for each in exact),
                    num_questions=len(sparse),
                )
            )
    return SparseLosses(model=model, sinks=sinks, window=window, measured=tuple(measured))
