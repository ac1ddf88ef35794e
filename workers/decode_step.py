"""One decode step as one rank runs it: the newest token of every sequence, over KV that is spread over the ring.

B sequences, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_core.attention import AttentionBackend
from cp_core.decode import sharded_decode
from cp_core.transport import RingTransport
from workers.decode_batch import DecodeBatch
from workers.kv_cache import KvCache
from workers.model import LoadedModel


class DecodePass:
    """The attention of a ring's decode steps. Every rank computes the whole batch; the KV alone is spread."""

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
        self._rows: Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64)

    def run(self) -> Tensor:
        """One step of the whole batch -> hidden states [B, hidden_size], the same on every rank."""
        device, rows = self._cache.device, self._batch.rows
        appended = self._batch.append()
        self._slots = torch.tensor(appended.slots, dtype=torch.int64, device=device)
        # None: all of them, in order, so that no layer needs to pick rows.
        everything = len(appended.rows) == len(rows)
        self._rows = None if everything else torch.tensor(appended.rows, dtype=torch.int64, device=device)
        token_ids = torch.tensor([row.token_id for row in rows], device=device)
        positions = torch.tensor([row.position for row in rows], device=device)
        return self._model.hidden_states(token_ids, positions, self)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store the rows of k[B,K,D] and v[B,K,D] that are this rank's, attend q[B,H,D] over all shards -> [B,H,D]."""
        cache = self._cache
        if self._rows is None:
            cache.write_slots(layer, self._slots, k, v)
        elif self._rows.shape[0]:
            cache.write_slots(layer, self._slots, k[self._rows], v[self._rows])
        shards = [cache.views(layer, row.runs) for row in self._batch.rows]
        return sharded_decode(q, shards, self._transport, self._backend, scale)
