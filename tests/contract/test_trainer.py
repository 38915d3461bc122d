"""Tests of every trainer: equal inputs give equal bytes, and files restore the state."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora_pipe.consumers.contributions import read_contributions, write_contributions
from dora_pipe.consumers.learners.learner import Learner, LeavesDevice, Settings, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner, initial_weights
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Manifest, PolicyDtype
from dora_pipe.store.adapters import stands_on
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore
from tests.support import deepspeed, device
from tests.support.adapters import LAYERS, RANK
from tests.support.batches import SETTINGS, make_batch
from tests.support.models import make_further, make_llama_gqa, make_qwen2, make_qwen3_moe
from tests.support.tiers import more


@dataclass
class Subject:
    store: PolicyStore
    policy: Manifest
    make: Callable[[], Learner]
    lora: bool = False
    """Its policies are adapters on version 0."""

    def fresh(self) -> Learner:
        trainer = self.make()
        weights = self.store.weights_path(self.policy.digest)
        trainer.load(weights, digest=self.policy.digest, optimizer=None)
        return trainer


LORA_OPTIONS = LoraOptions(rank=RANK, alpha=8.0, targets=LAYERS)


def _torch_subject(
    root: Path,
    make_model: Callable[[Path], Path],
    lora: LoraOptions | None = None,
    dtype: PolicyDtype = "float32",
) -> Subject:
    store = PolicyStore(root / "policies")
    policy, assets = import_model(store, make_model(root / "model"), dtype)
    reference = store.weights_path(policy.digest)
    device.prepare()
    options = TorchOptions(micro_batch_tokens=256, device=device.DEVICE, lora=lora)
    return Subject(
        store=store,
        policy=policy,
        make=lambda: TorchLearner(store.assets_path(assets), reference=reference, options=options),
        lora=lora is not None,
    )


def _simulated_subject(root: Path) -> Subject:
    store = PolicyStore(root / "policies")
    return Subject(
        store=store, policy=store.publish_weights(initial_weights), make=SimulatedLearner
    )


def _deepspeed_subject(root: Path, kind: str) -> Subject:
    deepspeed.need_deepspeed()
    _, stage, *words = kind.split("-")
    more = [word for word in words if word not in ("lora", "published")]
    dtype, offload = (more + ["float32", "none"][len(more) :])[:2]
    store = PolicyStore(root / "policies")
    published: PolicyDtype = "bfloat16" if "published" in words else "float32"
    policy, assets = import_model(store, make_llama_gqa(root / "model"), published)
    log = deepspeed.BatchLog(root / "log.sqlite")
    return Subject(
        store=store,
        policy=policy,
        make=lambda: deepspeed.make_learner(
            store.assets_path(assets),
            store.weights_path(policy.digest),
            log,
            zero_stage=int(stage),
            dtype=dtype,
            offload=offload,
            lora=LORA_OPTIONS if "lora" in words else None,
        ),
        lora="lora" in words,
    )


DEEPSPEED = [f"deepspeed-{stage}{lora}" for lora in ("", "-lora") for stage in range(4)] + [
    "deepspeed-2-bfloat16",
    "deepspeed-2-bfloat16-optimizer",
    "deepspeed-3-bfloat16-all",
    "deepspeed-3-lora-bfloat16",
    "deepspeed-1-lora-published",
    "deepspeed-3-lora-published-float32-all",
]
TORCH = {
    "qwen2": make_qwen2,
    "llama-gqa": make_llama_gqa,
    "qwen3-moe": make_qwen3_moe,
    "glm4-moe": make_further,
}


BFLOAT16 = {
    "llama-gqa-published-in-bfloat16": make_llama_gqa,
    "qwen3-moe-published-in-bfloat16": make_qwen3_moe,
    "llama-gqa-lora-published-in-bfloat16": make_llama_gqa,
}


FAST = ("qwen2", "qwen3-moe", "llama-gqa-published-in-bfloat16", "simulated")
SLOW = ("llama-gqa", "llama-gqa-lora", "glm4-moe", "qwen3-moe-published-in-bfloat16")


@pytest.fixture(
    scope="module",
    params=[*FAST, "llama-gqa-lora-published-in-bfloat16", *more(SLOW), *DEEPSPEED],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    root = tmp_path_factory.mktemp(str(request.param))
    if request.param == "simulated":
        return _simulated_subject(root)
    if request.param in DEEPSPEED:
        return _deepspeed_subject(root, str(request.param))
    if request.param == "llama-gqa-lora":
        return _torch_subject(root, make_llama_gqa, LORA_OPTIONS)
    if request.param in BFLOAT16:
        lora = LORA_OPTIONS if "lora" in request.param else None
        return _torch_subject(root, BFLOAT16[request.param], lora, dtype="bfloat16")
    return _torch_subject(root, TORCH[request.param])


def batches(count: int) -> list[TrainBatch]:
    return [make_batch(seed=step, step=step, groups=3, samples=3) for step in range(count)]


def train(trainer: Learner, *steps: TrainBatch, settings: Settings = SETTINGS) -> list[str]:
    digests = []
    for batch in steps:
        trainer.train(batch, settings)
        digests.append(trainer.manifest().digest)
    return digests


def test_two_runs_from_the_same_checkpoint_are_bit_equal(subject: Subject) -> None:
    steps = batches(3)
    first = train(subject.fresh(), *steps)
    assert first == train(subject.fresh(), *steps)
    assert len({subject.policy.digest, *first}) == 4


def test_saved_and_loaded_it_goes_on_as_if_it_had_never_stopped(
    subject: Subject, tmp_path: Path
) -> None:
    steps = batches(4)
    trainer = subject.fresh()
    train(trainer, *steps[:2])
    manifest = trainer.save_weights(tmp_path / "weights")
    trainer.save_optimizer(tmp_path / "optimizer")
    uninterrupted = train(trainer, *steps[2:])
    loaded = subject.make()
    loaded.load(tmp_path / "weights", digest=manifest.digest, optimizer=tmp_path / "optimizer")
    assert train(loaded, *steps[2:]) == uninterrupted


def test_what_leaves_its_device_between_steps_comes_back_bit_for_bit(
    subject: Subject, tmp_path: Path
) -> None:
    steps, stayed, moved = batches(3), subject.fresh(), subject.fresh()
    if not isinstance(moved, LeavesDevice):
        assert subject.make().name == "simulated"
        return
    for step in steps:
        moved.leave_device()
        assert train(moved, step) == train(stayed, step)
    moved.leave_device()
    moved.leave_device()
    assert moved.save_weights(tmp_path / "left") == stayed.save_weights(tmp_path / "stayed")
    moved.leave_device()
    moved.save_optimizer(tmp_path / "left")
    stayed.save_optimizer(tmp_path / "stayed")
    assert (tmp_path / "left").read_bytes() == (tmp_path / "stayed").read_bytes()


def test_what_has_left_its_device_loads_other_weights(subject: Subject, tmp_path: Path) -> None:
    trainer, steps = subject.fresh(), batches(2)
    if isinstance(trainer, LeavesDevice):
        trainer.train(steps[0], SETTINGS)
        trainer.leave_device()
    weights = subject.store.weights_path(subject.policy.digest)
    trainer.load(weights, digest=subject.policy.digest, optimizer=None)
    assert train(trainer, *steps) == train(subject.fresh(), *steps)


def test_optimizer_state_is_written_as_it_was_read(subject: Subject, tmp_path: Path) -> None:
    trainer = subject.fresh()
    train(trainer, *batches(2))
    manifest = trainer.save_weights(tmp_path / "weights")
    trainer.save_optimizer(tmp_path / "one")
    loaded = subject.make()
    loaded.load(tmp_path / "weights", digest=manifest.digest, optimizer=tmp_path / "one")
    loaded.save_optimizer(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_optimizer_state_of_version_0_can_be_kept_too(subject: Subject, tmp_path: Path) -> None:
    subject.fresh().save_optimizer(tmp_path / "optimizer")
    trainer = subject.make()
    weights = subject.store.weights_path(subject.policy.digest)
    trainer.load(weights, digest=subject.policy.digest, optimizer=tmp_path / "optimizer")
    steps = batches(1)
    assert train(trainer, *steps) == train(subject.fresh(), *steps)


def test_without_its_optimizer_state_it_goes_on_elsewhere(subject: Subject, tmp_path: Path) -> None:
    steps = batches(2)
    trainer = subject.fresh()
    train(trainer, steps[0])
    manifest = trainer.save_weights(tmp_path / "weights")
    loaded = subject.make()
    loaded.load(tmp_path / "weights", digest=manifest.digest, optimizer=None)
    assert train(loaded, steps[1]) != train(trainer, steps[1])


def test_manifest_is_that_of_the_file_it_writes(subject: Subject, tmp_path: Path) -> None:
    trainer = subject.fresh()
    assert trainer.manifest() == subject.policy
    train(trainer, *batches(1))
    written = trainer.save_weights(tmp_path / "weights")
    assert trainer.manifest() == written == read_manifest(tmp_path / "weights")
    assert stands_on(written, subject.policy.digest) == subject.lora
    if subject.lora:
        return
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in written.tensors] == [
        (tensor.name, tensor.dtype, tensor.shape) for tensor in subject.policy.tensors
    ]


def test_weights_with_another_digest_are_refused(subject: Subject) -> None:
    weights = subject.store.weights_path(subject.policy.digest)
    with pytest.raises(PolicyError, match="other weights"):
        subject.make().load(weights, digest="0" * 64, optimizer=None)


def test_weights_as_optimizer_state_are_refused(subject: Subject) -> None:
    weights = subject.store.weights_path(subject.policy.digest)
    with pytest.raises(PolicyError):
        subject.make().load(weights, digest=subject.policy.digest, optimizer=weights)


def test_every_digit_of_the_learning_rate_counts(subject: Subject) -> None:
    steps = batches(1)
    other = {**SETTINGS, "trainer.learning_rate": 1.001e-3}
    assert train(subject.fresh(), *steps) != train(subject.fresh(), *steps, settings=other)


def test_contributions_have_a_row_per_trajectory_in_the_order_of_the_batch(
    subject: Subject, tmp_path: Path
) -> None:
    batch = make_batch(seed=1, step=2, groups=3, samples=4, valid=0.7)
    result = subject.fresh().train(batch, SETTINGS)
    write_contributions(tmp_path / "rows", result.contributions)
    rows = read_contributions(tmp_path / "rows")
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    assert [row["trajectory"] for row in rows] == [
        trajectory.trajectory for trajectory in trajectories
    ]
    assert [row["reward"] for row in rows] == [trajectory.reward for trajectory in trajectories]
    assert [row["advantage"] is None for row in rows] == [
        not trajectory.valid for trajectory in trajectories
    ]
    assert {row["staleness"] for row in rows} == {2}
    assert result.metrics["tokens"] > 0


def test_fingerprint_is_made_of_words_and_stays(subject: Subject) -> None:
    numerics = subject.make().numerics()
    assert numerics == subject.fresh().numerics()
    assert numerics["trainer"].startswith(subject.make().name)
    assert all(isinstance(value, str) and value for value in numerics.values())
