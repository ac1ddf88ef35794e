"""One prompt on a decode ring, between two steps of its batch: new tokens after KV that the ring keeps.

It is a prefill step like any other, by pass-Q: the keys stay where they are, and queries go round. Its KV is written
into this ring's own shards, so nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cp_core.attention.interface import AttentionBackend
from cp_core.layout.shards import balanced_layout
from cp_core.transport.interface import RingTransport
from workers.decode.batch import Prompt
from workers.decode.header import LEADER
from workers.kv.cache import KvCache
from workers.model.loading import LoadedModel
from workers.prefill.step import run_prefill
from workers.protocol.steps import Algorithm, PrefillStep, SequencePrefill, TransferKey
from workers.sampling.journey import gather_drawn, send_drawn
from workers.sampling.parameters import Sampled
from workers.sampling.rows import sample_rows
from workers.step_clock import StepClock


class DecodePrompts:
    """A ring's prompts, one at a time. Collective: every process of the ring runs the same ones in the same order."""

    def __init__(self, model: LoadedModel, transport: RingTransport, cache: KvCache, backend: AttentionBackend) -> None:
        self._model = model
        self._transport = transport
        self._cache = cache
        self._backend = backend
        # As of `DecodePass`.
        self.clock = StepClock()
        self.timed: Sequence[RingTransport] = (transport,)

    def run(self, prompt: Prompt) -> Sampled | None:
        """Compute and store the prompt's tokens -> in the ring's first process the token after them; None elsewhere.

        Raises Unavailable when a peer is lost, FloatingPointError for a NaN in attention or logits.
        """
        with self.clock.step(*self.timed):
            return self._run(prompt)

    def _run(self, prompt: Prompt) -> Sampled | None:
        rank = self._transport.rank
        sequence = SequencePrefill(
            sequence_id=prompt.sequence_id,
            token_ids=np.asarray(prompt.token_ids, dtype=np.int64),
            layout=balanced_layout(sum(prompt.held), len(prompt.token_ids), prompt.held),
            cached=prompt.held,
            blocks=prompt.blocks[rank],
            sample=prompt.sampling,
            history=prompt.history,
        )
        step = PrefillStep(algorithm=Algorithm.PASS_Q, sequences=(sequence,))
        forward, states = run_prefill(
            step, self._model, self._transport, self._cache, self._backend, _nobody_waits_for_layers
        )
        # All processes of a rank make the logits together, also those of no row; the first of them draws.
        logits = self._model.logits(states[[last.row for last in forward.last_rows]])
        if self._model.tensor.rank != 0:
            return None
        return self._bring_to_leader(sequence, sample_rows(forward.last_rows, logits), prompt.sampling.logprobs)

    def _bring_to_leader(
        self, sequence: SequencePrefill, sampled: Sequence[Sampled], num_top: int | None
    ) -> Sampled | None:
        """Only the rank of the last token has drawn one."""
        transport, device = self._transport, self._cache.device
        owner, _ = sequence.layout.owner_of(sequence.layout.tokens.stop - 1)
        if owner == LEADER:
            return sampled[0] if transport.rank == LEADER else None
        if transport.rank != LEADER:
            send_drawn(sampled, transport, device)
            return None
        tops = [[num_top] if rank == owner else [] for rank in range(transport.size)]
        return gather_drawn(sampled, tops, transport, device)[owner][0]


def _nobody_waits_for_layers(key: TransferKey, layer: int) -> None:
    raise AssertionError("a prompt on a decode ring is sent nowhere")
