"""When a turn did what on a prefill ring: what its traces are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestration.protocol.tracing import Attributes, Stretch, just_ended
from orchestration.protocol.turns import Chunk


class PrefillTimes:
    """Of one attempt of one turn. Noted as it goes, told at the end.

    The stretches are `pull` (KV from the decode ring), `queue` (from being ready until its first step), `prefill` with
    a part for each chunk, and `hand-over` (what is left of the KV to be sent when all is computed).
    """

    def __init__(self) -> None:
        self._pull: Stretch | None = None
        self._chunks: list[Stretch] = []

    def note_pull(self, payload_bytes: int, seconds: float) -> None:
        """A pull has just ended."""
        self._pull = just_ended("pull", seconds, {"ringserve.bytes": payload_bytes})

    def note_chunk(self, chunk: Chunk, seconds: float) -> None:
        """A step that took so long has just ended."""
        attributes: Attributes = {
            "ringserve.tokens.start": chunk.tokens.start,
            "ringserve.tokens.stop": chunk.tokens.stop,
            "ringserve.algorithm": chunk.algorithm.value,
            "ringserve.turns_in_step": chunk.num_turns,
        }
        self._chunks.append(just_ended("chunk", seconds, attributes))

    def stretches(self, ring: str, attempt: int, reserved_at: float, ended: float) -> Sequence[Stretch]:
        """Of a turn that reserved on `ring` and has left it, however far it came."""
        where: Attributes = {"ringserve.ring": ring, "ringserve.attempt": attempt}
        pulled, ready = [], reserved_at
        if self._pull is not None:
            pulled, ready = [replace(self._pull, attributes={**where, **self._pull.attributes})], self._pull.ended
        if not self._chunks:
            return [*pulled, Stretch(name="queue", began=ready, ended=ended, attributes=where)]
        first, last = self._chunks[0].began, self._chunks[-1].ended
        return [
            *pulled,
            Stretch(name="queue", began=ready, ended=first, attributes=where),
            Stretch(name="prefill", began=first, ended=last, attributes=where, parts=tuple(self._chunks)),
            Stretch(name="hand-over", began=last, ended=ended, attributes=where),
        ]
