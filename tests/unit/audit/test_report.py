"""Figures of a report: buckets, hosting times, findings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.audit.findings import NAMED_MAX, Findings
from dora_pipe.audit.group_ledger import bucket_of
from dora_pipe.audit.version_residency import PAIRS_MAX, Hosting

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


def test_pairs_count_the_time_in_which_both_versions_are_hosted() -> None:
    hosting = Hosting()
    hosting.advance(0)
    hosting.ready(1, 3)
    hosting.ready(2, 3)
    hosting.advance(2 * S)
    hosting.ready(2, 4)
    hosting.advance(5 * S)
    hosting.ready(7, 5)
    hosting.advance(6 * S)
    hosting.keep({2, 7})
    hosting.advance(10 * S)
    assert hosting.pairs == {(3, 4): 4.0, (3, 5): 1.0, (4, 5): 5.0}
    assert hosting.seconds == 10.0
    assert hosting.several_seconds == 8.0
    assert hosting.hosts.keys() == {2, 7}


def test_of_a_long_run_the_longest_pairs_are_kept_and_the_others_summed() -> None:
    hosting = Hosting()
    hosting.advance(0)
    hosting.ready(1, 0)
    now_s, length_s = 0, 0
    for version in range(1, 5 * PAIRS_MAX):
        hosting.ready(version % 2 + 1, version)
        length_s = 1 + version % 7 if version > 1 else 100
        now_s += length_s
        hosting.advance(now_s * S)
    pairs, (others, others_seconds) = hosting.pairs, hosting.others
    newest = (5 * PAIRS_MAX - 2, 5 * PAIRS_MAX - 1)
    assert pairs[0, 1] == 100.0
    assert pairs[newest] == length_s
    assert len(pairs) <= 2 * PAIRS_MAX
    assert len(pairs) + others == 5 * PAIRS_MAX - 1
    assert sum(pairs.values()) + others_seconds == hosting.several_seconds == now_s
    shortest = sorted(pairs.values())[: len(pairs) // 2]
    assert others_seconds / others < sum(shortest) / len(shortest)


def test_time_that_goes_back_is_not_counted_twice() -> None:
    hosting = Hosting()
    hosting.ready(1, 0)
    for now_s in (5, 3, 5, 6):
        hosting.advance(now_s * S)
    assert hosting.seconds == 1.0


def test_violation_is_one_line_with_what_was_expected_and_found() -> None:
    findings = Findings()
    assert findings.same("C3", "g1", "is late", expected=3, found=3)
    assert not findings.same("C3", "g1", "is late", expected=3, found=4)
    assert findings.violations[0].line == "C3 g1: is late: expected 3, found 4"
    assert findings.looked["C3"] == 2
    assert findings.total == 1


def test_violations_beyond_the_bound_are_counted_not_kept() -> None:
    findings = Findings()
    for number in range(NAMED_MAX + 5):
        findings.add("records", str(number), "is gone")
    assert len(findings.violations) == NAMED_MAX
    assert findings.total == findings.count["records"] == NAMED_MAX + 5
