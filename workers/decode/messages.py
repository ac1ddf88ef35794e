"""Messages of a decode ring: headers and sampled tokens between its ranks, commands and events with its leader.

A header is one int64[4 + max_batch] (kind, variant, payload bytes, number of tokens, tokens). A msgpack payload with
the change follows only where the batch changes. The fixed size lets followers wait without knowing what comes.

A sampled token is one 64-bit word. With log-probabilities these words follow: rank, log-probability, and (id,
log-probability) of each top token.

The mailbox is between the leader and the loop of the first rank: commands in, events out.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeVar

import msgpack
import numpy as np
import torch

from cp_core.cost.decode import GATHER, VARIANTS
from cp_core.cost.model import RingRates
from cp_core.errors import Unavailable
from cp_core.transport.interface import RingTransport
from workers.protocol.decode_commands import (
    AdmitSequence,
    ComputePrompt,
    DecodeCommand,
    DecodeEvent,
    DecodeEvents,
    GrowSequence,
    RemoveSequence,
)
from workers.sampling.parameters import (
    NO_TOKEN,
    OUTSIDE_GRAMMAR,
    Sampled,
    SamplingParameters,
    TokenBias,
    TokenHistory,
    TokenLogprobs,
)

Command = TypeVar("Command", AdmitSequence, GrowSequence, ComputePrompt)

LEADER = 0
HEARTBEAT_SECONDS = 1.0
# Limit of a follower's wait for a header: many heartbeats, so that a busy machine is not taken for a dead leader.
SILENCE_SECONDS = 15.0
# Part of a seed that a draw uses, and the most that msgpack can carry.
SIXTY_FOUR_BITS = 0xFFFF_FFFF_FFFF_FFFF


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


class HeaderKind(IntEnum):
    """Kind of a header: a step boundary, a heartbeat, the end of the loop, or a measurement between two steps."""

    STEP = 0
    IDLE = 1
    STOP = 2
    PROBE = 3


@dataclass(frozen=True, slots=True)
class Header:
    """Order for the next step. `token_ids` were sampled from the last step, in the order of its rows.

    `change` turns that batch into the next, which `variant` serves.
    """

    kind: HeaderKind
    token_ids: tuple[int, ...] = ()
    change: BatchChange = UNCHANGED
    variant: str = GATHER


class HeaderChannel:
    """Channel of headers from the first rank to all others.

    `hops` are this rank's rings in the order in which a header passes them: a header arrives by the first and leaves by
    the second. Besides the ring of rank 0 these are, with tensor parallelism, the tensor parallel rings of cp ranks.
    Headers are tensors of the host, so that no rank waits for a GPU to know its next step.
    """

    def __init__(self, hops: Sequence[RingTransport], max_batch: int) -> None:
        self._hops = [hop for hop in hops if hop.size > 1]
        self._size = 4 + max_batch

    def send(self, header: Header) -> None:
        """Send a header; for rank 0 only."""
        if not self._hops:
            return
        payload = encode_change(header.change) if header.change else b""
        words = [header.kind, VARIANTS.index(header.variant), len(payload), len(header.token_ids), *header.token_ids]
        fixed = torch.tensor(words + [0] * (self._size - len(words)), dtype=torch.int64)
        self._pass(fixed)
        if payload:
            self._pass(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()))

    def receive(self) -> Header:
        """Receive a header; for every other rank. Raises Unavailable if none comes within SILENCE_SECONDS."""
        fixed = torch.empty(self._size, dtype=torch.int64)
        self._pass(fixed, SILENCE_SECONDS)
        kind, variant, payload_bytes, num_tokens, *words = fixed.tolist()
        change = UNCHANGED
        if payload_bytes:
            payload = torch.empty(payload_bytes, dtype=torch.uint8)
            self._pass(payload, SILENCE_SECONDS)
            change = decode_change(payload.numpy().tobytes())
        return Header(HeaderKind(kind), tuple(words[:num_tokens]), change, VARIANTS[variant])

    def _pass(self, tensor: torch.Tensor, timeout_seconds: float | None = None) -> None:
        for hop in self._hops:
            hop.broadcast(tensor, LEADER).wait(timeout_seconds)


def encode_change(change: BatchChange) -> bytes:
    """Encode a batch change as msgpack: every dataclass as the list of its field values."""
    encoded = msgpack.packb([change.removed, change.admitted, change.grown, change.prompt], default=_values)
    assert isinstance(encoded, bytes)
    return encoded


def decode_change(payload: bytes) -> BatchChange:
    """Decode what `encode_change` wrote; seeds come back modulo 2**64."""
    removed, admitted, grown, prompt = msgpack.unpackb(payload, use_list=False)
    return BatchChange(
        removed=removed,
        admitted=tuple(_command(AdmitSequence, values) for values in admitted),
        grown=tuple(_command(GrowSequence, values) for values in grown),
        prompt=None if prompt is None else _command(ComputePrompt, prompt),
    )


def _values(item: Any) -> bytes | list[Any]:
    if isinstance(item, np.ndarray):
        return item.tobytes()  # int64 token ids
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    if isinstance(item, SamplingParameters):
        values["seed"] &= SIXTY_FOUR_BITS
    return list(values.values())


def _named(kind: type[Any], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip((field.name for field in fields(kind)), values, strict=True))


def _command(kind: type[Command], values: Sequence[Any]) -> Command:
    named = _named(kind, values)
    if "sampling" in named:
        sampling = _named(SamplingParameters, named["sampling"])
        sampling["logit_bias"] = tuple(TokenBias(*item) for item in sampling["logit_bias"])
        named["sampling"] = SamplingParameters(**sampling)
        named["history"] = TokenHistory(**_named(TokenHistory, named["history"]))
    if "token_ids" in named:
        named["token_ids"] = np.frombuffer(named["token_ids"], dtype=np.int64)
    return kind(**named)


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


WITHOUT_TOKEN = {-1: NO_TOKEN, -2: OUTSIDE_GRAMMAR}
"""Word that fills a row without a token, and what it stands for."""


def num_words(num_top: int | None) -> int:
    """Return the words of a row with `num_top` top tokens; None means no log-probabilities."""
    return 1 if num_top is None else 3 + 2 * num_top


def write_words(sampled: Iterable[Sampled], num_tops: Iterable[int | None]) -> list[int]:
    """Encode sampled tokens as 64-bit words, for rows with so many top tokens each."""
    words: list[int] = []
    for drawn, num_top in zip(sampled, num_tops, strict=True):
        if drawn.token_id is None:
            words += [-2 if drawn.is_outside_grammar else -1] * num_words(num_top)
            continue
        words.append(drawn.token_id)
        if (logprobs := drawn.logprobs) is not None:
            words += [logprobs.rank, _bits(logprobs.logprob)]
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                words += [token_id, _bits(logprob)]
    return words


def read_words(words: Sequence[int], num_tops: Iterable[int | None]) -> list[Sampled]:
    """Decode what `write_words` wrote, for rows with so many top tokens each."""
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


class DecodeMailbox:
    """Queue of commands for the next step boundary, and of events for the leader.

    Events are numbered from 0. `poll(after)` returns the events from `after` on and drops earlier ones, so a poll whose
    answer was lost may be repeated.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._changed = threading.Condition()
        self._commands: list[DecodeCommand] = []
        self._admitted: set[str] = set()
        self._events: list[DecodeEvent] = []
        self._first_event = 0
        self._wants_rates = False
        self._rates: list[RingRates] = []
        self._closed: str | None = None

    def submit(self, commands: Sequence[DecodeCommand]) -> None:
        """Queue commands for the next step boundary. Raises Unavailable once the loop has ended.

        Removing or growing a sequence that has just finished is no error. Admissions are checked here, so that a wrong
        one fails its caller and not the ring.
        """
        with self._changed:
            self._check_open()
            expected = set(self._admitted)
            for command in commands:
                if isinstance(command, RemoveSequence):
                    expected.discard(command.sequence_id)
                if isinstance(command, ComputePrompt):
                    assert len(command.token_ids), f"{command.sequence_id!r} has no new token"
                if not isinstance(command, AdmitSequence):
                    continue
                _check_admission(command)
                assert command.sequence_id not in expected, f"{command.sequence_id!r} is in the batch already"
                expected.add(command.sequence_id)
            assert len(expected) <= self._max_batch, f"{len(expected)} sequences exceed a batch of {self._max_batch}"
            self._admitted = expected
            self._commands.extend(commands)
            self._changed.notify_all()

    def poll(self, after: int, timeout: float) -> DecodeEvents:
        """Return events from cursor `after` on, waiting up to `timeout` seconds for the first one.

        Raises Unavailable once the loop has ended and every event was fetched.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            assert self._first_event <= after <= self._last_event, f"cursor {after} was never given or is forgotten"
            del self._events[: after - self._first_event]
            self._first_event = after
            while not self._events:
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return DecodeEvents(start=after, stop=self._last_event, events=tuple(self._events))

    def take(self, timeout: float) -> list[DecodeCommand]:
        """Take all commands; with none, wait up to `timeout` seconds for one, for the end, or for `ask_rates`."""
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._commands or self._closed is not None or self._wants_rates, timeout)
            taken, self._commands = self._commands, []
            return taken

    def post(self, events: Sequence[DecodeEvent]) -> None:
        """Queue events for the leader."""
        with self._changed:
            self._events.extend(events)
            self._admitted.difference_update(event.sequence_id for event in events if event.has_left)
            self._changed.notify_all()

    def ask_rates(self, timeout: float) -> RingRates:
        """Let the loop measure the ring between two steps, and wait `timeout` seconds for it. Raises Unavailable."""
        with self._changed:
            self._check_open()
            self._wants_rates = True
            self._rates.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rates or self._closed is not None, timeout)
            if not self._rates:
                self._check_open()
                raise Unavailable(f"the decode loop measured nothing within {timeout:.1f} s")
            return self._rates[0]

    def take_question(self) -> bool:
        """Return True if rates are asked for, once for each `ask_rates`."""
        with self._changed:
            wanted, self._wants_rates = self._wants_rates, False
            return wanted

    def answer_rates(self, rates: RingRates) -> None:
        """Answer `ask_rates`."""
        with self._changed:
            self._rates.append(rates)
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """End the queue: later calls raise Unavailable with this reason, or with an earlier one."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def _last_event(self) -> int:
        return self._first_event + len(self._events)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise Unavailable(self._closed)


def _check_admission(command: AdmitSequence) -> None:
    sampling = command.sampling
    assert command.history.num_generated < sampling.max_tokens, f"{command.sequence_id!r} has all its tokens already"
    assert command.token_id not in sampling.stop_token_ids, f"{command.sequence_id!r} has stopped already"
    assert sum(command.held) == command.position, f"{command.sequence_id!r} lacks KV before its newest token"
