"""Tests of GPU visibility by role, and of missing GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dora_pipe.cli import doctor
from dora_pipe.cli.start import worker
from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError
from dora_pipe.launch import local_roles, roles
from dora_pipe.launch.local_roles import (
    ORDER,
    VISIBLE,
    gpus_of,
    need_gpus,
    show_gpus,
    visible,
)
from dora_pipe.producers.engines import registry
from dora_pipe.producers.engines.vllm import core as vllm_core
from tests.support.configs import small_config

RANKS = {"kind": "deepspeed", "ranks": 2}


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VISIBLE, ORDER[0]):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def config(*, trainer: dict[str, object] | None = None, **workers: object) -> Config:
    all_workers = {"count": 4, "engine": "vllm"} | workers
    return small_config(workers=all_workers, trainer=trainer or {})


def test_workers_take_gpus_in_turn_and_the_trainer_its_own() -> None:
    shared = config(gpus=[1, 2], trainer={**RANKS, "gpus": [0, 3]})
    names = ("w0", "w1", "w2", "w3", "late", local_roles.TRAINER, local_roles.ORCHESTRATOR)
    results = [gpus_of(shared, name)[1] for name in names]
    assert results == [(1,), (2,), (1,), (2,), (), (0, 3), ()]


def test_a_worker_of_several_gpus_takes_them_in_turn() -> None:
    pairs = {"tensor_parallel_size": 2}
    shared = config(engine="vllm", gpus=[1, 2, 3, 5], vllm=pairs)
    results = [gpus_of(shared, name)[1] for name in ("w0", "w1", "w2")]
    assert results == [(1, 2), (3, 5), (1, 2)]
    with pytest.raises(ConfigError, match="3 is not a multiple of 2"):
        config(engine="vllm", gpus=[1, 2, 3], vllm=pairs)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [(None, "2,0"), ("4,5,6,7", "6,4"), ("GPU-a, GPU-b,GPU-c", "GPU-c,GPU-a")],
)
def test_gpus_are_counted_among_those_that_are_visible(observed: str | None, expected: str) -> None:
    assert visible("workers.gpus", (2, 0), observed) == expected


@pytest.mark.parametrize("observed", ["4,5", ""])
def test_a_gpu_that_is_not_visible_is_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, observed: str
) -> None:
    monkeypatch.setenv(VISIBLE, observed)
    need_gpus(config())
    count = len([word for word in observed.split(",") if word])
    line = rf"workers\.gpus: there is no GPU 2 among the {count} of {VISIBLE}={observed}$"
    with pytest.raises(ConfigError, match=line):
        need_gpus(config(gpus=[2]))
    with pytest.raises(ConfigError, match=r"trainer\.gpus: there is no GPU 7"):
        need_gpus(config(trainer={"device": "cuda", "gpus": [7]}))


@pytest.mark.parametrize(
    ("name", "expected"), [("w0", ("1", "PCI_BUS_ID")), ("trainer", ("0,3", "PCI_BUS_ID"))]
)
def test_a_role_sees_its_own_gpus(name: str, expected: tuple[str, str]) -> None:
    show_gpus(config(gpus=[1, 2], trainer={**RANKS, "gpus": [0, 3]}), name)
    assert (os.environ[VISIBLE], os.environ[ORDER[0]]) == expected


def test_a_worker_started_by_hand_takes_the_gpu_of_its_name_and_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    observed: list[str] = []

    def prepare_role(*_: object) -> None:
        observed.append(os.environ.get(VISIBLE, "-"))
        raise InterruptedError

    monkeypatch.setattr(roles, "log_as", lambda _: None)
    monkeypatch.setattr(registry, "need_engines", lambda *_: None)
    monkeypatch.setattr(roles, "prepare_role", prepare_role)
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "r"\nsteps = 1\n[model]\npath = "m"\n[task]\nkind = "arithmetic"\n'
        '[workers]\nengine = "torch"\ngpus = [4, 5]\n'
    )
    for engine in ("torch", "vllm"):
        with pytest.raises(InterruptedError):
            worker(path, name="w1", engine=engine, root=tmp_path)
    assert observed == ["-", "5"]


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"trainer": {"gpus": [0]}}, "needs trainer.device"),
        ({"trainer": {**RANKS, "device": "cpu", "gpus": [0, 1]}}, "needs trainer.device"),
        ({"trainer": {"device": "cuda", "gpus": [0, 1]}}, r"the torch trainer has one GPU"),
        ({"trainer": {**RANKS, "gpus": [1, 1]}}, r"every rank needs its own GPU"),
        ({"gpus": [-1]}, r"workers\.gpus"),
    ],
)
def test_gpus_that_nobody_would_use_are_one_line(sections: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config(**sections)  # type: ignore[arg-type]


def test_vllm_that_sees_none_of_the_gpus_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    module = SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    monkeypatch.setenv(VISIBLE, "9")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"no visible GPU with {VISIBLE}=9"):
        vllm_core.device_name()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert vllm_core.device_name() == "cuda"


@pytest.mark.parametrize(
    ("script", "state", "detail"),
    [
        (
            "echo '0, NVIDIA H100 80GB HBM3, 81559 MiB'; echo '1, NVIDIA L4, 23034 MiB'",
            "ok",
            "0 NVIDIA H100 80GB HBM3, 81559 MiB; 1 NVIDIA L4, 23034 MiB",
        ),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "note", "NVIDIA-SMI has failed"),
        ("exit 6", "note", "nvidia-smi ended with exit code 6"),
        ("exec sleep 60", "fail", "nvidia-smi did not answer within 0 s"),
    ],
)
def test_doctor_says_which_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, state: str, detail: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if state == "fail":
        monkeypatch.setattr(doctor, "GPUS_LIMIT_S", 0.2)
    gpus = doctor._gpus()
    assert (gpus.state, gpus.detail) == (state, detail)
