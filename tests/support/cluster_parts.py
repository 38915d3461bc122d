"""What a cluster is made of beside the machines: policy, engine, tokenizer, trainer.

`SimulatedParts` needs no torch and takes no time; `TorchParts` is what production runs, on a model
directory. Nothing of torch is imported before a `TorchParts` is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dora_pipe.config.model import Config, versions_resident
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.learners.simulated import SimulatedLearner, initial_weights
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers
from dora_pipe.consumers.trainer.ports import InlinePort
from dora_pipe.core.clock import Clock
from dora_pipe.core.wait_tracker import Limits
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.simulated import (
    END_TOKEN,
    Lengths,
    SimulatedEngine,
    long_tailed_length,
)
from dora_pipe.producers.worker.ports import Texts
from dora_pipe.producers.worker.tokenizer import Tokenizer
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support.inline_tasks import Numbers


class Parts(Protocol):
    """See the head of this file; asked once for the policy, then once per role."""

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        """Version 0 and the digest of the assets, both in the store."""
        ...

    def engine(self, assets: Path, config: Config, clock: Clock) -> Engine:
        """A worker's engine."""
        ...

    def texts(self, assets: Path) -> Texts:
        """A worker's tokenizer."""
        ...

    def stop_ids(self, assets: Path) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def trainer(self, assets: Path, reference: Path, config: Config) -> Learner:
        """The trainer."""
        ...


@dataclass(frozen=True)
class SimulatedParts:
    """Without torch: tokens and lengths are hashes, weights too."""

    lengths: Lengths = long_tailed_length
    versions: int = 1
    """How many each worker hosts at once."""

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        assets = directory / "assets"
        assets.mkdir(exist_ok=True)
        (assets / "config.json").write_text(json.dumps({"model_type": "simulated"}))
        digest = store.publish_assets([assets / "config.json"])
        return store.publish_weights(initial_weights), digest

    def engine(self, assets: Path, config: Config, clock: Clock) -> Engine:
        workers = config.workers
        return SimulatedEngine(
            slots=workers.slots,
            context_tokens=workers.context_tokens,
            versions_resident=self.versions,
            lengths=self.lengths,
            clock=clock,
        )

    def texts(self, assets: Path) -> Texts:
        return Numbers()

    def stop_ids(self, assets: Path) -> tuple[int, ...]:
        return (END_TOKEN,)

    def trainer(self, assets: Path, reference: Path, config: Config) -> Learner:
        return SimulatedLearner()


@dataclass(frozen=True)
class TorchParts:
    """A model directory, run and trained by torch."""

    model: Path

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        return import_model(store, self.model)

    def engine(self, assets: Path, config: Config, clock: Clock) -> Engine:
        from dora_pipe.producers.engines.torch.engine import TorchEngine

        workers = config.workers
        return TorchEngine.open(
            assets,
            slots=workers.slots,
            context_tokens=workers.context_tokens,
            threads=1,
            decode=Tokenizer(assets).full_text,
            lora_rank=config.lora.rank,
            versions_resident=versions_resident(config),
        )

    def texts(self, assets: Path) -> Texts:
        return Tokenizer(assets)

    def stop_ids(self, assets: Path) -> tuple[int, ...]:
        return tuple(Tokenizer(assets).stop_ids)

    def trainer(self, assets: Path, reference: Path, config: Config) -> Learner:
        return make_learner(assets=assets, reference=reference, config=config)


def limits_of(config: Config) -> Limits:
    """Of the waits of every role."""
    return Limits(short_s=config.timing.alarm_s, work_s=config.timing.alarm_work_s)


class SlowPort(InlinePort):
    """The trainer's work in the loop, with a pause of some turns before each event."""

    def __init__(self, handlers: EffectHandlers, ticks: int) -> None:
        super().__init__(handlers)
        self._ticks = ticks
        self._left = ticks

    def poll(self) -> list[Any]:
        """The next event, once its time has come."""
        if self.busy and self._left:
            self._left -= 1
            return []
        self._left = self._ticks
        return super().poll()
