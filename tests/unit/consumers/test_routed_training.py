"""Tests of training with logged routes and live router weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from dora_pipe.audit.mismatch import measure
from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.torch.memory import MemoryOptions
from dora_pipe.consumers.learners.torch.model import TorchModel, passage_of
from dora_pipe.consumers.learners.torch.routing import RoutedExperts
from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import TokensSampled
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.routes import Routes
from tests.support.batches import SETTINGS, make_batch, make_trajectory, routed
from tests.support.engine_contract import request as engine_request
from tests.support.models import MIXTURE
from tests.support.torch_engines import make
from tests.support.torch_policy import Policy, gradients_of

PROMPT = [1, *range(20, 36)]
AGAIN = MemoryOptions(gradient_checkpointing=True)
LAID: list[dict[str, Any]] = [
    {"memory": MemoryOptions(packing=True)},
    {"micro_batch_tokens": 60},
]
NEAR = 1e-5
"""Tolerance in nats between engine and trainer with equal weights and experts."""


class Mixture(Policy):
    def model(self) -> TorchModel:
        model = TorchModel(self.assets, device="cpu")
        model.load(self.weights)
        return model

    def sampled(self) -> TokensSampled:
        engine = TorchEngine.open(
            self.directory, slots=1, context_tokens=64, threads=1, routes=True
        )
        engine.add(engine_request("r", PROMPT, max_tokens=20, routes=True))
        events = [event for _ in range(20) for event in engine.step()]
        (event,) = [event for event in events if isinstance(event, TokensSampled)]
        return event


@pytest.fixture(scope="module", params=["qwen3_moe", "grouped"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(tmp_path_factory.mktemp(request.param), partial(make, request.param))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(tmp_path_factory.mktemp("one"), partial(make, "qwen3_moe"))


def logprobs(model: TorchModel, sampled: TokensSampled, routes: Routes | None) -> torch.Tensor:
    ids = [*PROMPT, *sampled.token_ids]
    mask = [0] * len(PROMPT) + [1] * len(sampled.token_ids)
    row = (ids, mask, [0.0] * len(ids))
    choices = [None if routes is None else routes.choices]
    with torch.no_grad():
        return model.logprobs(passage_of([row], width=40, device="cpu", choices=choices))


def turned(routes: Routes) -> Routes:
    choices = np.array(routes.choices)
    choices[1:] = (choices[1:] + 1) % routes.experts
    return Routes.of(choices, routes.experts)


def test_under_equal_weights_log_probs_are_those_of_the_engine(policy: Mixture) -> None:
    text, model = policy.sampled(), policy.model()
    assert text.routes is not None
    recorded = torch.tensor(text.logprobs)
    assert float((logprobs(model, text, text.routes) - recorded).abs().max()) < NEAR
    assert (model.routed.differing, model.routed.seen) == (0, model.routed.layers * 36)
    elsewhere = logprobs(model, text, turned(text.routes))
    assert float((elsewhere - recorded).abs().max()) > 1e-3
    assert model.routed.differing > 0
    assert float((logprobs(model, text, None) - recorded).abs().max()) < NEAR


def test_experts_of_another_model_are_refused(qwen3: Mixture) -> None:
    text, model = qwen3.sampled(), qwen3.model()
    assert text.routes is not None
    many = Routes.of(text.routes.choices[:, :1], 8)
    with pytest.raises(PolicyError, match="experts of 1 layers, 2 for a token"):
        logprobs(model, text, many)


def test_a_router_of_deepseek_that_chooses_group_by_group_takes_experts_of_a_record() -> None:
    heads = dict(head_dim=8, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16)
    heads |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    mixture = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1)
    mixture |= dict(n_group=2, topk_group=1)
    torch.manual_seed(0)
    make: Any = DeepseekV3ForCausalLM
    network = make(DeepseekV3Config(**MIXTURE | heads | mixture)).eval()
    gate = network.model.layers[1].mlp.gate
    torch.nn.init.normal_(gate.weight)
    ids, routed = torch.tensor([PROMPT]), RoutedExperts(network)
    tensors: list[torch.Tensor] = []
    with torch.no_grad():
        hook = gate.register_forward_hook(lambda *text: tensors.append(text[2][2]))
        own = network(ids).logits
        hook.remove()
        (chosen,) = tensors
        assert (chosen // 4 == chosen[:, :1] // 4).all(), "of one group of four"
        routed.take(chosen.unsqueeze(1))
        assert torch.equal(network(ids).logits, own)
        routed.take((chosen.unsqueeze(1) + 1) % 8)
        assert (network(ids).logits - own).abs().max() > 1e-3
        assert (routed.differing > 0, routed.seen) == (True, 2 * len(PROMPT))


@pytest.mark.parametrize("planted", [False, True])
def test_a_disturbance_of_the_router_is_called_routing(
    planted: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = Mixture(tmp_path_factory.mktemp("planted"), partial(make, "glm4_moe"))
    engine = TorchEngine.open(policy.directory, slots=4, context_tokens=64, threads=1, routes=True)
    experts = engine._weights.layers[1].experts if engine._weights else None
    assert experts is not None and experts.choice_bias is not None
    if planted:  # Other experts are chosen, with unchanged weights.
        experts.choice_bias.add_(torch.linspace(0, 0.2, 8))
    names = [trajectory_id(group_id("train", 0), sample) for sample in range(4)]
    for seed, name in enumerate(names):
        engine.add(engine_request(name, PROMPT, seed=seed, max_tokens=20, routes=True))
    events = [event for _ in range(20) for event in engine.step()]
    by_request = {event.request: event for event in events if isinstance(event, TokensSampled)}
    created = [
        replace(
            make_trajectory(
                name,
                prompt=PROMPT,
                sampled=by_request[name].token_ids,
                logprobs=by_request[name].logprobs,
            ),
            routed_experts=by_request[name].routes,
        )
        for name in names
    ]
    batch = TrainBatch(
        step=0, groups=[TrainGroup(group=names[0][:11], version=0, trajectories=created)]
    )
    measurement = measure(
        batch, policy.trainer(), lambda _: (policy.weights, policy.manifest.digest)
    )
    causes = {metric.cause: metric for metric in measurement.metrics}
    assert measurement.rerouted is not None and measurement.rerouted.choices == 4 * 36
    assert causes["numerics"].largest < NEAR and causes["trained"].largest < NEAR
    if not planted:
        assert measurement.rerouted.differing == 0 and causes["routing"].largest < NEAR
        return
    assert measurement.rerouted.differing > 0
    assert causes["routing"].largest > 100 * NEAR
    share = causes["routing"].share
    assert share is not None and share > 0.99
    assert measurement.plain()["causes"]["routing"]["share"] == share


def gradients(policy: Mixture, batch: TrainBatch, **options: Any) -> dict[str, torch.Tensor]:
    step = {**SETTINGS, "objective.kl_coef": 0.2, "trainer.minibatches": 1}
    step |= {"trainer.max_grad_norm": 1e9}
    return gradients_of(policy.trainer(**options), batch, step)


def apart(tensors: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    pairs = [(tensors[name].double(), other[name].double()) for name in other]
    gap = sum(float((a - b).square().sum()) for a, b in pairs)
    return float(np.sqrt(gap / sum(float(b.square().sum()) for _, b in pairs)))


def test_a_step_goes_where_the_log_says_however_it_is_laid_out(qwen3: Mixture) -> None:
    batch = routed(make_batch(seed=0), layers=2)
    logged = gradients(qwen3, batch)
    assert apart(gradients(qwen3, make_batch(seed=0)), logged) > 1e-2
    assert float(logged["model.layers.1.mlp.gate.weight"].abs().max()) > 0
    again = gradients(qwen3, batch, memory=AGAIN)
    assert all(torch.equal(again[name], fact) for name, fact in logged.items())
    for options in LAID:
        assert apart(gradients(qwen3, batch, **options), logged) < 1e-5


def test_the_loss_of_routers_is_transformers_own_of_every_sequence(qwen3: Mixture) -> None:
    model, ids = qwen3.model(), [list(range(4, 14)), list(range(20, 51))]
    rows = [(token_id, [0, *[1] * (len(token_id) - 1)], [0.0] * len(token_id)) for token_id in ids]
    passage = passage_of(rows, width=40, device="cpu")
    for weights, row in zip(([1.0, 0.0], [0.0, 1.0]), ids, strict=True):
        entry = model.logprobs_and_balance(passage, weights)[1]
        network = model.network(input_ids=torch.tensor([row]), output_router_logits=True)
        torch.testing.assert_close(entry, network.aux_loss, rtol=1e-6, atol=1e-6)


def test_the_loss_of_routers_is_added_by_its_weight_however_a_step_is_laid_out(
    qwen3: Mixture,
) -> None:
    batch = routed(make_batch(seed=0), layers=2)
    plain, full = (gradients(qwen3, batch, router_aux_loss=entry) for entry in (0.0, 0.5))
    twice = gradients(qwen3, batch, router_aux_loss=1.0)
    gate = "model.layers.0.mlp.gate.weight"
    added = full[gate] - plain[gate]
    torch.testing.assert_close(twice[gate] - plain[gate], 2 * added, rtol=1e-3, atol=1e-6)
    assert float(added.abs().max()) > 1e-4
    again = gradients(qwen3, batch, router_aux_loss=0.5, memory=AGAIN)
    assert all(torch.equal(again[name], entry) for name, entry in full.items())
    for options in LAID:
        laid = gradients(qwen3, batch, router_aux_loss=0.5, **options)
        assert apart(laid, full) < 1e-5
    # One sequence per pass: a router near a tie then chooses the same.
    trainer = qwen3.trainer(router_aux_loss=0.5, micro_batch_tokens=1)
    assert trainer.numerics()["router_aux_loss"] == "0.5"
    assert "router_aux_loss" not in qwen3.trainer().numerics()
    step = {**SETTINGS, "trainer.minibatches": 1}
    metrics = trainer.train(batch, step).metrics
    split = replace(batch, parts=[len(batch.groups) // 2])
    in_parts = qwen3.trainer(router_aux_loss=0.5, micro_batch_tokens=1).train(split, step).metrics
    assert metrics["router_aux_loss"] > 1
    assert in_parts["router_aux_loss"] == pytest.approx(metrics["router_aux_loss"], rel=1e-6)


def test_a_model_without_a_loss_of_routers_is_refused_by_name(tmp_path: Path) -> None:
    for kind in ("qwen2", "glm4_moe"):
        policy = Mixture(tmp_path / kind, partial(make, kind))
        with pytest.raises(PolicyError, match=r"trainer\.router_aux_loss: transformers has no"):
            policy.trainer(router_aux_loss=0.1)
