"""Commands that work without torch, with expected exit code and output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.damage import change_token
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.tamper import Tamper


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call of `dora-pipe`: words, exit code, part of stdout."""

    words: tuple[str, ...]
    says: str
    code: int = 0


def lay_out(recorded: RecordedRun, path: Path) -> tuple[Call, ...]:
    (path / "runs").mkdir(parents=True)
    recorded.copy(path / "runs" / "recorded")
    damaged = recorded.copy(path / "runs" / "damaged")
    with Tamper(damaged) as log:
        harmed = change_token(log)
    return (
        Call(words=("audit", "recorded"), says="C2: outcome of every dispatched group"),
        Call(words=("audit", "recorded", "--json"), says='"holds": true'),
        Call(words=("audit", "damaged"), says=harmed, code=5),
        Call(words=("export", "parquet", "recorded", "out.parquet"), says=""),
        Call(words=("export", "policy", "recorded", "3", "policy"), says=""),
        Call(words=("prune", "recorded", "--keep-every", "2"), says="retention"),
        Call(words=("show", "recorded", "g0000000010-001"), says="lineage"),
        Call(
            words=("log", "read", "recorded", "trajectories", "--limit", "1", "--json"),
            says='"token_ids"',
        ),
        Call(words=("show", "--json"), says=f'"steps": {STEPS}'),
        Call(words=("log", "topics", "recorded"), says="recorded.dead-letters"),
        Call(words=("top", "recorded", "--once"), says="waits"),
        Call(words=("config", "runs/recorded/config.toml"), says="max_staleness"),
        Call(words=("doctor",), says="torch"),
    )


def assert_written(path: Path) -> None:
    import pyarrow.parquet as pq

    assert pq.read_metadata(path / "out.parquet").num_rows > STEPS
    assert (path / "policy" / "model.safetensors").is_file()
