"""Whole runs with a DeepSpeed trainer of two ranks: replayed bit for bit, and through a death."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.learners.sft import Example, SftOptions, train_sft
from dora_pipe.consumers.learners.torch.model import load_weights
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.schemas.control import RoleStarted, RunStarted, StepCommitted
from dora_pipe.store.adapters import stands_on
from dora_pipe.store.safetensors_file import read_manifest
from tests.support import deepspeed
from tests.support.models import make_glm4_moe, make_qwen3_moe
from tests.support.user_run import answer, assert_clean, facts, furnish, start, steps, until

pytestmark = pytest.mark.slow

LIMIT_S = 400
TRAINER = ["-o", "trainer.kind=deepspeed", "-o", "trainer.ranks=2", "-o", "trainer.zero_stage=2"]
IN_PARTS = ["-o", "rollout.prompts_per_step=6", "-o", "trainer.batch_parts=3"]
"""More groups than there are slots for: those of a step never end all at once."""
VARIED = """
def score(row, text):
    return len(set(text)) / 12
"""
"""A reward that tells trajectories apart from the first step on."""
DEALT = ["-o", "trainer.expert_parallel_size=2"]
RUNS = [
    pytest.param(make_glm4_moe, 2, "bfloat16", [], id="glm4_moe"),
    pytest.param(make_qwen3_moe, 3, "float32", [], id="qwen3_moe"),
    pytest.param(make_qwen3_moe, 2, "bfloat16", DEALT, id="dealt"),
]
COMMAND = str(Path(sys.executable).parent / "dora-pipe")


@pytest.fixture(autouse=True)
def _two_ranks() -> None:
    deepspeed.need_deepspeed(ranks=2)


def _call(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return answer(path, *words, wait_s=LIMIT_S)


def _said(path: Path) -> str:
    text = path / "said"
    return text.read_text() if text.exists() else ""


def _ranks(path: Path) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            here = (entry / "cwd").resolve() == path.resolve()
        except OSError:
            continue
        if "trainer rank" in words and here:
            yield int(entry.name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    deepspeed.need_deepspeed(ranks=2)
    directory = furnish(tmp_path_factory.mktemp("run"))
    run = start(directory, "run", "config.toml", *TRAINER, *IN_PARTS)
    control = directory / "runs" / "tiny" / "log.sqlite"
    until(lambda: control.exists() and len(steps(directory, "tiny")) >= 1, LIMIT_S)
    (rank,) = _ranks(directory)
    os.kill(rank, signal.SIGKILL)
    assert run.wait(LIMIT_S) == 0, _said(directory)
    return directory


def test_run_goes_on_after_the_death_of_a_rank_and_every_promise_holds(finished: Path) -> None:
    assert steps(finished, "tiny") == [0, 1, 2]
    assert_clean(finished, "tiny")
    roles = [fact for fact in facts(finished, "tiny") if isinstance(fact, RoleStarted)]
    assert sum(role.role == "trainer" for role in roles) == 2
    log = (finished / "runs" / "tiny" / "logs" / "trainer.log").read_text()
    assert "error: rank 1 of the trainer was killed (SIGKILL)" in log
    assert list(_ranks(finished)) == []


def test_replay_starts_as_many_ranks_by_itself_and_every_step_is_bit_equal(finished: Path) -> None:
    done = _call(finished, "replay", "tiny")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("step") and "equal" in line for line in lines), done.stdout
    assert "3 of 3 steps bit-equal" in done.stderr
    commits = [fact for fact in facts(finished, "tiny") if isinstance(fact, StepCommitted)]
    assert any(commit.parts for commit in commits)
    assert {commit.numerics["world_size"] for commit in commits} == {"2"}
    assert {commit.numerics["zero_stage"] for commit in commits} == {"2"}


def test_replay_with_another_number_of_ranks_is_one_line(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in three.items():
        monkeypatch.setenv(name, value)
    done = _call(finished, "replay", "tiny")
    assert done.returncode == 3
    assert "error: trainer.ranks is 2, but the environment names 3" in done.stderr


@pytest.mark.parametrize(("stage", "dtype"), [(2, "float32"), (3, "bfloat16")])
def test_lora_run_is_audited_and_every_step_and_trajectory_is_bit_equal(
    stage: int, dtype: str, tmp_path: Path
) -> None:
    directory = furnish(tmp_path)
    words = [*TRAINER, "-o", f"trainer.zero_stage={stage}", "-o", "trainer.minibatches=2"]
    words += ["-o", f"policies.dtype={dtype}"]
    words += [
        "-o",
        "lora.rank=4",
        "-o",
        "trainer.learning_rate=1e-2",
        "-o",
        "objective.kl_coef=0.1",
    ]
    assert start(directory, "run", "config.toml", *words).wait(LIMIT_S) == 0, _said(directory)
    assert steps(directory, "tiny") == [0, 1, 2]
    assert_clean(directory, "tiny")
    actual_facts = list(facts(directory, "tiny"))
    (first,) = (event.policy for event in actual_facts if isinstance(event, RunStarted))
    commits = [event for event in actual_facts if isinstance(event, StepCommitted)]
    assert all(stands_on(commit.policy, first.digest) for commit in commits)
    assert {commit.policy.dtype for commit in commits} == {dtype}
    assert {commit.numerics["lora"].partition(", ")[0] for commit in commits} == {"rank 4"}
    assert {commit.numerics["zero_stage"] for commit in commits} == {str(stage)}
    done = _call(directory, "replay", "tiny")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 steps bit-equal" in done.stderr
    again = _call(directory, "replay", "tiny", "--random", "8")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(("make", "stage", "dtype", "keys"), RUNS)
def test_run_is_audited_replayed_bit_for_bit_and_exported_with_equal_logits(
    make: Callable[..., Path], stage: int, dtype: str, keys: list[str], tmp_path: Path
) -> None:
    directory = furnish(tmp_path)
    (directory / "judge.py").write_text(VARIED)
    examples = [Example(token_ids=[1, *range(20, 30)], mask=[0, *([1] * 10)])]
    cold, warm = make(tmp_path / "cold"), tmp_path / "warm"
    options = SftOptions(steps=2, batch=2)
    train_sft(cold, examples, warm, encode=lambda example: example, options=options)
    words = [*TRAINER, "-o", f"trainer.zero_stage={stage}", "-o", "trainer.learning_rate=1e-3"]
    words += ["-o", f"policies.dtype={dtype}", "-o", "policies.full_every=4"]
    words += ["-o", "model.path=warm", *keys]
    assert start(directory, "run", "config.toml", *words).wait(LIMIT_S) == 0, _said(directory)
    assert_clean(directory, "tiny")
    assert list((directory / "runs" / "tiny" / "policies" / "deltas").glob("*.delta"))
    commits = [fact for fact in facts(directory, "tiny") if isinstance(fact, StepCommitted)]
    assert {commit.policy.dtype for commit in commits} == {dtype}
    assert len({commit.policy.digest for commit in commits}) == len(commits) == 3
    for more in ([], ["--random", "4"]):
        done = _call(directory, "replay", "tiny", *more)
        assert done.returncode == 0, done.stderr
    done = _call(directory, "export", "policy", "tiny", "3", "exported")
    assert done.returncode == 0, done.stderr
    assert (
        read_manifest(directory / "exported/model.safetensors").digest == commits[-1].policy.digest
    )
    assert_same_logits(directory / "exported", directory / "exported" / "model.safetensors")


def assert_same_logits(directory: Path, weights: Path) -> None:
    network = build(directory)
    load_weights(network, weights)
    read: Any = AutoModelForCausalLM.from_pretrained
    theirs = read(directory, dtype=torch.float32).eval()
    ids = torch.arange(30).reshape(2, -1)
    with torch.no_grad():
        assert torch.equal(network(ids).logits, theirs(ids).logits)
