"""Which prefills are measured: new tokens T after cached ones P."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_core.errors import ConfigError
from ringserve.v1 import inference_pb2

NEW_TOKENS = (32, 128, 512, 2048)
CACHED_TOKENS = (0, 1024, 4096)
ANSWER_TOKENS = 17
"""Of a turn whose decode steps are measured; of every other one token is taken."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """T new tokens after P cached ones."""

    cached_tokens: int
    new_tokens: int


def room_of(model: inference_pb2.GetModelInfoResponse, server: inference_pb2.GetServerInfoResponse) -> int:
    """The longest sequence that every ring that serves, and the model, can take."""
    rooms = [ring.capacity_tokens for ring in server.rings if ring.capacity_tokens]
    return min([model.max_context_length, *rooms])


def grid(new_tokens: Sequence[int] | None, cached_tokens: Sequence[int] | None, room: int) -> list[Cell]:
    """Every T after every P. Of the defaults (None) those that fit; what was asked for has to.

    Raises ConfigError where something that was asked for does not fit, or nothing does.
    """
    cells = []
    for cached in cached_tokens or CACHED_TOKENS:
        for new in new_tokens or NEW_TOKENS:
            if cached + new + ANSWER_TOKENS <= room:
                cells.append(Cell(cached_tokens=cached, new_tokens=new))
            elif new_tokens and cached_tokens:
                raise ConfigError(
                    f"--tokens {new} with --cached {cached}: {cached + new + ANSWER_TOKENS} tokens with the answer are "
                    f"too long; these rings allow at most {room}"
                )
    if not cells:
        raise ConfigError(f"--tokens, --cached: nothing fits rings of {room} tokens; give smaller ones")
    return sorted(cells)
