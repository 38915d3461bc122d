"""Decides whether the text of a request now contains one of its stop strings, token by token.

Decoding everything after every token would be quadratic. Decoding a token alone would be wrong:
a character may be spread over several tokens, and some tokenizers treat the first token of a text
differently. So a short window of tokens is decoded, and what it shows beyond the text that was
known before is new (the method of text-generation servers, which call it incremental
detokenization).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of tokens; an incomplete character decodes to U+FFFD."""

WINDOW_TOKENS = 6
"""Tokens of known text that give the new ones their context."""
WINDOW_TOKENS_MAX = 32
"""A window whose last character is still incomplete after so many tokens is taken as it is."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopText:
    """The end of a request's text, as far as its stop strings need it.

    Example: ``StopText(decode, ("</s>",), sampled=[5, 9]).feed(11)`` is True as soon as the text
    of all tokens contains ``</s>`` and a part of it is new.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], sampled: Sequence[int]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._keep = max(map(len, self._stops)) - 1
        """Characters of known text that a stop string may begin with."""
        self._tail = self._end_of(decode(sampled)) if sampled else ""
        self._restart_window(list(sampled))

    def feed(self, token: int) -> bool:
        """Take the next token; whether a stop string ends in what it adds."""
        self._window.append(token)
        text = self._decode(self._window)
        new = text[len(self._known) :]
        if self._ends_in(new):
            return True
        if not new.endswith(_INCOMPLETE) or len(self._window) >= WINDOW_TOKENS_MAX:
            self._tail = self._end_of(self._tail + new)
            self._restart_window(self._window)
        return False

    def _ends_in(self, new: str) -> bool:
        # A match within the known text was found when it was new, or belongs to an earlier turn.
        text, known = self._tail + new, len(self._tail)
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self._stops)

    def _end_of(self, text: str) -> str:
        return text.rstrip(_INCOMPLETE)[-self._keep :] if self._keep else ""

    def _restart_window(self, tokens: list[int]) -> None:
        self._window = tokens[-WINDOW_TOKENS:]
        known = self._decode(self._window) if self._window else ""
        self._known = known.rstrip(_INCOMPLETE)
