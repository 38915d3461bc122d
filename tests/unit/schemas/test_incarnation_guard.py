"""Tests of the order of rounds, cut logs and foreign rounds."""

from __future__ import annotations

import pytest

from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.schemas.rounds import IncarnationGuard, Round
from dora_pipe.schemas.wire import encode


def value(ordinal: int, incarnation: int = 0) -> bytes:
    return encode(Round(ordinal=ordinal, incarnation=incarnation, now_ns=0, control_next=0))


def reader_at(ordinal: int, incarnation: int = 0) -> IncarnationGuard:
    guard = IncarnationGuard()
    assert guard.read(0, value(ordinal, incarnation)) is not None
    return guard


def test_rounds_follow_one_another_from_any_first_one_through_incarnations() -> None:
    guard = reader_at(17, incarnation=2)
    for ordinal, incarnation in ((18, 2), (19, 2), (20, 3), (21, 5)):
        actual_round = guard.read(ordinal, value(ordinal, incarnation))
        assert actual_round is not None
        assert (actual_round.ordinal, actual_round.incarnation) == (ordinal, incarnation)


def test_a_round_of_an_older_orchestrator_is_not_obeyed_and_changes_nothing() -> None:
    guard = reader_at(17, incarnation=2)
    assert guard.read(1, value(18, incarnation=1)) is None
    assert guard.read(2, value(3, incarnation=0)) is None
    assert guard.read(3, value(18, incarnation=2)) is not None


@pytest.mark.parametrize("ordinal", [15, 17, 19, 400])
def test_a_round_that_is_missing_or_comes_twice_breaks_the_promise(ordinal: int) -> None:
    with pytest.raises(InvariantBroken, match=f"decisions offset 40: round {ordinal} comes after"):
        reader_at(17).read(40, value(ordinal, incarnation=1))


@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b"[1, 2]", b'{"ordinal": 1}'])
def test_what_is_no_round_is_named_with_its_offset(garbage: bytes) -> None:
    with pytest.raises(SchemaError, match="decisions offset 40") as refused:
        reader_at(17).read(40, garbage)
    assert "somebody else" in (refused.value.hint or "")
