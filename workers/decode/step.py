"""One decode step as one rank runs it: the newest token of every sequence, over KV that is spread over the ring.

B sequences (rows), R rows that this rank computes, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_core.attention.interface import AttentionBackend
from cp_core.attention.paged import PagedShards, takes_pages
from cp_core.cost.model import PASS_Q
from cp_core.layout.decode_plan import DecodePlan, PassQRoute
from cp_core.ring.decode import ring_decode, sharded_decode
from cp_core.ring.prefill import KvRun
from cp_core.transport.interface import RingTransport
from workers.decode.batch import DecodeBatch
from workers.decode.header import LEADER
from workers.kv.cache import KvCache
from workers.model.loading import LoadedModel
from workers.sampling.journey import gather_drawn, send_drawn
from workers.sampling.parameters import Sampled
from workers.sampling.rows import sample_rows
from workers.step_clock import StepClock


class DecodePass:
    """A ring's decode steps over spread KV. Each row is computed by every rank (`gather`) or by one (`pass_q`).

    Variants may change from step to step: either leaves the same KV on the same ranks. With tensor parallelism a rank
    is a group of processes, each in the ring of its own heads; they make the logits together, and the first draws.
    """

    def __init__(
        self,
        model: LoadedModel,
        transport: RingTransport,
        cache: KvCache,
        backend: AttentionBackend,
        batch: DecodeBatch,
    ) -> None:
        self._model = model
        self._transport = transport
        self._cache = cache
        self._backend = backend
        self._batch = batch
        self._draws = model.tensor.rank == 0
        # Whose clock runs during steps, and whose waits it counts: the rank's own, where it sets them.
        self.clock = StepClock()
        self.timed: Sequence[RingTransport] = (transport,)
        self._plan: DecodePlan
        # Of a pass-Q step; None where every rank computes every row.
        self._route: PassQRoute | None = None
        # Places of the stored rows among the computed ones; None: all of them, so that no layer needs to pick rows.
        self._stored: Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64)
        # Of a step whose kernel follows block tables: the batch's table, and the tokens stored of each row.
        self._follows_tables = takes_pages(backend, cache.block_tokens)
        self._table = torch.empty(0, 0, dtype=torch.int32)
        self._stored_tokens: tuple[int, ...] = ()

    def run(self, variant: str) -> list[Sampled]:
        """One step of the whole batch -> in the first process the token after each row, in order; elsewhere none.

        Raises Unavailable when a peer is lost, FloatingPointError for a NaN in attention or logits.
        """
        with self.clock.step(*self.timed):
            return self._run(variant)

    def _run(self, variant: str) -> list[Sampled]:
        device = self._cache.device
        appended = self._batch.append()
        self._plan = self._batch.plan(appended)
        self._route = PassQRoute(self._plan, self._transport.rank) if variant == PASS_Q else None
        computed = range(len(self._batch)) if self._route is None else self._route.own
        self._slots = torch.tensor(appended.slots, dtype=torch.int64, device=device)
        stores_all = len(appended.rows) == len(computed)
        self._stored = None if stores_all else torch.tensor(appended.rows, dtype=torch.int64, device=device)
        if self._follows_tables:
            self._stored_tokens = tuple(row.held[self._transport.rank] for row in self._batch.rows)
            self._table = self._cache.table([row.blocks for row in self._batch.rows], self._stored_tokens)
        states = self._hidden_states(computed)
        if self._route is None:
            return self._sample(computed, states) if self._transport.rank == LEADER else []
        sampled = self._sample(computed, states)
        return self._bring_to_leader(sampled) if self._draws else []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store the rows of k[R,K,D] and v[R,K,D] that are this rank's, attend q[R,H,D] over all shards -> [R,H,D]."""
        cache = self._cache
        if self._stored is None:
            cache.write_slots(layer, self._slots, k, v)
        elif self._stored.shape[0]:
            cache.write_slots(layer, self._slots, k[self._stored], v[self._stored])
        shards = self._shards(layer)
        if self._route is not None:
            return ring_decode(q, shards, self._route, self._transport, self._backend, scale)
        return sharded_decode(q, shards, self._transport, self._backend, scale, self._plan)

    def _shards(self, layer: int) -> PagedShards | list[list[KvRun]]:
        if self._follows_tables:
            return PagedShards(*self._cache.pages(layer), self._table, self._stored_tokens)
        return [self._cache.views(layer, row.runs) for row in self._batch.rows]

    def _hidden_states(self, computed: Sequence[int]) -> Tensor:
        """[R, hidden_size] of the newest tokens of these rows."""
        if not computed:
            return self._model.attend_without_tokens(self)
        rows = [self._batch.rows[number] for number in computed]
        token_ids = torch.tensor([row.token_id for row in rows], device=self._cache.device)
        positions = torch.tensor([row.position for row in rows], device=self._cache.device)
        return self._model.hidden_states(token_ids, positions, self)

    def _sample(self, computed: Sequence[int], states: Tensor) -> list[Sampled]:
        """The token after each of these rows, from states[R, hidden_size]; none where another process draws."""
        if not computed:
            return []
        logits = self._model.logits(states)
        if not self._draws:
            return []
        return sample_rows([self._batch.rows[number] for number in computed], logits)

    def _bring_to_leader(self, sampled: Sequence[Sampled]) -> list[Sampled]:
        """Each rank sends what it drew for its rows to the first, which puts them in the batch's order.

        Every rank knows of every row whether and how many log-probabilities it wants, and so each message's length.
        """
        transport, device = self._transport, self._cache.device
        if transport.rank != LEADER:
            send_drawn(sampled, transport, device)
            return []
        rows_of = [self._plan.rows_of(rank) for rank in range(transport.size)]
        tops_of = [[self._batch.rows[row].sampler.sampling.logprobs for row in rows] for rows in rows_of]
        arrived = gather_drawn(sampled, tops_of, transport, device)
        drawn_for = {
            row: drawn
            for rows, drawn_there in zip(rows_of, arrived, strict=True)
            for row, drawn in zip(rows, drawn_there, strict=True)
        }
        return [drawn_for[row] for row in range(len(self._batch))]
