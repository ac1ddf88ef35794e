"""Drawn tokens as 64-bit words, for the message that brings them to a ring's first rank.

A row's words: its token and, where log-probabilities are asked for, rank, log-probability, and (id, log-probability)
of each of the top ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from workers.sampling.parameters import Sampled, TokenLogprobs


def num_words(num_top: int | None) -> int:
    """Of a row that wants so many top tokens; None wants no log-probabilities."""
    return 1 if num_top is None else 3 + 2 * num_top


def write_words(sampled: Iterable[Sampled]) -> list[int]:
    words: list[int] = []
    for drawn in sampled:
        words.append(drawn.token_id)
        if (logprobs := drawn.logprobs) is not None:
            words += [logprobs.rank, _bits(logprobs.logprob)]
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                words += [token_id, _bits(logprob)]
    return words


def read_words(words: Sequence[int], num_tops: Iterable[int | None]) -> list[Sampled]:
    """What was written for rows that want so many top tokens each."""
    sampled, place = [], 0
    for num_top in num_tops:
        row = words[place : place + num_words(num_top)]
        place += len(row)
        sampled.append(Sampled(row[0], None if num_top is None else _logprobs(row)))
    assert place == len(words), "as many words as the rows ask for"
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
