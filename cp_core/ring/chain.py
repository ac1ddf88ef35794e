"""Chain prefill of sequences of any length (KV-Runahead, arXiv 2405.05329): KV moves one way along the ranks.

Each rank computes one range of a sequence's new tokens and receives the KV of all earlier new tokens from the rank
before it. It sends its own KV at once, and forwards received KV as soon as it arrives, while attending. So message
latency is paid once per hop instead of once per hop in every layer, and each message hides behind a whole layer. Cached
KV does not change during the step, so a rank sends it straight to all ranks that attend it, two layers before it
attends that layer itself: the ranks of a chain are at different layers, and those that are ahead must not wait.
RingPrefill makes a Chain per step; it holds the messages in flight and the new KV of the layer attended last.

A rank's messages leave in the order in which its peers await them: its new KV, forwarded KV, a later layer's cached KV.
Sends of two layers may be in flight. The chain has not been tried with NCCL: a communicator runs its operations in
order, so a receive posted early would hold back later sends. It would need a communicator per neighbour and direction.

Shapes: T query tokens, S tokens of a message, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ringserve.cp_core.attention.partial import AttentionBackend, KeyShard, attend_pairs, newest_tokens
from ringserve.cp_core.cost.chain import LAYERS_AHEAD
from ringserve.cp_core.errors import InvalidRequest
from ringserve.cp_core.layout.step_plans import KvRun, PrefillPlan, Shard
from ringserve.cp_core.ring.pass_kv import SequenceParts, merge_all_held
from ringserve.cp_core.transport.interface import RingTransport, Work

MAX_LAYERS_UNDER_WAY = 2
"""Layers whose sends may be in flight. A rank that runs further ahead would only fill memory."""


@dataclass(frozen=True, slots=True)
class KvPart:
    """Part of a message: the KV, new or cached, of `count` tokens of a sequence on rank `source`."""

    source: int
    sequence: int
    count: int


class ChainRoute:
    """New KV that a rank of a chain receives and sends in each layer; it is the same in all layers of a step.

    `received` comes from rank `before`. In the buffer the KV that rank `before` forwards (`num_passed` tokens) lies in
    front of that rank's own KV. `sent` is this rank's own KV and `onward` the KV that this rank forwards, both to rank
    `after`. `place` is this rank's place in the chain.
    """

    def __init__(self, plan: PrefillPlan, rank: int, size: int) -> None:
        order = plan.order or tuple(range(size))
        _check(plan, order)
        self.place = order.index(rank)
        self.before = order[self.place - 1] if self.place else None
        self.after = order[self.place + 1] if self.place + 1 < size else None
        earlier = [_needed(plan, order, place, self.place) for place in range(self.place)]
        self.received = [each for of_source in earlier for each in of_source]
        self.num_passed = sum(each.count for of_source in earlier[:-1] for each in of_source)
        self.sent = _needed(plan, order, self.place, self.place + 1)
        self.onward = [each for place in range(self.place) for each in _needed(plan, order, place, self.place + 1)]

    @property
    def num_received(self) -> int:
        """Tokens that the rank receives per layer."""
        return sum(each.count for each in self.received)


def _check(plan: PrefillPlan, order: Sequence[int]) -> None:
    for sequence in plan.sequences:
        ranges = [sequence.layout.ranges[rank] for rank in order]
        filled = [each[0] for each in ranges if each]
        if any(len(each) > 1 for each in ranges) or any(one.start > other.start for one, other in pairwise(filled)):
            raise InvalidRequest(
                f"layout of a chain of ranks {tuple(order)} is {sequence.layout.ranges}; "
                f"allowed is one range per rank, in this order"
            )


def _needed(plan: PrefillPlan, order: Sequence[int], origin: int, place: int) -> list[KvPart]:
    """Return the new KV computed at chain place `origin` that the rank at `place` or at a later place needs."""
    needed = []
    for index, sequence in enumerate(plan.sequences):
        count = sequence.layout.tokens_on(order[origin])
        later = order[place:]
        if count and any(sequence.layout.tokens_on(rank) or sequence.stores(rank, order[origin]) for rank in later):
            needed.append(KvPart(order[origin], index, count))
    return needed


class Chain:
    """Chain prefill of one step on one rank: call `attend` for every layer, in order, then `finish`.

    All ranks synchronise before every `period`-th layer (0: never), and the receives of new KV for such a layer are not
    posted earlier.
    """

    def __init__(
        self,
        plan: PrefillPlan,
        transport: RingTransport,
        backend: AttentionBackend,
        num_layers: int = 1,
        period: int = 0,
    ) -> None:
        """Derive the route. Raises InvalidRequest if the plan is no chain."""
        self._plan = plan
        self._transport = transport
        self._backend = backend
        self._num_layers = num_layers
        self._period = period
        self._route = ChainRoute(plan, transport.rank, transport.size)
        self._under_way: deque[list[Work]] = deque()
        self._coming: tuple[torch.Tensor, list[Work]] | None = None
        self._coming_cached: deque[tuple[list[torch.Tensor], Work]] = deque()
        self._num_exchanged = 0  # layers whose cached KV has been sent
        self._new: dict[tuple[int, int], KvRun] = {}

    def attend(
        self,
        layer: int,
        q_of_sequence: Sequence[torch.Tensor],
        keys_of_sequence: Sequence[KeyShard],
        cached_of: Callable[[int], Sequence[Sequence[KvRun]]],
        scale: float,
        layer_plan: PrefillPlan,
    ) -> list[SequenceParts]:
        """Return this rank's partial results, by the rank whose keys they attended: result[source][sequence].

        q_of_sequence[i][T, H, D] and keys_of_sequence[i] are this rank's queries and keys. `layer_plan` is the plan of
        what the layer's queries see; in a layer with a window it has fewer cached tokens than the chain's plan, though
        messages carry all. `cached_of(layer)` returns this rank's cached runs by sequence. Raises Unavailable if a peer
        is lost.
        """
        rank, size, route = self._transport.rank, self._transport.size, self._route
        like = keys_of_sequence[0].new.k
        if len(self._under_way) == MAX_LAYERS_UNDER_WAY:
            for work in self._under_way.popleft():
                work.wait()
        sends: list[Work] = []
        self._new = {(rank, index): keys.new for index, keys in enumerate(keys_of_sequence)}
        self._exchange_cached(cached_of, 0, like)
        if self._coming is None:
            self._receive(like)
        self._send(sends, [self._new[rank, each.sequence] for each in route.sent], like)

        queries = layer_plan.of_rank(rank)
        parts: list[SequenceParts] = [[[] for _ in queries] for _ in range(size)]
        parts[rank] = attend_pairs(self._backend, q_of_sequence, queries, dict(enumerate(keys_of_sequence)), scale)

        buffer, works = self._coming or (like, [])
        for work in works:
            work.wait()
        self._coming = None
        self._new |= _views(buffer, route.received)
        if route.onward == route.received:
            self._send_packed(sends, buffer)
        else:
            self._send(sends, [self._new[each.source, each.sequence] for each in route.onward], like)
        self._under_way.append(sends)
        cached = self._received_cached()
        self._exchange_cached(cached_of, layer + LAYERS_AHEAD, like)
        following = layer + 1
        if following < self._num_layers and (not self._period or following % self._period):
            self._receive(like)

        for source in range(size):
            if source == rank:
                continue
            came = {
                index: self._keys(layer_plan.of_rank(source)[index], source, index, cached, like)
                for index, shard in enumerate(queries)
                if shard.new
            }
            keys = {index: each for index, each in came.items() if each.shard.stored}
            parts[source] = attend_pairs(self._backend, q_of_sequence, queries, keys, scale)
            merge_all_held(parts, q_of_sequence)
        return parts

    def stored(self, index: int) -> KvRun:
        """Return k and v[S, K, D] of the new tokens that this rank stores, for the layer attended last."""
        rank, sequence = self._transport.rank, self._plan.sequences[index]
        if sequence.stored is None:
            return self._new[rank, index]
        taken = []
        for tokens in sequence.stored.ranks[rank]:
            for source in self._plan.order or range(self._transport.size):
                for each in sequence.layout.ranges[source]:
                    common = tokens.intersect(each)
                    if len(common):
                        run, rows = self._new[source, index], slice(common.start - each.start, common.stop - each.start)
                        taken.append(KvRun(run.k[rows], run.v[rows]))
        own = self._new[rank, index]
        if len(taken) == 1:
            return taken[0]
        return KvRun(
            torch.cat([own.k[:0], *(run.k for run in taken)]), torch.cat([own.v[:0], *(run.v for run in taken)])
        )

    def finish(self) -> None:
        """Wait until all sends are done. Raises Unavailable if a peer is lost."""
        while self._under_way:
            for work in self._under_way.popleft():
                work.wait()

    def _send(self, sends: list[Work], runs: Sequence[KvRun], like: torch.Tensor) -> None:
        if runs:
            self._send_packed(sends, _packed(runs, like))

    def _send_packed(self, sends: list[Work], message: torch.Tensor) -> None:
        after = self._route.after
        if after is not None and message.numel():
            sends.append(self._transport.exchange(message, after, message[:0], after))

    def _receive(self, like: torch.Tensor) -> None:
        """Post the receives of a layer: rank `before` sends its own KV first, though that lies at the buffer's end."""
        route = self._route
        buffer = like.new_empty(route.num_received, 2, *like.shape[1:])
        works = []
        for part in (buffer[route.num_passed :], buffer[: route.num_passed]):
            if route.before is not None and part.numel():
                works.append(self._transport.exchange(part[:0], route.before, part, route.before))
        self._coming = buffer, works

    def _cached_to(self, reader: int, holder: int) -> list[int]:
        """Return the sequences whose cached KV rank `reader` needs from rank `holder`."""
        mine, theirs = self._plan.of_rank(reader), self._plan.of_rank(holder)
        return [index for index, shard in enumerate(theirs) if reader != holder and shard.cached and mine[index].new]

    def _exchange_cached(
        self, cached_of: Callable[[int], Sequence[Sequence[KvRun]]], until: int, like: torch.Tensor
    ) -> None:
        """Exchange the cached KV of all remaining layers up to `until` with the ranks that attend it."""
        while self._num_exchanged <= min(until, self._num_layers - 1):
            self._exchange_layer(cached_of(self._num_exchanged), like)
            self._num_exchanged += 1

    def _exchange_layer(self, cached: Sequence[Sequence[KvRun]], like: torch.Tensor) -> None:
        rank, size = self._transport.rank, self._transport.size
        packed: dict[tuple[int, ...], torch.Tensor] = {}
        sends, receives = [], []
        for peer in range(size):
            wanted = tuple(self._cached_to(peer, rank))
            if wanted not in packed:
                packed[wanted] = _packed([run for index in wanted for run in cached[index]], like)
            sends.append(packed[wanted])
            count = sum(self._plan.of_rank(peer)[index].cached for index in self._cached_to(rank, peer))
            receives.append(like.new_empty(count, 2, *like.shape[1:]))
        if size > 1 and any(each.numel() for each in (*sends, *receives)):
            # An all-to-all would copy the rank's own part, so it is left empty.
            sends[rank] = receives[rank] = like.new_empty(0)
            self._coming_cached.append((receives, self._transport.all_to_all(sends, receives)))

    def _received_cached(self) -> dict[tuple[int, int], KvRun]:
        """Wait for the other ranks' cached KV of the current layer. Return it by source and sequence."""
        if not self._coming_cached:
            return {}
        receives, work = self._coming_cached.popleft()
        work.wait()
        rank = self._transport.rank
        cached: dict[tuple[int, int], KvRun] = {}
        for source, buffer in enumerate(receives):
            shards = self._plan.of_rank(source)
            cached |= _views(
                buffer, [KvPart(source, index, shards[index].cached) for index in self._cached_to(rank, source)]
            )
        return cached

    def _keys(
        self, planned: Shard, source: int, index: int, cached: dict[tuple[int, int], KvRun], like: torch.Tensor
    ) -> KeyShard:
        """Return a sequence's keys from rank `source`: cached keys, and new keys if it is earlier in the chain."""
        new, old = self._new.get((source, index)), cached.get((source, index))
        runs = newest_tokens([old], planned.cached) if old else []
        shard = Shard(
            planned.cached if old else 0,
            planned.ranges if new else (),
            planned.window,
            planned.tail if old else (),
        )
        return KeyShard(shard, runs, new or KvRun(like[:0], like[:0]))


def _packed(runs: Sequence[KvRun], like: torch.Tensor) -> torch.Tensor:
    """Pack runs into [S, 2, K, D]: k and v of a token lie side by side, so any run of tokens is contiguous."""
    packed = like.new_empty(sum(run.k.shape[0] for run in runs), 2, *like.shape[1:])
    at = 0
    for run in runs:
        stop = at + run.k.shape[0]
        packed[at:stop, 0] = run.k
        packed[at:stop, 1] = run.v
        at = stop
    return packed


def _views(packed: torch.Tensor, parts: Sequence[KvPart]) -> dict[tuple[int, int], KvRun]:
    """Return views of the parts of packed[S, 2, K, D], by source and sequence."""
    views, at = {}, 0
    for each in parts:
        stop = at + each.count
        views[each.source, each.sequence] = KvRun(packed[at:stop, 0], packed[at:stop, 1])
        at = stop
    return views
