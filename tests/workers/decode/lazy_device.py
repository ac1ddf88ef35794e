"""Device that does nothing before its host waits for it: ranks issue steps to it as to a GPU that is far behind.

Work that it has not done shows: tokens are not there yet, inputs not copied, KV not stored.
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

from workers.decode import step as decode_step
from workers.decode.inputs import InputBuffers
from workers.decode.mailbox import DecodeMailbox
from workers.decode.prompts import DecodePrompts
from workers.decode.step import DecodePass
from workers.protocol.decode_commands import ComputePrompt, DecodeEvent
from workers.rank import worker as rank_worker
from workers.sampling.on_device import BROKEN, ChosenRows
from workers.sampling.parameters import Sampled


class LazyStream:
    """Work in order, done when an event behind it is waited for.

    `left` has one item for each wait that found work to do: how much was left behind the event.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._num_launched = 0
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
        for _ in range(count):
            self._waiting.popleft()()
        self.left.append(len(self._waiting))


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
    def __init__(self, device: torch.device, stream: LazyStream) -> None:
        super().__init__(device, is_staged=True)
        self._stream = stream

    def _copy(self, on_device: Tensor, on_host: Tensor) -> Any:
        return self._stream.launch(lambda: on_device.copy_(on_host))


def lazy_pass(stream: LazyStream) -> type[DecodePass]:
    """Return the class of passes whose steps go to the stream. What the host samples is computed at once."""

    class LazyPass(DecodePass):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, is_asynchronous=True)

        def _launch(self, before: ChosenRows | None) -> ChosenRows:
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
            stream.launch(lambda: None).synchronize()
            return super()._compute(computed)

    return LazyPass


@contextmanager
def lazy_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyStream]:
    """Let ranks decode on a lazy device; no sequence may be said to leave while its blocks may be written to."""
    stream = LazyStream()
    post, run_prompt = DecodeMailbox.post, DecodePrompts.run

    def checked_post(self: DecodeMailbox, events: Sequence[DecodeEvent]) -> None:
        assert stream.is_idle or not any(event.has_left for event in events), "a step still writes to its blocks"
        post(self, events)

    def checked_run(self: DecodePrompts, prompt: ComputePrompt) -> Sampled | None:
        assert stream.is_idle, "a prompt is computed after the steps before it"
        return run_prompt(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(decode_step, "InputBuffers", lambda device: LazyBuffers(device, stream))
        patch.setattr(rank_worker, "DecodePass", lazy_pass(stream))
        patch.setattr(DecodeMailbox, "post", checked_post)
        patch.setattr(DecodePrompts, "run", checked_run)
        yield stream
