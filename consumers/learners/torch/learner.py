"""Training step on torch.

Bit-equality needs packing by batch alone, fixed threads, deterministic kernels, no dropout.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from dora_pipe.config.section import ComputeDtype, OptimizerName
from dora_pipe.consumers.learners.learner import Reference, Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.parts import StepInParts
from dora_pipe.consumers.learners.settings import (
    MICRO_BATCH_TOKENS,
    PACKING,
    ROUTER_AUX_LOSS,
    StepSettings,
    step_settings,
)
from dora_pipe.consumers.learners.step import Pass, updates_of
from dora_pipe.consumers.learners.step_metrics import Sums, contribution, metrics_of
from dora_pipe.consumers.learners.torch.device import (
    capability,
    compute_clock,
    deterministic,
    device_class,
)
from dora_pipe.consumers.learners.torch.device_states import DeviceStates, tensors_in
from dora_pipe.consumers.learners.torch.lora import LoraModel, LoraOptions
from dora_pipe.consumers.learners.torch.memory import AT_ONCE, MemoryOptions
from dora_pipe.consumers.learners.torch.model import (
    Passage,
    TorchModel,
    bfloat16_names,
    inputs_of,
    joined,
    leaf_of,
    pass_loss,
    passages_of,
    pulled,
    score_rows,
    temperature_numerics,
)
from dora_pipe.consumers.learners.torch.named_optimizers import optimizer_numerics, parameters_of
from dora_pipe.consumers.learners.torch.optimizer import KeptState, Optimizer
from dora_pipe.consumers.learners.torch.routing import balance_numerics
from dora_pipe.consumers.objectives.registry import needs_proximal, needs_reference
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.routes import Choices
from dora_pipe.store.safetensors_file import manifest_in_memory, write_tensors
from dora_pipe.store.verified import need_digest

VERSION: Final = "1"
"""Version of the arithmetic, in the numerics fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """Options fixed for a run; see `dora_pipe.config.training.Trainer`."""

    optimizer: OptimizerName = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    micro_batch_tokens: int = 16384
    threads: int = 1
    device: str = "cpu"
    dtype: ComputeDtype = "float32"
    """Compute dtype of passes; updates use float32."""
    lora: LoraOptions | None = None
    temperature: float = 1.0
    """Divisor of logits (`Sampling.logprob_temperature`)."""
    memory: MemoryOptions = AT_ONCE
    router_aux_loss: float = 0.0


class TorchLearner:
    """Objectives of `consumers.objectives` on a Hugging Face causal LM."""

    name = "torch"
    version = VERSION

    def __init__(
        self, assets: Path, *, reference: Path, options: TorchOptions | None = None
    ) -> None:
        self._assets = assets
        self._reference_path = reference
        self._options = options or TorchOptions()
        self._bfloat16 = bfloat16_names(reference)
        self._model = _model(assets, reference, self._options, self._bfloat16)
        if self._options.router_aux_loss:
            _ = self._model.balance  # raises PolicyError for a model without one
        self._reference: TorchModel | None = None
        self._reference_digest: str | None = None
        self._optimizer = self._fresh_optimizer()
        self._parts = StepInParts()
        self._kept: tuple[KeptState, bool] | None = None
        self._states = DeviceStates(self._held, self._options.device)

    def leave_device(self) -> None:
        if not self._parts.begun:
            self._optimizer.clear()
        self._states.leave()

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        self._states.come_back()
        need_digest(weights, digest)
        if self._options.lora is None and bfloat16_names(weights) != self._bfloat16:
            raise PolicyError(f"{weights} has weights of another type than version 0")
        with deterministic(self._options.threads):
            self._model.load(weights)
        self._parts.loaded()
        self._kept = None
        self._optimizer = self._fresh_optimizer()
        if optimizer is not None:
            self._optimizer.load(optimizer)

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        self._states.come_back()
        if batch.parts:
            return self._parts.train(self, batch, settings)
        self._parts.forget(self)
        clock = self.stopwatch()
        start_s = clock()
        step = self.settings_of(settings)
        items, updates = updates_of(batch, step)
        sums = Sums()
        with deterministic(self._options.threads):
            if needs_reference(step.objective):
                self._refer_to(batch.reference)
            if needs_proximal(step.objective):
                for passes in updates[1:]:  # the first update computes its own
                    self._score_proximal(passes)
            for passes in updates:
                self._update(passes, step, sums)
        return StepResult(
            metrics=metrics_of(items, sums, step),
            contributions=[contribution(item) for item in items],
            compute_s=clock() - start_s,
        )

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        self._states.come_back()
        self._parts.add(self, batch, settings)

    def stopwatch(self) -> Callable[[], float]:
        return compute_clock(self._options.device, self._options.threads)

    def gather(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, before: int
    ) -> Sums:
        if not before:
            self._optimizer.clear()
        step, sums = self.settings_of(settings), Sums(passes=len(passes))
        with deterministic(self._options.threads):
            if needs_reference(step.objective):
                self._refer_to(part.reference)
            for pass_ in passes:
                self._accumulate(pass_, step, sums)
        return sums

    def finish(self, divisor: int, step: StepSettings, sums: Sums) -> None:
        with deterministic(self._options.threads):
            self._optimizer.divide(divisor)
            self._step_optimizer(step, sums)

    def update(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, later: bool
    ) -> Sums:
        step, sums = self.settings_of(settings), Sums(passes=len(passes))
        with deterministic(self._options.threads):
            if needs_reference(step.objective):
                self._refer_to(part.reference)
            if later and needs_proximal(step.objective):
                assert self._kept is not None
                with self._optimizer.at(self._kept[0]):
                    self._score_proximal(passes)
            self._update(passes, step, sums)
        return sums

    def keep(self) -> None:
        self._kept = self._optimizer.kept(), self._model.updated

    def restore_copy(self) -> None:
        assert self._kept is not None
        self._optimizer.restore_copy(self._kept[0])
        self._model.updated = self._kept[1]
        self._kept = None

    def free_copy(self) -> None:
        self._kept = None

    def settings_of(self, settings: Settings) -> StepSettings:
        options = self._options
        own = {
            MICRO_BATCH_TOKENS: options.micro_batch_tokens,
            PACKING: options.memory.packing,
            ROUTER_AUX_LOSS: options.router_aux_loss,
        }
        return step_settings({**own, **settings})

    def score(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        choices: Sequence[Choices | None] = (),
    ) -> list[list[float]]:
        """Return log-probs of rows (token ids, mask) where the mask is 1, never of the first token.

        `choices` are recorded experts, if any.
        """
        self._settle()
        options = self._options
        with deterministic(options.threads):
            return score_rows(
                rows,
                self._model.logprobs,
                padded_tokens_max=options.micro_batch_tokens,
                device=options.device,
                choices=choices,
            )

    def score_through(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], choices: Sequence[Choices | None]
    ) -> tuple[list[list[float]], int, int]:
        """Score with recorded experts (`schemas.routes`); also return differing and all choices.
        Raises PolicyError for an unsupported model."""
        routed = self._model.routed
        before = routed.differing, routed.seen
        scored = self.score(rows, choices)
        return scored, routed.differing - before[0], routed.seen - before[1]

    def manifest(self) -> Manifest:
        self._settle()
        return manifest_in_memory(self._model.sources())

    def save_weights(self, path: Path) -> Manifest:
        """See `Learner`. Raises OSError."""
        self._settle()
        return write_tensors(path, self._model.sources())

    def save_optimizer(self, path: Path) -> None:
        """See `Learner`. Raises OSError."""
        self._settle()
        self._optimizer.save(path)

    def numerics(self) -> dict[str, str]:
        options = self._options
        lora = options.lora
        return (
            (lora.numerics if lora else {})
            | ({"policies": "bfloat16"} if self._bfloat16 else {})
            | ({"dtype": options.dtype} if options.dtype != "float32" else {})
            | optimizer_numerics(options.optimizer)
            | balance_numerics(options.router_aux_loss)
            | temperature_numerics(options.temperature)
            | self._model.unassigned.numerics
            | options.memory.numerics(
                self._model.vocabulary,
                self._model.mlp_width,
                options.micro_batch_tokens,
                options.device,
                varlen=self._model.varlen,
            )
            | {
                "trainer": f"{self.name} {self.version}",
                "torch": str(torch.__version__),
                "transformers": str(transformers.__version__),
                "python": platform.python_version(),
                "device": device_class(options.device),
                "capability": capability(options.device),
                "world_size": "1",
                "threads": str(options.threads),
                "micro_batch_tokens": str(options.micro_batch_tokens),
            }
        )

    def _settle(self) -> None:
        self._states.come_back()
        self._parts.settle(self)

    def _held(self) -> Iterator[Tensor]:
        networks = [self._model.network] + ([self._reference.network] if self._reference else [])
        for network in networks:
            yield from tensors_in([*network.parameters(), *network.buffers()])
        yield from tensors_in([parameter for _, parameter in self._model.parameters()])
        yield from tensors_in(self._optimizer.held())

    def _fresh_optimizer(self) -> Optimizer:
        name, named = self._options.optimizer, dict(self._model.parameters())
        return Optimizer(
            list(named.items()),
            betas=self._options.betas,
            weight_decay=self._options.weight_decay,
            bfloat16=self._model.bfloat16,
            other=name,
            other_names=parameters_of(name, self._model.network, named),
        )

    def _score_proximal(self, passes: Sequence[Pass]) -> None:
        for pass_ in passes:
            pass_.proximal = joined(self._scored(passages_of(pass_, self._options.device)))

    def _scored(self, parts: Sequence[Passage]) -> list[Tensor]:
        with torch.no_grad():
            return [self._model.logprobs(part) for part in parts]

    def _update(self, passes: Sequence[Pass], step: StepSettings, sums: Sums) -> None:
        if not passes:
            return
        self._optimizer.clear()
        for pass_ in passes:
            self._accumulate(pass_, step, sums)
        self._step_optimizer(step, sums)

    def _step_optimizer(self, step: StepSettings, sums: Sums) -> None:
        sums.note_update(self._optimizer.gradient_norm(step.max_grad_norm))
        self._optimizer.update(step.learning_rate)
        self._model.updated = True

    def _accumulate(self, pass_: Pass, step: StepSettings, sums: Sums) -> None:
        given = inputs_of(pass_, self._options.device)
        parts, weights = given.passages, given.row_weights()
        if len(parts) == 1:
            logprobs, extra = self._with_balance(parts[0], weights[0], step, sums)
        else:
            logprobs, extra = leaf_of(self._scored(parts)), 0.0
        loss, metrics = pass_loss(given, logprobs, reference=self._reference_logprobs, step=step)
        if len(parts) == 1:
            torch.autograd.backward(loss + extra)
        else:
            pulls = pulled(logprobs, loss, parts)
            for part, gradient, of_part in zip(parts, pulls, weights, strict=True):
                again, extra = self._with_balance(part, of_part, step, sums)
                torch.autograd.backward((again * gradient).sum() + extra)
        sums.loss += float(loss.detach())
        sums.padded_tokens += pass_.padded_tokens
        pass_.note(metrics)

    def _with_balance(
        self, part: Passage, weights: Sequence[float], step: StepSettings, sums: Sums
    ) -> tuple[Tensor, Tensor | float]:
        if not step.router_aux_loss:
            return self._model.logprobs(part), 0.0
        logprobs, balance = self._model.logprobs_and_balance(part, weights)
        sums.router_aux += float(balance.detach())
        return logprobs, step.router_aux_loss * balance

    def _refer_to(self, reference: Reference | None) -> None:
        """Load the KL reference (None: version 0). Raises PolicyError."""
        digest = "" if reference is None else reference.digest
        if digest == self._reference_digest:
            return
        if reference is not None:
            need_digest(reference.weights, digest)
        if isinstance(self._model, LoraModel):
            self._model.refer_to(None if reference is None else reference.weights)
        else:
            how = _computed(self._options)
            self._reference = self._reference or TorchModel(self._assets, **how)
            self._reference.load(self._reference_path if reference is None else reference.weights)
        self._reference_digest = digest

    def _reference_logprobs(self, passage: Passage) -> Tensor:
        if isinstance(self._model, LoraModel):
            return self._model.reference_logprobs(passage)
        assert self._reference is not None
        with torch.no_grad():
            return self._reference.logprobs(passage)


def _model(
    assets: Path, first: Path, options: TorchOptions, bfloat16: Collection[str]
) -> TorchModel:
    how = _computed(options)
    if options.lora is None:
        return TorchModel(assets, bfloat16=bfloat16, **how)
    return LoraModel(assets, base=first, options=options.lora, **how)


def _computed(options: TorchOptions) -> dict[str, Any]:
    return {key: getattr(options, key) for key in ("device", "temperature", "memory", "dtype")}
