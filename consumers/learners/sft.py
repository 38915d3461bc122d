"""Supervised warm start of a model directory.

Shuffles by seed per data epoch; equal inputs give equal weights.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch

from dora_pipe.config.section import OptimizerName
from dora_pipe.config.training import RateSchedule, rate_of
from dora_pipe.consumers.learners.layout import MicroBatch, RowSize, lines_of, pack
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.lora import LoraModel, LoraOptions
from dora_pipe.consumers.learners.torch.memory import AT_ONCE, MemoryOptions
from dora_pipe.consumers.learners.torch.model import Passage, TorchModel, passage_of
from dora_pipe.consumers.learners.torch.named_optimizers import parameters_of
from dora_pipe.consumers.learners.torch.optimizer import Optimizer
from dora_pipe.core.errors import NonFinite, TaskError
from dora_pipe.store.model_dir import export_model, import_model, write_model_dir
from dora_pipe.store.safetensors_file import write_tensors
from dora_pipe.store.store import PolicyStore

R = TypeVar("R")
BETAS: Final = (0.9, 0.95)
GRAD_NORM_MAX: Final = 1.0
MICRO_BATCH_TOKENS: Final = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Token ids, and a mask of 1 for tokens to learn."""

    token_ids: Sequence[int]
    mask: Sequence[int]

    @property
    def counted(self) -> int:
        """Return the tokens in the loss, without the first."""
        return sum(self.mask[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Options; see `dora_pipe.config.training.Trainer` for shared keys."""

    optimizer: OptimizerName = "adamw"
    steps: int = 240
    batch: int = 64
    learning_rate: float = 2e-3
    schedule: RateSchedule = "constant"
    warmup_steps: int = 20
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0
    threads: int = 1
    context_tokens: int = 1024
    lora: LoraOptions | None = None
    """Adapter to train; written merged and separately."""
    memory: MemoryOptions = AT_ONCE
    """Packing shares rows of at most `context_tokens`."""


@dataclass(slots=True, kw_only=True)
class SftResult:
    loss: float = math.nan
    left_out: int = 0


def train_sft(
    model_dir: Path,
    rows: Sequence[R],
    out_dir: Path,
    *,
    encode: Callable[[R], Example],
    options: SftOptions,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> SftResult:
    """Train on rows, encoded on use, and write a model directory.

    The loss is the mean over counted tokens of a batch. Raises PolicyError, TaskError for unusable
    rows, NonFinite.
    """
    if not rows:
        raise TaskError("the data has no rows", hint="pass rows with --data")
    result = SftResult()
    batches = _Batches(rows, encode, options, result)
    with tempfile.TemporaryDirectory() as folder, deterministic(options.threads):
        # A temporary store reads shards and 16-bit weights alike.
        store = PolicyStore(Path(folder))
        manifest, assets = import_model(store, model_dir)
        first = store.weights_path(manifest.digest)
        model = _model(model_dir, first, options)
        optimizer = _optimizer(model, options)
        for step in range(options.steps):
            chosen = batches.draw()
            result.loss = _step(model, optimizer, chosen, options)
            if not math.isfinite(result.loss):
                raise NonFinite(
                    f"loss of step {step + 1} is {result.loss}", hint="lower the learning rate"
                )
            rate = rate_of(
                step,
                peak=options.learning_rate,
                schedule=options.schedule,
                warmup=options.warmup_steps,
                end=options.steps,
                least=options.min_lr_ratio,
            )
            optimizer.update(rate)
            model.updated = True
            progress(step + 1, result.loss)
        _write(model, model_dir, out_dir, store, assets)
    return result


def _model(model_dir: Path, first: Path, options: SftOptions) -> TorchModel:
    lora, memory = options.lora, options.memory
    if lora is None:
        model = TorchModel(model_dir, device="cpu", memory=memory)
    else:
        model = LoraModel(model_dir, base=first, options=lora, device="cpu", memory=memory)
    model.load(first)
    return model


def _optimizer(model: TorchModel, options: SftOptions) -> Optimizer:
    named = dict(model.parameters())
    return Optimizer(
        list(named.items()),
        betas=BETAS,
        weight_decay=options.weight_decay,
        other=options.optimizer,
        other_names=parameters_of(options.optimizer, model.network, named),
    )


def _write(
    model: TorchModel, model_dir: Path, out_dir: Path, store: PolicyStore, assets: str
) -> None:
    if not isinstance(model, LoraModel):
        write_model_dir(out_dir, model_dir, lambda path: write_tensors(path, model.sources()))
        return
    published = store.publish_weights(lambda path: write_tensors(path, model.sources()))
    export_model(store, published.digest, assets, out_dir)


class _Batches:
    def __init__(
        self,
        rows: Sequence[R],
        encode: Callable[[R], Example],
        options: SftOptions,
        result: SftResult,
    ) -> None:
        self._options = options
        self._result = result
        self._examples = self._encoded(rows, encode)

    def draw(self) -> list[Example]:
        return [next(self._examples) for _ in range(self._options.batch)]

    def _encoded(self, rows: Sequence[R], encode: Callable[[R], Example]) -> Iterator[Example]:
        unused = 0
        for index in _order(len(rows), self._options.seed):
            try:
                example = encode(rows[index])
            except TaskError as error:
                raise TaskError(f"row {index}: {error.message}", hint=error.hint) from None
            if len(example.token_ids) <= self._options.context_tokens:
                unused = 0
                yield example
                continue
            self._result.left_out += 1
            unused += 1
            if unused > 2 * len(rows):
                raise TaskError(
                    f"no row has at most {self._options.context_tokens} tokens",
                    hint="a longer --context",
                )


def _order(count: int, seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    while True:
        fresh = list(range(count))
        chance.shuffle(fresh)
        yield from fresh


def rows_of(
    examples: Sequence[Example], *, packing: bool, context_tokens: int
) -> list[list[Example]]:
    """Return the rows of a batch: one example each, or packed longest first (`lines_of`)."""
    if not packing:
        return [[example] for example in examples]
    ordered = sorted(examples, key=lambda example: -len(example.token_ids))
    lines = lines_of([len(example.token_ids) for example in ordered], context_tokens)
    return [[ordered[index] for index in line] for line in lines]


def _step(
    model: TorchModel, optimizer: Optimizer, chosen: Sequence[Example], options: SftOptions
) -> float:
    rows = rows_of(chosen, packing=options.memory.packing, context_tokens=options.context_tokens)
    sizes = [
        RowSize(ordinal=index, sample=0, tokens=sum(len(example.token_ids) for example in row))
        for index, row in enumerate(rows)
    ]
    tokens = sum(example.counted for example in chosen)
    if not tokens:
        raise TaskError("a batch has no token to learn", hint="a larger batch, or other rows")
    optimizer.clear()
    total = 0.0
    for micro in pack(sizes, padded_tokens_max=MICRO_BATCH_TOKENS):
        passage = _passage([rows[index] for index in micro.rows], micro)
        if not len(passage.targets):
            continue
        loss = -model.logprobs(passage).sum() / tokens
        torch.autograd.backward(loss)
        total += float(loss.detach())
    norm = optimizer.gradient_norm(GRAD_NORM_MAX)
    return total if math.isfinite(norm) else norm


def _passage(rows: Sequence[Sequence[Example]], micro: MicroBatch) -> Passage:
    examples = [example for row in rows for example in row]
    following = iter(range(len(examples)))
    return passage_of(
        [(example.token_ids, example.mask, [0.0] * len(example.token_ids)) for example in examples],
        width=micro.width,
        device="cpu",
        lines=[[next(following) for _ in row] for row in rows],
    )
