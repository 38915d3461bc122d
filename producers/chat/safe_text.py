"""Encoding of conversations in which control tokens of the data stay plain text.

Before rendering, a noncharacter breaks each control token in the data, so tokens found later are
the template's. The stretches between them are encoded without control tokens and breaks. Texts
without breaks are encoded at once, as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.template import NONCHARACTERS
from dora_pipe.producers.chat.tokenizer import plain_encoder

if TYPE_CHECKING:
    import tokenizers

_ANCHOR: Final = NONCHARACTERS[-1]
"""Token placed before a stretch, so that the stretch is not encoded as the start of a text."""

MARKS: Final = NONCHARACTERS[:-1]

_FULL: Final = frozenset({"role", "type", "name", "id", "tool_call_id"})
"""Keys whose values templates compare: only whole tokens in them are broken."""


class SafeText:
    """Encoder that marks control tokens in data. With `parse`, control tokens in the data count."""

    def __init__(
        self, backend: tokenizers.Tokenizer, control: Collection[str], *, parse: bool
    ) -> None:
        from tokenizers import AddedToken

        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.control = {
            token_id: token.content for token_id, token in added.items() if token.content in control
        }
        self._parse = parse or not control
        self._found = _pattern(control)
        self._ends = _Ends(sorted(control))
        self._plain = plain_encoder(backend, control)
        bare: list[int] = self._plain.encode("a", add_special_tokens=False).ids
        self._plain.add_special_tokens([AddedToken(_ANCHOR, normalized=False, special=True)])
        self._anchored = self._plain.encode(_ANCHOR + "a", add_special_tokens=False).ids[1:] != bare
        normalised = backend.normalizer is not None
        self._asks = normalised and any(token.normalized for token in added.values())

    def mark_for(self, *values: Any) -> str:
        """Return a character absent from these values. Raises TaskError if there is none."""
        written = set().union(*map(_noncharacters, values))
        mark = next((candidate for candidate in MARKS if candidate not in written), None)
        if mark is None or _ANCHOR in written:
            raise TaskError("the conversation contains Unicode noncharacters")
        return mark

    def marked(self, value: Any, mark: str, *, full: bool = False) -> Any:
        """Return a copy of messages with control tokens broken by `mark`; use `full` for tools,
        whose names templates compare."""
        if self._parse:
            return value
        if isinstance(value, str):
            return self.broken(value, mark, full=full)
        if isinstance(value, Mapping):
            return {
                self.broken(name, mark, full=True): self.marked(
                    element, mark, full=full or name in _FULL
                )
                for name, element in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(element, mark, full=full) for element in value]
        return value

    def broken(self, text: str, mark: str, *, full: bool) -> str:
        """Return `text` with `mark` in control tokens and, unless `full`, in parts that could
        form one with the template."""
        places = {match.start() for match in self._found.finditer(text)}
        if not full and text:
            places |= self._ends.places(text)
        if places:
            text = "".join(
                letter + mark if index in places else letter for index, letter in enumerate(text)
            )
        return self._asked(text, mark) if self._asks else text

    def _asked(self, text: str, mark: str) -> str:
        """Break tokens matched in normalized text, at the positions that the tokenizer reports."""
        for _ in range(len(text)):
            token = next(iter(self._tokens(text, mark)), None)
            if token is None:
                break
            start, end = token[1:]
            cut = end - len(text[start:end].lstrip()) + 1
            text = text[:cut] + mark + text[cut:]
        return text

    def ids(self, text: str, mark: str) -> list[int]:
        """Return the token ids of a rendered text, without the marks."""
        if self._parse or mark not in text:
            encoded: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return encoded
        ids: list[int] = []
        done = 0
        for token_id, start, end in self._tokens(text, mark):
            ids += [*self._stretch(text[done:start], mark, first=not ids), token_id]
            done = end
        return ids + self._stretch(text[done:], mark, first=not ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of these ids, including control tokens."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def tokens(self, text: str) -> list[int]:
        return [token_id for token_id, _, _ in self._tokens(text, MARKS[0])]

    def _tokens(self, text: str, mark: str) -> Iterator[tuple[int, int, int]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self.control.get(token_id)
            if token is None or (len(token) == 1 and text[end : end + 1] == mark):
                continue
            # If the unknown token is an added token, its text differs from the input.
            if token in text[start:end] or (self._asks and mark not in text[start:end]):
                yield token_id, start, end

    def _stretch(self, text: str, mark: str, *, first: bool) -> list[int]:
        text = text.replace(mark, "")
        if not text:
            return []
        skipped = int(self._anchored and not first)
        text = _ANCHOR + text if skipped else text
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids[skipped:]


class _Ends:
    """Positions where a text may form an added token with its surroundings."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._joined = "\0".join(tokens)
        self._starts = {token[:end] for token in tokens for end in range(1, len(token))}
        self._stops = {token[start:] for token in tokens for start in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def places(self, text: str) -> set[int]:
        if len(text) < self._longest and text in self._joined:
            return {0}
        places: set[int] = set()
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._starts:
                places.add(len(text) - size)
            if text[:size] in self._stops and not text[:size].isspace():
                places.add(0)
        return places


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match all positions where one of these starts, including nested ones."""
    words = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
    return re.compile(f"(?={words})" if words else r"(?!)")


def _noncharacters(value: Any) -> set[str]:
    if isinstance(value, str):
        return set() if value.isascii() else set(value) & set(NONCHARACTERS)
    if isinstance(value, Mapping):
        return set().union(*map(_noncharacters, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return set().union(*map(_noncharacters, value))
    return set()
