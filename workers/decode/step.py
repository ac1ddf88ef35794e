"""Decode steps of a ring and their variant, as one rank runs them over the newest tokens of its batch and their drafts.

The decode loop and the draft model run them. A step exchanges nothing but attention and the sampled tokens. Each token
of a step is a row of its tensors: it sees its sequence up to itself.

Shapes: B tokens of a step (rows), one a sequence if there are no drafts, R rows that this rank computes, H query heads,
K KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ringserve.cp_core.attention.native import NativeCpu, OwnRows, PagedRows, rows_alone
from ringserve.cp_core.attention.partial import AttentionBackend, PagedShards, takes_pages
from ringserve.cp_core.cost.decode import (
    HELIX,
    STEP_VARIANTS,
    VARIANT_POLICIES,
    DecodeLoad,
    DecodeRates,
    choose_at_start,
    choose_variant,
    predict_step,
)
from ringserve.cp_core.cost.model import PASS_Q, ModelShape
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.step_plans import DecodePlan, PassQRoute
from ringserve.cp_core.ring.decode import DraftedShards, Shards, ring_decode, sharded_decode
from ringserve.cp_core.ring.helix import helix_decode
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.decode.batch import BatchState, StepToken
from ringserve.workers.decode.graphs import RECORDING, GraphRunner, InputBuffers, StepInputs, bucket_of
from ringserve.workers.decode.messages import LEADER, gather_sampled
from ringserve.workers.kv.cache import KvCache, SlotRun, newest_slots
from ringserve.workers.model.loading import LoadedModel
from ringserve.workers.progress import StepClock
from ringserve.workers.sampling.on_device import ChosenRows
from ringserve.workers.sampling.parameters import Sampled
from ringserve.workers.sampling.sampler import (
    are_greedy,
    can_choose_on_device,
    choose_rows,
    prepare_masks,
    reached,
    sample_checked,
    sample_greedy_rows,
)

# Reasons why a device that works beside its host had to wait for it: labels of a metric, like PASS_Q and HELIX.
HOST_MESSAGES = "host_messages"
TENSOR_PARALLEL = "tensor_parallel"
SAMPLED_ON_HOST = "sampled_on_host"
DRAFTS = "drafts"

NO_BLOCKS: list[int] = []
"""Block table of a row of padding."""
# (sequences, stored tokens of all) of the next step -> the variant that serves it.
VariantChoice = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class StepRow:
    """Token of a step: rank `owner` stores it, and with it `kv_tokens` tokens of its sequence are stored."""

    sequence_id: str
    kv_tokens: int
    owner: int
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class IssuedStep:
    """Step whose work the device has, done or not, with its tokens: read already, or chosen by the device."""

    rows: tuple[StepRow, ...]
    tokens: ChosenRows | list[Sampled]


@dataclass(frozen=True, slots=True)
class DoneStep:
    """Step whose tokens have been read.

    In the ring's first process `sampled` has the token after each row; in others it has the same tokens or is empty.
    Unless it `is_last`, the next step with the same rows is under way already, and writes to a slot of each row.
    """

    rows: tuple[StepRow, ...]
    sampled: list[Sampled]
    is_last: bool


def never() -> bool:
    """Let no step follow before the tokens of the last are read."""
    return False


class DecodePass:
    """Decode steps of a ring over distributed KV.

    In `gather` every rank computes every row; in `pass_q` one rank computes each row. The variant may change from step
    to step: both leave the same KV on the same ranks. A model whose weights are cut over the ring takes `helix` alone:
    every rank computes every row, with its share of weights and KV.

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
        *,
        is_asynchronous: bool | None = None,
        sample: Callable[[Sequence[StepToken], Tensor], list[Sampled]] | None = None,
    ) -> None:
        """`clock` measures the steps; `control` carries tensors of the host, `transport` itself if None.

        `runner` records steps and replays them; without one each is computed as it is. A device that `is_asynchronous`
        returns from a launch before it has done it; by default GPUs do. `sample` draws what follows the step's
        tokens, in place of `sample_checked`.
        """
        self._draw = sample or sample_checked
        self._model = model
        self._transport = transport
        self._control = control or transport
        self._runner = runner
        self._cache = cache
        self._backend = backend
        self._batch = batch
        self._clock = clock or StepClock()
        self._columns = model.columns(cache.device)
        # For kernels that follow block tables: how many tokens of each row this rank stores, and the windows they take.
        self._follows_tables = takes_pages(backend, cache.block_tokens)
        self._stored_tokens: tuple[int, ...] = ()
        self._longest = 0
        self._takes_bounds = takes_pages(backend, cache.block_tokens) and backend.takes_bounds
        self._windows_by_table = sorted(set(model.windows) - {0}) if self._takes_bounds else []
        self._plan: DecodePlan
        # Tokens of the current step; a batch row's tokens lie side by side.
        self._tokens: list[StepToken] = []
        # Route of a pass-Q step; None if every rank computes every row.
        self._route: PassQRoute | None = None
        # Indices of the stored rows among the computed ones; None if all are stored, so that no layer has to pick.
        self._stored: Tensor | None = None
        self._buffers = InputBuffers(cache.device, len(self._windows_by_table))
        self._inputs: StepInputs
        self._windows, self._sinks = model.windows, model.sinks
        # For kernels that take runs: the runs of each row's shard, by window. Shards and tables are constant over
        # the layers with one window.
        self._pieces: dict[int, list[list[SlotRun | Tensor]]] = {}
        # With drafts: how many tokens of its row's shard lie before each token's window, by window.
        self._passed: dict[int, list[int]] = {}
        by_table = {*self._windows_by_table, *([0] if self._follows_tables else [])}
        self._windows_by_runs = set(model.windows) - by_table
        is_alone = transport.size == 1 and self._columns is None
        self._is_on_pages = is_alone and self._follows_tables and isinstance(backend, NativeCpu)
        # Number of padding rows in a step that is recorded whole; None in any other.
        self._num_padding: int | None = None
        self._is_asynchronous = cache.device.type == "cuda" if is_asynchronous is None else is_asynchronous
        # A whole step can be recorded only if attention reads tables and lengths from the device's memory, and messages
        # are work of its stream.
        self._records_whole = (
            model.tensor.size == 1
            and not model.is_helix
            and (transport.size == 1 or transport.is_on_stream)
            and takes_pages(backend, cache.block_tokens)
            and backend.skips_empty
            and not self._windows_by_runs
        )

    def run(self, variant: str, is_followed: Callable[[], bool] = never) -> Iterator[DoneStep]:
        """Run one step of the whole batch, and another of the same batch before its tokens are read if `is_followed`.

        `is_followed` is asked before each step is read, and says the same on every rank; if it says yes,
        `reason_to_wait` must be None. The tokens of a step that is followed go to the batch here, those of the last by
        the caller's `BatchState.advance`. A ring of one rank runs every variant as `gather`, with the same results.
        Raises Unavailable when a peer is lost.
        """
        issued: IssuedStep | None = None
        is_last = False
        while not is_last:
            with self._clock.step(), rows_alone():
                issued, following = issued or self._issue(variant), None
                if is_followed():
                    self._batch.advance_untold()
                    following = self._issue(variant, issued)
                tokens = issued.tokens
                sampled = tokens if isinstance(tokens, list) else tokens.read(self._transport.await_event)
            is_last = following is None
            if not is_last:
                self._batch.tell([drawn.token_id or 0 for drawn in sampled])
            yield DoneStep(issued.rows, sampled, is_last)
            issued = following

    @property
    def num_recordings(self) -> int:
        """Number of steps that took longer because they were being recorded."""
        return 0 if self._runner is None else self._runner.eager_steps[RECORDING]

    def reason_to_wait(self, variant: str) -> str | None:
        """Return why this step's tokens must be read before the next step is issued; None if they need not be.

        The same on every rank. Empty on devices that do their work when it is launched: there is nothing to gain.
        """
        if not self._is_asynchronous:
            return ""
        if len(self._tokens) > len(self._batch):
            return DRAFTS
        if self._model.tensor.size > 1:
            return TENSOR_PARALLEL
        if self._transport.size > 1 and not self._transport.is_on_stream:
            return HOST_MESSAGES
        if self._model.is_helix:
            return HELIX
        if self._transport.size > 1 and variant == PASS_Q:
            return PASS_Q
        return None if can_choose_on_device(self._batch.rows) else SAMPLED_ON_HOST

    def _issue(self, variant: str, before: IssuedStep | None = None) -> IssuedStep:
        """Issue a step; with `before`, its newest tokens come from that step, and the device alone may have them."""
        computed = self._begin(variant)
        rows = tuple(
            StepRow(token.row.sequence_id, token.next_position, token.row.owner, token.number > 0)
            for token in self._tokens
        )
        if self.reason_to_wait(variant) is None:
            tokens = None if before is None else before.tokens
            assert not isinstance(tokens, list), "tokens of a step that is followed unread are on the device"
            return IssuedStep(rows, self._launch(tokens))
        sampled = self._compute(computed)
        # Nothing is left to wait for once tokens are returned.
        self._settle()
        return IssuedStep(rows, sampled)

    def _settle(self) -> None:
        """Wait until the device has done all its work. Raises Unavailable."""
        if (done := self._cache.fence()) is not None:
            self._transport.await_event(done)

    def _launch(self, before: ChosenRows | None) -> ChosenRows:
        """Let the device compute the step that has begun, and choose its tokens, without waiting for it.

        The first rank's choice goes to the others' devices, which have it as inputs of the next step.
        """
        num_rows = len(self._batch)
        if before is not None:
            self._inputs.token_ids[:num_rows].copy_(before.token_ids)
        states = self._hidden_states(range(num_rows))
        if self._samples_alone:
            words = choose_rows(self._batch.rows, self._model.logits(states))
        else:
            words = torch.empty(num_rows, dtype=torch.int64, device=self._cache.device)
        if self._transport.size > 1:
            self._transport.broadcast(words, LEADER).wait()
        return ChosenRows(words)

    def _begin(self, variant: str) -> Sequence[int]:
        """Take slots for the new tokens, plan the step, fill its inputs. Return the rows that this rank computes."""
        appended = self._batch.append()
        self._tokens = tokens = self._batch.tokens
        self._plan = self._batch.plan()
        is_routed = variant == PASS_Q and self._transport.size > 1
        self._route = PassQRoute(self._plan, self._transport.rank) if is_routed else None
        computed = range(len(tokens)) if self._route is None else self._route.own
        if self._samples_alone or self._route is not None:
            prepare_masks([tokens[number] for number in computed if not tokens[number].number])
        self._num_padding = None
        has_drafts = len(tokens) > len(self._batch)
        if self._runner is not None and self._records_whole and self._route is None:
            self._num_padding = self._runner.num_padding(len(tokens), has_drafts=has_drafts)
        padding = self._num_padding or 0
        if self._follows_tables:
            self._stored_tokens = (*(held[self._transport.rank] for held in self._plan.held), *[0] * padding)
            self._longest = max(self._stored_tokens, default=0)
        self._batch.forget(max(self._windows, default=0))
        self._pieces = {window: self._pieces_in(window) for window in self._windows_by_runs}
        if has_drafts:
            self._passed = {window: self._passed_in(window) for window in self._windows_by_runs}
        places = {row: place for place, row in enumerate(computed)}
        stored, slots = [places[number] for number in appended.tokens], appended.slots
        if self._num_padding is not None:
            # Every step writes all rows. Rows that are not stored here go to a slot that no one reads.
            slots_of = dict(zip(appended.tokens, appended.slots, strict=True))
            stored, slots = [], [slots_of.get(row, self._cache.spare_slot) for row in range(len(tokens) + padding)]
        self._inputs = inputs = self._buffers.fill(
            [tokens[number].token_id for number in computed] + [0] * padding,
            [tokens[number].position for number in computed] + [0] * padding,
            slots,
            stored,
            [token.row.blocks for token in tokens] + [NO_BLOCKS] * padding if self._follows_tables else (),
            self._stored_tokens,
            max(max(row.room) for row in self._batch.rows) // self._cache.block_tokens if self._follows_tables else 0,
            [self._firsts(window) + [0] * padding for window in self._windows_by_table],
            self._ends() if has_drafts and self._takes_bounds else (),
        )
        writes_all = self._num_padding is not None or len(appended.tokens) == len(computed)
        self._stored = None if writes_all else inputs.stored
        return computed

    def _compute(self, computed: Sequence[int]) -> list[Sampled]:
        """Compute the step that has begun. Return each token's successor in the first process, [] elsewhere."""
        states = self._hidden_states(computed)
        if self._num_padding is not None and self._transport.size > 1:
            # Messages of a recording have no deadline of their own; this wait has one.
            self._settle()
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
        shards, sink_h = self._shards(layer), self._sinks[layer]
        if self._columns is not None:
            return helix_decode(q, shards, self._plan, self._columns, self._transport, self._backend, scale)
        if self._route is not None:
            return ring_decode(q, shards, self._route, self._transport, self._backend, scale, sink_h)
        # Rows of padding are in no plan, and messages of a recording have a fixed size: each rank answers for all rows.
        plan = self._plan if self._num_padding is None else None
        return sharded_decode(q, shards, self._transport, self._backend, scale, plan, sink_h)

    def own_layer(self, layer: int, dtype: torch.dtype, run: Callable[[OwnRows], Tensor]) -> Tensor | None:
        """Return run(rows) of a layer whose rows a CPU kernel can store and attend; else do nothing and return None.

        Then `attend` must do it: if KV is on several ranks, and in layers with a window or sinks.
        """
        if not self._is_on_pages or self._stored is not None or self._windows[layer] or self._sinks[layer] is not None:
            return None
        inputs, cache = self._inputs, self._cache
        if cache.dtype != dtype:
            return None
        k, v, sizes = cache.k_layers[layer], cache.v_layers[layer], (cache.block_tokens, self._longest)
        return run(PagedRows(k, v, inputs.slots, inputs.table, inputs.lengths, *sizes))

    def _pieces_in(self, window: int) -> list[list[SlotRun | Tensor]]:
        """Return the runs from which each row's shard is read: the KV that its newest token and its drafts see."""
        rows = self._batch.rows
        if not window:
            return [self._cache.pieces(row.runs) for row in rows]
        return [self._cache.pieces(newest_slots(row.runs, row.num_from_window(row.position, window))) for row in rows]

    def _passed_in(self, window: int) -> list[int]:
        """Return, for each step token, how many tokens here have left the window since its row's newest token."""
        if not window:
            return []
        return [
            token.row.num_from_window(token.row.position, window) - token.row.num_from_window(token.position, window)
            for token in self._tokens
        ]

    def _firsts(self, window: int) -> list[int]:
        """Return the first token of its row's shard on this rank that each token of the step sees in such a layer."""
        rank = self._transport.rank
        return [token.row.held[rank] - token.row.num_from_window(token.position, window) for token in self._tokens]

    def _ends(self) -> list[int]:
        """Return one more than the number of each sequence's last token in the step.

        In a step that is recorded whole the last end is repeated up to a power of two, so that fewer are recorded.
        """
        ends = list(accumulate(1 + len(row.drafts) for row in self._batch.rows))
        padding = 0 if self._num_padding is None else bucket_of(len(ends)) - len(ends)
        return ends + ends[-1:] * padding

    def _shards(self, layer: int) -> Shards:
        window = self._windows[layer]
        if window not in self._windows_by_runs:
            inputs = self._inputs
            firsts = inputs.firsts[self._windows_by_table.index(window)] if window else None
            pages = self._cache.pages(layer)
            lengths = self._stored_tokens, inputs.lengths
            return PagedShards(*pages, inputs.table, *lengths, firsts, window, inputs.ends)
        shards = [self._cache.gathered(layer, pieces) for pieces in self._pieces[window]]
        if len(self._tokens) == len(shards):
            return shards
        rank = self._transport.rank
        return DraftedShards(
            [runs for runs, row in zip(shards, self._batch.rows, strict=True) for _ in range(1 + len(row.drafts))],
            [token.num_after if token.row.owner == rank else 0 for token in self._tokens],
            self._passed[window],
        )

    def _hidden_states(self, computed: Sequence[int]) -> Tensor:
        """Return [R, hidden_size] of the tokens of these rows."""
        if not computed:
            return self._model.attend_without_tokens(self)
        inputs = self._inputs
        if self._runner is None:
            return self._model.hidden_states(inputs.token_ids, inputs.positions, self)
        if self._num_padding is None:
            return self._runner.run_pieces(inputs.token_ids, inputs.positions, self)
        return self._runner.run_step(inputs, self)[: len(computed)]

    def _sample(self, computed: Sequence[int], states: Tensor) -> list[Sampled]:
        """Sample the successor of each of these tokens from states[R, hidden_size]; [] if another process samples."""
        if not computed:
            return []
        logits = self._model.logits(states)
        if not self._model.samples:
            return []
        return self._draw([self._tokens[number] for number in computed], logits)

    def _sample_together(self, states: Tensor) -> list[Sampled]:
        """Sample the token after every row on the first rank, from logits of which each rank has a share."""
        if are_greedy(self._batch.rows):
            largest, tokens = self._model.largest_logits(states)
            return reached(self._tokens, sample_greedy_rows(largest, tokens)) if self._model.samples else []
        logits = self._model.logits(states)
        return self._draw(self._tokens, logits) if self._model.samples else []

    def _gather_in_order(self, sampled: Sequence[Sampled]) -> list[Sampled]:
        """Gather all ranks' tokens on the first rank, in the batch's order; [] elsewhere."""
        rows_of = [self._plan.rows_of(rank) for rank in range(self._transport.size)]
        tops_of = [[self._tokens[row].sampler.sampling.logprobs for row in rows] for rows in rows_of]
        arrived = gather_sampled(sampled, tops_of, self._control)
        if not arrived:
            return []
        by_row = {
            row: drawn
            for rows, drawn_there in zip(rows_of, arrived, strict=True)
            for row, drawn in zip(rows, drawn_there, strict=True)
        }
        return [by_row[row] for row in range(len(self._tokens))]


class DecodeChoice:
    """Variant choice by a policy of VARIANT_POLICIES, called with (sequences, stored tokens of all) before a step."""

    def __init__(self, policy: str, shape: ModelShape, num_ranks: int) -> None:
        """Choose by `policy`, without rates yet. Raises ConfigError for an unknown policy."""
        self._is_helix = policy == HELIX
        self.reason = ""
        self._num_ranks = num_ranks
        self.follow(policy)
        self._shape = shape
        self.rates: DecodeRates | None = None

    def follow(self, policy: str) -> None:
        """Choose by this policy from the next step on.

        Raises ConfigError for an unknown policy, and for one that the ring's weights do not allow: a ring decodes by
        helix from its start or never.
        """
        if policy not in VARIANT_POLICIES:
            raise ConfigError(f"decode.variant: {policy!r} is not allowed; use one of {', '.join(VARIANT_POLICIES)}")
        if self._num_ranks > 1 and (policy == HELIX) != self._is_helix:
            raise ConfigError(f"decode.variant: {policy!r} is not allowed on a ring that started with other weights")
        self._policy = policy

    def measured(self, rates: DecodeRates | None) -> None:
        """Use these rates from now on; before them, "auto" means gather."""
        self.rates = rates

    def __call__(self, num_sequences: int, stored_tokens: int) -> str:
        return choose_variant(self._policy, self._load(num_sequences, stored_tokens), self._shape, self.rates)

    def share_weights(self, model: LoadedModel, ring: RingTransport) -> LoadedModel:
        """Return the model with this rank's share of its weights, if helix is chosen; collective, once rates are known.

        By "auto" the first rank chooses for all, as every rank has rates of its own, and its first choice is final.
        With tensor parallelism nothing is chosen. Packed weights, of a rank that has served in an earlier ring, cannot
        be cut; then nothing is. Raises ModelRefused, Unavailable.
        """
        if self._policy != "auto" or self.reason or ring.size == 1 or model.tensor.size > 1 or self.rates is None:
            return model
        choice = choose_at_start(self._shape, self.rates, ring.size)
        self.reason = choice.reason
        own = torch.tensor([choice.is_helix, model.can_be_cut], dtype=torch.int64, device=model.model.device)
        words = [torch.empty_like(own) for _ in range(ring.size)]
        ring.gather_all(own, words).wait()
        if not words[LEADER][0] or not all(word[1] for word in words):
            return model
        self._policy, self._is_helix = HELIX, True
        share = model.cut_over_ring(ring.rank, ring.size)
        share.helix.connect(ring)
        return share

    def predicted(self, num_sequences: int, stored_tokens: int) -> list[tuple[str, float]]:
        """Return (variant, predicted seconds of a step) for every variant; nothing before rates are measured."""
        if self.rates is None:
            return []
        load = self._load(num_sequences, stored_tokens)
        return [
            (variant, predict_step(variant, load, self._shape, self.rates).total_seconds) for variant in STEP_VARIANTS
        ]

    def _load(self, num_sequences: int, stored_tokens: int) -> DecodeLoad:
        return DecodeLoad(batch=num_sequences, stored_tokens=stored_tokens, num_ranks=self._num_ranks)
