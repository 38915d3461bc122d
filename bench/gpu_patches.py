"""Measures a version of a large policy on its way from a trainer's GPU to another's: written whole,
as a patch, made of that patch, hashed, and loaded.

    python -m dora_pipe.bench.gpu_patches [MODEL] [--tiny]

Weights are random, in bfloat16 over float32 masters, and what changes between the two versions is
what steps of GRPO at a learning rate of 1e-6 change (`gpu_step`). Files lie in the temporary
folder; nothing is synced, so that the page cache is what they are written to and read from.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bench.gpu_cases import TINY, StepCase, tiny
from dora_pipe.bench.gpu_step import SETTINGS, batch_of, made_learner, now_s
from dora_pipe.bench.qwen3 import config_of
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.patch import opened_patches, write_patch, write_patched
from dora_pipe.store.safetensors_file import read_manifest

STEPS: Final = 2
"""Between the two versions: the masters of the first are its own numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigure:
    """What one stage took, and the bytes of its result."""

    model: str
    stage: str
    seconds: float
    megabytes: float
    said: str = ""


def bench_gpu_patches(case: StepCase) -> Iterator[StageFigure]:
    """The stages of a version, in their order. Raises PolicyError."""
    import torch

    from dora_pipe.consumers.learners.deepspeed import prepare

    prepare(case.device)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        config_of(case.model, case.row_tokens).save_pretrained(folder)
        learner = made_learner(case, folder)
        yield from _stages(case, learner, folder)


def _stages(case: StepCase, learner: Any, folder: Path) -> Iterator[StageFigure]:
    before, after, patch, made = (folder / one for one in ("before", "after", "patch", "made"))
    first: Manifest = learner.save_weights(before)
    batch = batch_of(case)
    for _ in range(STEPS):
        learner.train(batch, SETTINGS)

    def figure(stage: str, do: Callable[[], Any], path: Path) -> tuple[StageFigure, Any]:
        began_s = now_s(case.device)
        found = do()
        seconds = now_s(case.device) - began_s
        size = path.stat().st_size / 1e6
        one = StageFigure(
            model=case.model, stage=stage, seconds=round(seconds, 4), megabytes=round(size, 3)
        )
        return one, found

    whole, manifest = figure(
        "whole file written from the device, and hashed", lambda: learner.save_weights(after), after
    )
    yield whole
    kept = {"digest_before": first.digest, "digest_after": manifest.digest}
    one, change = figure(
        "patch: compared and written", lambda: write_patch(patch, before, after, **kept), patch
    )
    yield _saying(one, f"{change.share:.2%} of {change.elements:,} numbers changed")

    def apply() -> Manifest:
        with opened_patches([patch]) as patches:
            return write_patched(made, before, patches)

    one, again = figure("version made of the one before and the patch, hashed", apply, made)
    yield _saying(one, "equal" if again.digest == manifest.digest else "NOT EQUAL")
    yield figure("whole file hashed", lambda: read_manifest(made), made)[0]
    yield from _loads(case, learner, made, figure)


def _saying(figure: StageFigure, said: str) -> StageFigure:
    return StageFigure(**{**asdict(figure), "said": said})


def _loads(
    case: StepCase, learner: Any, path: Path, figure: Callable[..., tuple[StageFigure, Any]]
) -> Iterator[StageFigure]:
    """Into the memory of the device: as a trainer does, and in one copy."""
    import torch

    from dora_pipe.consumers.learners.torch.model import load_weights

    network = learner._model.network
    yield figure(
        "loaded by the torch trainer, as float32", lambda: load_weights(network, path), path
    )[0]
    held = torch.empty(path.stat().st_size, dtype=torch.uint8, pin_memory=case.device == "cuda")
    view: Any = held.numpy()

    def read() -> None:
        with path.open("rb") as file:
            file.readinto(memoryview(view))

    yield figure("file read into pinned memory", read, path)[0]
    there = torch.empty_like(held, device=case.device, pin_memory=False)
    copied, _ = figure("copied from pinned memory to the device", lambda: there.copy_(held), path)
    speed = copied.megabytes / 1e3 / max(copied.seconds, 1e-9)
    yield _saying(copied, f"{speed:.1f} GB/s")


def _main(words: Sequence[str]) -> int:
    model = words[0] if words else "1.7B"
    case = StepCase(model=model)
    for figure in bench_gpu_patches(tiny(case) if words[1:] == [TINY] else case):
        sys.stdout.write(msgspec.json.encode(asdict(figure)).decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
