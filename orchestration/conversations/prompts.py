"""Relation of a prompt to its conversation: the longest common prefix, and whether it repeats the history."""

from __future__ import annotations

import numpy as np

from cp_core.errors import InvalidRequest, NotFound
from orchestration.protocol.turns import PromptMode
from workers.protocol.prefill_steps import TokenIds

SHINGLE = 8
"""Consecutive tokens that must agree for a passage to count as repeated."""


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Return how many leading tokens agree."""
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _shingles(tokens: TokenIds) -> set[bytes]:
    window = np.lib.stride_tricks.sliding_window_view(tokens, SHINGLE)
    return {row.tobytes() for row in window}


def repeats_history(history: TokenIds, prompt: TokenIds) -> bool:
    """Return whether a prompt of unstated mode is the whole history, as it was or edited.

    The whole history: the prompt begins with all of it. Edited: at least half of the prompt and a quarter of the
    history agree from the start (cut back and continued), or at least half of the history's 8-token passages occur in
    the prompt (changed in the middle).
    """
    shared = common_prefix(history, prompt)
    if shared == len(history):
        return True
    if 2 * shared >= len(prompt) and 4 * shared >= len(history):
        return True
    if min(len(history), len(prompt)) < SHINGLE or 2 * len(prompt) < len(history):
        return False
    passages = _shingles(history)
    return 2 * len(passages & _shingles(prompt)) >= len(passages)


def resolve_prompt(history: TokenIds | None, prompt: TokenIds, mode: PromptMode) -> tuple[TokenIds, PromptMode]:
    """Return the whole prompt of a turn, and how it was read. `history` is None where the conversation is new."""
    if len(prompt) == 0:
        raise InvalidRequest("input: the prompt has 0 tokens, at least 1 is needed")
    if history is None:
        if mode is PromptMode.APPEND:
            raise NotFound("conversation_id: no such conversation, so there is nothing to append to")
        return prompt, PromptMode.NEW
    if mode is PromptMode.AUTO:
        mode = PromptMode.WHOLE_HISTORY if repeats_history(history, prompt) else PromptMode.APPEND
    if mode is PromptMode.APPEND:
        return np.concatenate([history, prompt]), mode
    return prompt, PromptMode.WHOLE_HISTORY
