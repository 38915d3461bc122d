"""A run whose policies are bfloat16, its trainer killed between checkpoints: bit for bit again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from dora_pipe.analysis.change import Change
from dora_pipe.analysis.replay import distances_of, replay_steps
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.replay_trajectory import pick, regenerate
from dora_pipe.config.load import from_plain
from dora_pipe.launch.plan import run_started
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.store import PolicyStore
from tests.support.cluster import TRAINER, Cluster, TorchParts, make_config
from tests.support.ledgers import build_ledger
from tests.support.models import make_llama_gqa

STEPS = 4
WIDE_LOGITS = 20.0


def has_version(cluster: Cluster, version: int) -> bool:
    return cluster.version >= version


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("bfloat16")
    model = make_llama_gqa(folder / "model", scale=WIDE_LOGITS)
    config = make_config(
        run__steps=STEPS,
        run__name="bfloat16",
        sampling__max_tokens=12,
        rollout__group_size=3,
        rollout__prompts_per_step=2,
        trainer__checkpoint_every=2,
        trainer__learning_rate=1e-4,
        evaluation__every=0,
    )
    parts = TorchParts(model, dtype="bfloat16")
    with Cluster(folder / "run", config, parts=parts, workers=("w0",)) as running:
        for version in (1, 3):
            running.until(partial(has_version, running, version))
            running.restart(TRAINER)
        running.run()
        yield running


def test_every_version_is_bfloat16_and_the_audit_is_clean(cluster: Cluster) -> None:
    report = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert report.holds, [violation.line for violation in report.violations]
    ledger = build_ledger(cluster.bus, cluster.topics)
    facts = [ledger.steps[step].fact for step in range(STEPS)]
    assert {fact.policy.dtype for fact in facts} == {"bfloat16"}
    assert len({fact.policy.digest for fact in facts}) == STEPS
    assert {fact.numerics["policies"] for fact in facts} == {"bfloat16"}
    assert [fact.full for fact in facts] == [False, True, False, True], "with a checkpoint"
    assert all(fact.delta is not None for fact in facts)


@pytest.mark.parametrize("first", [0, 2], ids=["version 0", "a checkpoint"])
def test_steps_come_out_bit_for_bit_from(cluster: Cluster, first: int) -> None:
    lines = cluster.replayed(first, STEPS)
    assert [line.replayed.step for line in lines] == list(range(first, STEPS))
    assert all(line.equal for line in lines)


def test_a_changed_step_is_measured_by_the_numbers_not_by_their_bytes(cluster: Cluster) -> None:
    source, change = cluster.source, Change(settings={"trainer.learning_rate": 2e-4})
    (line,) = replay_steps(source, range(1), change)
    distances = distances_of(source, line.replayed)
    assert distances
    assert all(0 < distance.relative_max < 0.1 for distance in distances)
    assert all(distance.differing <= distance.elements for distance in distances)


def test_trajectories_come_out_bit_for_bit(cluster: Cluster) -> None:
    stop_ids = cluster.parts.stop_ids(cluster.assets)
    config = cluster.config
    params: dict[str, SamplingParams] = {
        "train": sampling_params(config.sampling, stop_ids),
        "eval": sampling_params(config.eval_sampling(), stop_ids),
    }
    engine = cluster.parts.engine(cluster.assets, cluster.config, cluster.clock)
    bus, topics, store = cluster.bus, cluster.topics, cluster.store.root
    with closing(read_catalogue(bus, topics)) as tables:
        names = list(pick(tables, 6, 5))
        results = list(regenerate(bus, topics, store, tables, engine, names, params))
    assert all(result.equal for result in results)
    assert len(results) == 6


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
