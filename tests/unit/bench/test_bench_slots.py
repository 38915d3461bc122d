"""`bench plan --slots` measures what it says: slots are busy while judges and tools take long."""

from __future__ import annotations

import pytest

from dora_pipe.bench.slots import BEGIN_S, CASES, bench_slots


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_nine_of_ten_slots_are_busy_whatever_is_waited_for(case: object) -> None:
    (figure,) = bench_slots([case], end_s=BEGIN_S + 20.0)  # type: ignore[list-item]
    assert 0.9 < figure.busy <= 1.0
    assert figure.rounds_per_s < 12
