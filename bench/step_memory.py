"""Memory and time of a training step and of its head, each in a process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from dora_pipe.bench.peak import fresh_peak, peak_bytes
from dora_pipe.bench.support import emit_figures, reply, result_of, task_of
from dora_pipe.cli.options import JsonOption

HIDDEN: Final = 384
LAYERS: Final = 8
VOCABULARY: Final = 16_384
"""Vocabulary of a step's model: 27 million parameters."""

SEED: Final = 0
CASE_LIMIT_S: Final = 3600.0

AT_ONCE: Final[Mapping[str, Any]] = {"head_chunk_tokens": 0, "mlp_chunk_tokens": 0}
LEAST: Final[Mapping[str, Any]] = {"gradient_checkpointing": True}


class MemoryCase(msgspec.Struct, frozen=True, kw_only=True):
    """Head on `tokens` hidden states, or step on one sequence."""

    what: Literal["head", "step"]
    tokens: int
    vocabulary: int = VOCABULARY
    width: int = HIDDEN
    head_chunk_tokens: int | Literal["auto"] = "auto"
    mlp_chunk_tokens: int | Literal["auto"] = "auto"
    gradient_checkpointing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemoryFigure:
    """Peak memory and time of a case.

    Example: ``StepMemoryFigure(what="head", tokens=16384, vocabulary=151936,
    head_chunk_tokens="auto", mlp_chunk_tokens="auto", gradient_checkpointing=False, peak_mb=292.0,
    process_mb=664.0, seconds=31.4)``
    """

    what: str
    tokens: int
    vocabulary: int
    head_chunk_tokens: int | str
    mlp_chunk_tokens: int | str
    gradient_checkpointing: bool
    peak_mb: float
    """Peak of forward and backward, without weights, gradients and AdamW's moments."""
    process_mb: float
    """Peak of the process; on a GPU of torch's allocator."""
    seconds: float


def memory_cases(
    tokens: int, vocabulary: int, step_tokens: int, *, least: bool = False
) -> list[MemoryCase]:
    """Return a chunked head and, if small enough, an unchunked one; steps with all memory
    savings and, unless `least`, with fewer. 0 tokens omits one."""
    small = max(1, tokens // 16)
    head = [
        MemoryCase(what="head", tokens=size, vocabulary=vocabulary, width=64, **more)
        for size, more in ((tokens, {}), (small, {}), (small, AT_ONCE))
    ]
    ways = [LEAST] if least else [LEAST, {}, AT_ONCE]
    step = [MemoryCase(what="step", tokens=step_tokens, **more) for more in ways]
    return (head if tokens else []) + (step if step_tokens else [])


def command(
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the head; 0: the step alone.")
    ] = 16_384,
    vocabulary: Annotated[int, typer.Option(min=2, help="Vocabulary of the head.")] = 151_936,
    step_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a step's sequence; 0: the head alone.")
    ] = 4_096,
    least: Annotated[
        bool, typer.Option(help="Measure the step only with all memory savings.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure peak memory and time of a chunked head, and of a step of a model of 27 million
    parameters; on a GPU if there is one."""
    cases = memory_cases(tokens, vocabulary, step_tokens, least=least)
    emit_figures(bench_step_memory(cases), as_json=as_json)


def bench_step_memory(cases: Sequence[MemoryCase]) -> Iterator[StepMemoryFigure]:
    for case in cases:
        yield result_of("dora_pipe.bench.step_memory", case, StepMemoryFigure, limit_s=CASE_LIMIT_S)


def _measured(case: MemoryCase) -> StepMemoryFigure:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with prepared(case, device) as compute:
        before = fresh_peak(device)
        start_s = time.perf_counter()
        compute()
        peak = peak_bytes(device)
        seconds = time.perf_counter() - start_s
    return StepMemoryFigure(
        what=case.what,
        tokens=case.tokens,
        vocabulary=case.vocabulary,
        head_chunk_tokens=case.head_chunk_tokens,
        mlp_chunk_tokens=case.mlp_chunk_tokens,
        gradient_checkpointing=case.gradient_checkpointing,
        peak_mb=round((peak - before) / 1e6, 1),
        process_mb=round(peak / 1e6, 1),
        seconds=round(seconds, 1),
    )


@contextmanager
def prepared(case: MemoryCase, device: str) -> Iterator[Callable[[], None]]:
    from dora_pipe.consumers.learners.torch.device import deterministic

    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder, deterministic(1):
        head = case.what == "head"
        compute = _head(case, device) if head else _step(case, device, Path(folder))
        compute(2)  # Allocate what stays.
        yield lambda: compute(case.tokens)


def _head(case: MemoryCase, device: str) -> Callable[[int], None]:
    import torch

    from dora_pipe.consumers.learners.torch.memory import MemoryOptions, head_logprobs

    torch.manual_seed(SEED)
    head = torch.nn.Linear(case.width, case.vocabulary, bias=False, device=device)
    hidden = torch.randn(case.tokens, case.width, device=device)
    targets = torch.randint(0, case.vocabulary, (case.tokens,), device=device)
    memory = MemoryOptions(head_chunk_tokens=case.head_chunk_tokens)

    def compute(tokens: int) -> None:
        given = hidden[:tokens].detach().requires_grad_()
        chunks = memory.head_chunks(tokens, case.vocabulary)
        logprobs = head_logprobs(head, given, targets[:tokens], temperature=1.0, chunks=chunks)
        head.weight.grad = None
        torch.autograd.backward(logprobs.mean())

    return compute


def _step(case: MemoryCase, device: str, folder: Path) -> Callable[[int], None]:
    import torch

    from dora_pipe.consumers.learners.torch.memory import MemoryOptions
    from dora_pipe.consumers.learners.torch.model import TorchModel, passage_of
    from dora_pipe.consumers.learners.torch.network import head_is_all
    from dora_pipe.consumers.learners.torch.optimizer import Optimizer

    torch.manual_seed(SEED)
    _config(case).save_pretrained(folder)
    memory = MemoryOptions(
        head_chunk_tokens=case.head_chunk_tokens,
        mlp_chunk_tokens=case.mlp_chunk_tokens,
        gradient_checkpointing=case.gradient_checkpointing,
    )
    model = TorchModel(folder, device=device, memory=memory)
    model.lean = head_is_all(model.network, device)
    parameters = list(model.parameters())
    optimizer = Optimizer(parameters, betas=(0.9, 0.95), weight_decay=0.0)

    def compute(tokens: int) -> None:
        ids = torch.randint(0, case.vocabulary, (tokens,)).tolist()
        row = ids, [1] * tokens, [0.0] * tokens
        passage = passage_of([row], width=tokens, device=device)
        optimizer.clear()
        torch.autograd.backward(-model.logprobs(passage).mean())
        optimizer.gradient_norm(1.0)
        optimizer.update(1e-6)

    return compute


def _config(case: MemoryCase) -> Any:
    from transformers import LlamaConfig

    config: Any = LlamaConfig
    return config(
        architectures=["LlamaForCausalLM"],
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=8 * case.width // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=case.width // 64,
        max_position_embeddings=case.tokens,
    )


if __name__ == "__main__":
    reply(_measured(task_of(MemoryCase)))
