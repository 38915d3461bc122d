"""Measures a step of GRPO of a Qwen3 model with random weights, by the torch trainer and by trl's.

    python -m dora_pipe.bench.gpu_step SET [--tiny]

Cases of a set share a process while each leaves the device as empty as it was, else a fresh one
goes on; a figure is one JSON object on a line. Both trainers get the same rows (token ids, masks,
advantages), cut into passes of the same tokens, the same network of transformers, AdamW, clipping
and gradient checkpointing; one step comes before the measured ones. Not the same: trl computes
entropies too, in a head of its own, and its AdamW is the fused one; ours takes deterministic
kernels, and keeps figures of every trajectory. `trl` computes in float32, `trl-bf16` under autocast
to bfloat16, as trl does by default. `--tiny` goes the way of a set on a CPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.bench.codec import sample_trajectory
from dora_pipe.bench.gpu_cases import GROUP, TINY, StepCase, cases_of, tiny, with_
from dora_pipe.bench.peak import fresh_peak, peak_bytes
from dora_pipe.bench.qwen3 import config_of, vocabulary_of
from dora_pipe.consumers.learners.port import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.settings import PACKING
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.schemas.trajectory import Trajectory

SEED: Final = 0
LEARNING_RATE: Final = 1e-6
NORM_MAX: Final = 1.0
WARM_TOKENS: Final = 2048
"""Of the rows of the own trainer's step that is not measured."""
LEFT_BYTES: Final = 200_000_000
"""Work space of libraries, which stays: more, and a process goes on in a fresh one."""
BETAS: Final = (0.9, 0.95)
SETTINGS: Final = {
    "trainer.learning_rate": LEARNING_RATE,
    "trainer.grad_norm_max": NORM_MAX,
    "trainer.minibatches": 1,
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.2,
    "objective.loss": "token-mean",
    "objective.advantage_std": True,
    "objective.kl": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStepFigure:
    """The median of the measured steps; `said` is why there is none."""

    by: str
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
    """By which way (`consumers.learners.settings`); empty: rows share no lines."""
    seconds: float | None = None
    tokens_s: int | None = None
    peak_gb: float | None = None
    """Most that torch's allocator held during those steps, weights and states among it."""
    held_gb: float | None = None
    """What it held before the first of them."""
    leave_s: float | None = None
    """Until the states had left, where they do; coming back is part of the step."""
    digest: str = ""
    """Of the weights after the last step, its beginning."""
    said: str = ""


def bench_gpu_steps(cases: Sequence[StepCase]) -> Iterator[GpuStepFigure]:
    """One figure after the other; a case whose package is not here, or whose process ended badly,
    says so in its figure."""
    absent = [one for one in cases if one.needs and importlib.util.find_spec(one.needs) is None]
    yield from (_figure(one, said=f"{one.needs} is not installed") for one in absent)
    rest = [one for one in cases if one not in absent]
    while rest:
        before = len(rest)
        with _started(rest) as process:
            for figure in _figures_in(process.stdout):
                yield figure
                rest = rest[1:]
        if rest and (process.returncode or len(rest) == before):
            yield _figure(rest[0], said=f"exit code {process.returncode}")
            rest = rest[1:]


def _started(cases: Sequence[StepCase]) -> subprocess.Popen[bytes]:
    """A process that has been told to measure these."""
    command = [sys.executable, "-m", "dora_pipe.bench.gpu_step"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(cases))
    process.stdin.close()
    return process


def _figures_in(lines: Iterable[bytes] | None) -> Iterator[GpuStepFigure]:
    """What is a figure among what a process prints; trl has lines of its own."""
    for line in lines or ():
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=GpuStepFigure)


def _measure(cases: Sequence[StepCase]) -> None:
    """Print figures until all are there, or the device keeps something of one."""
    for case in cases:
        figure = measured(case)
        _say(figure)
        if figure.said or _held_after(case.device) > LEFT_BYTES:
            return


def _held_after(device: str) -> int:
    """What the allocator still holds when all that can go has gone."""
    import torch

    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _say(figure: GpuStepFigure) -> None:
    sys.stdout.write(msgspec.json.encode(asdict(figure)).decode() + "\n")
    sys.stdout.flush()


def _figure(case: StepCase, **more: Any) -> GpuStepFigure:
    return GpuStepFigure(
        by=case.by,
        model=case.model,
        tokens=case.tokens,
        row_tokens=case.row_tokens,
        pass_tokens=case.pass_tokens,
        compute={"trl": "float32", "trl-bf16": "bfloat16"}.get(case.by, case.compute),
        policies=case.policies if case.by == "own" else "float32",
        optimizer=case.optimizer,
        checkpointing=case.gradient_checkpointing,
        offload=case.activation_offload,
        leaving=case.leaving,
        packing="",
        **more,
    )


def measured(case: StepCase) -> GpuStepFigure:
    """The figure of a case, in this process."""
    import torch

    from dora_pipe.consumers.learners.deepspeed import prepare

    prepare(case.device)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config_of(case.model, case.row_tokens).save_pretrained(folder)
        try:
            if case.by == "own":
                return _own(case, Path(folder))
            return _by_trl(case, Path(folder))
        except torch.OutOfMemoryError:
            return _figure(case, said="out of memory")


def _own(case: StepCase, folder: Path) -> GpuStepFigure:
    learner = made_learner(case, folder)
    batch, settings = batch_of(case), {**SETTINGS, PACKING: case.packing}
    short = with_(case, rows=GROUP, row_tokens=min(case.row_tokens, WARM_TOKENS), last_tokens=0)
    learner.train(batch_of(short), settings)
    left, took = [], []
    if case.leaving:  # What it pins of the host's memory the first time stays pinned.
        learner.leave_device()
        learner._states.come_back()
    held = 0
    for number in range(case.steps):
        if case.leaving:
            left.append(_seconds(learner.leave_device, case.device))
        if not number:
            held = fresh_peak(case.device)
        took.append(_seconds(lambda: learner.train(batch, settings), case.device))
    peak = peak_bytes(case.device)
    digest = learner.manifest().digest[:12] if case.digest else ""
    leave_s = round(statistics.median(left), 3) if left else None
    way = case.packing if case.packing is not True else learner.numerics()["packing"]
    figure = _of_times(case, took, peak, held, digest)
    return replace(figure, leave_s=leave_s, packing=way or "")


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Until the device has done it."""
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
    """The time when the device has done what it was told."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def made_learner(case: StepCase, folder: Path) -> Any:
    """The torch trainer over the model of a folder, whose random weights are made on the device:
    those of 4 billion would take a minute on a CPU, and as much to be written and read."""
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
        for _, one in model.parameters():
            one.data.copy_(one.data.to(torch.bfloat16))
    model.lean = head_is_all(model.network, case.device)
    return learner


def write_names(path: Path, folder: Path, dtype: PolicyDtype) -> None:
    """A file of version 0 as far as a trainer reads it here: names, types and shapes, over a hole
    in place of the numbers."""
    import torch

    from dora_pipe.consumers.learners.torch.network import build
    from dora_pipe.store.network_names import stored

    declared, end = {}, 0
    kind, size = ("BF16", 2) if dtype == "bfloat16" else ("F32", 4)
    with torch.device("meta"):
        tensors = stored(build(folder))
    for name, one in tensors.items():
        start, end = end, end + one.numel() * size
        declared[name] = {"dtype": kind, "shape": list(one.shape), "data_offsets": [start, end]}
    header = msgspec.json.encode(declared)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + end)


def rows_of(case: StepCase) -> Any:
    """Token ids, [rows, row_tokens]."""
    vocabulary = vocabulary_of(case.model)
    shape = (case.rows, case.row_tokens)
    return np.random.default_rng(SEED).integers(0, vocabulary, shape)


def batch_of(case: StepCase) -> TrainBatch:
    """The rows as groups of `GROUP` siblings."""
    rows = rows_of(case)
    groups: list[TrainGroup] = []
    for ordinal in range(case.rows // GROUP):
        group, at = group_id("train", ordinal), ordinal * GROUP
        siblings = [
            _sibling(case, group, one, rows[at + one][: case.tokens_of(at + one)])
            for one in range(GROUP)
        ]
        groups.append(TrainGroup(group=group, version=0, trajectories=siblings))
    return TrainBatch(step=0, groups=groups)


def _guess(case: StepCase) -> float:
    """The log-prob of a token under a policy that knows nothing."""
    return -math.log(vocabulary_of(case.model))


def _sibling(case: StepCase, group: str, sibling: int, ids: Any) -> Trajectory:
    """One with reward 1 or 0, sampled from a policy that knows nothing."""
    size = len(ids)
    like = sample_trajectory(size)
    prompt = like.meta.prompt_tokens
    column = [*[None] * prompt, *[_guess(case)] * (size - prompt)]
    meta = msgspec.structs.replace(like.meta, group=group, group_size=GROUP, sibling=sibling)
    return replace(
        like,
        trajectory=trajectory_id(group, sibling),
        version=0,
        token_ids=ids.tolist(),
        logprobs=column,
        sampler_logprobs=column,
        reward=float(sibling % 2),
        meta=meta,
    )


def _by_trl(case: StepCase, folder: Path) -> GpuStepFigure:
    """trl's whole training loop, but for what would be generated and rewarded."""
    import torch

    trainer = _trl_trainer(case, folder)
    took: list[float] = []
    held = 0

    class Clock(_callback_class()):  # type: ignore[misc]
        """Times every step but the first."""

        def on_step_begin(self, *given: Any, **more: Any) -> None:
            nonlocal held
            if len(took) == 1:
                held = fresh_peak(case.device)
            took.append(-now_s(case.device))

        def on_step_end(self, *given: Any, **more: Any) -> None:
            took[-1] += now_s(case.device)

    trainer.add_callback(Clock())
    torch.set_float32_matmul_precision("highest")
    trainer.train()
    return _of_times(case, took[1:], peak_bytes(case.device), held)


def _callback_class() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback


def _trl_trainer(case: StepCase, folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    base: Any = trl.GRPOTrainer

    rows_at_once = max(1, case.pass_tokens // case.row_tokens)
    passes = case.rows // rows_at_once
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(case.device):
        network = make(
            AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="sdpa"
        )
    options: Any = trl.GRPOConfig
    prompt = sample_trajectory(case.row_tokens).meta.prompt_tokens
    arguments = options(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_generations=GROUP,
        max_completion_length=case.row_tokens - prompt,
        max_steps=1 + case.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=NORM_MAX,
        beta=0.0,
        bf16=case.by == "trl-bf16",
        gradient_checkpointing=case.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=case.device == "cpu",
        save_strategy="no",
        report_to=[],
        logging_steps=1000,
        seed=SEED,
    )

    class Given(base):  # type: ignore[misc]
        """Completions that are there already."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return _trl_inputs(case, prompt)

    return Given(
        model=network,
        reward_funcs=lambda completions, **more: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w"] * case.rows * 4}),
        processing_class=_tokenizer(),
    )


def _trl_inputs(case: StepCase, prompt: int) -> dict[str, Any]:
    import torch

    ids = torch.from_numpy(rows_of(case)).to(case.device)
    mask = torch.ones_like(ids)
    advantages = torch.tensor([-1.0, 1.0], device=case.device).repeat(case.rows // GROUP)
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": advantages,
        "old_per_token_logps": torch.full_like(ids[:, prompt:], _guess(case), dtype=torch.float32),
        "num_items_in_batch": mask[:, prompt:].sum(),
    }


def _tokenizer() -> Any:
    """Of one word: nothing is tokenized."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(WordLevel({"w": 0, "<e>": 1}, unk_token="w"))
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=known, eos_token="<e>", pad_token="<e>", unk_token="w")


def _main(words: Sequence[str]) -> int:
    if not words:
        _measure(msgspec.json.decode(sys.stdin.buffer.read(), type=list[StepCase]))
        return 0
    name, *rest = words
    cases = cases_of(name)
    for figure in bench_gpu_steps([tiny(one) for one in cases] if rest == [TINY] else cases):
        _say(figure)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
