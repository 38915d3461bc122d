"""Supervised warm start: trains a model directory on (prompt, answer) pairs into another one.

It decides the order of the pairs (a seeded shuffle per data epoch) and nothing else; equal inputs
give equal weights. Only the tokens of the answer, and the end-of-sequence token that is appended to
it, count in the loss.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch

from dora_pipe.consumers.learners.step import MicroBatch, RowSize, pack
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.model import TorchModel, passage_of
from dora_pipe.consumers.learners.torch.optimizer import Optimizer
from dora_pipe.core.errors import NonFinite, PolicyError, TaskError
from dora_pipe.store.model_dir import import_model, read_config, write_model_dir
from dora_pipe.store.safetensors_file import write_tensors
from dora_pipe.store.store import PolicyStore

WARM_UP_STEPS: Final = 20
"""Steps over which the learning rate grows to its value."""

BETAS: Final = (0.9, 0.95)
GRAD_NORM_MAX: Final = 1.0
MICRO_BATCH_TOKENS: Final = 16384

ROWS_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""A larger JSONL file is refused: its rows are held in memory."""


class TextEncoder(Protocol):
    """How rollout workers turn text into tokens; the same must be used here."""

    stop_ids: tuple[int, ...]
    """Token ids that end a turn."""

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that is appended to others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """A pair as tokens, with a mask of 1 where the model shall learn to say it."""

    token_ids: list[int]
    mask: list[int]


class _Pair(msgspec.Struct, frozen=True):
    prompt: str
    answer: str


_PAIR = msgspec.json.Decoder(_Pair)


def train_sft(
    model_dir: Path,
    rows: Sequence[tuple[str, str]] | Path,
    out_dir: Path,
    *,
    tokenizer: TextEncoder,
    steps: int = 240,
    learning_rate: float = 2e-3,
    batch: int = 64,
    seed: int = 0,
    threads: int = 1,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train on pairs, or on a JSONL file of them, and write a model directory; the last loss.

    The loss is the mean over the answer tokens of a batch. `progress` gets the number of steps
    done and the loss. Raises PolicyError, TaskError for rows that cannot be used, NonFinite.
    """
    pairs = read_pairs(rows) if isinstance(rows, Path) else rows
    end = _end_id(model_dir, tokenizer)
    examples = [_encode(prompt, answer, tokenizer, end) for prompt, answer in pairs]
    if not examples:
        raise TaskError("there is nothing to train on", hint="give rows with prompt and answer")
    with deterministic(threads):
        model = _load(model_dir)
        optimizer = Optimizer(list(model.parameters()), betas=BETAS, weight_decay=0.0)
        loss = math.nan
        for step, chosen in enumerate(_batches(examples, steps, batch, seed)):
            loss = _step(model, optimizer, chosen)
            if not math.isfinite(loss):
                raise NonFinite(
                    f"loss of step {step + 1} is {loss}", hint="lower the learning rate"
                )
            optimizer.update(learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS))
            progress(step + 1, loss)
    write_model_dir(out_dir, model_dir, lambda path: write_tensors(path, model.sources()))
    return loss


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """(prompt, answer) of every line of a JSONL file. Raises TaskError naming the line."""
    try:
        if path.stat().st_size > ROWS_BYTES_MAX:
            raise TaskError(f"{path} is larger than {ROWS_BYTES_MAX} bytes")
        with path.open("rb") as file:
            return [
                _pair(path, number, line) for number, line in enumerate(file, 1) if line.strip()
            ]
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None


def _pair(path: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        pair = _PAIR.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{path} line {number}: {error}", hint="every line needs the texts prompt and answer"
        ) from None
    return pair.prompt, pair.answer


def _encode(prompt: str, answer: str, tokenizer: TextEncoder, end: int) -> _Example:
    before = tokenizer.prompt_ids(prompt)
    if not before:
        raise TaskError(f"prompt {prompt[:60]!r} has no tokens")
    after = [*tokenizer.ids(answer), end]
    return _Example(token_ids=[*before, *after], mask=[0] * len(before) + [1] * len(after))


def _end_id(model_dir: Path, tokenizer: TextEncoder) -> int:
    """The token that ends an answer: the config's own if it is one that ends a turn."""
    if not tokenizer.stop_ids:
        raise PolicyError(f"the tokenizer in {model_dir} has no end-of-sequence token")
    configured = read_config(model_dir).get("eos_token_id")
    if isinstance(configured, int) and configured in tokenizer.stop_ids:
        return configured
    return tokenizer.stop_ids[0]


def _load(model_dir: Path) -> TorchModel:
    """The model through a store of its own, which reads shards and sixteen-bit weights alike."""
    with tempfile.TemporaryDirectory() as folder:
        store = PolicyStore(Path(folder))
        manifest, _ = import_model(store, model_dir)
        model = TorchModel(model_dir, device="cpu")
        model.load(store.weights_path(manifest.digest))
    return model


def _batches(
    examples: Sequence[_Example], steps: int, batch: int, seed: int
) -> Iterator[list[_Example]]:
    """`steps` batches; every example once per data epoch, in another order each time."""
    chance = random.Random(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch:
            fresh = list(range(len(examples)))
            chance.shuffle(fresh)
            order += fresh
        yield [examples[place] for place in order[:batch]]
        del order[:batch]


def _step(model: TorchModel, optimizer: Optimizer, chosen: Sequence[_Example]) -> float:
    """Gradients of one batch, clipped; its loss."""
    rows = [
        RowSize(ordinal=place, sibling=0, tokens=len(one.token_ids))
        for place, one in enumerate(chosen)
    ]
    tokens = sum(sum(one.mask) for one in chosen)
    optimizer.clear()
    total = 0.0
    for micro in pack(rows, padded_tokens_max=MICRO_BATCH_TOKENS):
        loss = _loss(model, chosen, micro) / tokens
        torch.autograd.backward(loss)
        total += float(loss.detach())
    norm = optimizer.gradient_norm(GRAD_NORM_MAX)
    return total if math.isfinite(norm) else norm


def _loss(model: TorchModel, chosen: Sequence[_Example], micro: MicroBatch) -> torch.Tensor:
    """Summed negative log-likelihood of the answer tokens of one pass."""
    rows = [(chosen[place].token_ids, chosen[place].mask) for place in micro.rows]
    no_behaviour = [0.0] * micro.width
    passage = passage_of(
        [(token_ids, mask, no_behaviour) for token_ids, mask in rows],
        width=micro.width,
        device="cpu",
    )
    return -model.logprobs(passage).sum()
