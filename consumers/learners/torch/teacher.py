"""Teacher from a model directory, at the policy's temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_pipe.config.section import ComputeDtype
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.memory import AT_ONCE, MemoryOptions, UnassignedRows
from dora_pipe.consumers.learners.torch.model import Passage, score, score_rows
from dora_pipe.consumers.learners.torch.network import head_is_all
from dora_pipe.consumers.teachers.teacher import Row, Scores
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import unassigned_ids, weights_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of computing a teacher."""

    dtype: ComputeDtype = "float32"
    device: str = "cpu"
    temperature: float = 1.0
    padded_tokens_max: int = 16384
    threads: int = 1
    memory: MemoryOptions = AT_ONCE


class ModelTeacher:
    """Frozen teacher from a model directory."""

    repeatable = True
    waits_for = ""

    def __init__(self, directory: Path, *, digest: str, options: ModelOptions) -> None:
        """Raises PolicyError for an unusable directory or another digest."""
        self._digest = weights_digest(directory)
        if digest and digest != self._digest:
            raise PolicyError(
                f"teacher.path: the weights of {directory} have digest {self._digest[:12]}, those"
                f" of the run's teacher {digest[:12]}",
                hint="restore the teacher, or start a new run",
            )
        self._directory = directory
        self._options = options
        self._network = _network(directory, options)
        self._lean = head_is_all(self._network, options.device)

    def name(self) -> str:
        """Return weights digest and compute dtype."""
        return f"{self._options.dtype} {self._digest}"

    def logprobs(self, rows: Sequence[Row]) -> Scores:
        """See Teacher; does not wait."""
        vocabulary = self._network.config.vocab_size
        largest = max((max(ids) for ids, _ in rows if len(ids)), default=0)
        if largest >= vocabulary:
            raise PolicyError(f"{self._directory} has no token {largest}: it has {vocabulary}")
        options = self._options
        with deterministic(options.threads):
            scored = score_rows(
                rows,
                self._logprobs,
                padded_tokens_max=options.padded_tokens_max,
                device=options.device,
            )
        yield from ()
        return scored

    def _logprobs(self, passage: Passage) -> Tensor:
        network, options = self._network, self._options
        return score(
            network,
            passage.ids,
            passage.places,
            passage.targets,
            lean=self._lean,
            temperature=options.temperature,
            chunks=options.memory.head_chunks(len(passage.targets), network.config.vocab_size),
        )


def _network(directory: Path, options: ModelOptions) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    read: Any = AutoModelForCausalLM.from_pretrained
    try:
        network = read(
            directory,
            dtype=getattr(torch, options.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
        )
    except (ValueError, KeyError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise PolicyError(f"cannot read a causal LM from {directory}: {error}") from error
    network.unassigned = UnassignedRows(unassigned_ids(directory), network.config.vocab_size)
    return network.to(options.device).eval().requires_grad_(False)
