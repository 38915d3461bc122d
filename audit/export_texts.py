"""What people read of a trajectory, as columns: its texts, and the row of data that it is of.

It decides how turns are cut and what type a column of the data has; what is not there is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Protocol

import pyarrow as pa

from dora_pipe.schemas.trajectory import Trajectory

ROW: Final = "row_"
"""Begins the name of a column that is one of the data."""

JSON: Final = pa.large_utf8()
"""Of a column whose values are lists, objects, or of several types: each is JSON there."""

TURN: Final = pa.struct([("kind", pa.utf8()), ("turn", pa.int32()), ("text", pa.utf8())])

FIELDS: Final = (
    pa.field("prompt", pa.utf8()),
    pa.field("turns", pa.list_(TURN)),
    pa.field("answer", pa.utf8()),
)

_KINDS: Final[tuple[tuple[type, pa.DataType], ...]] = (
    (bool, pa.bool_()),
    (int, pa.int64()),
    (float, pa.float64()),
    (str, pa.utf8()),
)


class Words(Protocol):
    """A run's tokenizer."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        ...

    def full_text(self, token_ids: Sequence[int]) -> str:
        """With special tokens written out."""
        ...


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Texts:
    """What texts are made with. Example: ``Texts(Tokenizer(assets), {digest: rows})``."""

    words: Words | None = None
    data: Mapping[str, Rows] = field(default_factory=dict)
    """Rows by the digest of their data set."""

    def fields(self) -> list[pa.Field]:
        """Of the columns; a column of the data has one type, or is JSON."""
        found: dict[str, set[type]] = {}
        for rows in self.data.values():
            for row in rows:
                for name, value in row.items():
                    if value is not None:
                        found.setdefault(name, set()).add(_kind(value))
        return [*FIELDS, *(pa.field(ROW + name, _type(kinds)) for name, kinds in found.items())]

    def columns(self, trajectory: Trajectory, types: Mapping[str, pa.DataType]) -> dict[str, Any]:
        """The trajectory's; `types` are those of the columns."""
        texts = {} if self.words is None else _texts(trajectory, self.words)
        rows = self.data.get(trajectory.meta.dataset_digest, ())
        at = trajectory.meta.index
        row = rows[at] if 0 <= at < len(rows) else {}
        return texts | {
            ROW + name: _cell(value, types[ROW + name])
            for name, value in row.items()
            if ROW + name in types
        }


def _texts(trajectory: Trajectory, words: Words) -> dict[str, Any]:
    """A turn that was sampled in pieces, on several workers, is one text."""
    ids = trajectory.token_ids
    turns = []
    for (kind, turn), of in groupby(trajectory.segments, lambda one: (one.kind, one.turn)):
        pieces = list(of)
        turns.append((kind, turn, ids[pieces[0].start : pieces[-1].end]))
    said = [tokens for kind, _, tokens in turns if kind == "model"]
    return {
        "prompt": words.full_text(ids[: trajectory.meta.prompt_tokens]),
        "turns": [
            {"kind": kind, "turn": turn, "text": words.full_text(tokens)}
            for kind, turn, tokens in turns
            if kind != "prompt"
        ],
        "answer": words.text(said[-1]) if said else None,
    }


def _kind(value: Any) -> type:
    """Its Python type; that of an integer that no column holds is `object`."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return object
    return type(value)


def _type(kinds: set[type]) -> pa.DataType:
    if kinds == {int, float}:
        return pa.float64()
    return next((arrow for kind, arrow in _KINDS if kinds == {kind}), JSON)


def _cell(value: Any, kind: pa.DataType) -> Any:
    if value is None or kind != JSON:
        return value
    return json.dumps(value, ensure_ascii=False)
