"""GRPO step of a random Qwen3 model with the torch trainer.

    python -m dora_pipe.bench.gpu_step SET [--tiny]

Each case is a process that prints a JSON line. `--tiny` uses a tiny model on a CPU.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.bench.codec import sample_trajectory
from dora_pipe.bench.gpu_cases import GROUP, TINY, StepCase, cases_of, tiny, with_
from dora_pipe.bench.peak import fresh_peak, peak_bytes
from dora_pipe.bench.qwen3 import config_of, vocabulary_of
from dora_pipe.bench.support import reply, result_of, task_of
from dora_pipe.config.objectives import defaults_of
from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.settings import PACKING
from dora_pipe.core.errors import ResourceError
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.schemas.trajectory import Trajectory

SEED: Final = 0
LEARNING_RATE: Final = 1e-6
NORM_MAX: Final = 1.0
WARM_TOKENS: Final = 2048
CASE_LIMIT_S: Final = 470.0
BETAS: Final = (0.9, 0.95)
SETTINGS: Final = {
    "trainer.learning_rate": LEARNING_RATE,
    "trainer.max_grad_norm": NORM_MAX,
    "trainer.minibatches": 1,
    **{f"objective.{key}": value for key, value in defaults_of({"kind": "grpo"}).items()},
    "objective.kind": "grpo",
    "objective.clip_high": 0.2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStepFigure:
    """Median step, or the reason in `said`."""

    model: str
    tokens: int
    row_tokens: int
    pass_tokens: int
    compute: str
    policies: str
    optimizer: str
    checkpointing: bool
    offload: bool
    leaving: bool
    packing: str
    """Packing method (`consumers.learners.settings`); empty without packing."""
    seconds: float | None = None
    tokens_s: int | None = None
    peak_gb: float | None = None
    """Peak of torch's allocator during the steps, including weights and states."""
    held_gb: float | None = None
    """Allocated before the first step."""
    leave_s: float | None = None
    """Time to offload the states; reloading counts as part of the step."""
    digest: str = ""
    """Prefix of the final weights' digest."""
    said: str = ""


def bench_gpu_steps(cases: Sequence[StepCase]) -> Iterator[GpuStepFigure]:
    for case in cases:
        if case.needs and importlib.util.find_spec(case.needs) is None:
            yield _figure(case, said=f"{case.needs} is not installed")
            continue
        try:
            yield result_of("dora_pipe.bench.gpu_step", case, GpuStepFigure, limit_s=CASE_LIMIT_S)
        except ResourceError as error:
            yield _figure(case, said=error.message)


def _figure(case: StepCase, **more: Any) -> GpuStepFigure:
    return GpuStepFigure(
        model=case.model,
        tokens=case.tokens,
        row_tokens=case.row_tokens,
        pass_tokens=case.pass_tokens,
        compute=case.compute,
        policies=case.policies,
        optimizer=case.optimizer,
        checkpointing=case.gradient_checkpointing,
        offload=case.activation_offload,
        leaving=case.leaving,
        packing="",
        **more,
    )


def measured(case: StepCase) -> GpuStepFigure:
    import torch

    from dora_pipe.consumers.learners.deepspeed import prepare

    prepare(case.device)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config_of(case.model, case.row_tokens).save_pretrained(folder)
        try:
            return _own(case, Path(folder))
        except torch.OutOfMemoryError:
            return _figure(case, said="out of memory")


def _own(case: StepCase, folder: Path) -> GpuStepFigure:
    learner = made_learner(case, folder)
    batch, settings = batch_of(case), {**SETTINGS, PACKING: case.packing}
    short = with_(case, rows=GROUP, row_tokens=min(case.row_tokens, WARM_TOKENS), last_tokens=0)
    learner.train(batch_of(short), settings)
    leave_times, took = [], []
    if case.leaving:  # Pinned host memory stays pinned after the first time.
        learner.leave_device()
        learner._states.come_back()
    held = 0
    for number in range(case.steps):
        if case.leaving:
            leave_times.append(_seconds(learner.leave_device, case.device))
        if not number:
            held = fresh_peak(case.device)
        took.append(_seconds(lambda: learner.train(batch, settings), case.device))
    peak = peak_bytes(case.device)
    digest = learner.manifest().digest[:12] if case.digest else ""
    leave_s = round(statistics.median(leave_times), 3) if leave_times else None
    way = case.packing if case.packing is not True else learner.numerics()["packing"]
    figure = _of_times(case, took, peak, held, digest)
    return replace(figure, leave_s=leave_s, packing=way or "")


def _seconds(call: Callable[[], Any], device: str) -> float:
    began_s = now_s(device)
    call()
    return now_s(device) - began_s


def _of_times(
    case: StepCase, took: Sequence[float], peak: int, held: int, digest: str = ""
) -> GpuStepFigure:
    seconds = statistics.median(took)
    return _figure(
        case,
        seconds=round(seconds, 3),
        tokens_s=round(case.tokens / seconds),
        peak_gb=round(peak / 1e9, 2),
        held_gb=round(held / 1e9, 2),
        digest=digest,
    )


def now_s(device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def made_learner(case: StepCase, folder: Path) -> Any:
    """Return the torch trainer over a model folder with random weights made on the device;
    creating 4 billion on a CPU takes a minute."""
    import torch

    from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
    from dora_pipe.consumers.learners.torch.memory import MemoryOptions
    from dora_pipe.consumers.learners.torch.network import head_is_all

    options = TorchOptions(
        optimizer=case.optimizer,
        betas=BETAS,
        micro_batch_tokens=case.pass_tokens,
        device=case.device,
        dtype=case.compute,
        memory=MemoryOptions(
            head_chunk_tokens="auto",
            mlp_chunk_tokens="auto",
            gradient_checkpointing=case.gradient_checkpointing,
            activation_offload=case.activation_offload,
            packing=bool(case.packing),
        ),
    )
    reference = folder / "names.safetensors"
    write_names(reference, folder, case.policies)
    with torch.device(case.device):
        learner = TorchLearner(folder, reference=reference, options=options)
    model = learner._model
    if case.policies == "bfloat16":
        for _, parameter in model.parameters():
            parameter.data.copy_(parameter.data.to(torch.bfloat16))
    model.lean = head_is_all(model.network, case.device)
    return learner


def write_names(path: Path, folder: Path, dtype: PolicyDtype) -> None:
    """Write a sparse file of version 0: names, types and shapes without numbers."""
    import torch

    from dora_pipe.consumers.learners.torch.network import build
    from dora_pipe.store.network_names import stored

    declared, end = {}, 0
    kind, size = ("BF16", 2) if dtype == "bfloat16" else ("F32", 4)
    with torch.device("meta"):
        tensors = stored(build(folder))
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * size
        declared[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = msgspec.json.encode(declared)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + end)


def rows_of(case: StepCase) -> Any:
    """Return token ids, [rows, row_tokens]."""
    vocabulary = vocabulary_of(case.model)
    shape = (case.rows, case.row_tokens)
    return np.random.default_rng(SEED).integers(0, vocabulary, shape)


def batch_of(case: StepCase) -> TrainBatch:
    """Return groups of `GROUP` trajectories."""
    rows = rows_of(case)
    groups: list[TrainGroup] = []
    for ordinal in range(case.rows // GROUP):
        group, first_row = group_id("train", ordinal), ordinal * GROUP
        samples = [
            _sample(
                case, group, index, rows[first_row + index][: case.tokens_of(first_row + index)]
            )
            for index in range(GROUP)
        ]
        groups.append(TrainGroup(group=group, version=0, trajectories=samples))
    return TrainBatch(step=0, groups=groups)


def _guess(case: StepCase) -> float:
    return -math.log(vocabulary_of(case.model))


def _sample(case: StepCase, group: str, sample: int, ids: Any) -> Trajectory:
    size = len(ids)
    like = sample_trajectory(size)
    prompt = like.meta.prompt_tokens
    column = [*[None] * prompt, *[_guess(case)] * (size - prompt)]
    meta = msgspec.structs.replace(like.meta, group=group, group_size=GROUP, sample=sample)
    return replace(
        like,
        trajectory=trajectory_id(group, sample),
        version=0,
        token_ids=ids.tolist(),
        logprobs=column,
        sampler_logprobs=column,
        reward=float(sample % 2),
        meta=meta,
    )


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        reply(measured(task_of(StepCase)))
    else:
        chosen = cases_of(sys.argv[1])
        for step in bench_gpu_steps([tiny(one) for one in chosen] if TINY in sys.argv else chosen):
            reply(step)
