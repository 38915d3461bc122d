"""Measures the memory of an adapter's trainer on a base in float32 and in bfloat16: it decides
nothing.

Every figure is of a process of its own. Weights are random, the loss is the mean log-prob of one
sequence.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bench.peak import fresh_peak, peak_bytes
from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.config.section import ComputeDtype
from dora_pipe.schemas.policy import PolicyDtype

LAYERS: Final = 8
VOCABULARY: Final = 16_384
RANK: Final = 16
SEED: Final = 0
BASES: Final[tuple[tuple[PolicyDtype, ComputeDtype], ...]] = (
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
)
"""What is published, and what passes compute in."""


class AdapterCase(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory's config, weights in the type that is published, and what is computed."""

    assets: str
    weights: str
    published: PolicyDtype
    computed: ComputeDtype
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMemoryFigure:
    """Example: ``AdapterMemoryFigure(base="bfloat16", computed="float32", parameters=134_234_112,
    tokens=256, made_mb=300.0, held_mb=290.0, peak_mb=120.0, seconds=2.1)``"""

    base: str
    computed: str
    parameters: int
    tokens: int
    made_mb: float
    """Most that is held while network and adapter are made."""
    held_mb: float
    """Between steps: base, adapter, its gradients and moments."""
    peak_mb: float
    """Most that a step takes beside that."""
    seconds: float


def bench_adapter_memory(width: int, tokens: int) -> Iterator[AdapterMemoryFigure]:
    """A step of a model this wide with an adapter on all layers, by what its base is in."""
    with tempfile.TemporaryDirectory(prefix="bench-adapter-") as folder:
        for case in adapter_cases(Path(folder), width, tokens):
            done = subprocess.run(
                [sys.executable, "-m", "dora_pipe.bench.adapter_memory"],
                input=msgspec.json.encode(case),
                check=True,
                stdout=subprocess.PIPE,
            )
            yield msgspec.json.decode(done.stdout, type=AdapterMemoryFigure)


def adapter_cases(folder: Path, width: int, tokens: int) -> list[AdapterCase]:
    """One for each of `BASES`; its model's files go into the folder."""
    weights = _published(folder, width, tokens)
    return [
        AdapterCase(
            assets=str(folder),
            weights=weights[published],
            published=published,
            computed=computed,
            tokens=tokens,
        )
        for published, computed in BASES
    ]


def _published(folder: Path, width: int, tokens: int) -> dict[PolicyDtype, str]:
    """A random version 0 in either type."""
    import torch
    from transformers import LlamaConfig

    from dora_pipe.consumers.learners.torch.model import DTYPES_OF, tensor_source
    from dora_pipe.consumers.learners.torch.network import build
    from dora_pipe.store.network_names import stored
    from dora_pipe.store.safetensors_file import write_tensors

    torch.manual_seed(SEED)
    config: Any = LlamaConfig
    config(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    named, found = stored(build(folder)), {}
    for dtype, kind in DTYPES_OF.items():
        path = folder / f"{dtype}.safetensors"
        write_tensors(path, [tensor_source(name, one, kind) for name, one in named.items()])
        found[dtype] = str(path)
    return found


def adapter_phases(case: AdapterCase, device: str) -> Generator[int, None, None]:
    """What is measured, one piece at each `next`: network and adapter are made; the base is loaded,
    and a step of two tokens leaves what stays; a step. Each gives how many numbers the base has."""
    import torch

    from dora_pipe.consumers.learners.torch.device import deterministic
    from dora_pipe.consumers.learners.torch.lora import LoraModel, LoraOptions
    from dora_pipe.consumers.learners.torch.memory import MemoryOptions
    from dora_pipe.consumers.learners.torch.model import passage_of
    from dora_pipe.consumers.learners.torch.optimizer import Optimizer

    with deterministic(1):
        model = LoraModel(
            Path(case.assets),
            base=Path(case.weights),
            options=LoraOptions(rank=RANK, alpha=RANK, targets=LINEAR_LAYERS),
            device=device,
            memory=MemoryOptions(head_chunk_tokens="auto", mlp_chunk_tokens="auto"),
            dtype=case.computed,
        )
        parameters = sum(one.numel() for one in model.network.parameters())
        yield parameters
        model.load(Path(case.weights))
        named = list(model.parameters())
        optimizer = Optimizer(named, betas=(0.9, 0.95), weight_decay=0.0, bfloat16=model.bfloat16)

        def compute(tokens: int) -> None:
            ids = torch.randint(0, VOCABULARY, (tokens,)).tolist()
            passage = passage_of([(ids, [1] * tokens, [0.0] * tokens)], width=tokens, device=device)
            optimizer.clear()
            torch.autograd.backward(-model.logprobs(passage).mean())
            optimizer.update(1e-4)

        compute(2)  # What is there once is there then: gradients, moments, libraries.
        yield parameters
        compute(case.tokens)
        yield parameters


def _measured(case: AdapterCase) -> AdapterMemoryFigure:
    import torch
    from transformers import LlamaForCausalLM

    from dora_pipe.core.heap import give_back_freed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert LlamaForCausalLM.config_class is not None, "libraries are there before anything is held"
    give_back_freed()  # As every such trainer does on a CPU: else gaps are counted.
    phases = adapter_phases(case, device)
    empty = fresh_peak(device)
    parameters = next(phases)
    made = peak_bytes(device) - empty
    next(phases)
    held = fresh_peak(device)
    start_s = time.perf_counter()
    next(phases)
    seconds = time.perf_counter() - start_s
    return AdapterMemoryFigure(
        base=case.published,
        computed=case.computed,
        parameters=parameters,
        tokens=case.tokens,
        made_mb=round(made / 1e6, 1),
        held_mb=round((held - empty) / 1e6, 1),
        peak_mb=round((peak_bytes(device) - held) / 1e6, 1),
        seconds=round(seconds, 1),
    )


def _main() -> int:
    figure = _measured(msgspec.json.decode(sys.stdin.buffer.read(), type=AdapterCase))
    sys.stdout.write(msgspec.json.encode(figure).decode())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
