"""Tests of shares of a batch: one rank per pass, deterministic cuts."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.consumers.learners.deepspeed import rank_group as ranks
from dora_pipe.consumers.learners.deepspeed.commands import shares
from dora_pipe.consumers.learners.deepspeed.rank import ShareReader
from dora_pipe.consumers.learners.deepspeed.rank_group import (
    RankGroup,
    RankInfo,
    environment_rank,
    rank_group,
)
from dora_pipe.consumers.learners.learner import LoggedAt
from dora_pipe.consumers.learners.settings import MICRO_BATCH_TOKENS, StepSettings, step_settings
from dora_pipe.consumers.learners.step import Item, Pass, items_of, passes_of
from dora_pipe.core.errors import ConfigError, InvariantBroken, ResourceError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.schemas.topics import Topics
from tests.support.batches import SETTINGS, make_batch
from tests.support.deepspeed import RUN, BatchLog


def _step(tokens: int) -> StepSettings:
    return step_settings({**SETTINGS, MICRO_BATCH_TOKENS: tokens})


def _passes(seed: int, groups: int, tokens: int) -> list[Pass]:
    batch = make_batch(seed=seed, groups=groups)
    items = [item for group in items_of(batch, _step(tokens)) for item in group]
    return passes_of(items, 0, _step(tokens))


def _who(passes: list[Pass]) -> list[str]:
    return [unit.item.trajectory.trajectory for packed in passes for unit in packed.units]


@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 5),
    tokens=st.sampled_from([64, 200, 4096]),
    ranks=st.integers(1, 5),
)
def test_every_trajectory_is_trained_by_one_rank_with_its_weight(
    seed: int, groups: int, tokens: int, ranks: int
) -> None:
    passes = _passes(seed, groups, tokens)
    actual_shares = shares(passes, ranks=ranks)
    assert len(actual_shares) == ranks
    mine = [entry for own in actual_shares for entry in own]
    assert sorted(_who(mine)) == sorted(_who(passes))
    weights = {item.trajectory.trajectory: w for p in passes for item, w in _rows(p)}
    assert all(
        weights[item.trajectory.trajectory] == w for entry in mine for item, w in _rows(entry)
    )
    assert sorted(entry.number for entry in mine) == list(range(len(mine)))
    assert all(len(entry.units) == entry.parts[0].rows for entry in mine)
    assert all(entry.padded_tokens <= tokens or len(entry.units) == 1 for entry in mine)
    counts = [len(own) for own in actual_shares]
    assert max(counts) - min(counts) <= 1
    rows = len(_who(passes))
    assert len(mine) >= min(ranks, rows)


def _rows(first_pass: Pass) -> list[tuple[Item, float]]:
    return [(unit.item, unit.weight) for unit in first_pass.units]


def test_order_of_the_passes_does_not_matter() -> None:
    passes = _passes(3, 4, 200)
    shuffled = passes[:]
    random.Random(0).shuffle(shuffled)
    first, second = (shares(subset, ranks=2) for subset in (passes, shuffled))
    assert [_who(own) for own in first] == [_who(own) for own in second]


@pytest.fixture
def log(tmp_path: Path) -> BatchLog:
    return BatchLog(tmp_path / "log.sqlite")


def _reader(log: BatchLog) -> ShareReader:
    return ShareReader(log.place.open(), Topics(RUN).trajectories, SystemClock())


def test_share_comes_in_the_order_it_was_asked_for_and_nothing_else_is_read(log: BatchLog) -> None:
    groups = log.logged(make_batch(seed=1, groups=6, samples=4)).groups
    every = [pair for g in groups for pair in zip(g.places, g.trajectories, strict=True)]
    share = every[::9][::-1]
    reader = _reader(log)
    result = reader.read([location for location, _ in share])
    assert [result.trajectory for result in result] == [result.trajectory for _, result in share]
    assert [list(trajectory.token_ids) for trajectory in result] == [
        list(trajectory.token_ids) for _, trajectory in share
    ]
    assert reader.records == len(share)
    reader.close()


def test_record_of_another_place_is_no_trajectory_of_the_batch(log: BatchLog) -> None:
    entry, two = log.logged(make_batch(seed=1)).groups[0].places[:2]
    moved = LoggedAt(partition=entry.partition, offset=two.offset, sha256=entry.sha256)
    with pytest.raises(InvariantBroken, match=f"offset {two.offset} has other bytes"):
        _reader(log).read([moved])


GLOO = "[/a/b/pair.cc:553] Connection closed by peer [127.0.0.1]:21659. Check the logs."


def test_closed_connection_is_a_lost_rank_and_another_fault_stays_itself() -> None:
    group = RankGroup(RankInfo(rank=0, ranks=1, local_rank=0), "cpu")
    with pytest.raises(ResourceError) as caught, group.together():
        raise RuntimeError(GLOO)
    assert caught.value.message == "a rank of the trainer is gone: connection closed by peer"
    with pytest.raises(ResourceError, match="gone: store"), group.together():
        raise dist.DistError("store\nmore")
    with pytest.raises(RuntimeError, match="shapes"), group.together():
        raise RuntimeError("shapes do not fit")


def test_a_rank_is_what_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "h")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert environment_rank() is None
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert environment_rank() == RankInfo(rank=3, ranks=4, local_rank=1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK"):
        environment_rank()


def test_another_number_of_ranks_than_the_environment_names_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "h")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(ranks, "_GROUP", [])
    with pytest.raises(
        ConfigError, match=r"trainer.ranks is 2, but the environment names 3"
    ) as caught:
        rank_group(2, "cpu")
    assert "set trainer.ranks" in str(caught.value.hint)


def test_ranks_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ranks, "_GROUP", [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks .* and there are 1"):
        rank_group(2, "cuda")
