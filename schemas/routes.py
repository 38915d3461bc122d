"""Routed experts of a mixture-of-experts model.

A token's entry has the experts of the token *before* it, whose forward pass gave its log-prob. So
every sampled token has an entry. The first token, and tokens followed by no sampled one, have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.core.errors import ConfigError, SchemaError

Choices = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
"""Expert ids [tokens, layers, per_token]; `none_of` without an entry."""

BYTE_EXPERTS_MAX: Final = 255
"""Maximum experts for one-byte ids; 255 means no entry."""

BLOCK_NUMBERS: Final = 1 << 19
"""Ids checked at once, to fit CPU caches."""

ROUTES_BYTES_MAX: Final = 128 * 1024 * 1024
"""Maximum bytes per record: 137,000 tokens of 61 layers with 8 of 256 experts (976 bytes each)."""


class Routes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Routed experts of consecutive tokens; an entry has the experts of the token before it.

    Example: ``routes.choices[token, layer]``.
    """

    experts: int
    """Experts per layer."""
    layers: int
    """Number of layers with experts, in order."""
    per_token: int
    """Experts per token and layer."""
    data: bytes
    """Expert ids [tokens, layers, per_token], row-major, in router order; uint8, or little-endian
    uint16 above 255 experts; the type's maximum without an entry."""

    @classmethod
    def of(cls, choices: Choices, experts: int) -> Routes:
        """Return routes from an array of type `number_type`."""
        _, layers, per_token = choices.shape
        data = np.ascontiguousarray(choices, number_type(experts)).tobytes()
        return cls(experts=experts, layers=layers, per_token=per_token, data=data)

    @property
    def token_bytes(self) -> int:
        return self.layers * self.per_token * number_type(self.experts).itemsize

    @property
    def tokens(self) -> int:
        return len(self.data) // size if (size := self.token_bytes) > 0 else 0

    @property
    def choices(self) -> Choices:
        """Return a read-only array [tokens, layers, per_token]."""
        flat: Choices = np.frombuffer(self.data, number_type(self.experts))
        return flat.reshape(-1, self.layers, self.per_token)

    def part(self, start: int, end: int | None = None) -> Routes:
        """Return entries [start, end) with slice semantics."""
        places = slice(start, end).indices(self.tokens)
        size = self.token_bytes
        part = self.data[places[0] * size : max(places[:2]) * size]
        return msgspec.structs.replace(self, data=part)

    def alike(self, other: Routes) -> bool:
        """Return whether experts, layers and experts per token are equal."""
        return msgspec.structs.replace(self, data=other.data) == other


def number_type(experts: int) -> np.dtype[Any]:
    """Return the dtype of expert ids."""
    return np.dtype("u1" if experts <= BYTE_EXPERTS_MAX else "<u2")


def none_of(experts: int) -> int:
    """Return the id that means no entry."""
    return int(np.iinfo(number_type(experts)).max)


def check_routes(routes: Routes | None, tokens: int, *, distinct: bool = True) -> None:
    """Raises SchemaError unless these are valid entries of `tokens` tokens.

    Without `distinct` duplicate experts of a token are allowed, which saves nine tenths of the
    time.
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
    # Check in blocks, to bound memory.
    block = BLOCK_NUMBERS // (routes.layers * routes.per_token)
    choices = routes.choices
    numbers = min(block, tokens) * routes.layers * routes.per_token
    scratch = np.empty(
        (2, numbers), np.min_scalar_type(2 * routes.experts - 1)
    )  # One bit to spare.
    for start in range(0, tokens, block):
        part = choices[start : start + block]
        if not _plainly_sound(part, routes, scratch if distinct else None):
            _look_closer(part, routes, start)


def _look_closer(choices: Choices, routes: Routes, start: int) -> None:
    """Raises SchemaError with the first invalid entry; `start` is the index of the first token."""
    there = ~(choices == none_of(routes.experts)).all(axis=(1, 2))
    rows = choices[there]
    odd = np.any(rows >= routes.experts, axis=(1, 2))
    ordered = np.sort(rows, axis=2)
    odd |= np.any(ordered[:, :, 1:] == ordered[:, :, :-1], axis=(1, 2))
    if odd.any():
        token = start + int(np.flatnonzero(there)[odd.argmax()])
        raise SchemaError("not experts of this model, each once", path=f"$.routed_experts[{token}]")


def _plainly_sound(choices: Choices, routes: Routes, scratch: Choices | None) -> bool:
    """Return whether entries are valid, ten times faster than by sorting.

    `scratch` is [2, numbers] of a type with a spare bit; without it duplicates are not checked.
    """
    rows = choices.reshape(len(choices), -1)
    none = none_of(routes.experts)
    there = rows[:, 0] != none
    start = int(there.argmax()) if there.any() else len(rows)
    if (rows[~there] != none).any():
        return False
    # Avoid a copy if only the first tokens have no entry.
    rows = rows[start:] if there[start:].all() else rows[there]
    if not rows.size:
        return True
    numbers = rows.reshape(-1)
    return int(numbers.max()) < routes.experts and (
        scratch is None or _each_once(numbers, routes, scratch)
    )


def _each_once(numbers: Choices, routes: Routes, scratch: Choices) -> bool:
    """Return whether each choice of `per_token` has distinct experts.

    Compares numbers at every distance within a choice. The highest bit of every other choice is
    set, so that neighbors never compare equal.
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
    odd = np.arange(count) // per_token % 2
    return (odd << 8 * kind.itemsize - 1).astype(kind)


def need_entries(routes: Routes | None, places: Sequence[int] | np.ndarray[Any, Any]) -> None:
    """Raises SchemaError unless the tokens at these indices have entries; run
    `check_routes` first."""
    if routes is None:
        return
    first = routes.choices[:, 0, 0]
    missing = first[np.asarray(places, np.int64)] == none_of(routes.experts)
    if missing.any():
        token = int(np.asarray(places)[int(missing.argmax())])
        raise SchemaError("a sampled token without experts", path=f"$.routed_experts[{token}]")


def need_room(tokens: int, token_bytes: int) -> None:
    """Raises ConfigError if the entries of `tokens` tokens exceed the limit."""
    if tokens * token_bytes > ROUTES_BYTES_MAX:
        raise ConfigError(
            f"sampling.return_routed_experts: the experts of {tokens} tokens are"
            f" {tokens * token_bytes} bytes, and a record has at most {ROUTES_BYTES_MAX}",
            hint=f"workers.max_model_len = {ROUTES_BYTES_MAX // token_bytes} or less",
        )


class GrowingRoutes:
    """Routed experts of a growing sequence.

    Example: ``growing.add(routes, length)`` with entries of the last of `length` tokens.
    """

    __slots__ = ("_data", "_kind")

    def __init__(self) -> None:
        self._data = bytearray()
        self._kind: Routes | None = None

    @property
    def known(self) -> int:
        """Return the number of first tokens whose entries are final."""
        return 0 if self._kind is None else len(self._data) // self._kind.token_bytes

    def add(self, routes: Routes | None, length: int) -> None:
        """Add entries of the last of `length` tokens; unknown ones before have none."""
        if routes is None:
            return
        self._kind = self._kind or msgspec.structs.replace(routes, data=b"")
        assert self._kind.alike(routes)
        self._data += b"\xff" * ((length - routes.tokens - self.known) * routes.token_bytes)
        assert self.known + routes.tokens == length
        self._data += routes.data

    def note(self, first: int, routes: Routes) -> None:
        """Add entries computed from `first` on; known tokens keep theirs, because this is a
        recomputation."""
        length = first + routes.tokens + 1
        new = min(length - self.known, routes.tokens)
        if new > 0:
            self.add(routes.part(routes.tokens - new), length)

    def between(self, start: int, end: int) -> Routes | None:
        """Return entries of [start, end), which may exceed the known ones; None without any."""
        if self._kind is None:
            return None
        size = self._kind.token_bytes
        data = bytes(memoryview(self._data)[start * size : end * size])
        data += b"\xff" * ((end - start) * size - len(data))
        return msgspec.structs.replace(self._kind, data=data)
