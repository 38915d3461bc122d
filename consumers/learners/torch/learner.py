"""The training step on torch: a function of (weights, optimizer state, batch, settings).

It decides nothing about the run. What makes equal inputs give equal bytes: packing that depends on
the batch alone, one fixed number of threads, deterministic kernels, no dropout.
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
from dora_pipe.consumers.learners.parts import StepInParts
from dora_pipe.consumers.learners.port import Reference, Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.settings import (
    MICRO_BATCH_TOKENS,
    PACKING,
    ROUTER_AUX_LOSS,
    StepSettings,
    step_settings,
)
from dora_pipe.consumers.learners.step import Pass, updates_of
from dora_pipe.consumers.learners.step_figures import Sums, contribution, figures_of
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
"""Of the arithmetic; part of the numerics fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """What stays the same while a run lasts; see `dora_pipe.config.training.Trainer`."""

    optimizer: OptimizerName = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    micro_batch_tokens: int = 16384
    threads: int = 1
    device: str = "cpu"
    dtype: ComputeDtype = "float32"
    """What passes are computed in; weights are updated in float32."""
    lora: LoraOptions | None = None
    """What is trained, if not all weights."""
    temperature: float = 1.0
    """Of the policy: what logits are divided by; `sampling.logprob_temperature`."""
    memory: MemoryOptions = AT_ONCE
    router_aux_loss: float = 0.0
    """Weight of the load-balancing loss of routers; 0: none."""


class TorchLearner:
    """The objectives of `consumers.objectives` on a Hugging Face causal LM.

    Example::

        trainer = TorchLearner(assets, reference=store.weights_path(version_0))
        trainer.load(store.weights_path(digest), digest=digest, optimizer=None)
        trainer.train(batch, {"trainer.learning_rate": 3e-4, ...}).figures["loss"]
    """

    name = "torch"
    version = VERSION

    def __init__(
        self, assets: Path, *, reference: Path, options: TorchOptions | None = None
    ) -> None:
        self._assets = assets
        self._reference_path = reference
        self._options = options or TorchOptions()
        self._bfloat16 = bfloat16_names(reference)
        """What is published in that type: what version 0 has in it."""
        self._model = _model(assets, reference, self._options, self._bfloat16)
        if self._options.router_aux_loss:
            _ = self._model.balance  # A model without one is refused here.
        self._reference: TorchModel | None = None
        self._reference_digest: str | None = None
        """Of a version that was named; empty for version 0, None for nothing yet."""
        self._optimizer = self._fresh_optimizer()
        self._parts = StepInParts()
        """The gradient of those that were computed ahead lies in the optimizer."""
        self._kept: tuple[KeptState, bool] | None = None
        """What a step in parts begins with, and whether that was ever updated."""
        self._states = DeviceStates(self._held, self._options.device)

    def leave_device(self) -> None:
        """Weights, optimizer state and reference go to the host's memory until they are needed.

        Raises ResourceError.
        """
        if not self._parts.begun:
            self._optimizer.clear()
        self._states.leave()

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        """Take weights and, from a checkpoint, the optimizer state. Raises PolicyError."""
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
        """One step: several updates, or the parts of a batch. Raises NonFinite (the state is then
        no longer valid)."""
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
                for passes in updates[1:]:  # The first computes its own anyway.
                    self._score_proximal(passes)
            for passes in updates:
                self._update(passes, step, sums)
        return StepResult(
            figures=figures_of(items, sums, step),
            contributions=[contribution(item) for item in items],
            compute_s=clock() - start_s,
        )

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """Compute the next part of a step: its gradient, or its update. Raises NonFinite."""
        self._states.come_back()
        self._parts.add(self, batch, settings)

    def stopwatch(self) -> Callable[[], float]:
        """Seconds of computing, for differences."""
        return compute_clock(self._options.device, self._options.threads)

    def gather(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, before: int
    ) -> Sums:
        """Add the gradient of these passes to that of so many before."""
        if not before:
            self._optimizer.clear()
        step, sums = self.settings_of(settings), Sums(passes=len(passes))
        with deterministic(self._options.threads):
            if needs_reference(step.objective):
                self._refer_to(part.reference)
            for one in passes:
                self._accumulate(one, step, sums)
        return sums

    def finish(self, divisor: int, step: StepSettings, sums: Sums) -> None:
        """Divide the gradient that is there and update with it. Raises NonFinite."""
        with deterministic(self._options.threads):
            self._optimizer.divide(divisor)
            self._step_optimizer(step, sums)

    def update(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, later: bool
    ) -> Sums:
        """One update. Raises NonFinite."""
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
        """Keep a copy of weights and optimizer state as they are."""
        self._kept = self._optimizer.kept(), self._model.updated

    def go_back(self) -> None:
        """Be as the copy is, bit for bit, and let it go."""
        assert self._kept is not None
        self._optimizer.go_back(self._kept[0])
        self._model.updated = self._kept[1]
        self._kept = None

    def let_go(self) -> None:
        """The copy is not needed any more."""
        self._kept = None

    def settings_of(self, settings: Settings) -> StepSettings:
        """What is in force for a step."""
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
        """Log-probs under the present weights of rows (token ids, mask), where the mask is 1;
        `choices` are the experts of their tokens, where routers do not choose.

        The first token of a row is predicted by nothing and has none.
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
        """As `score`, with tokens sent through these experts (`schemas.routes`); in how many
        choices, each of a token in a layer, the router's own would be others, and of how many.
        Raises PolicyError for a model that cannot be told."""
        routed = self._model.routed
        before = routed.differing, routed.seen
        found = self.score(rows, choices)
        return found, routed.differing - before[0], routed.seen - before[1]

    def manifest(self) -> Manifest:
        """The manifest of the present weights; what was computed ahead is none of theirs."""
        self._settle()
        return manifest_in_memory(self._model.sources())

    def save_weights(self, path: Path) -> Manifest:
        """Write the present weights to a safetensors file and describe them. Raises OSError."""
        self._settle()
        return write_tensors(path, self._model.sources())

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer state to a safetensors file. Raises OSError."""
        self._settle()
        self._optimizer.save(path)

    def numerics(self) -> dict[str, str]:
        """What the bits of a step depend on beside its inputs."""
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
        """Everything is on the device, and what was computed ahead is none of the weights."""
        self._states.come_back()
        self._parts.settle(self)

    def _held(self) -> Iterator[Tensor]:
        """What lies on the device between two steps."""
        networks = [self._model.network] + ([self._reference.network] if self._reference else [])
        for network in networks:
            yield from tensors_in([*network.parameters(), *network.buffers()])
        yield from tensors_in([one for _, one in self._model.parameters()])
        yield from tensors_in(self._optimizer.held())

    def _fresh_optimizer(self) -> Optimizer:
        name, named = self._options.optimizer, dict(self._model.parameters())
        return Optimizer(
            list(named.items()),
            betas=self._options.betas,
            weight_decay=self._options.weight_decay,
            bfloat16=self._model.bfloat16,
            other=name,
            others=parameters_of(name, self._model.network, named),
        )

    def _score_proximal(self, passes: Sequence[Pass]) -> None:
        """The proximal log-probs of an update, by the weights that are there."""
        for one in passes:
            one.proximal = joined(self._scored(passages_of(one, self._options.device)))

    def _scored(self, parts: Sequence[Passage]) -> list[Tensor]:
        with torch.no_grad():
            return [self._model.logprobs(part) for part in parts]

    def _update(self, passes: Sequence[Pass], step: StepSettings, sums: Sums) -> None:
        """One optimizer update from a minibatch; none if nothing in it has a gradient."""
        if not passes:
            return
        self._optimizer.clear()
        for one in passes:
            self._accumulate(one, step, sums)
        self._step_optimizer(step, sums)

    def _step_optimizer(self, step: StepSettings, sums: Sums) -> None:
        """Step with the gradient that is there. Raises NonFinite."""
        sums.note_update(self._optimizer.gradient_norm(step.grad_norm_max))
        self._optimizer.update(step.learning_rate)
        self._model.updated = True

    def _accumulate(self, one: Pass, step: StepSettings, sums: Sums) -> None:
        """Add the gradient of one pass, and note what each of its units did."""
        given = inputs_of(one, self._options.device)
        parts, weights = given.passages, given.row_weights()
        if len(parts) == 1:
            logprobs, extra = self._with_balance(parts[0], weights[0], step, sums)
        else:
            logprobs, extra = leaf_of(self._scored(parts)), 0.0
        loss, figures = pass_loss(given, logprobs, reference=self._reference_logprobs, step=step)
        if len(parts) == 1:
            torch.autograd.backward(loss + extra)
        else:
            pulls = pulled(logprobs, loss, parts)
            for part, gradient, of_part in zip(parts, pulls, weights, strict=True):
                again, extra = self._with_balance(part, of_part, step, sums)
                torch.autograd.backward((again * gradient).sum() + extra)
        sums.loss += float(loss.detach())
        sums.padded_tokens += one.padded_tokens
        one.note(figures)

    def _with_balance(
        self, part: Passage, weights: Sequence[float], step: StepSettings, sums: Sums
    ) -> tuple[Tensor, Tensor | float]:
        """Log-probs of a part, and what the load-balancing loss of its rows, each of this weight,
        adds to the loss."""
        if not step.router_aux_loss:
            return self._model.logprobs(part), 0.0
        logprobs, balance = self._model.logprobs_and_balance(part, weights)
        sums.router_aux += float(balance.detach())
        return logprobs, step.router_aux_loss * balance

    def _refer_to(self, wanted: Reference | None) -> None:
        """Have the weights that the KL is to; None is version 0. Raises PolicyError."""
        digest = "" if wanted is None else wanted.digest
        if digest == self._reference_digest:
            return
        if wanted is not None:
            need_digest(wanted.weights, digest)
        if isinstance(self._model, LoraModel):
            self._model.refer_to(None if wanted is None else wanted.weights)
        else:
            how = _computed(self._options)
            self._reference = self._reference or TorchModel(self._assets, **how)
            self._reference.load(self._reference_path if wanted is None else wanted.weights)
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
    """The network that is trained, whole or by an adapter on the weights of version 0."""
    how = _computed(options)
    if options.lora is None:
        return TorchModel(assets, bfloat16=bfloat16, **how)
    return LoraModel(assets, base=first, options=options.lora, **how)


def _computed(options: TorchOptions) -> dict[str, Any]:
    """How passes are computed, as models are told."""
    return {key: getattr(options, key) for key in ("device", "temperature", "memory", "dtype")}
