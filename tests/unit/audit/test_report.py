"""Tests of report metrics: buckets, serving times, findings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.audit.entries import Serving
from dora_pipe.audit.findings import NAMED_MAX, Findings
from dora_pipe.audit.group_ledger import bucket_of

S = 1_000_000_000


@given(st.integers(1, 1 << 20))
def test_bucket_holds_its_tokens_and_touches_its_neighbour(tokens: int) -> None:
    low, high = bucket_of(tokens)
    assert low <= tokens <= high
    assert bucket_of(high + 1)[0] == high + 1
    assert bucket_of(low) == (low, high)


def test_nothing_sampled_has_a_bucket_of_its_own() -> None:
    assert bucket_of(0) == (0, 0)
    assert bucket_of(1) == (1, 1)
    assert bucket_of(2) == (2, 2)


def test_time_counts_in_which_two_versions_are_served() -> None:
    serving = Serving()
    serving.advance(0)
    serving.ready(1, 3)
    serving.ready(2, 3)
    serving.advance(2 * S)
    serving.ready(2, 4)
    serving.advance(5 * S)
    serving.ready(7, 5)
    serving.advance(6 * S)
    serving.keep({2, 7})
    serving.advance(10 * S)
    assert serving.seconds == 10.0
    assert serving.several_seconds == 8.0
    assert serving.hosts.keys() == {2, 7}


def test_time_that_goes_back_is_not_counted_twice() -> None:
    serving = Serving()
    serving.ready(1, 0)
    for now_s in (5, 3, 5, 6):
        serving.advance(now_s * S)
    assert serving.seconds == 1.0


def test_violation_is_one_line_with_what_was_expected_and_found() -> None:
    findings = Findings()
    assert findings.same("C3", "g1", "is late", expected=3, actual=3)
    assert not findings.same("C3", "g1", "is late", expected=3, actual=4)
    assert findings.violations[0].line == "C3 g1: is late: expected 3, found 4"
    assert findings.looked["C3"] == 2
    assert findings.total == 1


def test_violations_beyond_the_bound_are_counted_not_kept() -> None:
    findings = Findings()
    for number in range(NAMED_MAX + 5):
        findings.add("records", str(number), "is gone")
    assert len(findings.violations) == NAMED_MAX
    assert findings.total == findings.count["records"] == NAMED_MAX + 5
