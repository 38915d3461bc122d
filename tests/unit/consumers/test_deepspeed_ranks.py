"""What breaks between ranks is told in a few words; a seat is what torchrun says it is."""

import pytest
import torch
import torch.distributed as dist

from dora_pipe.consumers.learners.deepspeed import rank_group as ranks
from dora_pipe.consumers.learners.deepspeed.rank_group import (
    RankGroup,
    RankInfo,
    rank_group,
    torchrun_rank,
)
from dora_pipe.core.errors import ConfigError, ResourceError

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


def test_seat_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "h")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert torchrun_rank() is None
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrun_rank() == RankInfo(rank=3, ranks=4, local_rank=1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK"):
        torchrun_rank()


def test_more_ranks_than_torchrun_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "h")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(ranks, "_GROUP", [])
    with pytest.raises(ConfigError, match=r"trainer.ranks is 2, but torchrun started 3") as caught:
        rank_group(2, "cpu")
    assert "torchrun --nproc-per-node 2" in str(caught.value.hint)


def test_ranks_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(ranks, "_GROUP", [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks .* and there are 1"):
        rank_group(2, "cuda")
