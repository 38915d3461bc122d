"""`dora-pipe doctor`: whether this machine has what a run needs, and what each lack means."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sqlite3
import subprocess
from contextlib import suppress
from pathlib import Path

from dora_pipe.cli.check_result import CheckResult, State
from dora_pipe.launch.local_roles import VISIBLE
from dora_pipe.launch.run_dir import FREE_BYTES_MIN

_SLOW = "Kafka would be 88 times slower"
_CRC_INPUT, _CRC_RESULT = b"123456789", 0xE3069283  # the check value of the Castagnoli polynomial

PYTHON_MIN = (3, 11)
WAL_SQLITE_MIN = (3, 37)
GPUS_LIMIT_S = 10.0


def machine_findings() -> list[CheckResult]:
    """What needs no log."""
    findings = [_python(), _sqlite(), _crc32c(), *_extras(), _disk(), _threads(), _cores()]
    return [*findings, _gpus(), _java()]


def config_file_of(path: Path) -> Path:
    """A run's directory means the configuration in it."""
    inside = path / "config.toml"
    return inside if inside.is_file() else path


def _python() -> CheckResult:
    version = platform.python_version()
    good = tuple(int(part) for part in platform.python_version_tuple()[:2]) >= PYTHON_MIN
    return CheckResult(what="python", state="ok" if good else "fail", detail=version)


def _sqlite() -> CheckResult:
    good = sqlite3.sqlite_version_info >= WAL_SQLITE_MIN
    return CheckResult(
        what="sqlite", state="ok" if good else "fail", detail=f"{sqlite3.sqlite_version}, for logs"
    )


def _crc32c() -> CheckResult:
    """Without the C extension kafka-python computes checksums in Python, 88 times slower."""
    if importlib.util.find_spec("crc32c") is None:
        detail = f"not installed: {_SLOW}; pip install crc32c"
        return CheckResult(what="crc32c", state="fail", detail=detail)
    try:
        from crc32c import crc32c, hardware_based
    except ImportError as error:
        return CheckResult(what="crc32c", state="fail", detail=f"cannot be used ({error}): {_SLOW}")
    if crc32c(_CRC_INPUT) != _CRC_RESULT:
        return CheckResult(what="crc32c", state="fail", detail="computes wrong checksums")
    version = importlib.metadata.version("crc32c")
    how = "by the processor" if hardware_based else "in C"
    return CheckResult(what="crc32c", state="ok", detail=f"{version}, {how}")


def _extras() -> list[CheckResult]:
    findings = []
    for name, use in (
        ("torch", "the own engine and trainer"),
        ("transformers", "the own engine and trainer"),
        ("vllm", "the vLLM engine"),
        ("deepspeed", "the DeepSpeed trainer"),
    ):
        there = importlib.util.find_spec(name) is not None
        detail = _version(name) if there else f"not installed; for {use}"
        findings.append(CheckResult(what=name, state="ok" if there else "note", detail=detail))
    return findings


def _version(module: str) -> str:
    """Of the distribution that brings a module: that of vLLM for CPUs is called otherwise."""
    for name in (module, f"{module}-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def _disk() -> CheckResult:
    free = shutil.disk_usage(Path.cwd()).free
    state: State = "ok" if free >= FREE_BYTES_MIN else "fail"
    return CheckResult(what="disk", state=state, detail=f"{free // 1024**2} MiB free here")


def _threads() -> CheckResult:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS unset; roles set it"
    return CheckResult(what="threads", state="ok", detail=detail)


def _cores() -> CheckResult:
    return CheckResult(what="cores", state="ok", detail=str(os.cpu_count()))


def _gpus() -> CheckResult:
    """By their numbers, which `workers.gpus` and `trainer.gpus` name."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return CheckResult(what="gpus", state="note", detail="none: there is no nvidia-smi")
    command = [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GPUS_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"nvidia-smi did not answer within {GPUS_LIMIT_S:.0f} s"
        return CheckResult(what="gpus", state="fail", detail=detail)
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if done.returncode or not lines:
        said = lines[0] if lines else f"nvidia-smi ended with exit code {done.returncode}"
        return CheckResult(what="gpus", state="note", detail=said)
    detail = "; ".join(line.replace(", ", " ", 1) for line in lines)
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        detail += f"; {VISIBLE}={chosen}"
    return CheckResult(what="gpus", state="ok", detail=detail)


def _java() -> CheckResult:
    java = shutil.which("java")
    detail = java or "not found; only for a Kafka broker on this machine without Docker"
    return CheckResult(what="java", state="ok" if java else "note", detail=detail)
