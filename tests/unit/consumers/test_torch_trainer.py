"""Tests of the torch trainer against a simple implementation of the step."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.learners.learner import Reference, Settings, TrainBatch
from dora_pipe.consumers.learners.torch.learner import TorchLearner
from dora_pipe.consumers.learners.torch.model import TorchModel, passage_of
from dora_pipe.core.errors import ConfigError, NonFinite, PolicyError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.model_dir import export_model, import_model
from dora_pipe.store.store import PolicyStore
from tests.support.batches import SETTINGS, make_batch, poisoned
from tests.support.models import make_llama_gqa, make_qwen2
from tests.support.torch_policy import Policy

MAKE = {"qwen2": make_qwen2, "llama-gqa": make_llama_gqa}


@pytest.fixture(scope="module", params=MAKE)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp(request.param), MAKE[request.param])


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("qwen2"), make_qwen2)


def transformers_model(directory: Path, **options: Any) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(directory, **options)


def plain_logprobs(model: Any, token_ids: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1]
    table = torch.log_softmax(logits.double(), -1)
    return table.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def plain_loss(model: Any, reference: Any, batch: TrainBatch, settings: Settings) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    valid = [
        trajectory
        for group in batch.groups
        for trajectory in group.trajectories
        if trajectory.valid
    ]
    tokens = sum(row.sampled for row in valid)
    low, high = float(settings["objective.clip_low"]), float(settings["objective.clip_high"])
    kl = float(settings["objective.kl_coef"])
    for group in batch.groups:
        rewards = torch.tensor(
            [
                trajectory.reward
                for trajectory in group.trajectories
                if trajectory.reward is not None
            ],
            dtype=torch.float64,
        )
        for trajectory in group.trajectories:
            if trajectory.reward is None:
                continue
            # A single valid trajectory has no group to compare with.
            std = rewards.std() if len(rewards) > 1 else torch.zeros(())
            advantage = (trajectory.reward - rewards.mean()) / (std + 1e-4)
            first = trajectory.meta.prompt_tokens
            logprobs = plain_logprobs(model, list(trajectory.token_ids))[first - 1 :]
            behaviour = torch.tensor(list(trajectory.logprobs)[first:], dtype=torch.float64)
            ratio = torch.exp(logprobs - behaviour)
            gain = torch.minimum(
                ratio * advantage, torch.clip(ratio, 1 - low, 1 + high) * advantage
            )
            with torch.no_grad():
                fixed = plain_logprobs(reference, list(trajectory.token_ids))[first - 1 :]
            penalty = torch.exp(fixed - logprobs) - (fixed - logprobs) - 1
            if settings["objective.loss"] == "token-mean":
                weight = 1 / tokens
            else:
                weight = 1 / (len(valid) * trajectory.sampled)
            total = total - (gain - kl * penalty).sum() * weight
    return total


@pytest.mark.parametrize("averaging", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_step_is_that_of_a_plain_implementation(
    policy: Policy, averaging: str, kl: float, tmp_path: Path
) -> None:
    settings = {
        **SETTINGS,
        "trainer.minibatches": 1,
        "objective.loss": averaging,
        "objective.kl_coef": kl,
    }
    batch = make_batch(seed=3, groups=3, samples=3, valid=0.8)
    trainer = policy.trainer(micro_batch_tokens=200)
    # Step away from version 0, so that the reference differs.
    trainer.train(make_batch(seed=9, groups=2, samples=2), settings)
    start = trainer.save_weights(tmp_path / "start")
    trainer.load(tmp_path / "start", digest=start.digest, optimizer=None)
    result = trainer.train(batch, settings)

    reference = transformers_model(policy.directory)
    plain = transformers_model(policy.directory)
    TorchModelState(plain).load(tmp_path / "start")
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    loss = plain_loss(plain, reference, batch, settings)
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    adamw.step()

    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    assert result.metrics["masked"] == sum(not entry.valid for entry in trajectories) > 0
    for name, parameter in plain.named_parameters():
        ours = dict(trainer._model.parameters())[name]
        # AdamW's first update is the gradient's sign, which may differ for noise.
        close = torch.isclose(ours, parameter, atol=1e-5)
        assert close.float().mean() > 0.995, name


def test_kl_is_to_the_version_that_the_batch_names(policy: Policy) -> None:
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.minibatches": 1}
    trainer = policy.trainer()
    trainer.train(make_batch(seed=1), settings)
    first = policy.store.publish_weights(trainer.save_weights)
    path = policy.store.weights_path(first.digest)

    def step(seed: int, version: int) -> float:
        named = {0: (policy.manifest.digest, policy.weights), 1: (first.digest, path)}[version]
        reference = Reference(version=version, digest=named[0], weights=named[1])
        batch = replace(make_batch(seed=seed), reference=reference)
        result = trainer.train(batch, {**settings, "trainer.reference": version})
        assert result.metrics["reference_version"] == version
        return result.metrics["kl"]

    assert step(2, 1) == 0.0, "the weights themselves"
    to_first, to_zero = step(3, 1), step(4, 0)
    assert 0 < to_first < to_zero
    plain = trainer.train(make_batch(seed=5), settings).metrics
    assert plain["kl"] > 0 and "reference_version" not in plain


def test_reference_of_other_weights_than_named_is_refused(qwen2: Policy) -> None:
    wrong = Reference(version=1, digest="0" * 64, weights=qwen2.weights)
    batch = replace(make_batch(seed=1), reference=wrong)
    settings = {**SETTINGS, "objective.kl_coef": 0.5, "trainer.reference": 1}
    with pytest.raises(PolicyError, match="holds other weights"):
        qwen2.trainer().train(batch, settings)


def test_weight_decay_is_that_of_a_plain_optimizer_and_leaves_vectors_alone(qwen2: Policy) -> None:
    batch, rate, decay = make_batch(seed=3, groups=2, samples=2), 1e-2, 0.5
    after: dict[float, dict[str, Tensor]] = {}
    for used in (0.0, decay):
        trainer = qwen2.trainer(weight_decay=used)
        trainer.train(batch, {**SETTINGS, "trainer.minibatches": 1, "trainer.learning_rate": rate})
        named = trainer._model.parameters()
        after[used] = {name: entry.detach().clone() for name, entry in named}
    before = {name: entry.detach() for name, entry in qwen2.trainer()._model.parameters()}
    vectors = {name for name, entry in before.items() if entry.ndim == 1}
    assert vectors and vectors != set(before)
    for name, start in before.items():
        shrunk = 0.0 if name in vectors else rate * decay
        expected = after[0.0][name] - start * shrunk
        assert torch.allclose(after[decay][name], expected, rtol=0, atol=1e-6), name


class TorchModelState:
    def __init__(self, network: Any) -> None:
        self.network = network

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        _, unexpected = self.network.load_state_dict(load_file(path), strict=False)
        assert not unexpected


def test_logprobs_are_those_of_transformers_and_padding_reaches_nothing(policy: Policy) -> None:
    model = TorchModel(policy.assets, device="cpu")
    model.load(policy.weights)
    assert model.lean
    rows: list[tuple[list[int], list[int], list[float | None]]] = [
        ([4, 5, 6, 7], [0, 0, 1, 1], [None, None, -1.0, -2.0]),
        ([9, 8], [0, 1], [None, -3.0]),
    ]
    passage = passage_of(rows, width=11, device="cpu")
    assert passage.lengths == (2, 1)
    assert passage.behaviour.tolist() == [-1.0, -2.0, -3.0]
    network = transformers_model(policy.directory)
    expected = [*plain_logprobs(network, rows[0][0])[1:], *plain_logprobs(network, rows[1][0])]
    logprobs = model.logprobs(passage)
    assert logprobs.tolist() == pytest.approx(torch.stack(expected).tolist(), abs=1e-5)
    model.lean = False
    assert torch.allclose(model.logprobs(passage), logprobs, atol=1e-6)


def test_trajectories_without_advantage_cost_nothing_but_count_in_the_mean(qwen2: Policy) -> None:
    settings = {**SETTINGS, "trainer.minibatches": 1}
    batch = make_batch(seed=6, groups=2, samples=3)
    trainer = qwen2.trainer()
    from dataclasses import replace

    level = TrainBatch(
        step=0,
        groups=[
            batch.groups[0],
            replace(
                batch.groups[1],
                trajectories=[
                    replace(trajectory, reward=0.5) for trajectory in batch.groups[1].trajectories
                ],
            ),
        ],
    )
    result = trainer.train(level, settings)
    assert result.metrics["without_gradient"] == 3
    assert [row["ratio_mean"] is None for row in result.contributions] == [False] * 3 + [True] * 3
    alone = qwen2.trainer().train(TrainBatch(step=0, groups=level.groups[:1]), settings)
    share = alone.metrics["tokens"] / result.metrics["tokens"]
    assert result.metrics["grad_norm"] == pytest.approx(
        alone.metrics["grad_norm"] * share, rel=1e-5
    )


def test_step_in_which_nothing_has_a_gradient_leaves_the_policy_as_it_was(qwen2: Policy) -> None:
    batch = make_batch(seed=7, groups=2, samples=1)
    trainer = qwen2.trainer()
    metrics = trainer.train(batch, SETTINGS).metrics
    assert metrics["updates"] == 0
    assert trainer.manifest() == qwen2.manifest


def test_a_minibatch_is_an_update_of_its_own(qwen2: Policy) -> None:
    batch = make_batch(seed=8, groups=4, samples=3)
    result = qwen2.trainer().train(batch, {**SETTINGS, "trainer.minibatches": 3})
    assert result.metrics["updates"] == 3
    by_group = {row["group"]: row["minibatch"] for row in result.contributions}
    assert list(by_group.values()) == [0, 1, 2, 0]
    # The second update sees a changed policy, with other ratios.
    on_policy = qwen2.trainer().train(batch, {**SETTINGS, "trainer.minibatches": 1})
    changed = [
        abs(row["ratio_mean"] - same["ratio_mean"]) > 1e-4
        for row, same in zip(result.contributions, on_policy.contributions, strict=True)
    ]
    assert changed == [bool(row["minibatch"]) for row in result.contributions]


@pytest.mark.parametrize("logprob", [-200.0, -1e30])
def test_infinite_ratio_is_not_committed_and_names_the_way_out(
    qwen2: Policy, logprob: float
) -> None:
    batch = poisoned(make_batch(seed=2, groups=1, samples=2), logprob)
    with pytest.raises(NonFinite, match="gradient norm") as caught:
        qwen2.trainer().train(batch, SETTINGS)
    assert "fail-batch" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("reward", "divided"), [(1e39, False), (1e200, False), (1e200, True), (1.7e308, True)]
)
def test_rewards_that_overflow_are_not_committed_and_name_the_way_out(
    qwen2: Policy, reward: float, divided: bool
) -> None:
    batch = make_batch(seed=2, groups=1, samples=4)
    rewards = [reward, reward, reward, -reward]
    samples = [
        replace(trajectory, reward=value)
        for trajectory, value in zip(batch.groups[0].trajectories, rewards, strict=True)
    ]
    batch = replace(batch, groups=[replace(batch.groups[0], trajectories=samples)])
    settings = {**SETTINGS, "objective.advantage_std": divided}
    with pytest.raises(NonFinite) as caught:
        qwen2.trainer().train(batch, settings)
    assert "fail-batch" in str(caught.value.hint)


@pytest.mark.parametrize(
    "change",
    [
        {"trainer.learning_rate": "fast"},
        {"objective.loss": "median"},
        {"trainer.minibatches": 1.5},
        {"objective.kl_coef": None},
        {"trainer.learning_rate": 1e39},
        {"trainer.learning_rate": math.nan},
        {"trainer.minibatches": 0},
    ],
)
def test_settings_of_another_type_are_a_config_error(qwen2: Policy, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        qwen2.trainer().train(make_batch(seed=1, groups=1), {**SETTINGS, **change})


def test_tied_weights_are_written_once_and_load_with_transformers(tmp_path: Path) -> None:
    policy = Policy(tmp_path, make_llama_gqa)
    trainer = policy.trainer()
    trainer.train(make_batch(seed=1, groups=2), SETTINGS)
    manifest: Manifest = policy.store.publish_weights(trainer.save_weights)
    names = [tensor.name for tensor in manifest.tensors]
    assert "lm_head.weight" not in names
    assert names == [tensor.name for tensor in policy.manifest.tensors]
    export_model(policy.store, manifest.digest, policy.assets.name, tmp_path / "out")
    loaded, info = transformers_model(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ours = dict(trainer._model.parameters())
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, ours[name]), name


def test_weights_of_another_shape_are_refused(policy: Policy, tmp_path: Path) -> None:
    other = PolicyStore(tmp_path / "policies")
    small, _ = import_model(other, make_qwen2(tmp_path / "model", hidden_size=64))
    with pytest.raises(PolicyError, match="does not fit the model"):
        policy.trainer().load(other.weights_path(small.digest), digest=small.digest, optimizer=None)


def test_directory_that_is_no_model_is_a_policy_error(tmp_path: Path, qwen2: Policy) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(PolicyError, match="cannot build a causal LM"):
        TorchLearner(tmp_path, reference=qwen2.weights)


def test_figures_are_finite_and_describe_the_batch(qwen2: Policy) -> None:
    batch = make_batch(seed=1, step=3, groups=3, samples=3)
    metrics = qwen2.trainer().train(batch, SETTINGS).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    rewards = [
        trajectory.reward
        for group in batch.groups
        for trajectory in group.trajectories
        if trajectory.reward
    ]
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert metrics["trajectories"] == 9
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 3
    assert metrics["token_staleness"] == 3
    assert metrics["tokens"] == sum(
        trajectory.sampled for group in batch.groups for trajectory in group.trajectories
    )
