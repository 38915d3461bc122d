"""A rank reads its own records from their places, and compares their bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from dora_pipe.consumers.learners.deepspeed.rank import ShareReader
from dora_pipe.consumers.learners.port import LoggedAt
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.topics import Topics
from tests.support.batches import make_batch
from tests.support.deepspeed import RUN, BatchLog


@pytest.fixture
def log(tmp_path: Path) -> BatchLog:
    return BatchLog(tmp_path / "log.sqlite")


def _reader(log: BatchLog) -> ShareReader:
    return ShareReader(log.place.open(), Topics(RUN).trajectories, SystemClock())


def test_share_comes_in_the_order_it_was_asked_for_and_nothing_else_is_read(log: BatchLog) -> None:
    groups = log.logged(make_batch(seed=1, groups=6, siblings=4)).groups
    every = [pair for g in groups for pair in zip(g.places, g.trajectories, strict=True)]
    share = every[::9][::-1]
    reader = _reader(log)
    found = reader.read([place for place, _ in share])
    assert [one.trajectory for one in found] == [one.trajectory for _, one in share]
    assert [list(one.token_ids) for one in found] == [list(one.token_ids) for _, one in share]
    assert reader.records == len(share)
    reader.close()


def test_share_of_an_earlier_batch_can_be_read_again(log: BatchLog) -> None:
    first = log.logged(make_batch(seed=1)).groups[0]
    second = log.logged(make_batch(seed=2)).groups[0]
    reader = _reader(log)
    for group in (second, first, second):
        found = reader.read(group.places)
        assert [list(one.token_ids) for one in found] == [
            list(one.token_ids) for one in group.trajectories
        ]


def test_other_bytes_than_the_batch_was_taken_with_are_refused(log: BatchLog) -> None:
    place = log.logged(make_batch(seed=1)).groups[0].places[2]
    with pytest.raises(InvariantBroken, match="other bytes"):
        _reader(log).read([replace(place, sha256="0" * 64)])


def test_record_of_another_place_is_no_trajectory_of_the_batch(log: BatchLog) -> None:
    one, two = log.logged(make_batch(seed=1)).groups[0].places[:2]
    moved = LoggedAt(partition=one.partition, offset=two.offset, sha256=one.sha256)
    with pytest.raises(InvariantBroken, match=f"offset {two.offset} has other bytes"):
        _reader(log).read([moved])
