"""Tests that engine and trainer use softmax(logits / temperature)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.registry import make_learner, make_scorer
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.batches import SETTINGS, make_trajectory
from tests.support.configs import plain_config
from tests.support.engine_contract import request, run
from tests.support.models import make_qwen2
from tests.support.torch_policy import Policy

HOT = 0.7
ONE_UPDATE = {**SETTINGS, "trainer.minibatches": 1, "objective.kl_coef": 0.0}


class Sampling(Policy):
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
def policy(tmp_path_factory: pytest.TempPathFactory) -> Sampling:
    root = tmp_path_factory.mktemp("policy")
    return Sampling(root, partial(make_qwen2, scale=0.4), temperature=HOT)


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
    policy: Sampling, changes: dict[str, Any]
) -> None:
    batch = policy.sampled(params(**changes))
    metrics = policy.trainer().train(batch, ONE_UPDATE).metrics
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    other = policy.trainer(temperature=1.0).train(batch, ONE_UPDATE).metrics
    assert other["ratio_max"] - other["ratio_min"] > 0.05


@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_gradient_is_that_of_the_tempered_policy(policy: Sampling, kl: float) -> None:
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
    metrics = policy.trainer().train(batch, {**ONE_UPDATE, "objective.kl_coef": kl}).metrics
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)  # trained and reference at one temperature


def test_trainer_and_scorer_of_a_run_are_at_the_temperature_of_its_records(
    policy: Sampling,
) -> None:
    config = logged_config(plain_config(sampling={"temperature": HOT}))
    for make in (make_learner, make_scorer):
        created: Any = make(assets=policy.assets, reference=policy.weights, config=config)
        assert created._options.temperature == HOT
    assert sampling_params(config.sampling, ()).logprob_temperature == HOT
