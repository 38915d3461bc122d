"""`dora-pipe doctor`: whether this machine has what a run needs, and what each lack means."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dora_pipe.bus.open import open_bus
from dora_pipe.cli.output import emit_rows
from dora_pipe.cli.rundir import FREE_BYTES_MIN
from dora_pipe.errors import DoraError

State = Literal["ok", "note", "fail"]

PYTHON_MIN = (3, 11)
WAL_SQLITE_MIN = (3, 37)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `note` is no fault: something optional is not there."""

    what: str
    state: State
    detail: str


def doctor(
    bus: Annotated[str, typer.Option(help="Also try this log, e.g. kafka://host:9092.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Check this machine: versions, extras, disk, threads, and a log if one is named."""
    findings = [_python(), _sqlite(), _crc32c(), *_extras(), _disk(), _threads(), _cores(), _java()]
    if bus:
        findings.append(_bus(bus))
    rows = [{"state": one.state, "what": one.what, "detail": one.detail} for one in findings]
    emit_rows(("state", "what", "detail"), rows, as_json=as_json)
    if any(one.state == "fail" for one in findings):
        raise typer.Exit(1)


def _python() -> Finding:
    version = platform.python_version()
    good = tuple(int(part) for part in platform.python_version_tuple()[:2]) >= PYTHON_MIN
    return Finding(what="python", state="ok" if good else "fail", detail=version)


def _sqlite() -> Finding:
    good = sqlite3.sqlite_version_info >= WAL_SQLITE_MIN
    return Finding(
        what="sqlite", state="ok" if good else "fail", detail=f"{sqlite3.sqlite_version}, for logs"
    )


def _crc32c() -> Finding:
    """Without the C extension kafka-python computes checksums in Python, 88 times slower."""
    if importlib.util.find_spec("crc32c") is None:
        return Finding(
            what="crc32c", state="fail", detail="not installed: Kafka would be 88 times slower"
        )
    return Finding(what="crc32c", state="ok", detail=importlib.metadata.version("crc32c"))


def _extras() -> list[Finding]:
    findings = []
    for name, use in (
        ("torch", "the own engine and trainer"),
        ("transformers", "the own engine and trainer"),
        ("vllm", "the vLLM engine"),
        ("deepspeed", "the DeepSpeed trainer"),
    ):
        there = importlib.util.find_spec(name) is not None
        detail = importlib.metadata.version(name) if there else f"not installed; for {use}"
        findings.append(Finding(what=name, state="ok" if there else "note", detail=detail))
    return findings


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    state: State = "ok" if free >= FREE_BYTES_MIN else "fail"
    return Finding(what="disk", state=state, detail=f"{free // 1024**2} MiB free here")


def _threads() -> Finding:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS unset; roles set it"
    return Finding(what="threads", state="ok", detail=detail)


def _cores() -> Finding:
    return Finding(what="cores", state="ok", detail=str(os.cpu_count()))


def _java() -> Finding:
    java = shutil.which("java")
    detail = java or "not found; only for a Kafka broker on this machine without Docker"
    return Finding(what="java", state="ok" if java else "note", detail=detail)


def _bus(url: str) -> Finding:
    try:
        bus = open_bus(url)
        try:
            return Finding(what="log", state="ok", detail=f"{url}: {len(bus.topics())} topics")
        finally:
            bus.close()
    except DoraError as error:
        return Finding(what="log", state="fail", detail=f"{url}: {error.message}")
