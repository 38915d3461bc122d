"""Skips what needs DeepSpeed, with one line each, where it is not installed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.consumers.learners.learner import Settings, TrainBatch
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import deepspeed, device
from tests.support.models import make_llama_gqa

Make = Callable[..., deepspeed.LoggedTrainer]


@pytest.fixture(autouse=True)
def _installed() -> None:
    deepspeed.need_deepspeed()


class Bench:
    def __init__(
        self, root: Path, model: Path | None = None, *, dtype: PolicyDtype = "float32"
    ) -> None:
        self.store = PolicyStore(root / "policies")
        model = model or make_llama_gqa(root / "model")
        self.policy, assets = import_model(self.store, model, dtype)
        self.assets = self.store.assets_path(assets)
        self.weights = self.store.weights_path(self.policy.digest)
        self.log = deepspeed.BatchLog(root / "log.sqlite")

    def deepspeed(self, **options: Any) -> deepspeed.LoggedTrainer:
        learner = deepspeed.make_learner(self.assets, self.weights, self.log, **options)
        learner.load(self.weights, digest=self.policy.digest, optimizer=None)
        return learner

    def torch(self, micro_batch_tokens: int = 256, lora: Any = None, **more: Any) -> Any:
        from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions

        options = TorchOptions(
            micro_batch_tokens=micro_batch_tokens, device=device.DEVICE, lora=lora, **more
        )
        learner = TorchLearner(self.assets, reference=self.weights, options=options)
        learner.load(self.weights, digest=self.policy.digest, optimizer=None)
        return learner

    def tensors(self, trainer: Any, path: Path) -> dict[str, Any]:
        from dora_pipe.consumers.learners.torch.model import read_tensor
        from dora_pipe.store.safetensors_file import mapped, read_entries

        trainer.save_weights(path)
        with mapped(path) as data:
            return {entry.name: read_tensor(data, entry) for entry in read_entries(path)}


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    deepspeed.need_deepspeed()
    yield Bench(tmp_path_factory.mktemp("deepspeed"))


def steps(trainer: Any, batches: list[TrainBatch], settings: Settings) -> list[Any]:
    return [trainer.train(batch, settings) for batch in batches]
