"""Tests of the table and exit code of `bench faults`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from tests.support.kill_rounds import series as faults
from tests.support.kill_rounds.inject import Hit
from tests.support.kill_rounds.judge import Verdict
from tests.support.kill_rounds.order import Order, Point
from tests.support.kill_rounds.rounds import RoundResult

ORDER = Order(
    number=4, seed=11, role="trainer", at=Point(moment="after", what="step-committed", nth=2)
)
HIT = Hit(role="trainer", pid=7, phase="right after the append of step-committed", at_ns=1)
SOUND = Verdict(
    finished=True,
    steps=6,
    steps_wanted=6,
    violations=(),
    acknowledged=900,
    trajectories=100,
    lost=0,
    trained_twice=0,
    equal=6,
    moved=True,
)


def _played(
    *,
    hit: Hit | None = HIT,
    recovered_s: float | None = 0.5,
    verdict: Verdict | None = SOUND,
    trouble: str = "",
) -> RoundResult:
    return RoundResult(
        order=ORDER, hit=hit, recovered_s=recovered_s, verdict=verdict, trouble=trouble, seconds=4.0
    )


@pytest.mark.parametrize(
    "played",
    [
        _played(hit=None, recovered_s=None),
        _played(recovered_s=None),
        _played(verdict=None),
        _played(trouble="w0 ended with exit code 7"),
        _played(verdict=msgspec.structs.replace(SOUND, lost=1)),
        _played(verdict=msgspec.structs.replace(SOUND, trained_twice=1)),
        _played(verdict=msgspec.structs.replace(SOUND, equal=5)),
        _played(verdict=msgspec.structs.replace(SOUND, moved=False)),
        _played(verdict=msgspec.structs.replace(SOUND, finished=False)),
        _played(verdict=msgspec.structs.replace(SOUND, violations=("C2 g1: lost",))),
    ],
)
def test_a_round_that_is_not_sound_ends_the_command_with_exit_code_5_and_keeps_what_is_left(
    played: RoundResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not played.clean
    with pytest.raises(InvariantBroken, match="round 4 is not clean") as caught:
        faults.sum_up([_played(), played], tmp_path)
    assert caught.value.exit_code == 5
    assert tmp_path.exists() and str(tmp_path) in (caught.value.hint or "")
    assert "1 of 2 rounds clean" in capsys.readouterr().err


def test_a_role_that_stayed_dead_need_not_come_back_but_nobody_else_may_lose_anything() -> None:
    dead = msgspec.structs.replace(ORDER, role="w0", down_s=10.0)
    away = dataclasses.replace(_played(recovered_s=None), order=dead)
    assert away.clean
    lost = msgspec.structs.replace(SOUND, others=("w1 was fenced",))
    assert not dataclasses.replace(away, verdict=lost).clean
    assert not dataclasses.replace(away, hit=None).clean
