"""GPU rounds: contract suites and demos on one machine (`make test-gpu`).

    python -m tests.support.gpu [ROUND...]

Each round is a separate process, because DeepSpeed and vLLM have one device and type per process.
All rounds run, also after a failure.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.support.device import NO_GPU, has_gpu

ENGINE_TESTS: Final = (
    "tests/contract/test_engine_contract.py",
    "tests/contract/test_engine_vllm.py",
    "tests/contract/test_trainer_engine.py",
)
LORA_TESTS: Final = (
    "tests/contract/test_engine_resident.py",
    "tests/contract/test_engine_vllm_lora.py",
)
DEEPSPEED_TESTS: Final = (
    "tests/contract/test_trainer.py",
    "tests/deepspeed/test_arithmetic.py",
    "tests/deepspeed/test_lora.py",
)

OK: Final = "ok"
DORA_PIPE: Final = "from dora_pipe.cli.main import main; main()"
"""Command, also for a package in a folder on the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    name: str
    tests: tuple[str, ...] = ()
    only: str = ""
    """pytest's -k."""
    needs: str = ""
    """Required package."""
    dtype: str = "float32"
    gpus: int = 1
    engine: str = "vllm"
    """Engine of a demo."""
    keys: tuple[str, ...] = ()
    """Further configuration keys of a demo."""

    def environment(self) -> dict[str, str]:
        ours = {"DORA_PIPE_DEVICE": "cuda", "DORA_PIPE_DTYPE": self.dtype}
        return {**os.environ, **ours, "DORA_PIPE_RANKS": str(self.gpus)}

    def command(self, runs: str) -> list[str]:
        if not self.tests:
            words = [sys.executable, "-c", DORA_PIPE, "demo", "--engine", self.engine]
            keys = ("trainer.device=cuda", f"workers.vllm.dtype={self.dtype}", *self.keys)
            return [*words, "--runs", runs, *(word for key in keys for word in ("-o", key))]
        chosen = ["-k", self.only] if self.only else []
        # Warnings of GPU drivers and libraries are shown, not errors.
        options = ["-v", "-rs", "-W", "default", *chosen]
        return [sys.executable, "-m", "pytest", *options, *self.tests]

    def run(self) -> str:
        if self.gpus > (there := gpus()):
            return f"skipped: it needs {self.gpus} GPUs, here is {there}"
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"skipped: {self.needs} is not installed here"
        with tempfile.TemporaryDirectory(prefix="dora-pipe-gpu-") as runs:
            done = subprocess.run(self.command(runs), env=self.environment(), check=False)
        return f"exit code {done.returncode}" if done.returncode else OK


ROUNDS: Final = (
    Round(
        name="torch",
        tests=(
            "tests/contract/test_trainer.py",
            "tests/contract/test_trainer_engine.py",
            "tests/unit/consumers/test_packed_attention.py",
        ),
        only="not deepspeed and not simulated and not vllm",
    ),
    Round(name="memory", tests=("tests/unit/consumers/test_step_memory.py",), only="on_a_gpu"),
    Round(name="demo-torch", engine="torch"),
    Round(name="deepspeed", needs="deepspeed", tests=DEEPSPEED_TESTS, only="deepspeed"),
    Round(name="deepspeed-2", needs="deepspeed", tests=DEEPSPEED_TESTS, only="deepspeed", gpus=2),
    Round(name="vllm", needs="vllm", tests=ENGINE_TESTS, only="vllm"),
    Round(name="vllm-bf16", needs="vllm", tests=ENGINE_TESTS, only="vllm", dtype="bfloat16"),
    Round(name="lora-bf16", needs="vllm", tests=LORA_TESTS, only="vllm", dtype="bfloat16"),
    Round(name="kv", needs="vllm", tests=("tests/contract/test_engine_vllm_kv.py",)),
    Round(
        name="routes", needs="vllm", tests=("tests/contract/test_engine_routes.py",), only="vllm"
    ),
    Round(name="sleep", needs="vllm", tests=("tests/contract/test_engine_vllm_sleep.py",)),
    Round(name="runs", needs="vllm", tests=("tests/slow/test_vllm_run.py",)),
    Round(name="runs-bf16", needs="vllm", tests=("tests/slow/test_vllm_run.py",), dtype="bfloat16"),
    Round(name="demo-bf16", needs="vllm", dtype="bfloat16"),
    Round(
        name="demo-graphs",
        needs="vllm",
        dtype="bfloat16",
        keys=("workers.vllm.enforce_eager=false",),
    ),
)


def gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return int(has_gpu())
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def main(words: Sequence[str]) -> int:
    unknown = set(words) - {gpu_round.name for gpu_round in ROUNDS}
    if unknown or not has_gpu():
        names = ", ".join(gpu_round.name for gpu_round in ROUNDS)
        text = f"no round {sorted(unknown)[0]!r}; there are {names}" if unknown else NO_GPU
        sys.stderr.write(f"error: {text}\n")
        return 1
    replies = [
        _run_round(gpu_round) for gpu_round in ROUNDS if gpu_round.name in words or not words
    ]
    sys.stdout.write("".join(f"{line}\n" for line in replies))
    return int(any("exit code" in line for line in replies))


def _run_round(gpu_round: Round) -> str:
    started_s = time.monotonic()
    ended = gpu_round.run()
    line = f"gpu round {gpu_round.name:12} {time.monotonic() - started_s:5.0f} s  {ended}"
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
