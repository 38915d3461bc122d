"""Tests that engine and trainer use softmax(logits / temperature)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.registry import make_learner, make_scorer
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support.batches import SETTINGS, make_trajectory
from tests.support.engine_contract import request, run
from tests.support.models import make_qwen2

HOT = 0.7
PLAIN: dict[str, Any] = {
    "run": {"name": "r", "steps": 4},
    "model": {"path": "m"},
    "task": {"kind": "arithmetic"},
}
ONE_UPDATE = {**SETTINGS, "trainer.minibatches": 1, "objective.kl_coef": 0.0}


class Policy:
    def __init__(self, root: Path) -> None:
        self.directory = make_qwen2(root / "model", scale=0.4)
        self.store = PolicyStore(root / "policies")
        self.manifest, assets = import_model(self.store, self.directory)
        self.assets = self.store.assets_path(assets)
        self.weights = self.store.weights_path(self.manifest.digest)

    def trainer(self, temperature: float, lora: LoraOptions | None = None) -> TorchLearner:
        options = TorchOptions(temperature=temperature, lora=lora)
        learner = TorchLearner(self.assets, reference=self.weights, options=options)
        learner.load(self.weights, digest=self.manifest.digest, optimizer=None)
        return learner

    def sampled(self, params: SamplingParams) -> TrainBatch:
        engine = TorchEngine.open(self.directory, slots=8, context_tokens=64, threads=1)
        names = [
            trajectory_id(group_id("train", index), entry)
            for index in range(2)
            for entry in range(4)
        ]
        expected = [
            replace(request(name, [5, 6, 7], seed=index), params=params)
            for index, name in enumerate(names)
        ]
        results = run(engine, expected)
        rows = [self._trajectory(name, results[name], index) for index, name in enumerate(names)]
        groups = [
            TrainGroup(
                group=group_id("train", index),
                version=0,
                trajectories=rows[4 * index : 4 * index + 4],
            )
            for index in range(2)
        ]
        return TrainBatch(step=0, groups=groups)

    def _trajectory(self, name: str, result: Any, position: int) -> Trajectory:
        trajectory = make_trajectory(
            name,
            prompt=[5, 6, 7],
            sampled=result.tokens,
            logprobs=result.logprobs,
            reward=float(position % 3),
        )
        return replace(trajectory, sampler_logprobs=[None] * 3 + list(result.sampler_logprobs))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": HOT, "logprob_temperature": HOT, "max_tokens": 12, **changes}
    )


def tempered(model: Any, ids: list[int], first: int, temperature: float) -> Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    table = torch.log_softmax(logits / temperature, -1)
    return table.gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :, 0]


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.05}])
def test_on_policy_the_ratio_is_one_at_the_temperature_of_the_sampler(
    policy: Policy, changes: dict[str, Any]
) -> None:
    batch = policy.sampled(params(**changes))
    metrics = policy.trainer(HOT).train(batch, ONE_UPDATE).metrics
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    other = policy.trainer(1.0).train(batch, ONE_UPDATE).metrics
    assert other["ratio_max"] - other["ratio_min"] > 0.05


def test_without_truncation_what_is_recorded_is_what_was_drawn_from(policy: Policy) -> None:
    plain, cut = policy.sampled(params()), policy.sampled(params(top_k=3))
    for entry in (row for group in plain.groups for row in group.trajectories):
        assert list(entry.logprobs) == list(entry.sampler_logprobs)
    below = [
        (logprob, sampler)
        for group in cut.groups
        for trajectory in group.trajectories
        for logprob, sampler in zip(trajectory.logprobs, trajectory.sampler_logprobs, strict=True)
        if logprob is not None and sampler is not None
    ]
    assert all(logprob < sampler for logprob, sampler in below)


@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_gradient_is_that_of_the_tempered_policy(policy: Policy, kl: float) -> None:
    batch = policy.sampled(params())
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(policy.directory)
    rows = [trajectory for group in batch.groups for trajectory in group.trajectories]
    tokens = sum(row.sampled for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for group in batch.groups:
        rewards = torch.tensor(
            [trajectory.reward for trajectory in group.trajectories], dtype=torch.float64
        )
        for trajectory, worth in zip(group.trajectories, rewards - rewards.mean(), strict=True):
            logprobs = tempered(model, list(trajectory.token_ids), 3, HOT)
            w = torch.tensor(list(trajectory.logprobs)[3:], dtype=torch.float64)
            gain = torch.exp(logprobs - w) * worth / (rewards.std() + 1e-4)
            r = logprobs.detach() - logprobs  # the reference is the same model
            total = total - (gain - kl * (torch.exp(r) - r - 1)).sum() / tokens
    torch.autograd.backward(total)
    norm = math.sqrt(
        sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())
    )
    metrics = policy.trainer(HOT).train(batch, {**ONE_UPDATE, "objective.kl_coef": kl}).metrics
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)  # trained and reference at one temperature


def test_trainer_and_scorer_of_a_run_are_at_the_temperature_of_its_records(policy: Policy) -> None:
    config = logged_config({**PLAIN, "sampling": {"temperature": HOT}})
    for make in (make_learner, make_scorer):
        created: Any = make(assets=policy.assets, reference=policy.weights, config=config)
        assert created._options.temperature == HOT
    assert sampling_params(config.sampling, ()).logprob_temperature == HOT
