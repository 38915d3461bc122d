"""Model imported into a policy store, and torch learners that hold its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore


class Policy:
    def __init__(
        self,
        root: Path,
        make: Callable[[Path], Path],
        dtype: PolicyDtype = "float32",
        **options: Any,
    ) -> None:
        self.root, self.options = root, options
        self.directory = make(root / "model")
        self.store = PolicyStore(root / "policies")
        self.manifest, assets = import_model(self.store, self.directory, dtype)
        self.assets = self.store.assets_path(assets)
        self.weights = self.store.weights_path(self.manifest.digest)

    def trainer(self, **options: Any) -> TorchLearner:
        chosen = TorchOptions(**self.options | options)
        learner = TorchLearner(self.assets, reference=self.weights, options=chosen)
        learner.load(self.weights, digest=self.manifest.digest, optimizer=None)
        return learner

    def train(self, batch: TrainBatch, settings: Settings) -> tuple[StepResult, str]:
        trainer = self.trainer()
        result = trainer.train(batch, settings)
        return result, trainer.manifest().digest


def gradients_of(trainer: TorchLearner, batch: TrainBatch, settings: Settings) -> dict[str, Tensor]:
    trainer.train(batch, settings)
    named = trainer._model.parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
