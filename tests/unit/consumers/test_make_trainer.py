"""A trainer that cannot be made is one line with a hint, before anything is trained."""

import importlib.util
from pathlib import Path

import msgspec
import pytest
import torch

from dora_pipe.config.model import Config, Model, Run, Task
from dora_pipe.config.model import Trainer as Section
from dora_pipe.consumers.learners import registry as make
from dora_pipe.core.errors import ConfigError


def _config(**trainer: object) -> Config:
    return Config(
        run=Run(name="r", steps=1),
        model=Model(path="m"),
        task=Task(kind="arithmetic"),
        trainer=msgspec.convert(trainer, Section),
    )


def test_absent_deepspeed_is_one_line_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs deepspeed, which is not installed") as caught:
        make.make_learner(assets=tmp_path, reference=tmp_path, config=_config(kind="deepspeed"))
    assert "make deepspeed" in str(caught.value.hint)
    make.need_learner(_config(kind="torch"))


def test_absent_gpu_is_one_line_where_one_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in ("torch", "deepspeed"):
        with pytest.raises(ConfigError, match="torch finds no GPU here") as caught:
            make.device_of(Section(kind=kind, device="cuda"))
        assert "trainer.device=cpu" in str(caught.value.hint)
        assert make.device_of(Section(kind=kind)) == "cpu"


def test_gpu_is_taken_by_deepspeed_alone_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make.device_of(Section(kind="deepspeed")) == "cuda"
    assert make.device_of(Section(kind="torch")) == "cpu"
    assert make.device_of(Section(kind="torch", device="cuda")) == "cuda"
    assert make.device_of(Section(kind="deepspeed", device="cpu")) == "cpu"


@pytest.mark.parametrize("rank", ["", "0"])
def test_process_that_torchrun_did_not_start_as_another_rank_is_the_trainer(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora_pipe.store.log_location import LogLocation
    from dora_pipe.store.store import PolicyStore

    log, store = LogLocation(run="r", url=f"sqlite:{tmp_path}/x"), PolicyStore(tmp_path)
    monkeypatch.setenv("RANK", rank)
    assert not make.follows(_config(kind="deepspeed"), log, store)
    monkeypatch.setenv("RANK", "1")
    assert not make.follows(_config(kind="torch"), log, store)
