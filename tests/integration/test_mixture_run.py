"""Tests of mixtures of experts from warm start to export, with routing stored outside the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.export import export_policy
from dora_pipe.audit.prune import plan_blobs
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.blobs import BlobBus, BlobFiles, blob_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.learners.sft import Example, SftOptions, train_sft
from dora_pipe.consumers.learners.torch.model import load_weights
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.records import Record
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.schemas.routes import number_type
from dora_pipe.schemas.trajectory import Progress
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.cluster import TRAINER, Cluster, TorchParts, make_config
from tests.support.models import make_further, make_glm4_moe, make_qwen3_moe
from tests.support.tiers import more
from tests.support.worker import VirtualClock

STEPS = 2
MANY = 300
"""Experts of one of them: more than a byte can name."""
KINDS: dict[str, tuple[Callable[..., Path], PolicyDtype, bool]] = {
    "qwen3_moe": (make_qwen3_moe, "bfloat16", False),
    "many": (
        partial(make_glm4_moe, n_routed_experts=MANY, moe_intermediate_size=8),
        "float32",
        True,
    ),
    "further": (make_further, "float32", True),
}
"""The last says whether experts are recorded and trained by."""
BLOB_ABOVE = 1000
"""Bytes of a record that lies beside the log, where experts are recorded."""
MEMORY = {"gradient_checkpointing": True, "packing": True}


class LargeRecordCluster(Cluster):
    def open_log(self) -> Bus:
        blobs = BlobFiles(self.store.root / "blobs")
        return BlobBus(SqliteBus(self.path), blobs, above_bytes=BLOB_ABOVE)


@pytest.fixture(scope="module", params=["many", *more(["qwen3_moe", "further"])])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    make, dtype, routes = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    warm = folder / "warm"
    examples = [Example(token_ids=[1, *range(20, 30)], mask=[0, *([1] * 10)])]
    options = SftOptions(steps=2, batch=2)
    cold = make(folder / "cold", scale=20.0)
    train_sft(cold, examples, warm, encode=lambda example: example, options=options)
    config = make_config(
        run__steps=STEPS,
        run__name="mixture",
        sampling__max_tokens=8,
        sampling__return_routed_experts=routes,
        workers__checkpoint_tokens=3,
        rollout__group_size=2,
        rollout__prompts_per_step=2,
        trainer__checkpoint_every=2,
        trainer__learning_rate=1e-3,
        evaluation__every=0,
        policies__full_every=STEPS + 1,
        **{f"trainer__{key}": value for key, value in MEMORY.items()},
    )
    parts = TorchParts(warm, dtype=dtype)
    make_cluster = LargeRecordCluster if routes else Cluster
    with make_cluster(folder / "run", config, parts=parts, workers=("w0",)) as running:
        running.until(lambda: running.version >= 1)
        running.restart(TRAINER)
        running.until(lambda: bool(progress_of(running)))
        running.restart("w0")
        running.run()
        yield running


def progress_of(cluster: Cluster) -> list[Progress]:
    records = cluster.records(cluster.topics.progress)
    progress = [decode_any_progress(record.value) for record in records]
    return [
        progress
        for progress in progress
        if isinstance(progress, Progress) and progress.trajectory[0] == "g"
    ]


def test_the_audit_is_clean_and_steps_come_out_bit_for_bit(cluster: Cluster) -> None:
    cluster.clean_report()
    assert list((cluster.store.root / "deltas").glob("*.delta"))
    lines = cluster.replayed(0, STEPS)
    assert [line.equal for line in lines] == [True] * STEPS
    experts = MANY if "many" in str(cluster.directory) else 8
    routed = cluster.config.sampling.return_routed_experts
    for record in cluster.records(cluster.topics.trajectories):
        trajectory = decode_trajectory(record.value)
        asked = routed and trajectory.meta.purpose == "train"
        assert (trajectory.routed_experts is not None) == asked
        if trajectory.routed_experts is not None:
            assert trajectory.routed_experts.experts == experts
            assert trajectory.routed_experts.choices.dtype == number_type(experts)
    assert {entry.routed_experts is not None for entry in progress_of(cluster)} == {routed}


def test_records_beside_the_log_are_trained_and_kept_and_one_that_is_damaged_is_named(
    cluster: Cluster,
) -> None:
    store, topics = cluster.store, cluster.topics
    if not cluster.config.sampling.return_routed_experts:
        assert not store.blobs()
        return
    record, path = claimed(cluster)
    clock = VirtualClock()
    clock.ns += max(blob.modified_ns for blob in store.blobs()) + 10**13 - clock.wall_ns()
    with closing(cluster.open_log()) as bus:
        plan = plan_blobs(bus, topics, store, clock=clock)
    assert (plan.files, plan.candidates, plan.note) == (len(store.blobs()), (), "")
    data = path.read_bytes()
    for changed, why in (
        (data[:-1] + b"?", "has another digest"),
        (None, "the store has no such value"),
    ):
        path.unlink() if changed is None else path.write_bytes(changed)
        (violation,) = audit(cluster.bus, topics, store.root).violations
        assert dict(record.headers)["trajectory"].decode() in violation.line
        assert f"cannot be read: blob {path.name}: " in violation.line
        assert why in violation.line
        with pytest.raises(InvariantBroken, match=f"cannot be read: blob {path.name}"):
            cluster.replayed(0, STEPS)
    path.write_bytes(data)
    assert audit(cluster.bus, topics, store.root).holds


def claimed(cluster: Cluster) -> tuple[Record, Path]:
    with closing(SqliteBus(cluster.path)) as bus:
        records = records_of(bus, ends_of(bus, cluster.topics.trajectories))
        results = [record for record in records if blob_of(record) and record.key.startswith(b"g")]
    assert len(results) > 4
    return results[0], cluster.store.root / "blobs" / blob_of(results[0])


def test_trajectories_come_out_bit_for_bit_and_the_export_is_what_was_trained(
    cluster: Cluster, tmp_path: Path
) -> None:
    results = cluster.regenerated(4)
    with closing(read_catalogue(cluster.bus, cluster.topics)) as tables:
        versions = dict(tables.query("select version, digest from versions"))
        digest = export_policy(tables, cluster.store, STEPS, tmp_path)
    assert [result.equal for result in results] == [True] * 4
    assert read_manifest(tmp_path / "model.safetensors").digest == digest
    assert digest == versions[STEPS] != versions[0]
    network = build(cluster.assets)
    load_weights(network, cluster.store.weights(digest))
    read: Any = AutoModelForCausalLM.from_pretrained
    theirs = read(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(30).reshape(2, -1)
    with torch.no_grad():
        assert torch.equal(network(ids).logits, theirs(ids).logits)
    assert further(tmp_path) == further(cluster.directory.parent / "cold")


def further(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model.safetensors")
    return {
        name: tensor.numpy().tobytes() for name, tensor in tensors.items() if ".layers.2." in name
    }
