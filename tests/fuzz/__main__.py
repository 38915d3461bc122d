"""``make fuzz``: run every target for some seconds in its own process.

`targets` defines a finding. Its input is kept in the printed folder. After the fix, put it under
tests/fuzz/corpus/TARGET/ with a descriptive name.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.targets import CORPUS, MEMORY_BYTES_MAX, ROOT, TARGETS, Target

INPUT_BYTES_MAX: Final = 16 * 1024
HANG_S: Final = 10
"""An input that takes so long is a finding."""

SPARE_S: Final = 120
"""For a process to start and to end."""

HEAD: Final = (
    "target        inputs  inputs_per_s  branches_first  branches  kept  peak_mib  findings"
)
_BRANCHES: Final = re.compile(r"(INITED|DONE)\s+cov: (\d+) ft: \d+ corp: (\d+)")
_FINAL: Final = re.compile(r"stat::(number_of_executed_units|peak_rss_mb):\s+(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzed:
    inputs: int
    branches_first: int
    """Of our Python, and wordings of refusals, that the seeds reach."""
    branches: int
    kept: int
    """Inputs that reached something new, seeds included."""
    peak_mib: int
    """Of the whole process."""
    findings: tuple[Path, ...]

    def line(self, name: str, seconds: int) -> str:
        return (
            f"{name:<12}{self.inputs:>8}{self.inputs // seconds:>14}{self.branches_first:>16}"
            f"{self.branches:>10}{self.kept:>6}{self.peak_mib:>10}{len(self.findings):>10}"
        )


def fuzz(target: Target, *, seconds: int, seed: int, folder: Path) -> Fuzzed:
    seeds, path = folder / "corpus", folder / "found"
    for entry in (seeds, path):
        entry.mkdir(parents=True)
    for index, data in enumerate(target.seeds()):
        (seeds / f"seed-{index}").write_bytes(data)
    kept = CORPUS / target.name
    command = [
        *(sys.executable, "-m", "tests.fuzz.child", target.name),
        *(f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={HANG_S}"),
        *(f"-max_len={INPUT_BYTES_MAX}", f"-rss_limit_mb={MEMORY_BYTES_MAX >> 20}"),
        *("-print_final_stats=1", "-reload=0", f"-artifact_prefix={path}/"),
        *(str(path) for path in (seeds, kept) if path.is_dir()),
    ]
    log = folder / "log.txt"
    with log.open("wb") as file:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=seconds + SPARE_S,
            check=False,
        )
    findings = tuple(sorted(path.iterdir()))
    if done.returncode and not findings:
        findings = (log,)
    return parse(log.read_text(encoding="utf-8", errors="replace"), findings)


def parse(log: str, findings: tuple[Path, ...]) -> Fuzzed:
    final = {name: int(number) for name, number in _FINAL.findall(log)}
    reached = {when: (int(branches), int(kept)) for when, branches, kept in _BRANCHES.findall(log)}
    first = reached.get("INITED", (0, 0))
    last = reached.get("DONE", first)
    return Fuzzed(
        inputs=final.get("number_of_executed_units", 0),
        branches_first=first[0],
        branches=last[0],
        kept=last[1],
        peak_mib=final.get("peak_rss_mb", 0),
        findings=findings,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: it has wheels for Linux on x86-64 alone")
    folder = Path(tempfile.mkdtemp(prefix="dora-pipe-fuzz-"))
    _say(HEAD)
    broken = 0
    for name in chosen.targets or TARGETS:
        fuzzed = fuzz(TARGETS[name], seconds=chosen.seconds, seed=chosen.seed, folder=folder / name)
        _say(fuzzed.line(name, chosen.seconds))
        for path in fuzzed.findings:
            _say(f"found: {path} (log: {folder / name / 'log.txt'})")
        broken += bool(fuzzed.findings)
    return broken


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
