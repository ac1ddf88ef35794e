"""Run of one turn on a prefill ring: pull missing KV, take part in steps, hand the KV over.

The prefill leader begins and cleans up a run, its loop computes the steps. A run writes only its own sequence's KV.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringserve.cp_core.errors import RingserveError
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, spread
from ringserve.orchestration.prefill.scheduler import StepForm, lay_out
from ringserve.orchestration.protocol.plans import LayoutFallback, PlannedChunk
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.turns import Attributes, PrefillTurn, SentKv, TimeSpan, just_ended
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.orchestration.ring.kv_transfers import copy_blocks, fetch, sends_for
from ringserve.orchestration.ring.life import Ring
from ringserve.orchestration.tasks import gather_all, gather_first_error
from ringserve.workers.protocol.steps import Algorithm, PrefillOutput, PromptScore, SequencePrefill
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import NO_HISTORY, TokenHistory, TokenLogprobs

log = logging.getLogger(__name__)

NOTHING = SentKv(payload_bytes=0, seconds=0.0)
PLAIN = StepForm()


@dataclass(frozen=True, slots=True)
class PreparedPiece:
    """Part of a step that computes `tokens` of one turn; process p computes `sequences[p]`.

    `after` are the places of the sequence's KV once the step is computed. `fallback` is set if a better layout had no
    room.
    """

    run: PrefillRun
    tokens: TokenRange
    sequences: tuple[SequencePrefill, ...]
    after: ShardMap
    fallback: LayoutFallback | None


class PrefillRun:
    """One attempt of one turn on one incarnation of a ring. The caller pins `sequence` until `clean_up` has returned.

    While `is_computing`, ranks read and write the sequence's blocks. `chunks` and `prefill_seconds` count the work that
    the ranks have done.
    """

    def __init__(
        self, ring: Ring, pool: KvPool, sequence: SequenceKv, incarnation: str, turn: PrefillTurn, peers: Peers
    ) -> None:
        self._ring = ring
        self._settings = ring.settings
        self._ranks = ring.ranks
        self._pool = pool
        self._sequence = sequence
        self._incarnation = incarnation
        self._turn = turn
        self._peers = peers
        self._cached_tokens = turn.cached_tokens
        self._sending: TransferKey | None = None
        self.stop_error: RingserveError | None = None
        self.first_logprobs: TokenLogprobs | None = None
        self._scores: dict[int, TokenLogprobs] = {}
        self.is_computing = False
        self.chunks: list[PlannedChunk] = []
        self.prefill_seconds = 0.0
        self.times = PrefillTimes()

    @property
    def turn_id(self) -> str:
        return self._turn.turn_id

    @property
    def is_sparse(self) -> bool:
        """True if the turn's KV is approximate."""
        return self._turn.sparsity is not None

    @property
    def planned_chunks(self) -> tuple[PlannedChunk, ...]:
        """Chunks of the turn's plan, after a chunk of the tokens that could not be pulled."""
        chunks = self._turn.chunks
        if not self.lost_tokens:
            return chunks
        lost = TokenRange(self._cached_tokens, self._turn.cached_tokens)
        return (PlannedChunk(tokens=lost, algorithm=chunks[0].algorithm), *chunks)

    @property
    def lost_tokens(self) -> int:
        """Number of tokens that could not be pulled from another ring and are computed instead."""
        return self._turn.cached_tokens - self._cached_tokens

    async def pull(self) -> SentKv:
        """Fetch from another ring the cached KV that this ring lacks.

        The decode ring computed it, or it was evicted here. A failed pull from the turn's decode ring ends the turn.
        After a failed pull from another ring, this ring computes the tokens.
        """
        turn, sequence = self._turn, self._sequence
        await copy_blocks(self._ring, self._pool, sequence, self._incarnation)
        held = sequence.shards.held
        missing = TokenRange(sequence.shards.num_tokens, turn.cached_tokens)
        if not len(missing):
            return NOTHING
        shards = spread(missing.start, len(missing), held)
        after = sequence.shards.extend(shards)
        self._pool.make_room(sequence, after.held)
        try:
            sent = await self._fetch(missing, shards)
        except RingserveError as error:
            if turn.pulled_from is None or self.stop_error is not None:
                raise
            log.warning("turn %s computes %d tokens: %s", turn.turn_id, len(missing), error)
            self._cached_tokens = missing.start
            return NOTHING
        sequence.shards = after
        self.times.note_pull(sent.payload_bytes, sent.seconds)
        return sent

    async def _fetch(self, tokens: TokenRange, shards: ShardMap) -> SentKv:
        turn, other, timeout = self._turn, self._turn.pulled_from, self._settings.transfer_timeout
        transfer_id = f"{turn.turn_id}/pull"
        if other is None:
            key = TransferKey(transfer_id, turn.attempt, turn.destination.incarnation, self._incarnation)
            decode = self._peers.leader("decode", turn.decode_endpoint)
            return await fetch(self._ring, self._sequence, decode, key, tokens, shards, timeout, turn_id=turn.turn_id)
        key = TransferKey(transfer_id, turn.attempt, other.incarnation, self._incarnation)
        source = self._peers.leader(other.role, other.endpoint)
        return await fetch(self._ring, self._sequence, source, key, tokens, shards, timeout, kv_id=other.kv_id)

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of the sequence on each rank."""
        return self._sequence.shards.held

    def is_whole_prompt(self, piece: TokenRange) -> bool:
        """Return whether the piece is the whole prompt, and no KV of its sequence is here yet."""
        return piece == TokenRange(0, len(self._turn.token_ids)) and not self._sequence.shards.num_tokens

    def prepare(
        self,
        piece: TokenRange,
        load: Sequence[int],
        whole_on: int | None = None,
        form: StepForm = PLAIN,
    ) -> PreparedPiece:
        """Return what each process computes of the tokens `piece`. Their KV is sent layer by layer.

        `load`, `whole_on` and `form` are passed to `lay_out`. Raises the error that stopped the turn, CapacityExceeded,
        ReshardError.
        """
        if self.stop_error is not None:
            raise self.stop_error
        turn, sequence = self._turn, self._sequence
        held = sequence.shards.held
        placed = lay_out(
            self._pool,
            sequence,
            piece,
            num_left=len(turn.token_ids) - piece.stop,
            load=load,
            whole_on=whole_on,
            form=form,
        )
        after = sequence.shards.extend(placed.kv)
        key = TransferKey(turn.turn_id, turn.attempt, self._incarnation, turn.destination.incarnation)
        # The first chunk also carries cached KV that the decode ring lacks; no chunk carries KV that the decode ring
        # retains.
        retained = turn.destination.retained_tokens
        first = retained if piece.start == self._cached_tokens else max(piece.start, retained)
        sends = sends_for(
            key,
            after,
            turn.destination.shards,
            TokenRange(first, max(first, piece.stop)),
            blocks=[sequence.table(rank) for rank in range(len(held))],
            kv_endpoints=turn.destination.kv_endpoints,
            num_kv_heads=self._ring.model.num_kv_heads,
            source_tp=self._settings.ranks.tp,
            destination_tp=turn.destination.tp,
        )
        is_last = piece.stop == len(turn.token_ids)
        tail = sequence.shards.newest(self._ring.model.tail_tokens)
        sequences = (
            SequencePrefill(
                sequence_id=turn.turn_id,
                token_ids=turn.token_ids[piece.start : piece.stop],
                layout=placed.layout,
                stored=placed.stored,
                cached=held,
                blocks=send.blocks,
                sample=turn.sampling if is_last else None,
                sends=(send,),
                history=_history(turn) if is_last else NO_HISTORY,
                score=_score(turn, piece.stop),
                sparsity=turn.sparsity,
                tail=tail,
            )
            for send in sends
        )
        self._sending = key
        return PreparedPiece(self, piece, tuple(sequences), after, placed.fallback)

    def commit(self, done: PreparedPiece, algorithm: Algorithm, num_turns: int, seconds: float) -> None:
        """Record that the step with `done`, in which `num_turns` turns took part, has been computed."""
        self._sequence.shards = done.after
        self.chunks.append(
            PlannedChunk(tokens=done.tokens, algorithm=algorithm, num_turns=num_turns, fallback=done.fallback)
        )
        self.prefill_seconds += seconds
        self.times.note_chunk(self.chunks[-1], seconds)

    @property
    def is_complete(self) -> bool:
        """True if the last token of the prompt has been computed."""
        return bool(self.chunks) and self.chunks[-1].tokens.stop == len(self._turn.token_ids)

    def note_logprobs(self, outputs: Sequence[PrefillOutput]) -> None:
        """Collect the log probabilities that the ranks computed in a step of the turn."""
        for output in outputs:
            self._scores.update(output.scores.get(self.turn_id, {}))
            self.first_logprobs = output.logprobs.get(self.turn_id, self.first_logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of the prompt's tokens from the second on; empty if the request did not ask."""
        assert sorted(self._scores) == list(range(1, len(self._scores) + 1)), "ranks and chunks cover the prompt"
        return tuple(self._scores[position] for position in sorted(self._scores))

    async def hand_over(self) -> None:
        """Wait until the decode ring has acknowledged every byte."""
        key = self._sending
        assert key is not None, "nothing was computed"
        await gather_first_error(port.finish_sends(key, self._settings.transfer_timeout) for port in self._ranks)
        self._sending = None

    async def clean_up(self) -> None:
        """Return when no sender of the ring reads the sequence's blocks."""
        key, self._sending = self._sending, None
        if key is not None:
            control = self._settings.control_timeout
            try:
                await gather_all(port.abandon_send(key, control) for port in self._ranks)
            except RingserveError as error:
                # A rank that does not answer is dead: it neither reads nor writes.
                log.info("cleaning up turn %s: %s", self._turn.turn_id, error)


def _history(turn: PrefillTurn) -> TokenHistory:
    """Return the tokens that the first token's sampling looks back at."""
    prompt = np.unique(turn.token_ids) if turn.sampling.looks_at_prompt else ()
    return TokenHistory.of(turn.sampling, prompt)


def _score(turn: PrefillTurn, stop: int) -> PromptScore | None:
    """Return the request to score the prompt tokens of a step that ends before position `stop`; None for no scores."""
    num_top = turn.sampling.prompt_logprobs
    if num_top is None or turn.attempt > 1:
        return None  # not asked for, or answered in the first attempt
    return PromptScore(num_top=num_top, following=int(turn.token_ids[stop]) if stop < len(turn.token_ids) else None)


class PrefillTimes:
    """Times of one attempt of one turn, for its trace.

    The trace has `pull` (KV from another ring), `queue` (from ready to the first step), `prefill` with a part for each
    chunk, and `hand-over` (after the last step: the rest of the KV is sent).
    """

    def __init__(self) -> None:
        self._pull: TimeSpan | None = None
        self._chunks: list[TimeSpan] = []

    def note_pull(self, payload_bytes: int, seconds: float) -> None:
        """Record that a pull has just ended."""
        self._pull = just_ended("pull", seconds, {"ringserve.bytes": payload_bytes})

    def note_chunk(self, chunk: PlannedChunk, seconds: float) -> None:
        """Record that the step of the chunk has just ended."""
        attributes: Attributes = {
            "ringserve.tokens.start": chunk.tokens.start,
            "ringserve.tokens.stop": chunk.tokens.stop,
            "ringserve.algorithm": chunk.algorithm.value,
            "ringserve.turns_in_step": chunk.num_turns,
        }
        if chunk.fallback is not None:
            attributes = {**attributes, "ringserve.fallback": chunk.fallback.value}
        self._chunks.append(just_ended("chunk", seconds, attributes))

    def spans(self, ring: str, attempt: int, reserved_at: float, ended: float) -> Sequence[TimeSpan]:
        """Return the spans of a turn that has left `ring`, however far it came."""
        where: Attributes = {"ringserve.ring": ring, "ringserve.attempt": attempt}
        pulled, ready = [], reserved_at
        if self._pull is not None:
            pulled, ready = [replace(self._pull, attributes={**where, **self._pull.attributes})], self._pull.ended
        if not self._chunks:
            return [*pulled, TimeSpan(name="queue", began=ready, ended=ended, attributes=where)]
        first, last = self._chunks[0].began, self._chunks[-1].ended
        return [
            *pulled,
            TimeSpan(name="queue", began=ready, ended=first, attributes=where),
            TimeSpan(name="prefill", began=first, ended=last, attributes=where, parts=tuple(self._chunks)),
            TimeSpan(name="hand-over", began=last, ended=ended, attributes=where),
        ]
