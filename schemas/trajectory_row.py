"""Checks a trajectory where its columns lie; decides that what looks unusual is Arrow's to judge.

What is found here need only be enough, not tell what is wrong. A mask has to be what segments say,
and a bitmap of nulls what the mask says: both are made from the segments, which are few, and
compared as bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, cast

import msgspec
import numpy as np

from dora_pipe.schemas import wire
from dora_pipe.schemas.arrow_frame import ENTRIES_MAX
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.trajectory import Meta, Segment, SegmentKind, Trajectory, check_digest
from dora_pipe.schemas.trajectory_codec import META
from dora_pipe.schemas.trajectory_numbers import Metadata, Unusual

_PAIR: Final = struct.Struct("<2i")
_NOTHING: Final = _PAIR.pack(0, 0)
_LONG: Final = struct.Struct("<q")
_DOUBLE: Final = struct.Struct("<d")

_NAME, _VERSION, _DIGEST, _TOKENS, _LOGPROBS, _SAMPLER, _MASK = 1, 4, 6, 8, 12, 16, 20
"""Of a text or list the buffer of its offsets; its bitmap is before, its entries are behind it."""
_REWARD, _SEGMENTS, _KIND, _WORKER, _TOOL, _META = 24, 26, 29, 42, 49, 54
_LISTS: Final = (_LOGPROBS, _SAMPLER, _MASK)
_INTEGERS: Final = (32, 34, 36)  # of segments: start, end, turn
_LONGS: Final = (38, 40, 45, 47)  # start_ns, end_ns, epoch, version
_OK: Final = 52
_EMPTY: Final = (0, 3, 5, 7, 9, 11, 19, 21, 25, 27, 28, 31, 33, 35, 37, 39, 41, 44, 46, 48, 51, 53)
"""Bitmaps of what is never null."""
_EMPTY_SIZES: Final = itemgetter(*_EMPTY)
_NONE: Final = (0,) * len(_EMPTY)
_SAMPLER_NODE: Final = 7
_REWARD_NODE: Final = 11

_KINDS: Final[dict[str, SegmentKind]] = {
    "prompt": "prompt",
    "model": "model",
    "tool": "tool",
    "environment": "environment",
}
_SEGMENTS_MAX: Final = 64
"""Beyond, Arrow is faster."""
_INTEGER_ROWS: Final = tuple(struct.Struct(f"<{count}i") for count in range(_SEGMENTS_MAX + 2))
_LONG_ROWS: Final = tuple(struct.Struct(f"<{count}q") for count in range(_SEGMENTS_MAX + 1))

_TEXTS_KEPT_MAX: Final = 4096
"""Columns of texts that are remembered: kinds and workers are nearly always the same few."""

_MULTIPLES_OF_8: Final = bytes(range(0, 256, 8))
_FINITE_MAX: Final = -0x00800001
"""The bits of the lowest finite float32 as an int32. All negative floats, -0 among them, are below
it or equal; infinity, NaN and what is not negative are above."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) that a worker's engine sampled in one go."""

    start: int
    end: int
    worker: str
    epoch: int
    version: int


class Glance(msgspec.Struct, frozen=True, gc=False):
    """What a trajectory says but for its arrays, which were checked."""

    trajectory: str
    version: int
    digest: str
    reward: float | None
    length: int
    """Of the sequence."""
    sampled: int
    runs: tuple[Sampled, ...]
    """Its model segments."""
    meta: Meta


class Row:
    """The row of a stream that begins as this version writes it, checked in the making.

    `texts` remembers columns of texts. Raises Unusual, SchemaError, ValueError or struct.error
    where Arrow has to look.
    """

    __slots__ = (
        *("_at", "_raw", "_sizes", "_texts"),
        *("count", "digest", "epochs", "kinds", "length", "meta", "name", "reward"),
        *("rows", "sampled", "version", "versions", "workers"),
    )

    def __init__(
        self, raw: bytes, frame: Metadata, texts: dict[tuple[bytes, bytes], tuple[str, ...]]
    ) -> None:
        self._texts = texts
        self._raw, nodes, self._at, self._sizes = frame.numbers(raw)
        if _EMPTY_SIZES(self._sizes) != _NONE:
            raise Unusual
        self.length, self.count = self._list_end(_TOKENS), self._list_end(_SEGMENTS)
        if self.length > ENTRIES_MAX or self.count > _SEGMENTS_MAX:
            raise Unusual
        self.kinds, self.workers = self._texts_at(_KIND), self._texts_at(_WORKER)
        self._check_segment_sizes()
        self.rows = tuple(self._integers(one) for one in _INTEGERS[:2])
        runs = self._runs()
        self.sampled = sum(end - start for start, end in runs)
        self._check_nodes(nodes)
        other = nodes[2 * _SAMPLER_NODE + 1] == 0
        self._check_lists(other)
        self._check_arrays(runs, other)
        self.epochs, self.versions = self._longs(_LONGS[2]), self._longs(_LONGS[3])
        self.name = self._text(_NAME).decode()
        self.version = self._version()
        self.digest = self._digest()
        self.reward = self._reward(nodes[2 * _REWARD_NODE + 1])
        self.meta = self._meta()
        self._check_fields()

    def glance(self) -> Glance:
        """What it says, but for its arrays."""
        starts, ends = self.rows
        columns = zip(
            self.kinds, starts, ends, self.workers, self.epochs, self.versions, strict=True
        )
        runs = tuple(Sampled(*rest) for kind, *rest in columns if kind == "model")
        return Glance(
            self.name,
            self.version,
            self.digest,
            self.reward,
            self.length,
            self.sampled,
            runs,
            self.meta,
        )

    def trajectory(self) -> Trajectory:
        """What it says, but for log-probs."""
        token_ids = np.frombuffer(self._raw, "<i4", self.length, self._at[_TOKENS + 2])
        mask = np.frombuffer(self._raw, "u1", self.length, self._at[_MASK + 2])
        return Trajectory(
            trajectory=self.name,
            version=self.version,
            digest=self.digest,
            token_ids=cast("Sequence[int]", token_ids),
            logprobs=(),
            sampler_logprobs=(),
            loss_mask=cast("Sequence[int]", mask),
            reward=self.reward,
            segments=self._segments(),
            meta=self.meta,
        )

    def _segments(self) -> list[Segment]:
        turns = self._integers(_INTEGERS[2])
        start_ns, end_ns = self._longs(_LONGS[0]), self._longs(_LONGS[1])
        tools, oks = self._texts_at(_TOOL), self._raw[self._at[_OK] :]
        return [
            Segment(
                kind=_KINDS[kind],
                start=self.rows[0][at],
                end=self.rows[1][at],
                turn=turns[at],
                start_ns=start_ns[at],
                end_ns=end_ns[at],
                worker=self.workers[at],
                epoch=self.epochs[at],
                version=self.versions[at],
                tool=tools[at],
                ok=bool(oks[at // 8] >> at % 8 & 1),
            )
            for at, kind in enumerate(self.kinds)
        ]

    def _list_end(self, place: int) -> int:
        """The end of the only list or text of a column."""
        if self._sizes[place] < _PAIR.size:
            raise Unusual
        first, end = _PAIR.unpack_from(self._raw, self._at[place])
        if first or end < 0:
            raise Unusual
        return int(end)

    def _check_lists(self, other: bool) -> None:
        """The only list of a column goes from its first entry to the last token."""
        at, begins, whole = self._at, self._raw.startswith, _PAIR.pack(0, self.length)
        sampler = whole if other else _NOTHING
        if min(map(self._sizes.__getitem__, _LISTS)) < _PAIR.size:
            raise Unusual
        if not (begins(whole, at[_LOGPROBS]) and begins(whole, at[_MASK])):
            raise Unusual
        if not begins(sampler, at[_SAMPLER]):
            raise Unusual

    def _text(self, place: int) -> bytes:
        end, start = self._list_end(place), self._at[place + 1]
        if end > self._sizes[place + 1]:
            raise Unusual
        return self._raw[start : start + end]

    def _texts_at(self, place: int) -> tuple[str, ...]:
        """A text for each segment."""
        if not self.count:
            return ()
        raw, (offset, start) = self._raw, self._at[place : place + 2]
        width = 4 * self.count + 4
        offsets = raw[offset : offset + width]
        end = int.from_bytes(offsets[-4:], "little")
        if width > self._sizes[place] or end > self._sizes[place + 1]:
            raise Unusual
        key = offsets, raw[start : start + end]
        found = self._texts.get(key)
        if found is None:
            if len(self._texts) >= _TEXTS_KEPT_MAX:
                self._texts.clear()
            found = self._texts[key] = self._split(*key)
        return found

    def _split(self, offsets: bytes, data: bytes) -> tuple[str, ...]:
        ends = _INTEGER_ROWS[self.count + 1].unpack(offsets)
        if ends[0] or list(ends) != sorted(ends):
            raise Unusual
        return tuple(data[first:last].decode() for first, last in pairwise(ends))

    def _integers(self, place: int) -> tuple[int, ...]:
        return _INTEGER_ROWS[self.count].unpack_from(self._raw, self._at[place])

    def _longs(self, place: int) -> tuple[int, ...]:
        return _LONG_ROWS[self.count].unpack_from(self._raw, self._at[place])

    def _check_segment_sizes(self) -> None:
        sizes, count = self._sizes, self.count
        integers = min(sizes[32], sizes[34], sizes[36]) < 4 * count
        longs = min(sizes[38], sizes[40], sizes[45], sizes[47]) < 8 * count
        if integers or longs or 8 * sizes[_OK] < count:
            raise Unusual
        self._texts_at(_TOOL)

    def _runs(self) -> list[tuple[int, int]]:
        """The model segments, of segments that tile the sequence and of a mask that says so."""
        raw, mask, length = self._raw, self._at[_MASK + 2], self.length
        if self._sizes[_MASK + 2] < length:
            raise Unusual
        at, found = 0, []
        for kind, start, end in zip(self.kinds, *self.rows, strict=True):
            if start != at or not at <= end <= length or kind not in _KINDS:
                raise Unusual
            model = kind == "model"
            if not raw.startswith((b"\x01" if model else b"\x00") * (end - at), mask + at):
                raise Unusual
            if model:
                found.append((start, end))
            at = end
        if at != length:
            raise Unusual
        return found

    def _check_nodes(self, nodes: tuple[int, ...]) -> None:
        """Lengths and nulls are those that the offsets and the segments want."""
        length, nulls = self.length, self.length - self.sampled
        other = nodes[2 * _SAMPLER_NODE + 1] == 0
        floats = (1, 0, length, nulls)
        wanted = (
            *(1, 0, 1, 0, 1, 0, 1, 0, length, 0),
            *floats,
            *(floats if other else (1, 1, 0, 0)),
            *(1, 0, length, 0),
            *(1, 0 if nodes[2 * _REWARD_NODE + 1] == 0 else 1),
            *(1, 0),
            *((self.count, 0) * 12),
            *(1, 0),
        )
        if nodes != wanted:
            raise Unusual

    def _check_arrays(self, runs: list[tuple[int, int]], other: bool) -> None:
        """Token ids and log-probs; where these are null, the sampler's are not `other` ones."""
        raw, at, sizes, length = self._raw, self._at, self._sizes, self.length
        if sizes[_TOKENS + 2] < 4 * length:
            raise Unusual
        token_ids = np.frombuffer(raw, "<i4", length, at[_TOKENS + 2])
        if length and np.minimum.reduce(token_ids) < 0:
            raise Unusual
        self._check_floats(_LOGPROBS, runs)
        if other:
            if sizes[_SAMPLER - 1]:
                raise Unusual
            self._check_floats(_SAMPLER, runs)
        else:
            null = sizes[_SAMPLER - 1] and not raw[at[_SAMPLER - 1]] & 1
            if not null or sizes[_SAMPLER + 1]:
                raise Unusual

    def _check_floats(self, place: int, runs: list[tuple[int, int]]) -> None:
        raw, length = self._raw, self.length
        bitmap, start = self._at[place + 1 : place + 3]
        bitmap_bytes, size = self._sizes[place + 1 : place + 3]
        if size < 4 * length:
            raise Unusual
        if self.sampled == length:
            if bitmap_bytes:
                raise Unusual
        else:
            width = (length + 7) // 8
            known = sum((1 << end) - (1 << first) for first, end in runs)
            # What the last byte says beyond the end is nobody's business.
            said = int.from_bytes(raw[bitmap : bitmap + width], "little") & ((1 << length) - 1)
            if bitmap_bytes < width or said != known:
                raise Unusual
        for first, end in runs:
            if end > first:
                _check_logprobs(raw, start + 4 * first, end - first)

    def _version(self) -> int:
        version = _LONG.unpack_from(self._raw, self._at[_VERSION])[0]
        if version < 0 or self._sizes[_VERSION] < _LONG.size:
            raise Unusual
        return int(version)

    def _digest(self) -> str:
        start = self._at[_DIGEST]
        if self._sizes[_DIGEST] < 32:
            raise Unusual
        return self._raw[start : start + 32].hex()

    def _reward(self, nulls: int) -> float | None:
        bitmap, start = self._at[_REWARD - 1 : _REWARD + 1]
        bitmap_bytes, size = self._sizes[_REWARD - 1 : _REWARD + 1]
        if size < _DOUBLE.size or bool(nulls) != bool(bitmap_bytes):
            raise Unusual
        if nulls:
            if self._raw[bitmap] & 1:
                raise Unusual
            return None
        reward = float(_DOUBLE.unpack_from(self._raw, start)[0])
        if not math.isfinite(reward):
            raise Unusual
        return reward

    def _meta(self) -> Meta:
        text = self._text(_META)
        if not text.isascii():
            text.decode()
        return wire.decode(text, META, "$.meta")

    def _check_fields(self) -> None:
        """What `check_fields` checks, where the segments are known to hold."""
        meta, name = self.meta, self.name
        if (self.reward is None) != (meta.reward_error is not None):
            raise Unusual
        if not 0 <= meta.prompt_tokens <= self.length:
            raise Unusual
        purpose, _, sibling = parse_trajectory_id(name)
        if not name.startswith(meta.group) or name[len(meta.group) : -3] != "-":
            raise Unusual
        if (purpose, sibling) != (meta.purpose, meta.sibling):
            raise Unusual
        if meta.weights:
            for one in meta.weights:
                check_digest(one.digest)
            sampled = zip(self.kinds, self.versions, strict=True)
            versions = dict.fromkeys(version for kind, version in sampled if kind == "model")
            versions.pop(self.version, None)
            if [one.version for one in meta.weights] != list(versions):
                raise Unusual


def _check_logprobs(raw: bytes, start: int, count: int) -> None:
    """Finite and not above 0, first as bits: one look is enough unless there is a plain 0."""
    bits = np.frombuffer(raw, "<i4", count, start)
    if np.maximum.reduce(bits) <= _FINITE_MAX:
        return
    values = bits.view("<f4")
    # A NaN is neither: the comparison fails, too.
    if not (values.max() <= 0 and values.min() > -np.inf):
        raise Unusual
