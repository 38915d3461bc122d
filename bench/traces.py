"""`bench traces`: what traces cost a run in throughput, from logs of runs with and without; decides
which time of a run counts.

Runs of one round differ in `telemetry.traces` alone. Their policy hardly moves (`STILL`), so that
all of them sample the same kind of trajectories. What counts is the time from the commit of step
`WARM_STEPS - 1` to the last commit. Every round is a ratio of its own, on to off, because a machine
is not equally fast all day; the runs without traces also say how far apart equal runs are.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from dora_pipe.bench.processes import end
from dora_pipe.bench.whole_runs import run_whole, warm_start
from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.cli.output import emit_json, emit_line, emit_rows
from dora_pipe.config.load import load_config
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.launch.plan import plan_new
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.topics import Topics

Traces = Literal["off", "on"]

WARM_STEPS: Final = 2
"""Steps before the time that counts: processes start, queues fill."""

STILL: Final = "trainer.learning_rate=1e-9"
"""The setting of a run whose policy samples at its end as it does at its beginning."""

LOST_MAX: Final = 0.03
"""Share of the throughput that traces may cost."""

_ENDPOINT: Final = "dora_pipe.bench.traces_endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """One run."""

    round: int
    traces: Traces
    steps: int
    """That count."""
    seconds: float
    sampled_tokens_per_s: float
    """Of all trajectories that were logged in that time."""
    trained_trajectories_per_s: float
    requests: int
    """That the endpoint got."""
    megabytes: float
    """That it was sent, compressed as it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A figure of the runs with traces over that of the runs without, round by round."""

    figure: str
    rounds: int
    ratio: float
    """Median over the rounds."""
    low: float
    high: float
    lost_percent: float
    """1 - ratio; below 0 where the runs with traces were faster."""
    off_spread_percent: float
    """Largest to smallest of the runs without traces: what cannot be told apart here."""


FIGURES: Final = ("sampled_tokens_per_s", "trained_trajectories_per_s")


def measure(
    bus: Bus, topics: Topics, *, round_: int, traces: Traces, requests: int, sent_bytes: int
) -> TracedRun:
    """The figures of a finished run. Raises UsageError for one that is too short."""
    with closing(read_catalogue(bus, topics)) as tables:
        steps = tables.query("select committed_ns, trajectories from steps order by step")
        if len(steps) <= WARM_STEPS:
            raise UsageError(f"{len(steps)} steps say nothing", hint=f"more than {WARM_STEPS}")
        counted = steps[WARM_STEPS:]
        span = (steps[WARM_STEPS - 1][0], counted[-1][0])
        ((tokens,),) = tables.query(
            "select sum(tokens) from records where logged_ns > ? and logged_ns <= ?", span
        )
    seconds = (span[1] - span[0]) / 1e9
    trajectories = sum(count for _, count in counted)
    return TracedRun(
        round=round_,
        traces=traces,
        steps=len(counted),
        seconds=round(seconds, 2),
        sampled_tokens_per_s=round(tokens / seconds, 1),
        trained_trajectories_per_s=round(trajectories / seconds, 2),
        requests=requests,
        megabytes=round(sent_bytes / 1e6, 3),
    )


def costs(runs: Sequence[TracedRun]) -> list[Cost]:
    """What traces cost in each figure; every round has a run of each kind.

    Example: 100 and 98 tokens/s in one round, 90 and 90 in another are a ratio of 0.99, with off
    runs that are 11.1 % apart.
    """
    found = []
    for figure in FIGURES:
        values = {(run.round, run.traces): float(getattr(run, figure)) for run in runs}
        rounds = sorted({round_ for round_, _ in values})
        off = [values[round_, "off"] for round_ in rounds]
        ratios = [values[round_, "on"] / values[round_, "off"] for round_ in rounds]
        ratio = statistics.median(ratios)
        found.append(
            Cost(
                figure=figure,
                rounds=len(rounds),
                ratio=round(ratio, 4),
                low=round(min(ratios), 4),
                high=round(max(ratios), 4),
                lost_percent=round(100 * (1 - ratio), 2),
                off_spread_percent=round(100 * (max(off) / min(off) - 1), 2),
            )
        )
    return found


def order(round_: int) -> tuple[Traces, Traces]:
    """Who is first changes from round to round, so that a machine that tires favours nobody."""
    return ("off", "on") if round_ % 2 == 0 else ("on", "off")


class Endpoint:
    """Takes traces in a process of its own. Example: ``with Endpoint() as endpoint: ...``, then
    `endpoint.requests` and `endpoint.bytes`."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", _ENDPOINT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        try:
            if kind is None:
                self._process.stdin.close()
                taken: dict[str, Any] = json.loads(self._line())
                self.requests, self.bytes = taken["requests"], taken["bytes"]
        finally:
            end(self._process, at_once=kind is not None)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError("the endpoint of the bench has ended", hint="it said why above")
        return line.strip()


def setting_of(config: Path | None, place: Path) -> tuple[Path, list[str]]:
    """The configuration, and what every run of it has in common."""
    if config is not None:
        return config, []
    demo = warm_start(place / "start")
    return demo, [f'model.path="{place / "start" / "warm"}"', "evaluation.prompts=0"]


def run_one(
    config: Path, place: Path, round_: int, kind: Traces, common: Sequence[str], ratio: float
) -> TracedRun:
    """One run and its figures."""
    with Endpoint() if kind == "on" else nullcontext() as endpoint:
        own = [f'run.name="{kind}-{round_}"', "telemetry.traces=off"]
        if endpoint is not None:
            own[1:] = [f"telemetry.traces={endpoint.address}", f"telemetry.traces_ratio={ratio}"]
        plan = plan_new(load_config(config, [*common, *own]), place)
        run_whole(plan)
    with opened(str(plan.directory.path)) as run:
        return measure(
            run.bus,
            run.topics,
            round_=round_,
            traces=kind,
            requests=0 if endpoint is None else endpoint.requests,
            sent_bytes=0 if endpoint is None else endpoint.bytes,
        )


def line_of(run: TracedRun) -> str:
    """A run in one line."""
    return (
        f"round {run.round}, traces {run.traces}: "
        f"{run.sampled_tokens_per_s:,.0f} tokens/s sampled, "
        f"{run.trained_trajectories_per_s:.1f} trajectories/s trained, {run.seconds:.1f} s, "
        f"{run.megabytes:.2f} MB of traces"
    )


def print_traces(
    setting: str, runs: Sequence[TracedRun], found: Sequence[Cost], *, as_json: bool
) -> None:
    """Every run, and what traces cost."""
    if as_json:
        emit_json({"setting": setting})
    else:
        emit_line(setting)
    emit_rows([one.name for one in fields(TracedRun)], map(asdict, runs), as_json=as_json)
    emit_rows([one.name for one in fields(Cost)], map(asdict, found), as_json=as_json)
