"""Runs in bfloat16 with another optimizer than AdamW, updates in parts and every bound on memory.

The trainer is killed between checkpoints; everything comes out bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dora_pipe.analysis.change import Change
from dora_pipe.analysis.replay import distances_of, replay_steps
from dora_pipe.config.load import from_plain
from dora_pipe.consumers.learners.torch import memory
from dora_pipe.launch.plan import run_started
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.store import PolicyStore
from tests.support.cluster import TRAINER, Cluster, TorchParts, make_config
from tests.support.models import make_llama_gqa

STEPS = 4
WIDE_LOGITS = 20.0


def has_version(cluster: Cluster, version: int) -> bool:
    return cluster.version >= version


@pytest.fixture(scope="module", params=["muon", "adamw8bit"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if request.param == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="make test-adamw8bit")
    folder = tmp_path_factory.mktemp("bfloat16")
    model = make_llama_gqa(folder / "model", scale=WIDE_LOGITS)
    config = make_config(
        run__steps=STEPS,
        run__name="bfloat16",
        sampling__max_tokens=12,
        rollout__group_size=3,
        rollout__prompts_per_step=2,
        objective__kl_coef=0.1,
        trainer__optimizer=request.param,
        trainer__weight_decay=0.1,
        trainer__batch_parts=2,
        trainer__minibatches=2,
        trainer__checkpoint_every=2,
        trainer__learning_rate=1e-2,
        trainer__packing=True,
        trainer__gradient_checkpointing=True,
        evaluation__every=0,
    )
    parts = TorchParts(model, dtype="bfloat16")
    with (
        pytest.MonkeyPatch.context() as small,
        Cluster(folder / "run", config, parts=parts, workers=("w0",)) as running,
    ):
        for name in ("HEAD_ELEMENTS", "MLP_ELEMENTS", "MLP_ELEMENTS_MIN"):
            small.setattr(memory, name, 2**12)
        for version in (1, 3):
            running.until(partial(has_version, running, version))
            running.restart(TRAINER)
        running.run()
        yield running


def test_every_version_is_bfloat16_and_the_audit_is_clean(cluster: Cluster) -> None:
    cluster.clean_report()
    commits = cluster.facts(StepCommitted)
    assert {commit.policy.dtype for commit in commits} == {"bfloat16"}
    assert len({commit.policy.digest for commit in commits}) == STEPS
    assert [commit.full for commit in commits] == [False, True, False, True], "with a checkpoint"
    assert all(commit.delta is not None for commit in commits)
    for commit in commits:
        assert (commit.numerics["policies"], commit.numerics["packing"]) == ("bfloat16", "on")
        assert commit.numerics.keys() >= {"head_chunk_tokens", "mlp_chunk_tokens"}
        name, _, _ = commit.numerics["optimizer"].partition(" ")
        assert name == cluster.config.trainer.optimizer


@pytest.mark.parametrize("first", [0, 2], ids=["version 0", "a checkpoint"])
def test_steps_come_out_bit_for_bit_from(cluster: Cluster, first: int) -> None:
    lines = cluster.replayed(first, STEPS)
    assert [line.replayed.step for line in lines] == list(range(first, STEPS))
    assert all(line.equal for line in lines)


def test_a_changed_step_is_measured_by_the_numbers_not_by_their_bytes(cluster: Cluster) -> None:
    source, change = cluster.source, Change(settings={"trainer.learning_rate": 2e-2})
    (line,) = replay_steps(source, range(1), change)
    distances = distances_of(source, line.replayed)
    assert distances
    assert all(0 < distance.relative_max < 0.1 for distance in distances)
    assert all(distance.differing <= distance.elements for distance in distances)


def test_trajectories_come_out_bit_for_bit(cluster: Cluster) -> None:
    results = cluster.regenerated(6)
    assert [result.equal for result in results] == [True] * 6


@pytest.mark.parametrize(
    ("says", "asked", "published"),
    [
        ("bfloat16", {}, "bfloat16"),
        ("float16", {}, "float32"),
        ("bfloat16", {"dtype": "float32"}, "float32"),
        ("float32", {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_type_of_a_run_is_decided_by_its_model_unless_it_is_asked_for(
    tmp_path: Path, says: str, asked: dict[str, str], published: PolicyDtype
) -> None:
    model = make_llama_gqa(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"dtype": says}
    (model / "config.json").write_text(json.dumps(config))
    plain = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": str(model)},
        "task": {"kind": "arithmetic"},
        "policies": asked,
    }
    first = run_started(from_plain(plain), PolicyStore(tmp_path / "policies"))
    assert first.policy.dtype == published
