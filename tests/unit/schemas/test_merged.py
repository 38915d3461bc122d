"""Tests that merged status changes equal full statuses."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.metrics import WorkerStatus, merged
from tests.golden.later_values import STATUS_SINCE

NAMES = st.sampled_from(["a", "b", "c", "d"])
RESUMES = st.builds(Resume, tokens=st.integers(1, 3), partition=st.just(0), offset=st.just(1))
PROGRESS = st.dictionaries(NAMES, RESUMES)


def status(progress: dict[str, Resume], *, since: bool = False, **more: object) -> WorkerStatus:
    entry = msgspec.structs.replace(STATUS_SINCE, since=since, ended=(), progress=progress)
    return msgspec.structs.replace(entry, **more)


def change(before: dict[str, Resume], after: dict[str, Resume]) -> WorkerStatus:
    newer = {name: entry for name, entry in after.items() if before.get(name) != entry}
    return status(newer, since=True, ended=tuple(sorted(before.keys() - after.keys())))


@given(st.lists(PROGRESS, min_size=1))
def test_changes_merged_in_order_are_the_whole(wholes: list[dict[str, Resume]]) -> None:
    latest = merged(None, status(wholes[0]))
    for before, after in pairwise(wholes):
        latest = merged(latest, change(before, after))
        assert latest == status(after)


@given(PROGRESS, PROGRESS, PROGRESS)
def test_who_begins_in_the_middle_says_nothing_wrong_and_is_whole_with_the_next_whole_status(
    first: dict[str, Resume], second: dict[str, Resume], third: dict[str, Resume]
) -> None:
    latest = merged(None, change(first, second))
    assert latest.progress.items() <= second.items()
    latest = merged(latest, change(second, third))
    assert latest.progress.items() <= third.items()
    assert merged(latest, status(third)) == status(third)


def test_another_incarnation_has_nothing_of_the_one_before() -> None:
    resume = Resume(tokens=1, partition=0, offset=1)
    before = status({"a": resume}, incarnation=1)
    later = status({"b": resume}, since=True, incarnation=2)
    assert merged(before, later).progress == {"b": resume}
    assert before.progress == {"a": resume}, "what was merged is left as it is"


def test_status_of_an_older_version_is_whole() -> None:
    resume = Resume(tokens=1, partition=0, offset=1)
    assert merged(status({"a": resume}), status({"b": resume})).progress == {"b": resume}
