"""Messages between the ranks of a decode ring: headers and sampled tokens.

The ring's decode loops send the headers, its steps the tokens. A header is one int64[6 + w * max_batch]: kind, variant,
bytes of the payload, three counts, and the three lists that they count: the tokens; for each token, how many drafts
were accepted before it; for each row of the next step, the number of its drafts and the drafts. w is 1, or 3 +
max_drafts if a ring drafts. A payload with the encoded change follows only if the batch changes. The fixed size lets
followers wait for a header of any kind.

A sampled token is one 64-bit word. With log-probabilities these words follow: rank, log-probability, and (id,
log-probability) of each top token.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

import numpy as np
import torch

from ringserve.cp_core.cost.decode import GATHER, VARIANTS
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.workers.protocol.encoding import Codec
from ringserve.workers.protocol.steps import (
    AdmitSequence,
    ComputePrompt,
    GrowSequence,
)
from ringserve.workers.sampling.parameters import (
    NO_TOKEN,
    NOT_REACHED,
    OUTSIDE_GRAMMAR,
    Sampled,
    TokenLogprobs,
)

LEADER = 0
HEARTBEAT_SECONDS = 1.0
# Limit of a follower's wait for a header: many heartbeats, so that a busy machine is not taken for a dead leader.
SILENCE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Changes at a step boundary, in this order: sequences leave, sequences join, block tables grow.

    `prompt` is computed before the batch's next step.
    """

    removed: tuple[str, ...] = ()
    admitted: tuple[AdmitSequence, ...] = ()
    grown: tuple[GrowSequence, ...] = ()
    prompt: ComputePrompt | None = None

    def __bool__(self) -> bool:
        return bool(self.removed or self.admitted or self.grown or self.prompt)


UNCHANGED = BatchChange()
CHANGES = Codec(BatchChange)
"""Encoding of batch changes between ranks."""


class HeaderKind(IntEnum):
    """Header kind: STEP, a step boundary; IDLE, a heartbeat; STOP, the end; PROBE, a measurement between two steps.

    FOLLOW and READ come while a step is under way: all ranks issue the next one at once, or read its tokens first.
    """

    STEP = 0
    IDLE = 1
    STOP = 2
    PROBE = 3
    FOLLOW = 4
    READ = 5


@dataclass(frozen=True, slots=True)
class Header:
    """Order for the next step. `token_ids` were sampled from the last step, in the order of its rows.

    `accepted` counts the drafts before each of them. `change` turns that batch into the next, whose step `variant`
    computes. `drafts` has an item for each row. `accepted` and `drafts` are empty if the ring drafts nothing.
    """

    kind: HeaderKind
    token_ids: tuple[int, ...] = ()
    change: BatchChange = UNCHANGED
    variant: str = GATHER
    accepted: tuple[int, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()


class HeaderChannel:
    """Channel of headers from the first rank to all others.

    `hops` are the rings of this process that a header passes, in that order. In each rank's first process the decode
    ring comes first; with tensor parallelism the ring of the rank's processes follows. Headers are tensors of the host,
    so that no rank waits for a GPU to know its next step.
    """

    def __init__(self, hops: Sequence[RingTransport], max_batch: int, max_drafts: int = 0) -> None:
        self._hops = [hop for hop in hops if hop.size > 1]
        self._size = 6 + max_batch * (3 + max_drafts if max_drafts else 1)

    def send(self, header: Header) -> None:
        """Send a header; for rank 0 only."""
        if not self._hops:
            return
        payload = CHANGES.encode(header.change) if header.change else b""
        words = [header.kind, VARIANTS.index(header.variant), len(payload), len(header.token_ids)]
        words += [len(header.accepted), len(header.drafts), *header.token_ids, *header.accepted]
        for drafts in header.drafts:
            words += [len(drafts), *drafts]
        fixed = torch.tensor(words + [0] * (self._size - len(words)), dtype=torch.int64)
        self._pass(fixed)
        if payload:
            self._pass(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()))

    def receive(self) -> Header:
        """Receive a header; for every other rank. Raises Unavailable if none comes within SILENCE_SECONDS."""
        fixed = torch.empty(self._size, dtype=torch.int64)
        self._pass(fixed, SILENCE_SECONDS)
        kind, variant, payload_bytes, *counts_and_words = fixed.tolist()
        (num_tokens, num_accepted, num_drafted), words = counts_and_words[:3], iter(counts_and_words[3:])
        token_ids, accepted = tuple(islice(words, num_tokens)), tuple(islice(words, num_accepted))
        drafts = tuple(tuple(islice(words, next(words))) for _ in range(num_drafted))
        change = UNCHANGED
        if payload_bytes:
            payload = torch.empty(payload_bytes, dtype=torch.uint8)
            self._pass(payload, SILENCE_SECONDS)
            change = CHANGES.decode(payload.numpy().tobytes())
        return Header(HeaderKind(kind), token_ids, change, VARIANTS[variant], accepted, drafts)

    def _pass(self, tensor: torch.Tensor, timeout_seconds: float | None = None) -> None:
        for hop in self._hops:
            hop.broadcast(tensor, LEADER).wait(timeout_seconds)


def gather_sampled(
    sampled: Sequence[Sampled],
    num_tops: Sequence[Sequence[int | None]],
    transport: RingTransport,
) -> list[list[Sampled]]:
    """Gather the ranks' sampled tokens on the first rank -> there a list for each rank, elsewhere nothing.

    `transport` carries tensors of the host.

    `num_tops[r]` has one item for each row that rank r sampled: the number of top tokens that its log-probabilities
    name, None without log-probabilities. So the first rank knows each message's length. Collective. Raises Unavailable.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    words = write_words(sampled, num_tops[transport.rank])
    message = torch.tensor(words, dtype=torch.int64)
    sends = [message if peer == LEADER else nothing for peer in range(transport.size)]
    if transport.rank != LEADER:
        transport.all_to_all(sends, [nothing] * transport.size).wait()
        return []
    arrived = [torch.empty(sum(map(num_words, tops)), dtype=torch.int64) for tops in num_tops]
    transport.all_to_all(sends, arrived).wait()
    return [read_words(words.tolist(), tops) for words, tops in zip(arrived, num_tops, strict=True)]


WITHOUT_TOKEN = {-1: NO_TOKEN, -2: OUTSIDE_GRAMMAR, -3: NOT_REACHED}
"""Word that fills a row without a token, and its meaning."""


def num_words(num_top: int | None) -> int:
    """Return the words of a row with `num_top` top tokens; None means no log-probabilities."""
    return 1 if num_top is None else 3 + 2 * num_top


def write_words(sampled: Iterable[Sampled], num_tops: Iterable[int | None]) -> list[int]:
    """Encode sampled tokens as 64-bit words; `num_tops` has the number of top tokens of each row."""
    words: list[int] = []
    for drawn, num_top in zip(sampled, num_tops, strict=True):
        if drawn.token_id is None:
            word = -3 if not drawn.is_reached else -2 if drawn.is_outside_grammar else -1
            words += [word] * num_words(num_top)
            continue
        words.append(drawn.token_id)
        if (logprobs := drawn.logprobs) is not None:
            words += [logprobs.rank, _bits(logprobs.logprob)]
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                words += [token_id, _bits(logprob)]
    return words


def read_words(words: Sequence[int], num_tops: Iterable[int | None]) -> list[Sampled]:
    """Decode the words of `write_words`; `num_tops` has the number of top tokens of each row."""
    sampled, place = [], 0
    for num_top in num_tops:
        row = words[place : place + num_words(num_top)]
        place += len(row)
        if row[0] in WITHOUT_TOKEN:
            sampled.append(WITHOUT_TOKEN[row[0]])
        else:
            sampled.append(Sampled(row[0], None if num_top is None else _logprobs(row)))
    assert place == len(words), "the number of words differs from what the rows ask for"
    return sampled


def _logprobs(row: Sequence[int]) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=row[0],
        rank=row[1],
        logprob=_float(row[2]),
        top_ids=tuple(row[3::2]),
        top_logprobs=tuple(_float(word) for word in row[4::2]),
    )


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
