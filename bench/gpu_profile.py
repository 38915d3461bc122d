"""Where a training step spends its time on a GPU: its kernels, by torch's profiler.

python -m dora_pipe.bench.gpu_profile [MODEL] [--tiny]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bench.gpu_cases import TINY, StepCase, tiny, with_
from dora_pipe.bench.gpu_step import SETTINGS, batch_of, made_learner, now_s
from dora_pipe.bench.qwen3 import config_of

SHOWN: Final = 12
NAME_LETTERS: Final = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigure:
    """A kernel in a step; `share` is of the time from its begin to its end, in which nothing is
    computed where the shares of all do not add up to 1."""

    compute: str
    kernel: str
    calls: int
    ms: float
    share: float


def bench_gpu_profile(case: StepCase) -> Iterator[KernelFigure]:
    """The kernels of a step that take longest, and all together; the second step of a learner."""
    from torch.profiler import ProfilerActivity, profile

    from dora_pipe.consumers.learners.deepspeed import prepare

    prepare(case.device)
    kinds = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config_of(case.model, case.row_tokens).save_pretrained(folder)
        learner, batch = made_learner(case, Path(folder)), batch_of(case)
        learner.train(batch, SETTINGS)
        with profile(activities=[kinds[case.device]]) as seen:
            began_s = now_s(case.device)
            learner.train(batch, SETTINGS)
            step_ms = (now_s(case.device) - began_s) * 1e3
    yield from _longest(case, seen.key_averages(), step_ms)


def _longest(case: StepCase, events: Any, step_ms: float) -> Iterator[KernelFigure]:
    def took_ms(event: Any) -> float:
        took = event.self_device_time_total if case.device == "cuda" else event.self_cpu_time_total
        return float(took) / 1e3

    def figure(name: str, calls: int, ms: float) -> KernelFigure:
        return KernelFigure(
            compute=case.compute,
            kernel=name[:NAME_LETTERS].replace("|", " "),
            calls=calls,
            ms=round(ms, 2),
            share=round(ms / step_ms, 4),
        )

    by_time = sorted(events, key=took_ms, reverse=True)
    yield figure("the step", 1, step_ms)
    yield figure("all kernels", sum(one.count for one in events), sum(map(took_ms, events)))
    for one in by_time[:SHOWN]:
        yield figure(one.key, one.count, took_ms(one))


def _main(words: Sequence[str]) -> int:
    model = words[0] if words else "0.6B"
    case = StepCase(model=model, compute="bfloat16")
    case = tiny(case) if words[1:] == [TINY] else case
    for one in (case, with_(case, compute="float32")):
        for figure in bench_gpu_profile(one):
            sys.stdout.write(msgspec.json.encode(asdict(figure)).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
