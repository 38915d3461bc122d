"""GPU report, piece by piece: `make gpu-report`.

    python -m dora_pipe.bench.gpu_report [--out DIR] [--pieces a,b] [--seconds N] [--commit ID]
    python -m dora_pipe.bench.gpu_report --tiny      # every piece in small, on a CPU

Each piece is a process that writes PIECE.log and PIECE.json. Finished pieces of the same commit and
card are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from dora_pipe.bench.gpu_cases import TINY

SECONDS: Final = 470

OUT: Final = Path("gpu-report")
OUT_WORD: Final = "{out}"
PACKAGES: Final = ("torch", "transformers", "vllm", "deepspeed", "bitsandbytes")
NO_GPU: Final = "no GPU on this machine"

State = Literal["done", "failed", "ended", "skipped"]


class PieceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    piece: str
    what: str
    state: State
    said: str = ""
    date: str
    """UTC, to the minute."""
    card: str
    driver: str
    versions: dict[str, str]
    commit: str
    seconds: float
    figures: list[dict[str, Any]] = []


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    card: str
    driver: str
    versions: dict[str, str]
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Command that prints JSON figures, or a test run."""

    name: str
    what: str
    command: tuple[str, ...]
    """Arguments of Python; OUT_WORD is the report's folder. Empty if the piece needs a GPU."""
    tiny: tuple[str, ...] = ()
    """The same on a CPU."""
    needs: str = ""
    """Required package."""


def _round(name: str, what: str, needs: str = "") -> Piece:
    command = ("-m", "tests.support.gpu", name)
    return Piece(name=f"suite-{name}", what=what, needs=needs, command=command)


def _bench(
    name: str, what: str, *words: str, tiny: Sequence[str] = (), needs: str = "", more: str = ""
) -> Piece:
    """`more` precedes the words of both variants."""
    run = ("-m", "dora_pipe.bench", name, *more.split())
    command, small = (*run, *words, "--json"), (*run, *tiny, "--json")
    return Piece(name=name, what=what, needs=needs, command=command, tiny=small)


def _module(name: str, what: str, module: str, size: str) -> Piece:
    command = ("-m", f"dora_pipe.bench.{module}", size)
    return Piece(name=name, what=what, command=command, tiny=(*command, TINY))


def _steps(size: str, what: str) -> Piece:
    return _module(f"step-{size}", what, "gpu_step", size)


PIECES: Final = (
    _steps("ways", "all ways of a step once, on a tiny model; equal digests are equal bits"),
    _steps("0.6B", "a step of GRPO, Qwen3-0.6B's shape"),
    _steps("1.7B", "the same, Qwen3-1.7B's"),
    _steps("4B", "the same, Qwen3-4B's"),
    _steps("long", "rows of 32 000 tokens, 0.6B"),
    _bench(
        "memory",
        "the head in chunks, and a step of 27 million parameters",
        tiny=("--tokens", "256", "--vocabulary", "512", "--step-tokens", "64"),
    ),
    _round("torch", "the trainer's contract"),
    _round("memory", "activations offloaded: equal bits, less of the GPU"),
    _round("demo-torch", "the demo, trainer on the GPU: it learns, audit, replay bit-equal"),
    _round("deepspeed", "the trainer's contract on DeepSpeed", "deepspeed"),
    _round("deepspeed-2", "the same on two GPUs", "deepspeed"),
    _round("vllm", "the engine's contract", "vllm"),
    _round("vllm-bf16", "the same in bfloat16", "vllm"),
    _round("lora-bf16", "adapters", "vllm"),
    _round("kv", "requests move with their caches between servers", "vllm"),
    _round("routes", "experts of a mixture are logged as vLLM chose them", "vllm"),
    _round("sleep", "vLLM releases its memory and then serves the next version", "vllm"),
    _round("runs", "whole runs", "vllm"),
    _round("runs-bf16", "the same in bfloat16", "vllm"),
    _round("demo-bf16", "the demo with vLLM", "vllm"),
    _round("demo-graphs", "the same with compiled graphs", "vllm"),
)


def here(commit: str = "") -> Machine:
    card, driver = _card()
    return Machine(
        card=card, driver=driver, versions=_versions(), commit=commit or _commit() or "unknown"
    )


def _card() -> tuple[str, str]:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "", ""
    name, _, driver = (output.splitlines() or [""])[0].partition(", ")
    return name, driver


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def run_report(
    out: Path, pieces: Sequence[Piece], machine: Machine, *, seconds: float
) -> Iterator[PieceOutcome]:
    """Run unfinished pieces; yield results."""
    out.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        outcome = read_outcome(out / f"{piece.name}.json")
        if outcome is None or not _stands(outcome, machine):
            outcome = _run(piece, out, machine, seconds)
            (out / f"{piece.name}.json").write_bytes(
                msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n"
            )
        yield outcome


def _stands(outcome: PieceOutcome, machine: Machine) -> bool:
    same = (outcome.commit, outcome.card) == (machine.commit, machine.card)
    return outcome.state == "done" and same


def read_outcome(path: Path) -> PieceOutcome | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=PieceOutcome)
    except FileNotFoundError:
        return None


def _run(piece: Piece, out: Path, machine: Machine, seconds: float) -> PieceOutcome:
    state: State = "skipped"
    note, took_s, log = _lacks(piece), 0.0, out / f"{piece.name}.log"
    if not note:
        began_s = time.monotonic()
        state, note = _command(piece, log, out, seconds)
        took_s = time.monotonic() - began_s
    figures, counts, skipped = _read_log(log) if state != "skipped" else ([], "", "")
    if skipped and not counts:
        state, note = "skipped", skipped
    return PieceOutcome(
        piece=piece.name,
        what=piece.what,
        state=state,
        said=", ".join(part for part in (note, counts) if part),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        seconds=round(took_s, 1),
        figures=figures,
        **msgspec.structs.asdict(machine),
    )


def _lacks(piece: Piece) -> str:
    if piece.needs and importlib.util.find_spec(piece.needs) is None:
        return f"{piece.needs} is not installed"
    return "" if piece.command else NO_GPU


def _command(piece: Piece, log: Path, out: Path, seconds: float) -> tuple[State, str]:
    """Run it in a session that is killed at the end."""
    command = [sys.executable, *(word.replace(OUT_WORD, str(out)) for word in piece.command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "ended", f"ended after {seconds:g} s"
        finally:
            _end(process)
    return ("failed", f"exit code {code}") if code else ("done", "")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_log(log: Path) -> tuple[list[dict[str, Any]], str, str]:
    figures: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    counts = skipped = ""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            with contextlib.suppress(msgspec.DecodeError):  # other output
                figures.append(msgspec.json.decode(line, type=dict[str, Any]))
        elif line.startswith("tests/") and (match := re.search(_OUTCOME, line)):
            outcomes[match[0].lower()] += 1
        elif totals := re.findall(r"\b(\d+ (?:passed|failed|skipped|errors?))\b", line):
            counts = ", ".join(totals)
        elif line.startswith("gpu round") and " skipped: " in line:
            skipped = line.partition(" skipped: ")[2]
    # Tests without a summary: count the per-test outcomes.
    told_of = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return figures, counts or told_of, skipped


_OUTCOME: Final = r"\b(PASSED|FAILED|ERROR|SKIPPED)\b"
"""In pytest's line of a test."""


def _line(outcome: PieceOutcome) -> str:
    note = f"  {outcome.said}" if outcome.said else ""
    return f"gpu {outcome.piece:18} {outcome.state:8}{outcome.seconds:6.0f} s{note}\n"


def _chosen(words: Mapping[str, Any]) -> Sequence[Piece]:
    pieces = [replace(piece, command=piece.tiny) for piece in PIECES] if words["tiny"] else PIECES
    names = [word for word in words["pieces"].split(",") if word]
    unknown = set(names) - {piece.name for piece in pieces}
    if unknown:
        there = ", ".join(piece.name for piece in pieces)
        raise SystemExit(f"error: no piece {min(unknown)!r}; there are {there}")
    return [piece for piece in pieces if piece.name in names or not names]


def _words(words: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="gpu_report", description="What runs on a GPU.")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder")
    parser.add_argument("--pieces", default="", help="pieces, separated by commas; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of each piece")
    parser.add_argument("--commit", default="", help="commit, if git is missing")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU")
    return vars(parser.parse_args(words))


def main(words: Sequence[str]) -> int:
    """Run pieces; return 1 for a failure or no GPU."""
    given = _words(words)
    pieces, machine = _chosen(given), here(given["commit"])
    if not machine.card and not given["tiny"]:
        sys.stderr.write(f"error: {NO_GPU}\n")
        return 1
    failed = False
    for outcome in run_report(given["out"], pieces, machine, seconds=given["seconds"]):
        sys.stdout.write(_line(outcome))
        sys.stdout.flush()
        failed |= outcome.state == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
