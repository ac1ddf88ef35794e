"""Prompts that a decode ring computes between two steps of its batch, as one rank runs them.

The decode loop runs them, and the draft model reads its texts with them.
"""

from __future__ import annotations

from ringserve.cp_core.attention.partial import AttentionBackend
from ringserve.cp_core.layout.shards import balanced_layout
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.decode.graphs import PromptRunner
from ringserve.workers.decode.messages import LEADER, gather_sampled
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.model.loading import LoadedModel
from ringserve.workers.prefill.step import run_prefill
from ringserve.workers.progress import StepClock
from ringserve.workers.protocol.steps import Algorithm, ComputePrompt, PrefillStep, SequencePrefill
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import Sampled
from ringserve.workers.sampling.sampler import sample_rows


class DecodePrompts:
    """Prompts that a decode ring computes itself, one at a time between two steps of the batch.

    New tokens follow retained KV. A prompt is an ordinary prefill step by pass-Q: the keys stay on their ranks, and the
    queries circulate. In helix every rank has all queries, so none circulate. Its KV goes to this ring's own shards, so
    nothing is sent elsewhere. Collective: every process of the ring runs the same prompts in the same order.
    """

    def __init__(
        self,
        model: LoadedModel,
        transport: RingTransport,
        cache: KvCache,
        backend: AttentionBackend,
        clock: StepClock | None = None,
        control: RingTransport | None = None,
        runner: PromptRunner | None = None,
    ) -> None:
        """`clock` measures the steps. `control` carries tensors in host memory; if it is None, `transport` does.

        If `runner` is given, it records the kernels of short prompts as CUDA graphs and replays them.
        """
        self._model = model
        self._transport = transport
        self._control = control or transport
        self._cache = cache
        self._backend = backend
        self._clock = clock or StepClock()
        self._hidden_states = None if runner is None else runner.hidden_states

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
            tail=prompt.tail,
        )
        step = PrefillStep(algorithm=Algorithm.PASS_Q, sequences=(sequence,))
        forward, states = run_prefill(
            step,
            self._model,
            transport,
            self._cache,
            self._backend,
            _send_nothing,
            hidden_states=self._hidden_states,
        )
        # All processes of a rank compute the logits together, even if the rank has no row. The first process samples.
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
