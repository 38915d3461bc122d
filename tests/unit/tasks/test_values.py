"""Tests of users' values as text: preserved or rejected."""

from __future__ import annotations

import enum
import uuid
from collections import namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from dora_pipe.producers.tasks.values import NoValue, as_text, observation_text


class Color(enum.Enum):
    RED = "red"
    ONE = 1


@dataclass
class Point:
    x: int = 1
    day: date = date(2026, 1, 2)


class Box(msgspec.Struct):
    mean: Any = numpy.float32(1.5)


Pair = namedtuple("Pair", "a b")
DAY = numpy.datetime64("2026-01-02T03:04:05.123456789")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        ("a\ud83d", "a\\ud83d"),
        ({"\ud83d": "\ud83d"}, r'{"\\ud83d":"\\ud83d"}'),
        (None, "null"),
        (True, "true"),
        (3.0, "3.0"),
        (2**100, str(2**100)),
        ([2**64, -1], f"[{2**64},-1]"),
        (float("inf"), "Infinity"),
        ({"a": [float("nan"), -float("inf")]}, '{"a":[NaN,-Infinity]}'),
        (Decimal("1.50"), "1.50"),
        ([Decimal("1.50")], "[1.50]"),
        (Fraction(1, 3), "1/3"),
        (b"abc", "abc"),
        ((1, "a"), '[1,"a"]'),
        (range(3), "[0,1,2]"),
        ({3, 1, 2}, "[1,2,3]"),
        ({1: 2, (1, 2): 3}, '{"1":2,"[1,2]":3}'),
        (Color.RED, "red"),
        ([Color.ONE], "[1]"),
        (Point(), '{"x":1,"day":"2026-01-02"}'),
        (Box(), '{"mean":1.5}'),
        (Pair(1, 2), '{"a":1,"b":2}'),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        (timedelta(1), "1 day, 0:00:00"),
        (Path("a/b"), "a/b"),
        (uuid.UUID(int=1), str(uuid.UUID(int=1))),
        (numpy.float64(0.5), "0.5"),
        (numpy.int64(7), "7"),
        (numpy.bool_(True), "true"),
        (numpy.array([[1, 2]]), "[[1,2]]"),
        (numpy.array([numpy.nan]), "[NaN]"),
        (DAY, str(DAY)),
        ([DAY], f'["{DAY}"]'),
    ],
)
def test_value_keeps_its_meaning(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize("value", [1j, object(), b"\xff", int, {1: 2, "1": 3}, [object()]])
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(NoValue):
        as_text(value)


def test_an_observation_is_no_none() -> None:
    assert observation_text(numpy.arange(2000)).endswith(",1998,1999]")
    with pytest.raises(NoValue, match="the observation is None"):
        observation_text(None)


def test_tables_of_pandas_keep_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1, 2], "b": ["x", None]})
    double = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    assert as_text(table) == '[{"a":1,"b":"x"},{"a":2,"b":NaN}]'
    assert as_text(table.set_index("b")[:1]) == '[{"b":"x","a":1}]'
    assert as_text(table["a"]) == "[1,2]"
    assert as_text(table["a"].set_axis(["x", "y"])) == '{"x":1,"y":2}'
    assert as_text(table["a"].set_axis(["x", "x"])) == '[["x",1],["x",2]]'
    assert as_text(pandas.Timestamp("2026-01-02")) == "2026-01-02T00:00:00"
    assert as_text([pandas.NA, pandas.NaT]) == '[null,"NaT"]'
    with pytest.raises(NoValue, match="two keys of the same name"):
        as_text(double)


def test_models_of_pydantic_are_values() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", x=(int, 1), day=(date, date(2026, 1, 2)))
    assert as_text(model()) == '{"x":1,"day":"2026-01-02"}'
