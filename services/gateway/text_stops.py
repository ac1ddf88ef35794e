"""An answer's text up to the first stop string. What may become a stop string waits, so that none of it is sent."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.text import IncrementalText


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Strings that end an answer where they are complete, but within its first `min_tokens` tokens.

    Of several the one that is complete first counts, of those that end together the longest: so it does not matter how
    the text came to be cut into tokens. With `is_shown` the string stays part of the text.
    """

    strings: tuple[str, ...] = ()
    is_shown: bool = False
    min_tokens: int = 0


class AnswerText:
    """Takes tokens one by one; `push` returns text that is certain to be sent. `matched` is what ended it."""

    def __init__(self, text: IncrementalText, rule: StopRule | None = None) -> None:
        self._text = text
        self._rule = rule or StopRule()
        self._num_tokens = 0
        self._held = ""
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """Add a token to an answer that has not ended."""
        assert self.matched is None, "nothing follows a stop string"
        self._num_tokens += 1
        new = self._text.push([token_id])
        if not self._rule.strings:
            return self._send(new)
        pending = self._held + new
        if self._num_tokens > self._rule.min_tokens:
            ends = self._first_match(pending)
            if ends is not None:
                begin, end = ends
                self.matched, self._held = pending[begin:end], ""
                return self._send(pending[: end if self._rule.is_shown else begin])
        kept = self._length_to_hold(pending)
        self._held = pending[len(pending) - kept :]
        return self._send(pending[: len(pending) - kept])

    def finish(self) -> str:
        """The rest of an answer that no stop string ended: what was held, and what never became a whole character."""
        if self.matched is not None:
            return ""
        rest, self._held = self._held + self._text.finish(), ""
        return self._send(rest)

    def _send(self, text: str) -> str:
        self.text += text
        return text

    def _first_match(self, pending: str) -> tuple[int, int] | None:
        """(begin, end) in `pending` of the stop string that its new part, after what was held, completes first."""
        found = []
        for stop in self._rule.strings:
            begin = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        if not found:
            return None
        end, begin = min(found)
        return begin, end

    def _length_to_hold(self, pending: str) -> int:
        """Of the longest end of `pending` that a stop string begins with."""
        longest = max(len(stop) for stop in self._rule.strings) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if pending.endswith(tuple(stop[:length] for stop in self._rule.strings if len(stop) > length)):
                return length
        return 0
