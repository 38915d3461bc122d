"""Which experts of a mixture the tokens of a sequence passed; decides how that is written.

An entry of a token says through which experts the token *before* it went: those that its own
log-prob came from. So every sampled token has an entry, made by whoever sampled it, and a sequence
that ends with a sampled token has all that a trainer computes it from. The first token of a
sequence, and tokens behind which nothing was sampled, have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.core.errors import ConfigError, SchemaError

Choices = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
"""[tokens, layers, per_token], `none_of` its type where there is no entry."""

BYTE_EXPERTS_MAX: Final = 255
"""Experts whose numbers are bytes: the highest byte says that there is none."""

BLOCK_NUMBERS: Final = 1 << 19
"""Numbers that are looked at together, so that they stay near the processor."""

ROUTES_BYTES_MAX: Final = 128 * 1024 * 1024
"""Of one record: 61 layers of 8 among 256 experts are 976 bytes a token, so 137 000 tokens."""


class Routes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The entries of consecutive tokens. Example: ``routes.choices[token, layer]``."""

    experts: int
    """That each layer has."""
    layers: int
    """Those that have experts, in their order."""
    per_token: int
    """Experts that a token passes in each."""
    data: bytes
    """Numbers of experts, uint8 or (of more than 255) little-endian uint16, row-major:
    [tokens, layers, per_token], those of a token in the order of its router's choice; the type's
    highest number where there is no entry."""

    @classmethod
    def of(cls, choices: Choices, experts: int) -> Routes:
        """Of an array of numbers in the type of `number_type`."""
        _, layers, per_token = choices.shape
        data = np.ascontiguousarray(choices, number_type(experts)).tobytes()
        return cls(experts=experts, layers=layers, per_token=per_token, data=data)

    @property
    def token_bytes(self) -> int:
        """Of an entry."""
        return self.layers * self.per_token * number_type(self.experts).itemsize

    @property
    def tokens(self) -> int:
        """How many have an entry, or a place for one."""
        return len(self.data) // size if (size := self.token_bytes) > 0 else 0

    @property
    def choices(self) -> Choices:
        """[tokens, layers, per_token]; not to be written to."""
        flat: Choices = np.frombuffer(self.data, number_type(self.experts))
        return flat.reshape(-1, self.layers, self.per_token)

    def part(self, start: int, end: int | None = None) -> Routes:
        """Entries [start, end), counted as slices are."""
        places = slice(start, end).indices(self.tokens)
        size = self.token_bytes
        part = self.data[places[0] * size : max(places[:2]) * size]
        return msgspec.structs.replace(self, data=part)

    def alike(self, other: Routes) -> bool:
        """Whether both are of models with as many experts, layers and experts for a token."""
        return msgspec.structs.replace(self, data=other.data) == other


def number_type(experts: int) -> np.dtype[Any]:
    """Of the numbers of so many experts."""
    return np.dtype("u1" if experts <= BYTE_EXPERTS_MAX else "<u2")


def none_of(experts: int) -> int:
    """What stands where there is no entry."""
    return int(np.iinfo(number_type(experts)).max)


def check_routes(routes: Routes | None, tokens: int, *, distinct: bool = True) -> None:
    """Raise SchemaError unless these are entries, or places for them, of so many tokens.

    Without `distinct` an expert that a token names twice is not looked for: that is nine tenths of
    the time, and who reads a record looks.
    """
    if routes is None:
        return
    sizes = (routes.experts, routes.layers, routes.per_token)
    wide = routes.layers * routes.per_token > BLOCK_NUMBERS
    if wide or min(sizes) < 1 or not routes.per_token <= routes.experts <= np.iinfo("<u2").max:
        raise SchemaError(f"{sizes} are no sizes of a mixture", path="$.routed_experts")
    if len(routes.data) != tokens * routes.token_bytes:
        why = f"{len(routes.data)} bytes for {tokens} tokens of {routes.token_bytes}"
        raise SchemaError(why, path="$.routed_experts")
    # Some tokens at a time, whatever they hold: nothing as large as the record is made of it.
    some = BLOCK_NUMBERS // (routes.layers * routes.per_token)
    choices = routes.choices
    numbers = min(some, tokens) * routes.layers * routes.per_token
    scratch = np.empty((2, numbers), np.min_scalar_type(2 * routes.experts - 1))  # A bit to spare.
    for start in range(0, tokens, some):
        part = choices[start : start + some]
        if not _plainly_sound(part, routes, scratch if distinct else None):
            _look_closer(part, routes, start)


def _look_closer(choices: Choices, routes: Routes, start: int) -> None:
    """Raise SchemaError where something is wrong with entries, the first of token `start`."""
    there = ~(choices == none_of(routes.experts)).all(axis=(1, 2))
    rows = choices[there]
    odd = np.any(rows >= routes.experts, axis=(1, 2))
    ordered = np.sort(rows, axis=2)
    odd |= np.any(ordered[:, :, 1:] == ordered[:, :, :-1], axis=(1, 2))
    if odd.any():
        at = start + int(np.flatnonzero(there)[odd.argmax()])
        raise SchemaError("not experts of this model, each once", path=f"$.routed_experts[{at}]")


def _plainly_sound(choices: Choices, routes: Routes, scratch: Choices | None) -> bool:
    """Whether nothing is wrong, in passes over numbers as they lie: a tenth of the time of sorting
    them. What is wrong, and where, is for who looks closer.

    `scratch` is [2, numbers] of a type with a bit that they do not need; without it, none are
    looked for twice.
    """
    rows = choices.reshape(len(choices), -1)
    none = none_of(routes.experts)
    there = rows[:, 0] != none
    start = int(there.argmax()) if there.any() else len(rows)
    if (rows[~there] != none).any():
        return False
    # Mostly the first token alone has none: what lies behind it need not be copied.
    rows = rows[start:] if there[start:].all() else rows[there]
    if not rows.size:
        return True
    numbers = rows.reshape(-1)
    return int(numbers.max()) < routes.experts and (
        scratch is None or _each_once(numbers, routes, scratch)
    )


def _each_once(numbers: Choices, routes: Routes, scratch: Choices) -> bool:
    """Whether these, some choices of `per_token` after each other, name each expert once.

    Every number is held against those behind it in its choice, one distance after the other, in two
    passes each. The highest bit of every other choice is set before: nothing is equal beyond one.
    """
    count = len(numbers)
    marked, differs = scratch[:, :count]
    marks = _marks(scratch.shape[1], routes.per_token, scratch.dtype)
    np.bitwise_or(numbers, marks[:count], out=marked)
    for distance in range(1, routes.per_token):
        apart = differs[: count - distance]
        np.bitwise_xor(marked[distance:], marked[:-distance], out=apart)
        if not apart.min():
            return False
    return True


@lru_cache(maxsize=8)
def _marks(count: int, per_token: int, kind: np.dtype[Any]) -> Choices:
    """[count]: the highest bit in every other choice, else 0."""
    odd = np.arange(count) // per_token % 2
    return (odd << 8 * kind.itemsize - 1).astype(kind)


def need_entries(routes: Routes | None, places: Sequence[int] | np.ndarray[Any, Any]) -> None:
    """Raise SchemaError unless the tokens at these places have entries; `check_routes` has passed
    them."""
    if routes is None:
        return
    first = routes.choices[:, 0, 0]
    missing = first[np.asarray(places, np.int64)] == none_of(routes.experts)
    if missing.any():
        at = int(np.asarray(places)[int(missing.argmax())])
        raise SchemaError("a sampled token without experts", path=f"$.routed_experts[{at}]")


def need_room(tokens: int, token_bytes: int) -> None:
    """Raise ConfigError where a record of so many tokens could not have the entries of all."""
    if tokens * token_bytes > ROUTES_BYTES_MAX:
        raise ConfigError(
            f"sampling.routes: the experts of {tokens} tokens are {tokens * token_bytes} bytes, and"
            f" a record has at most {ROUTES_BYTES_MAX}",
            hint=f"workers.context_tokens = {ROUTES_BYTES_MAX // token_bytes} or less",
        )


class GrowingRoutes:
    """The entries of a sequence that grows; none until there are some. Decides nothing.

    Example: ``growing.add(routes, length)`` with the entries of the last tokens of so many.
    """

    __slots__ = ("_data", "_kind")

    def __init__(self) -> None:
        self._data = bytearray()
        self._kind: Routes | None = None

    @property
    def known(self) -> int:
        """How many first tokens have entries, or will never have any."""
        return 0 if self._kind is None else len(self._data) // self._kind.token_bytes

    def add(self, routes: Routes | None, length: int) -> None:
        """These are of the last of `length` tokens. Tokens before them that are not known yet have
        none."""
        if routes is None:
            return
        self._kind = self._kind or msgspec.structs.replace(routes, data=b"")
        assert self._kind.alike(routes)
        self._data += b"\xff" * ((length - routes.tokens - self.known) * routes.token_bytes)
        assert self.known + routes.tokens == length
        self._data += routes.data

    def note(self, first: int, routes: Routes) -> None:
        """These are what was computed of the positions from `first` on. Of a token that is known it
        is not what that came from, but was computed once more."""
        length = first + routes.tokens + 1
        new = min(length - self.known, routes.tokens)
        if new > 0:
            self.add(routes.part(routes.tokens - new), length)

    def cut(self, length: int) -> None:
        """Forget those behind the first tokens."""
        if self._kind is not None:
            del self._data[length * self._kind.token_bytes :]

    def between(self, start: int, end: int) -> Routes | None:
        """Of tokens [start, end), perhaps beyond what is known; None where nothing is."""
        if self._kind is None:
            return None
        size = self._kind.token_bytes
        data = bytes(memoryview(self._data)[start * size : end * size])
        data += b"\xff" * ((end - start) * size - len(data))
        return msgspec.structs.replace(self._kind, data=data)
