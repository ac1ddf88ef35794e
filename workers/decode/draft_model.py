"""Drafts from a small model that a decode ring's first rank holds beside its share of the large one.

The small model reads each sequence's newest tokens and guesses the next ones; a step of the ring then checks them. All
of its KV is on the first rank: the other ranks get only the drafts, in the header of the step. It draws with the
sequence's own random numbers, so if both models have about the same distribution they draw the same token. The decode
loop of the first rank calls it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.cost.decode import GATHER, MAX_DRAFTS
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.workers.decode.batch import BatchRow, BatchState, StepToken
from ringserve.workers.decode.graphs import Compilation, GraphRunner, PromptRunner, Recorder
from ringserve.workers.decode.prompts import DecodePrompts
from ringserve.workers.decode.step import DecodePass
from ringserve.workers.kv.cache import KvCache, runs
from ringserve.workers.model.loading import DTYPES, LoadedModel
from ringserve.workers.protocol.steps import ComputePrompt
from ringserve.workers.sampling.parameters import NOT_REACHED, Sampled, SamplingParameters
from ringserve.workers.sampling.sampler import RowSampler, sample_rows

READ_TOKENS = 256
"""Maximum tokens of new text that the model reads between two steps of the ring; the ring waits meanwhile."""
NO_SAMPLING = SamplingParameters()

Text = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts by sequence, and the seconds that they took, not counting the seconds for reading text."""

    drafts: Mapping[str, tuple[int, ...]]
    seconds: float


@dataclass(eq=False, slots=True)
class _Reading:
    """Part of one sequence's text that the model has read.

    The text is the sequence's newest tokens, as its `TextDrafter` keeps them: text[t] is the token at position t +
    `shift` of the sequence. `row` has KV of text[first:], as far as it is read. The first `num_sure` of these tokens
    are certainly the text's; `guessed` are those after them, which were drafts.
    """

    row: BatchRow
    shift: int
    first: int = 0
    num_sure: int = 0
    guessed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Row whose token at the sequence's own `next_position` is drawn."""

    sampler: RowSampler
    next_position: int


class DraftModel:
    """Small model with KV for the newest `context` tokens, at most, of each of `max_batch` sequences.

    Not a collective: it is the first rank's alone, on the thread of its decode loop.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        *,
        vocab_size: int,
        max_batch: int,
        context: int,
        block_tokens: int,
        compilation: Compilation | None = None,
        poisoned: bool = False,
    ) -> None:
        """`vocab_size` is the large model's: no other tokens are drafted. `poisoned` fills KV with NaN, for tests.

        `compilation` must have its own recorder, since a recorder replays its recordings in their order.
        """
        self._compilation = compilation
        blocks_each = min(-(-context // block_tokens), max(1, model.info.max_positions // block_tokens))
        self._model = model
        self._backend = backend
        self._vocab_size = min(vocab_size, model.info.vocab_size)
        self._capacity = blocks_each * block_tokens
        self._cache = KvCache(
            num_layers=model.info.num_layers,
            num_blocks=max_batch * blocks_each,
            block_tokens=block_tokens,
            num_kv_heads=model.info.num_kv_heads,
            head_dim=model.info.head_dim,
            dtype=DTYPES[model.info.kv_dtype],
            device=model.model.device,
            poisoned=poisoned,
        )
        self._free = [list(range(place * blocks_each, (place + 1) * blocks_each)) for place in range(max_batch)]
        self._readings: dict[str, _Reading] = {}
        self._batch = BatchState(0, 1, block_tokens)
        self._use(model, None)

    def _use(self, model: LoadedModel, recorder: Recorder | None) -> None:
        alone, cache = InProcessRing(1).transports[0], self._cache
        self._model = model
        runner = None if recorder is None else GraphRunner(model, recorder, cache.device)
        prompts = None if recorder is None else PromptRunner(model, recorder, cache.device)
        self._step = DecodePass(
            model,
            alone,
            cache,
            self._backend,
            self._batch,
            None,
            None,
            runner,
            is_asynchronous=False,
            sample=self._draw_last,
        )
        self._prompts = DecodePrompts(model, alone, cache, self._backend, runner=prompts)

    def make_fast(self, *, packs_weights: bool) -> None:
        """Pack the weights if asked; with a `compilation`, compile the layers and record their steps. Idempotent."""
        if packs_weights:
            self._model.pack_weights(with_head=True, is_shared=True)
        if self._compilation is not None:
            self._use(self._model.compiled(self._compilation.backend), self._compilation.recorder)

    def begin(self, sequence_id: str, sampling: SamplingParameters, shift: int) -> None:
        """Take in a sequence. The token at its position p is text[p - `shift`]."""
        own = SamplingParameters(
            temperature=sampling.temperature,
            seed=sampling.seed,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        blocks = self._free.pop()
        row = BatchRow(sequence_id, 0, 0, [0], [self._capacity], blocks, [], RowSampler(own))
        if self._model.info.tail_tokens:
            row.recent = []
        self._readings[sequence_id] = _Reading(row, shift)

    def end(self, sequence_id: str) -> None:
        """Forget a sequence. Idempotent."""
        if (reading := self._readings.pop(sequence_id, None)) is not None:
            self._free.append(reading.row.blocks)

    def end_all(self) -> None:
        """Forget all sequences, as when the loop ends."""
        for sequence_id in list(self._readings):
            self.end(sequence_id)

    def guess(self, texts: Mapping[str, Text], limits: Mapping[str, int]) -> Guesses:
        """Return, for each sequence s of `limits`, at most limits[s] tokens that may follow its text.

        `begin` was called for each of them. A sequence whose text the model has not read yet gets none. Of one such
        sequence the call reads the next part.
        """
        reads = [self._readings[name] for name in limits if self._keep_read(self._readings[name], texts[name])]
        for name in limits:
            if self._readings[name] not in reads and self._read_on(self._readings[name], texts[name]):
                break
        began, drafts = time.perf_counter(), {each.row.sequence_id: list[int]() for each in reads}
        for each in reads:
            self._place_unread(each, texts[each.row.sequence_id])
        while reads:
            self._batch.rows = [each.row for each in reads]
            (done,) = self._step.run(GATHER)
            self._batch.settle([len(each.row.drafts) for each in reads])
            drawn = [each.token_id for each in done.sampled if each.is_reached]
            following = []
            for each, token_id in zip(reads, drawn, strict=True):
                own = drafts[each.row.sequence_id]
                # The last token drawn has no KV yet.
                each.guessed = tuple(own)
                if token_id is not None and token_id < self._vocab_size:
                    own.append(token_id)
                    each.row.position, each.row.token_id = each.row.position + 1, token_id
                    if len(own) < limits[each.row.sequence_id]:
                        following.append(each)
            reads = following
        self._batch.rows = []
        return Guesses({name: tuple(own) for name, own in drafts.items()}, time.perf_counter() - began)

    def _keep_read(self, reading: _Reading, text: Text) -> bool:
        """Keep the read tokens that the text still has. Return True if one step can read the rest."""
        # The newest token is computed in any case: its logits are wanted.
        num_sure = min(reading.num_sure, len(text) - reading.first - 1)
        following = text[reading.first + num_sure : -1]
        num_right = 0
        while num_right < len(following) and reading.guessed[num_right : num_right + 1] == (following[num_right],):
            num_right += 1
        num_kept = num_sure + num_right
        if len(text) - reading.first + MAX_DRAFTS > self._capacity:
            # The text no longer fits. Places in the KV change, so the newest capacity / 2 tokens are read again; the
            # other half stays free for new tokens.
            reading.first, num_kept = max(0, len(text) - self._capacity // 2), 0
        reading.num_sure, reading.guessed = num_kept, ()
        row = reading.row
        row.held, row.position, row.drafts = [num_kept], num_kept, []
        row.runs = list(runs(row.blocks, num_kept, self._batch.block_tokens))
        if row.recent is not None:
            row.recent = list(range(max(0, num_kept - self._model.info.tail_tokens), num_kept))
        unread = text[reading.first + num_kept :]
        return len(unread) <= 1 + MAX_DRAFTS and self._knows(unread)

    def _knows(self, tokens: Text) -> bool:
        """Return True if all these tokens are in the model's vocabulary: a prompt of ids may have others."""
        return bool(tokens.max() < self._vocab_size)

    def _read_on(self, reading: _Reading, text: Text) -> bool:
        """Read a part of the rest of a text. Return False if none is left, or the model does not know a token of it."""
        row, start = reading.row, reading.first + reading.num_sure
        part = text[start : len(text) - 1][:READ_TOKENS]
        if not len(part) or not self._knows(part):
            return False
        held, tail = reading.num_sure, self._model.info.tail_tokens
        prompt = ComputePrompt(
            sequence_id=row.sequence_id,
            token_ids=part.astype(np.int64),
            held=(held,),
            blocks=(tuple(row.blocks),),
            sampling=NO_SAMPLING,
            tail=ShardMap.of([[TokenRange(max(0, held - tail), held)]]) if tail else None,
        )
        self._prompts.run(prompt)
        reading.num_sure += len(part)
        return True

    def _place_unread(self, reading: _Reading, text: Text) -> None:
        """Let the row's next step compute all tokens of the text that it has not read."""
        first, *others = text[reading.first + reading.num_sure :].tolist()
        reading.row.token_id, reading.row.drafts = first, others
        reading.num_sure += 1 + len(others)

    def _draw_last(self, tokens: Sequence[StepToken], logits: Tensor) -> list[Sampled]:
        """Draw the token after the last one of each row; earlier tokens are followed by known ones."""
        last = [place for place, token in enumerate(tokens) if not token.num_after]
        rows = []
        for place in last:
            reading = self._readings[tokens[place].row.sequence_id]
            rows.append(_Drawn(tokens[place].sampler, tokens[place].next_position + reading.first + reading.shift))
        sampled = [NOT_REACHED] * len(tokens)
        for place, drawn in zip(last, sample_rows(rows, logits[last]), strict=True):
            sampled[place] = drawn
        return sampled
