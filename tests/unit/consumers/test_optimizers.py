"""Tests of Muon and 8-bit AdamW."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor

from dora_pipe.config.checks import problems_of
from dora_pipe.config.load import changed_keys
from dora_pipe.config.model import Config
from dora_pipe.config.section import OptimizerName
from dora_pipe.consumers.learners import registry
from dora_pipe.consumers.learners.torch.model import TorchModel
from dora_pipe.consumers.learners.torch.named_optimizers import parameters_of
from dora_pipe.consumers.learners.torch.optimizer import Optimizer
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.safetensors_file import read_entries
from tests.support.batches import SETTINGS, make_batch, states_with_a_part_ahead
from tests.support.configs import plain_config
from tests.support.models import make_llama_gqa, make_qwen2
from tests.support.torch_policy import Policy

LIBRARY = "bitsandbytes"


KINDS: list[tuple[PolicyDtype, OptimizerName]] = [
    ("float32", "muon"),
    ("bfloat16", "muon"),
    ("bfloat16", "adamw8bit"),
]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    dtype, optimizer = request.param
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="make test-adamw8bit")
    make = partial(make_llama_gqa, hidden_size=48, intermediate_size=96)
    options = {"optimizer": optimizer, "weight_decay": 0.1, "micro_batch_tokens": 128}
    return Policy(tmp_path_factory.mktemp("policy"), make, dtype, **options)


def orthogonalized(matrix: Tensor) -> Tensor:
    x: Tensor = matrix.bfloat16()
    x = x.T if len(matrix) > matrix.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        b: Tensor = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    tensor: Tensor = x.T if len(matrix) > matrix.shape[1] else x
    return tensor


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_updates_are_those_of_the_literature(shape: tuple[int, int], decay: float) -> None:
    torch.manual_seed(1)
    start, rate = torch.randn(shape), 1e-2
    parameter = torch.nn.Parameter(start.clone())
    bias = torch.nn.Parameter(torch.zeros(3))
    optimizer = Optimizer(
        [("x", parameter), ("bias", bias)],
        betas=(0.9, 0.95),
        weight_decay=decay,
        other="muon",
        other_names=["x"],
    )
    momentum, expected = torch.zeros(shape), start.clone()
    for _ in range(3):
        gradient = torch.randn(shape)
        parameter.grad, bias.grad = gradient.clone(), torch.ones(3)
        optimizer.update(rate)
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalized(0.95 * momentum + 0.05 * gradient)
        expected = expected * (1 - rate * decay) - rate * 0.2 * 24**0.5 * update
    # bfloat16 has eight bits, and this rounds in another order.
    assert torch.allclose(parameter.detach(), expected, rtol=0, atol=3 * rate * 0.05)
    moved = (parameter.detach() - start * (1 - rate * decay) ** 3).square().mean().sqrt()
    assert 0.1 * rate < float(moved) < 0.8 * rate, "as far as AdamW would go, about"
    assert torch.allclose(bias.detach(), torch.full((3,), -3 * rate), rtol=1e-4)


def test_eight_bits_go_nearly_as_adamw_goes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="make test-adamw8bit")
    torch.manual_seed(1)
    start, after = torch.randn(64, 80), []
    gradients = [torch.randn(64, 80) for _ in range(5)]
    for other in NAMES:
        named = [("x", torch.nn.Parameter(start.clone())), ("b", torch.nn.Parameter(torch.ones(2)))]
        optimizer = Optimizer(
            named, betas=(0.9, 0.95), weight_decay=0.1, other=other, other_names=["x"]
        )
        for gradient in gradients:
            named[0][1].grad, named[1][1].grad = gradient.clone(), torch.ones(2)
            optimizer.update(1e-2)
        after.append(named[0][1].detach() - start)
        optimizer.save(tmp_path / other)
    apart = (after[0] - after[1]).norm() / after[0].norm()
    assert 0 < float(apart) < 0.05
    sizes = [(tmp_path / other).stat().st_size for other in NAMES]
    assert sizes[1] < sizes[0] / 3.5


NAMES: list[OptimizerName] = ["adamw", "adamw8bit"]


@pytest.mark.parametrize(("make", "head"), [(make_qwen2, True), (make_llama_gqa, False)])
def test_embeddings_head_and_vectors_are_adamws(make: object, head: bool, tmp_path: Path) -> None:
    assert callable(make)
    model = TorchModel(make(tmp_path), device="cpu")
    named = dict(model.parameters())
    hidden = parameters_of("muon", model.network, named)
    other_named = {name for name in named if name not in hidden}
    assert {name for name in other_named if named[name].ndim > 1} == {
        "model.embed_tokens.weight",
        *(["lm_head.weight"] if head else []),
    }
    assert all(".layers." in name and named[name].ndim == 2 for name in hidden)
    assert len(hidden) == 2 * 7


def test_trainer_goes_on_from_its_files_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    batches = [make_batch(seed=seed, step=seed, groups=2, samples=3) for seed in range(3)]
    trainer, broken = policy.trainer(), policy.trainer()
    for batch in batches:
        trainer.train(batch, SETTINGS)
    broken.train(batches[0], SETTINGS)
    for batch in batches[1:]:
        manifest = broken.save_weights(tmp_path / "weights")
        broken.save_optimizer(tmp_path / "state")
        broken = policy.trainer()
        broken.load(tmp_path / "weights", digest=manifest.digest, optimizer=tmp_path / "state")
        broken.train(batch, SETTINGS)
    broken.save_optimizer(tmp_path / "broken")
    trainer.save_optimizer(tmp_path / "whole")
    assert broken.manifest() == trainer.manifest()
    assert (tmp_path / "broken").read_bytes() == (tmp_path / "whole").read_bytes()
    names = {entry.name.partition("/")[0] for entry in read_entries(tmp_path / "whole")}
    remainders = {"remainder"} if policy.manifest.dtype == "bfloat16" else set()
    own = {"muon": {"momentum_buffer"}, "adamw8bit": {"state1", "absmax1", "state2", "absmax2"}}[
        policy.options["optimizer"]
    ]
    assert names == {"steps", "exp_avg", "exp_avg_sq"} | own | remainders


def test_updates_ahead_are_taken_back_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    plain, ahead = states_with_a_part_ahead(policy.trainer, tmp_path / "state")
    assert plain == ahead


def test_fingerprint_names_it_and_states_of_the_other_optimizer_are_refused(
    policy: Policy, tmp_path: Path
) -> None:
    plain, named = policy.trainer(optimizer="adamw"), policy.trainer()
    optimizer = named.numerics().pop("optimizer")
    assert optimizer.partition(" ")[0] == policy.options["optimizer"]
    assert named.numerics() == plain.numerics() | {"optimizer": optimizer}
    for entry, other in ((plain, named), (named, plain)):
        entry.train(make_batch(seed=1, step=0, groups=2, samples=3), SETTINGS)
        entry.save_optimizer(tmp_path / "state")
        with pytest.raises(PolicyError, match="not the optimizer state of this model"):
            other.load(policy.weights, digest=policy.manifest.digest, optimizer=tmp_path / "state")


def config(**sections: dict[str, object]) -> Config:
    return msgspec.convert(plain_config(trainer={"optimizer": "muon"}) | sections, Config)


def test_what_it_does_not_go_with_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(problems_of(config()))
    (problem,) = problems_of(config(lora={"rank": 4}))
    assert problem.text.startswith("trainer.optimizer: ") and problem.hint
    own = SimpleNamespace(TRAINER=registry.LearnerKind(open=registry.BUILT_IN["torch"].open))
    monkeypatch.setitem(sys.modules, "own", own)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: own)
    for kind in ("deepspeed", "own:TRAINER"):
        chosen = config(trainer={"kind": kind, "optimizer": "muon"})
        with pytest.raises(ConfigError, match=f"trainer `{kind}` has no muon") as raised:
            registry.need_learner(chosen)
        assert "trainer.kind = 'torch'" in str(raised.value.hint)
    registry.need_learner(config())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: own if name != LIBRARY else None)
    with pytest.raises(ConfigError, match="'adamw8bit' needs bitsandbytes") as missing:
        registry.need_learner(config(trainer={"optimizer": "adamw8bit"}))
    assert ".[adamw8bit]" in str(missing.value.hint)
    frozen, _, _ = changed_keys(config(), config(trainer={"optimizer": "adamw"}))
    assert set(frozen) == {"trainer.optimizer"}
