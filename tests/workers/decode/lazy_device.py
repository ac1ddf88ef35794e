"""Device that does nothing before its host waits for it: ranks issue steps to it as to a GPU that is far behind.

Work that it has not done shows: tokens are not there yet, inputs not copied, KV not stored, messages not sent.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ringserve.cp_core.transport.collectives import Message, PointToPointRing
from ringserve.workers.decode.graphs import InputBuffers
from ringserve.workers.decode.loop import DecodeMailbox
from ringserve.workers.decode.prompts import DecodePrompts
from ringserve.workers.decode.step import DecodePass
from ringserve.workers.protocol.steps import ComputePrompt, DecodeEvent
from ringserve.workers.rank import worker as rank_worker
from ringserve.workers.sampling.on_device import BROKEN, ChosenRows
from ringserve.workers.sampling.parameters import Sampled


class LazyStream:
    """Work in order, done when an event behind it is waited for.

    `left` has one item for each wait that found work to do: how much was left behind the event.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._num_launched = 0
        self._is_working = False
        self.left: list[int] = []
        self.num_steps = 0
        self.fault: Exception | None = None

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def launch(self, work: Callable[[], object]) -> Any:
        """Take work -> the event behind it."""
        self._waiting.append(work)
        self._num_launched += 1
        return LazyEvent(self, self._num_launched)

    def finish(self, number: int) -> None:
        """Do all work up to a number."""
        count = number - (self._num_launched - len(self._waiting))
        if count <= 0:
            return
        self._is_working = True
        for _ in range(count):
            self._waiting.popleft()()
        self._is_working = False
        self.left.append(len(self._waiting))

    def carries(self, transport: PointToPointRing) -> None:
        """Let messages be work of this stream: the host sends none beside what waits."""
        begin = transport._begin

        def checked(sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
            assert self._is_working or self.is_idle, "a message overtakes the work before it"
            return begin(sends, recvs)

        transport._begin = checked  # type: ignore[method-assign]


class LazyEvent:
    def __init__(self, stream: LazyStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.finish(self._number)


class LazyRows(ChosenRows):
    """Tokens that are not there before the stream has chosen them."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(torch.full((num_rows,), BROKEN))

    def chosen_by(self, stream: LazyStream, choose: Callable[[], ChosenRows]) -> LazyRows:
        self._arrived = stream.launch(lambda: self._words.copy_(choose()._words))
        return self


class LazyBuffers(InputBuffers):
    def __init__(self, device: torch.device, num_windows: int, stream: LazyStream) -> None:
        super().__init__(device, num_windows, is_staged=True)
        self._stream = stream

    def _copy(self, on_device: Tensor, on_host: Tensor) -> Any:
        return self._stream.launch(lambda: on_device.copy_(on_host))


def lazy_pass(streams: Sequence[LazyStream]) -> type[DecodePass]:
    """Return the class of passes whose steps go to their rank's stream. What the host samples is computed at once."""

    class LazyPass(DecodePass):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, is_asynchronous=True)
            self._stream = streams[self._transport.rank]
            self._buffers = LazyBuffers(self._cache.device, len(self._windows_by_table), self._stream)
            if self._transport.is_on_stream:
                assert isinstance(self._transport, PointToPointRing)
                self._stream.carries(self._transport)

        def _launch(self, before: ChosenRows | None) -> ChosenRows:
            stream = self._stream
            stream.num_steps += 1
            # A launch has what the host knows now: its batch goes on before the work is done.
            now = copy.copy(self)
            now._batch = copy.copy(self._batch)
            now._batch.rows = [copy.copy(row) for row in self._batch.rows]

            def choose() -> ChosenRows:
                if stream.fault is not None:
                    raise stream.fault
                return DecodePass._launch(now, before)

            return LazyRows(len(self._batch)).chosen_by(stream, choose)

        def _compute(self, computed: Sequence[int]) -> list[Sampled]:
            self._stream.launch(lambda: None).synchronize()
            return super()._compute(computed)

    return LazyPass


@contextmanager
def lazy_devices(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> Iterator[list[LazyStream]]:
    """Let each rank decode on a lazy device; no sequence may be said to leave while its blocks may be written to."""
    streams = [LazyStream() for _ in range(num_ranks)]
    post, run_prompt = DecodeMailbox.post, DecodePrompts.run

    def checked_post(self: DecodeMailbox, events: Sequence[DecodeEvent]) -> None:
        assert streams[0].is_idle or not any(event.has_left for event in events), "a step still writes to its blocks"
        post(self, events)

    def checked_run(self: DecodePrompts, prompt: ComputePrompt) -> Sampled | None:
        assert streams[self._transport.rank].is_idle, "a prompt is computed after the steps before it"
        return run_prompt(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(rank_worker, "DecodePass", lazy_pass(streams))
        patch.setattr(DecodeMailbox, "post", checked_post)
        patch.setattr(DecodePrompts, "run", checked_run)
        yield streams


@contextmanager
def lazy_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyStream]:
    """Let a rank that is alone decode on a lazy device."""
    with lazy_devices(monkeypatch, 1) as (stream,):
        yield stream
