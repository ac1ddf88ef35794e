"""Decode batch of a ring and its steps, as one rank runs them: over the newest tokens, or over one prompt.

`workers.decode.loop` calls it. Every rank derives the same batch from the same headers: its sequences, and which rank
stores each sequence's next token in which slot. So a step exchanges nothing but attention and the sampled tokens.

Shapes: B sequences (rows), R rows that this rank computes, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cp_core.attention.paged import PagedShards, takes_pages
from cp_core.attention.partial import AttentionBackend
from cp_core.cost.model import PASS_Q
from cp_core.layout.shards import assign_owners, balanced_layout
from cp_core.layout.step_plans import DecodePlan, KvRun, PassQRoute
from cp_core.ring.decode import ring_decode, sharded_decode
from cp_core.ring.helix import helix_decode
from cp_core.transport.interface import RingTransport
from workers.decode.graphs import GraphRunner
from workers.decode.inputs import InputBuffers, StepInputs
from workers.decode.messages import LEADER, BatchChange, gather_sampled
from workers.kv.cache import KvCache, SlotRun, runs
from workers.model.loading import LoadedModel
from workers.prefill.step import run_prefill
from workers.progress import StepClock
from workers.protocol.decode_commands import ComputePrompt
from workers.protocol.prefill_steps import Algorithm, PrefillStep, SequencePrefill
from workers.protocol.transfers import TransferKey
from workers.sampling.grammar import Grammars
from workers.sampling.parameters import Sampled
from workers.sampling.sampler import RowSampler, are_greedy, prepare_masks, sample_greedy_rows, sample_rows


@dataclass(slots=True)
class BatchRow:
    """Running sequence. `token_id` at `position` is its newest token; the next step computes that token's KV.

    `held` counts the stored tokens of every rank, `room` the slots in every rank's table. `owner` is the rank that
    stores the newest token, from the step's start on. `blocks` and `runs` are this rank's: its block table, and the
    slots of its shard in stored order. `sampler` draws tokens; the leading loop decides when the sequence ends.
    """

    sequence_id: str
    token_id: int
    position: int
    held: list[int]
    room: list[int]
    blocks: list[int]
    runs: list[SlotRun]
    sampler: RowSampler
    owner: int = 0

    @property
    def next_position(self) -> int:
        """Position of the token that the next step samples."""
        return self.position + 1


@dataclass(frozen=True, slots=True)
class Appended:
    """Rows whose newest token this rank stores, and the slots of those tokens."""

    rows: list[int]
    slots: list[int]


class BatchState:
    """Running rows in order of admission, with this rank's blocks and slots. Every rank holds one."""

    def __init__(self, rank: int, num_ranks: int, block_tokens: int, grammars: Grammars | None = None) -> None:
        """Begin without rows; a rank that samples has `grammars`."""
        self._rank = rank
        self._grammars = grammars
        self._num_ranks = num_ranks
        self.block_tokens = block_tokens
        self.rows: list[BatchRow] = []

    def __len__(self) -> int:
        return len(self.rows)

    def advance(self, token_ids: Sequence[int], change: BatchChange) -> None:
        """Append the tokens sampled from the last step, in the order of its rows, then apply `change`."""
        if token_ids:
            for row, token_id in zip(self.rows, token_ids, strict=True):
                row.token_id = token_id
                row.position += 1
                row.sampler.push(token_id)
        if change.removed:
            self.rows = [row for row in self.rows if row.sequence_id not in change.removed]
        for admission in change.admitted:
            blocks, held = list(admission.blocks[self._rank]), list(admission.held)
            assert sum(held) == admission.position, "tokens before the newest one must all be stored"
            row = BatchRow(
                sequence_id=admission.sequence_id,
                token_id=admission.token_id,
                position=admission.position,
                held=held,
                room=[self.block_tokens * len(table) for table in admission.blocks],
                blocks=blocks,
                runs=list(runs(blocks, held[self._rank], self.block_tokens)),
                sampler=RowSampler(admission.sampling, admission.history, self._grammars),
            )
            self.rows.append(row)
        for growth in change.grown:
            row = next(row for row in self.rows if row.sequence_id == growth.sequence_id)
            row.blocks += growth.blocks[self._rank]
            row.room = [
                slots + self.block_tokens * len(blocks) for slots, blocks in zip(row.room, growth.blocks, strict=True)
            ]

    def append(self) -> Appended:
        """Assign every row's newest token to a rank by `assign_owners`, and take the slots of this rank's."""
        appended = Appended([], [])
        owners = assign_owners([row.held for row in self.rows], [row.room for row in self.rows])
        for number, (row, owner) in enumerate(zip(self.rows, owners, strict=True)):
            row.owner = owner
            if owner == self._rank:
                appended.rows.append(number)
                appended.slots.append(self._take_slot(row))
            row.held[owner] += 1
        return appended

    def plan(self) -> DecodePlan:
        """Plan the step whose tokens were just appended: the rank that computes each row, and every rank's tokens.

        The rank that stores a row's new token computes the row, so its KV never travels. Owners rotate over the ranks,
        and the work rotates with them (arXiv 2411.01783, 3.6). In each step the rows lie evenly over the ranks.
        """
        owners = tuple(row.owner for row in self.rows)
        return DecodePlan(self._num_ranks, owners, tuple(tuple(row.held) for row in self.rows))

    def _take_slot(self, row: BatchRow) -> int:
        """Return the slot of this rank's next token of the row, and add it to the row's runs."""
        block, offset = divmod(row.held[self._rank], self.block_tokens)
        slot = row.blocks[block] * self.block_tokens + offset
        if row.runs and row.runs[-1].stop == slot:
            row.runs[-1] = SlotRun(row.runs[-1].start, slot + 1)
        else:
            row.runs.append(SlotRun(slot, slot + 1))
        return slot


NO_BLOCKS: list[int] = []
"""Block table of a row of padding."""


class DecodePass:
    """Decode steps of a ring over distributed KV. Every rank computes a row (`gather`), or one rank does (`pass_q`).

    The variant may change from step to step: both leave the same KV on the same ranks. A model whose weights are cut
    over the ring takes `helix` alone: every rank has every row and, of all else, its share.

    With tensor parallelism each rank of the ring is several processes, each in the ring of its own heads. They compute
    the logits together, and the first of them samples. The model calls `attend` at each layer.
    """

    def __init__(
        self,
        model: LoadedModel,
        transport: RingTransport,
        cache: KvCache,
        backend: AttentionBackend,
        batch: BatchState,
        clock: StepClock | None = None,
        control: RingTransport | None = None,
        runner: GraphRunner | None = None,
    ) -> None:
        """`clock` measures the steps; `control` carries tensors of the host, `transport` itself if None.

        `runner` records steps and replays them; without one each is computed as it is.
        """
        self._model = model
        self._transport = transport
        self._control = control or transport
        self._runner = runner
        self._cache = cache
        self._backend = backend
        self._batch = batch
        self._clock = clock or StepClock()
        self._columns = model.columns(cache.device)
        self._plan: DecodePlan
        # Route of a pass-Q step; None where every rank computes every row.
        self._route: PassQRoute | None = None
        # Indices of the stored rows among the computed ones; None where these are all, and no layer has to pick rows.
        self._stored: Tensor | None = None
        self._buffers = InputBuffers(cache.device)
        self._inputs: StepInputs
        # For kernels that take runs: what each row's shard is read from. Shard and table are constant over the layers.
        self._pieces: list[list[SlotRun | Tensor]] = []
        # For kernels that follow block tables: how many tokens of each row this rank stores.
        self._follows_tables = takes_pages(backend, cache.block_tokens)
        self._stored_tokens: tuple[int, ...] = ()
        # Rows behind those of the batch, in a step that is recorded with its attention; None in any other.
        self._num_padding: int | None = None
        # A device records attention that sends nothing and reads tables and lengths where they change.
        self._records_attention = (
            transport.size == 1 and takes_pages(backend, cache.block_tokens) and backend.skips_empty
        )

    def run(self, variant: str) -> list[Sampled]:
        """Run one step of the whole batch. Return the token after each row in the first process, [] elsewhere.

        A ring of one rank runs every variant as `gather`, with the same results.
        Raises Unavailable when a peer is lost.
        """
        with self._clock.step():
            sampled = self._run(variant)
            # Where tokens were read, nothing is left to wait for.
            self._cache.settle()
            return sampled

    def _run(self, variant: str) -> list[Sampled]:
        appended, rows = self._batch.append(), self._batch.rows
        self._plan = self._batch.plan()
        self._route = PassQRoute(self._plan, self._transport.rank) if variant == PASS_Q else None
        computed = range(len(self._batch)) if self._route is None else self._route.own
        if self._samples_alone or self._route is not None:
            prepare_masks([rows[number] for number in computed])
        self._num_padding = None
        if self._runner is not None and self._records_attention:
            self._num_padding = self._runner.num_padding(len(rows))
        padding = self._num_padding or 0
        if self._follows_tables:
            self._stored_tokens = (*(row.held[self._transport.rank] for row in rows), *[0] * padding)
        else:
            self._pieces = [self._cache.pieces(row.runs) for row in rows]
        places = {row: place for place, row in enumerate(computed)}
        self._inputs = inputs = self._buffers.fill(
            [rows[number].token_id for number in computed] + [0] * padding,
            [rows[number].position for number in computed] + [0] * padding,
            appended.slots + [self._cache.spare_slot] * padding,
            [places[number] for number in appended.rows],
            [row.blocks for row in rows] + [NO_BLOCKS] * padding if self._follows_tables else (),
            self._stored_tokens,
        )
        self._stored = None if len(appended.rows) == len(computed) else inputs.stored
        states = self._hidden_states(computed)
        if self._model.is_helix:
            return self._sample_together(states)
        if self._route is None:
            return self._sample(computed, states) if self._samples_alone else []
        sampled = self._sample(computed, states)
        return self._gather_in_order(sampled) if self._model.samples else []

    @property
    def _samples_alone(self) -> bool:
        """True if this rank samples all rows of a step that every rank computes."""
        return self._transport.rank == LEADER

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store this rank's rows of k[R,K,D] and v[R,K,D], then attend q[R,H,D] over all shards.

        Return [R,H,D], in helix this rank's columns of it.
        """
        cache = self._cache
        if self._stored is None:
            cache.write_slots(layer, self._inputs.slots, k, v)
        elif self._stored.shape[0]:
            cache.write_slots(layer, self._inputs.slots, k[self._stored], v[self._stored])
        shards = self._shards(layer)
        if self._columns is not None:
            return helix_decode(q, shards, self._plan, self._columns, self._transport, self._backend, scale)
        if self._route is not None:
            return ring_decode(q, shards, self._route, self._transport, self._backend, scale)
        # Rows of padding are in no plan: a rank that is alone has all rows.
        plan = self._plan if self._num_padding is None else None
        return sharded_decode(q, shards, self._transport, self._backend, scale, plan)

    def _shards(self, layer: int) -> PagedShards | list[list[KvRun]]:
        if self._follows_tables:
            inputs = self._inputs
            return PagedShards(*self._cache.pages(layer), inputs.table, self._stored_tokens, inputs.lengths)
        return [self._cache.gathered(layer, pieces) for pieces in self._pieces]

    def _hidden_states(self, computed: Sequence[int]) -> Tensor:
        """Return [R, hidden_size] of the newest tokens of these rows."""
        if not computed:
            return self._model.attend_without_tokens(self)
        inputs = self._inputs
        if self._runner is None:
            return self._model.hidden_states(inputs.token_ids, inputs.positions, self)
        if self._num_padding is None:
            return self._runner.run_pieces(inputs.token_ids, inputs.positions, self)
        return self._runner.run_step(inputs, self._buffers.allocation, self)[: len(computed)]

    def _sample(self, computed: Sequence[int], states: Tensor) -> list[Sampled]:
        """Sample the token after each of these rows from states[R, hidden_size]; [] where another process samples."""
        if not computed:
            return []
        logits = self._model.logits(states)
        if not self._model.samples:
            return []
        return sample_rows([self._batch.rows[number] for number in computed], logits)

    def _sample_together(self, states: Tensor) -> list[Sampled]:
        """Sample the token after every row on the first rank, from logits of which each rank has a share."""
        rows = self._batch.rows
        if are_greedy(rows):
            largest, tokens = self._model.largest_logits(states)
            return sample_greedy_rows(largest, tokens) if self._model.samples else []
        logits = self._model.logits(states)
        return sample_rows(rows, logits) if self._model.samples else []

    def _gather_in_order(self, sampled: Sequence[Sampled]) -> list[Sampled]:
        """Gather all ranks' tokens on the first rank, in the batch's order; [] elsewhere."""
        rows_of = [self._plan.rows_of(rank) for rank in range(self._transport.size)]
        tops_of = [[self._batch.rows[row].sampler.sampling.logprobs for row in rows] for rows in rows_of]
        arrived = gather_sampled(sampled, tops_of, self._control)
        if not arrived:
            return []
        by_row = {
            row: drawn
            for rows, drawn_there in zip(rows_of, arrived, strict=True)
            for row, drawn in zip(rows, drawn_there, strict=True)
        }
        return [by_row[row] for row in range(len(self._batch))]


class DecodePrompts:
    """Prompts that a decode ring computes itself, one at a time between two steps of the batch.

    New tokens follow retained KV. A prompt is an ordinary prefill step by pass-Q: the keys stay on their ranks and the
    queries circulate, or, in helix, every rank has all of them. Its KV goes to this ring's own shards, so nothing is
    sent elsewhere. Collective: every process of the ring runs the same prompts in the same order.
    """

    def __init__(
        self,
        model: LoadedModel,
        transport: RingTransport,
        cache: KvCache,
        backend: AttentionBackend,
        clock: StepClock | None = None,
        control: RingTransport | None = None,
    ) -> None:
        """`clock` measures the steps; `control` carries tensors of the host, `transport` itself if None."""
        self._model = model
        self._transport = transport
        self._control = control or transport
        self._cache = cache
        self._backend = backend
        self._clock = clock or StepClock()

    def run(self, prompt: ComputePrompt) -> Sampled | None:
        """Compute the prompt's tokens and store their KV. Return the next token in the ring's first process, else None.

        Raises Unavailable when a peer is lost.
        """
        with self._clock.step():
            drawn = self._run(prompt)
            self._cache.settle()
            return drawn

    def _run(self, prompt: ComputePrompt) -> Sampled | None:
        transport = self._transport
        layout = balanced_layout(sum(prompt.held), len(prompt.token_ids), prompt.held)
        sequence = SequencePrefill(
            sequence_id=prompt.sequence_id,
            token_ids=prompt.token_ids,
            layout=layout,
            cached=prompt.held,
            blocks=prompt.blocks[transport.rank],
            sample=prompt.sampling,
            history=prompt.history,
        )
        step = PrefillStep(algorithm=Algorithm.PASS_Q, sequences=(sequence,))
        forward, states = run_prefill(step, self._model, transport, self._cache, self._backend, _send_nothing)
        # All processes of a rank compute the logits together, also of no rows; the first of them samples.
        logits = self._model.logits(states[[last.row for last in forward.last_rows]])
        if not self._model.samples:
            return None
        owner, _ = layout.owner_of(layout.tokens.stop - 1)
        sampled = sample_rows(forward.last_rows, logits)
        if owner == LEADER or self._model.is_helix:
            return sampled[0] if sampled else None
        tops_of = [[prompt.sampling.logprobs] if rank == owner else [] for rank in range(transport.size)]
        arrived = gather_sampled(sampled, tops_of, self._control)
        return arrived[owner][0] if arrived else None


def _send_nothing(key: TransferKey, layer: int) -> None:
    raise AssertionError("a prompt on a decode ring sends no KV")
