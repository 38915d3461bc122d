"""Drawn batches in drawn parts, on ranks: the gradient of the whole batch on one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.consumers.learners.learner import Settings, TrainBatch
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from tests.deepspeed.conftest import Bench
from tests.support.adapters import publish, random_adapter
from tests.support.batches import make_batch, with_teacher
from tests.support.deepspeed import ENGINES, LoggedTrainer
from tests.unit.consumers.test_parts_of_a_batch import PARTED, gradient_of, settings_of
from tests.unit.consumers.test_torch_objectives import RECOMPUTED, settings_for

EXAMPLES = 5
LORA = LoraOptions(rank=4, alpha=8.0, targets=LINEAR_LAYERS)
SUBJECTS: list[dict[str, Any]] = [
    *ENGINES,
    *({"zero_stage": stage, "lora": LORA} for stage in range(4)),
    {"zero_stage": 3, "offload": "all", "lora": LORA},
    *({"zero_stage": stage, "lora": LORA, "published": "bfloat16"} for stage in (1, 3)),
]
LOSSES = ("token-mean", "sequence-mean", "constant")
APART = 1e-4
"""Of the largest part of the gradient: sums have another order."""


class Pair:
    def __init__(self, bench: Bench, folder: Path, options: dict[str, Any]) -> None:
        self._folder = folder
        lora = options.get("lora")
        self._policy = bench.policy
        self._weights = bench.weights
        if lora is not None:  # A fresh one has no gradient in half of its matrices.
            dtype, base = bench.policy.dtype, bench.policy.digest
            adapter = random_adapter(bench.weights, base, seed=1, dtype=dtype)
            self._policy = publish(bench.store, adapter)
            self._weights = bench.store.weights_path(self._policy.digest)
        self.ours: LoggedTrainer = bench.deepspeed(**options)
        self.theirs = bench.torch(lora=lora)

    def gradients(
        self, batch: TrainBatch, settings: Settings, ahead: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        for trainer in (self.ours, self.theirs):
            trainer.load(self._weights, digest=self._policy.digest, optimizer=None)
        for part in batch.in_parts()[:ahead]:
            self.ours.train_part(part, settings)
        self.ours.train(batch, settings)
        self.theirs.train(replace(batch, parts=()), settings)
        state = self._folder / "state"
        return gradient_of(self.ours, state), gradient_of(self.theirs, state)


def _named(options: dict[str, Any]) -> str:
    return " ".join(key if key == "lora" else f"{key}={option}" for key, option in options.items())


@pytest.fixture(scope="module", params=SUBJECTS, ids=_named)
def pair(
    request: pytest.FixtureRequest, bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    options, folder = dict(request.param), tmp_path_factory.mktemp("pair")
    published = options.pop("published", "float32")
    own = bench if published == "float32" else Bench(folder / "narrow", dtype=published)
    return Pair(own, folder, options)


@st.composite
def steps(draw: st.DrawFn) -> tuple[TrainBatch, dict[str, Any], int]:
    groups = draw(st.integers(2, 5))
    first = draw(st.integers(1, groups - 1))
    second = draw(st.integers(0, groups - 1 - first))
    shortest = draw(st.integers(1, 12))
    batch = make_batch(
        seed=draw(st.integers(0, 999)),
        groups=groups,
        samples=draw(st.integers(1, 4)),
        tokens=(shortest, shortest + draw(st.integers(0, 40))),
        valid=draw(st.sampled_from([0.7, 1.0])),
    )
    parts = [first, second] if second else [first]
    kind = draw(st.sampled_from(PARTED))
    keys: dict[str, Any] = {}
    if "objective.loss" in settings_for(kind):
        keys["loss"] = draw(st.sampled_from(LOSSES))
    if "objective.kl_coef" in settings_for(kind):
        keys["kl_coef"] = draw(st.sampled_from([0.0, 0.3]))
    if kind in RECOMPUTED:
        keys["proximal"] = draw(st.sampled_from(["behaviour", "recomputed"]))
    ahead = draw(st.integers(0, len(parts) + 1))
    return replace(with_teacher(batch), parts=parts), settings_of(kind, **keys), ahead


@given(step=steps())
@settings(max_examples=EXAMPLES)
def test_gradient_of_drawn_parts_is_that_of_the_batch_on_one_process(
    pair: Pair, step: tuple[TrainBatch, dict[str, Any], int]
) -> None:
    result, expected = pair.gradients(*step)
    assert result.keys() == expected.keys()
    scale = max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    for name, entry in expected.items():
        apart = float((result[name] - entry).abs().max())
        assert apart <= APART * scale, name
