"""Drafts of next tokens from a sequence's own text, and how many drafts of any source a step checks.

A decode step reads all weights once, whatever the number of tokens that it computes. So a step may compute the newest
token and guesses of those that follow: if a guess is the token that would have been sampled, the step has two tokens
for one. A guess is what followed the text's last tokens when they occurred before (prompt lookup, as in
github.com/apoorvumang/prompt-lookup-decoding): answers about a document, edits of code and summaries repeat their
prompt. Tokens are exact, since every one is sampled from the model's logits. The first rank's decode loop has a drafter
for each sequence, on its own thread.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ringserve.cp_core.attention.partial import MAX_TOGETHER
from ringserve.cp_core.cost.decode import MAX_DRAFTS
from ringserve.workers.protocol.steps import DRAFT_TEXT_TOKENS, TokenIds

assert MAX_DRAFTS < MAX_TOGETHER, "drafts and the newest token are attended together"
LEAST_MATCH = 2
"""A text gives drafts only if at least this many of its newest tokens occurred before."""
LONGEST_MATCH = 12
"""Newest tokens that are looked for, at most."""

# Assumed share of right drafts until one is checked: of a draft model, after a short match, and after a match of
# LONGEST_MATCH tokens. Each checked draft multiplies the weight of earlier ones by MEMORY.
FIRST_SHARE, SHORT_SHARE, LONG_SHARE, MEMORY = 0.7, 0.6, 0.95, 0.8
# After PROBE_TOKENS tokens without a draft, one draft of a sequence whose drafts were wrong is tried again.
PROBE_TOKENS = 24
# Time of a draft over the time of a one-sequence step, until it is measured; weight of a new measurement.
FIRST_COST, NEW_WEIGHT = 0.04, 0.2


class Acceptance:
    """Share of a sequence's drafts of one kind that were right lately, and how many are worth checking."""

    def __init__(self, share: float = FIRST_SHARE) -> None:
        self._share = share
        self._tokens_since = 0

    def pushed(self) -> None:
        """Note one more token of the answer."""
        self._tokens_since += 1

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        """Note how many drafts a step accepted. The first wrong draft says nothing about later ones."""
        self._tokens_since = 0
        for is_right in [True] * num_accepted + [False] * (num_accepted < num_drafts):
            self._share = MEMORY * self._share + (1.0 - MEMORY) * is_right

    def limit(self, least_share: float) -> int:
        """Return how many drafts are worth their time: the most that are all correct with a chance of `least_share`.

        If none is, one is tried again after a while.
        """
        chance, count = self._share, 0
        while count < MAX_DRAFTS and chance >= least_share:
            chance *= self._share
            count += 1
        return count or int(self._tokens_since >= PROBE_TOKENS)


class TextDrafter:
    """Text of one sequence, and drafts of its next tokens: the tokens that followed its newest ones before.

    Drafts after a match of LONGEST_MATCH tokens are right far more often than others, so the two have own counts.
    """

    def __init__(self, text: TokenIds) -> None:
        """Begin with all tokens up to the newest."""
        self._short, self._long = Acceptance(SHORT_SHARE), Acceptance(LONG_SHARE)
        # Length of the text that was searched, length of the match, and the place right after the match.
        self._match = (-1, 0, 0)
        kept = text[-DRAFT_TEXT_TOKENS:]
        self._tokens: npt.NDArray[np.int32] = np.empty(2 * len(kept) + 64, np.int32)
        self._tokens[: len(kept)] = kept
        self._length = len(kept)

    @property
    def text(self) -> npt.NDArray[np.int32]:
        """Tokens up to the newest, valid until the next `push`."""
        return self._tokens[: self._length]

    def push(self, token_id: int) -> None:
        """Append a token."""
        if self._length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._length] = token_id
        self._length += 1
        self._short.pushed()
        self._long.pushed()

    def limit(self, least_share: float) -> int:
        """Return how many drafts are worth their time. See Acceptance.limit."""
        if not (self._short.limit(least_share) or self._long.limit(least_share)):
            return 0  # large batches: no text is searched
        num_matched, _ = self._matched()
        return self._kind(num_matched).limit(least_share) if num_matched >= LEAST_MATCH else 0

    def propose(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that followed the latest occurrence of the longest match."""
        num_matched, place = self._matched()
        if limit < 1 or num_matched < LEAST_MATCH:
            return ()
        return tuple(self._tokens[place : min(place + limit, self._length)].tolist())

    def checked(self, num_drafts: int, num_accepted: int) -> None:
        """Note how many of the text's drafts were accepted. Call it before those tokens are pushed."""
        num_matched, _ = self._matched()
        for right in range(num_accepted):
            self._kind(num_matched + right).checked(1, 1)
        if num_accepted < num_drafts:
            self._kind(num_matched + num_accepted).checked(1, 0)

    def _kind(self, num_matched: int) -> Acceptance:
        return self._long if num_matched >= LONGEST_MATCH else self._short

    def _matched(self) -> tuple[int, int]:
        """Return the length of the longest match, at most LONGEST_MATCH, and the place after it."""
        if self._match[0] != self._length:
            self._match = (self._length, *self._search())
        return self._match[1:]

    def _search(self) -> tuple[int, int]:
        tokens = self.text
        if not len(tokens):
            return 0, 0
        # Places right after earlier occurrences of the newest token. The loop keeps those at which longer matches end.
        places = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        if not len(places):
            return 0, 0
        for length in range(2, min(LONGEST_MATCH, len(tokens) - 1) + 1):
            longer = places[places >= length]
            longer = longer[tokens[longer - length] == tokens[-length]]
            if not len(longer):
                return length - 1, int(places[-1])
            places = longer
        return min(LONGEST_MATCH, len(tokens) - 1), int(places[-1])


class DraftCosts:
    """Measured decode steps: their time without drafts by batch size, and the cost of drafts and guesses."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._draft: float | None = None
        self._guess: float | None = None

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """Note the time of a step."""
        plain = self._plain.get(num_sequences)
        if not num_drafts:
            self._plain[num_sequences] = seconds if plain is None else _mean(plain, seconds)
        elif plain is not None:
            known = FIRST_COST * plain if self._draft is None else self._draft
            self._draft = _mean(known, max(0.0, seconds - plain) / num_drafts)

    def note_guesses(self, num_drafts: int, seconds: float) -> None:
        """Note the time in which a draft model made `num_drafts` drafts."""
        each = seconds / num_drafts
        self._guess = each if self._guess is None else _mean(self._guess, each)

    def least_share(self, num_sequences: int, *, is_guessed: bool = False) -> float:
        """Return the least chance at which a draft is worth its time; if it `is_guessed`, a draft model's time counts.

        A step of B sequences and t seconds has B tokens, so a draft that adds c seconds must be right with more than
        B * c / t. Nothing is drafted before a step without drafts has been timed; the nearest batch size counts.
        """
        if not self._plain:
            return math.inf
        plain = self._plain[min(self._plain, key=lambda size: abs(size - num_sequences))]
        checking = FIRST_COST * plain if self._draft is None else self._draft
        return num_sequences * (checking + ((self._guess or 0.0) if is_guessed else 0.0)) / plain


def _mean(known: float, new: float) -> float:
    """Return the running mean. A step that had to wait is no measure of its own work: slower ones count less."""
    return known + (NEW_WEIGHT if new <= known else NEW_WEIGHT / 2) * (new - known)
