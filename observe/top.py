"""Content of `top` as lines in panels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from dora_pipe.ledger.statuses import ORCHESTRATOR, TRAINER
from dora_pipe.observe.alarms import silent_after_s
from dora_pipe.observe.run_stats import RunStats, WorkerState, WorkerView, evaluation_words
from dora_pipe.observe.text import duration, short, sparkline
from dora_pipe.observe.why import batch_words, roles_of
from dora_pipe.schemas.metrics import AnyMetrics, OrchestratorStatus
from dora_pipe.schemas.rounds import NO_VERSION, Round

Style = Literal["", "dim", "good", "busy", "alarm"]

RECENT: Final = 10
"""Steps that rates, staleness and the estimate cover."""

STOPPED_NS: Final = 60_000_000_000
"""A log silent for this long is shown as of its last record."""

SPARKS: Final = 20

STATE_STYLES: Final[Mapping[WorkerState, Style]] = {
    "generating": "good",
    "loading": "busy",
    "joined": "busy",
    "fenced": "alarm",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Line of text with a style; the text alone carries the meaning."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    lines: tuple[Line, ...]

    def fit(self, rows: int) -> tuple[Line, ...]:
        """Return at most `rows` lines; the last gives the number omitted."""
        if len(self.lines) <= rows:
            return self.lines
        if rows <= 1:
            return self.lines[: max(0, rows)]
        left_out = len(self.lines) - rows + 1
        return (*self.lines[: rows - 1], Line(f"and {left_out} more", "dim"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    head: str
    done: float
    workers: Panel
    numbers: Panel
    waits: Panel
    decisions: Panel
    over: bool

    @property
    def panels(self) -> tuple[Panel, ...]:
        return self.workers, self.numbers, self.waits, self.decisions

    def lines(self) -> Iterator[str]:
        yield self.head
        for panel in self.panels:
            yield ""
            yield panel.title
            yield from (f"  {line.text}" for line in panel.lines)


def moment_of(stats: RunStats, now_ns: int) -> int:
    """Return the time to show: now, or the last record of a silent log."""
    stopped = stats.over or now_ns - stats.last_ns > STOPPED_NS
    return stats.last_ns if stopped else max(now_ns, stats.last_ns)


def frame(stats: RunStats, now_ns: int, *, plain: bool = False) -> Screen:
    """Return the screen; `now_ns` is the wall clock, `plain` means ASCII."""
    at_ns = moment_of(stats, now_ns)
    planned = stats.steps_planned or 0
    return Screen(
        head=_head(stats, at_ns, stopped=at_ns < now_ns),
        done=min(1.0, stats.version / planned) if planned else 0.0,
        workers=Panel(title="workers", lines=tuple(_workers(stats, at_ns))),
        numbers=Panel(title="run", lines=tuple(_numbers(stats, at_ns, plain))),
        waits=Panel(title="waits", lines=tuple(_waits(stats, at_ns))),
        decisions=Panel(title="last decisions", lines=tuple(_recent_decisions(stats))),
        over=stats.over,
    )


def _head(stats: RunStats, at_ns: int, *, stopped: bool) -> str:
    if stats.started is None:
        return f"{stats.run}: not started"
    parts = [f"{stats.run}: step {stats.version} of {stats.steps_planned or '?'}"]
    if stats.over:
        parts[0] = f"{stats.run}: finished {stats.version} steps"
    parts.append(f"{duration(max(0, at_ns - stats.started.at_ns) / 1e9)} since its start")
    if stats.over:
        return ", ".join(parts)
    left_s = _left_s(stats, at_ns)
    if stopped:
        parts.append("no record since")
    elif left_s is not None:
        parts.append(f"about {duration(left_s)} to go")
    return ", ".join(parts)


def _left_s(stats: RunStats, at_ns: int) -> float | None:
    lasted = [step.seconds for step in list(stats.steps)[-RECENT:] if step.seconds is not None]
    if not lasted or stats.steps_planned is None:
        return None
    steps_left = max(0, stats.steps_planned - stats.version)
    since_s = (at_ns - stats.steps[-1].committed_ns) / 1e9
    return max(0.0, steps_left * median(lasted) - min(since_s, median(lasted)))


def _workers(stats: RunStats, at_ns: int) -> Iterator[Line]:
    workers = sorted(stats.workers.values(), key=_rank)
    states = stats.worker_states()
    for (version, state), count in sorted(states.items(), key=lambda item: (-item[0][0], item[0])):
        served = f"version {version}" if version >= 0 else "no version"
        yield Line(f"{count} {state}, {served}", _style_of(state))
    width = max((len(worker.name) for worker in workers), default=0)
    for worker in workers:
        yield _worker(stats, worker, f"{worker.name:<{width}}", at_ns)
    if not states:
        yield Line("no worker has joined", "dim")


def _rank(worker: WorkerView) -> tuple[bool, int, str]:
    return bool(worker.gone), -worker.history.served, worker.name


def _style_of(state: WorkerState) -> Style:
    return STATE_STYLES.get(state, "dim")


def _worker(stats: RunStats, worker: WorkerView, name: str, at_ns: int) -> Line:
    history, status = worker.history, worker.status
    if history.gone is not None:
        return Line(f"{name} {worker.gone}: {history.gone.why}", _style_of(worker.state))
    version = f"v{history.served}" if history.served >= 0 else "-"
    if worker.state == "loading":
        version += f">v{history.target}"
    text = f"{name} {version:<3} {worker.state}"
    if status is None:
        return Line(text, _style_of(worker.state))
    silent_s = _silent_s(stats, status, at_ns)
    if silent_s is not None:
        return Line(f"{name} {version:<3} silent for {duration(silent_s)}", "alarm")
    away = f" env {status.in_environment}" if status.in_environment else ""
    away += f" scored {status.being_scored}" if status.being_scored else ""
    away += f" agents {status.with_agent}" if status.with_agent else ""
    if status.calls_open:
        away += f" calls {status.calls_open} ({duration(status.call_open_s)})"
    for server in status.failing:
        away += (
            f" {server.url or server.task} failing ({duration((at_ns - server.since_ns) / 1e9)})"
        )
    capacity = history.joined.kv_tokens
    kv = status.kv_used_tokens / capacity if capacity else 0.0
    counts = worker.counts
    reused = f" reused {counts.reused_share:.0%}" if counts.reused else ""
    return Line(
        f"{text} {status.active}/{history.joined.slots}+{status.waiting}{away}"
        f" {short(worker.tokens_per_s)} tok/s kv {kv:.0%}{reused}",
        _style_of(worker.state),
    )


def _silent_s(stats: RunStats, status: AnyMetrics, at_ns: int) -> float | None:
    age_s = (at_ns - status.at_ns) / 1e9
    silent = age_s > silent_after_s(stats.heartbeat_s)
    return age_s if silent and not (stats.over or stats.halted) else None


def _numbers(stats: RunStats, at_ns: int, plain: bool) -> Iterator[Line]:
    """The smallest terminal shows only the first lines."""
    recent = list(stats.steps)[-RECENT:]
    counts: Counter[int] = Counter()
    for step in recent:
        counts.update(dict(step.staleness))
    shares = {value: count / counts.total() for value, count in sorted(counts.items())}
    bound = stats.bound
    yield Line(_step_now(stats, at_ns))
    if failed := stats.failed.share().words:
        yield Line(failed, "alarm")
    text = " ".join(f"{value}:{share:.0%}" for value, share in shares.items())
    late = bound is not None and any(value > bound for value in shares)
    beyond = " over the bound" if late else ""
    yield Line(f"staleness (bound {_or(bound)}) {text or '-'}{beyond}", "alarm" if late else "")
    yield from map(Line, _queue(stats))
    yield Line(_tokens(stats))
    yield from map(Line, _reward(stats, plain))
    yield Line(_outcomes(stats), "dim")


def _or(value: object) -> str:
    return "?" if value is None else str(value)


def _step_now(stats: RunStats, at_ns: int) -> str:
    if stats.over:
        return "no step in training"
    batch = stats.account.batch
    if batch is not None:
        since_s = max(0, at_ns - batch.taken_ns) / 1e9
        usual = [step.training_s for step in list(stats.steps)[-RECENT:]]
        of = f" of about {duration(median(usual))}" if usual else ""
        return f"step {batch.take.step} trains {duration(since_s)}{of}"
    return batch_words(stats)


def _queue(stats: RunStats) -> Iterator[str]:
    status = stats.heard.get(ORCHESTRATOR)
    queued = status.queued_requests if isinstance(status, OrchestratorStatus) else None
    yield f"queue {_or(queued)} requests, {len(stats.account.open)} open groups"
    groups = [group for group in stats.account.open.values() if group.spec.purpose == "train"]
    slack = Counter(group.spec.deadline - stats.version for group in groups)
    if slack:
        due = " ".join(f"{steps}:{count}" for steps, count in sorted(slack.items()))
        yield f"groups by steps to deadline {due}"


def _tokens(stats: RunStats) -> str:
    now = sum(worker.tokens_per_s for worker in stats.present())
    recent = [step for step in list(stats.steps)[-RECENT:] if step.seconds]
    seconds = sum(step.seconds or 0.0 for step in recent)
    trained = sum(step.tokens for step in recent) / seconds if seconds else 0.0
    return f"tokens/s {short(now)} sampled now, {short(trained)} trained"


def _reward(stats: RunStats, plain: bool) -> Iterator[str]:
    rewards = [step.reward for step in stats.steps][-SPARKS:]
    last = "-" if not rewards or rewards[-1] is None else f"{rewards[-1]:.3f}"
    yield f"reward {last} {sparkline(rewards, plain=plain)}".rstrip()
    if rewards and stats.steps[-1].task_rewards:
        yield "  ".join(f"{name} {value:.3f}" for name, value in stats.steps[-1].task_rewards)
    yield from map(evaluation_words, stats.evaluated.values())


def _outcomes(stats: RunStats) -> str:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(stats.outcomes.items()))
    return f"groups: {outcomes or 'none ended'}; {stats.migrations['decided']} migrations"


def _waits(stats: RunStats, at_ns: int) -> Iterator[Line]:
    """Trainer and orchestrator first; excludes working workers."""
    if stats.over:
        yield Line("run finished", "dim")
        return
    for answer in roles_of(stats, at_ns):
        yield from (Line(alarm, "alarm") for alarm in answer.alarms)
        if answer.wait or (answer.role in (TRAINER, ORCHESTRATOR) and not answer.alarms):
            blocked = f" <- {answer.end}" if answer.end else ""
            style: Style = "alarm" if answer.wait == "silent" else "busy" if answer.wait else "good"
            yield Line(f"{answer.line}{blocked}", style)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSummary:
    """Equal decisions of a round. Example: ``schedule 8 version 29 on w0``."""

    at_ns: int
    words: str
    reason: str


def summaries_of(round_: Round) -> Iterator[DecisionSummary]:
    """Group the decisions of a round by kind, version, worker, step and outcome, in order."""
    count: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], str] = {}
    for decision in round_.decisions:
        about = {name: getattr(decision, name, None) for name in ("worker", "step", "outcome")}
        version = getattr(getattr(decision, "spec", decision), "version", None)
        parts = (
            f" version {version}" if version not in (None, NO_VERSION) else "",
            f" on {about['worker']}" if about["worker"] else "",
            f" of step {about['step']}" if about["step"] is not None else "",
            f" as {about['outcome']}" if about["outcome"] else "",
        )
        key = str(type(decision).__struct_config__.tag), "".join(parts)
        count[key] += len(getattr(decision, "samples", ())) or 1
        reasons[key] = decision.reason
    for (kind, what), times in count.items():
        words = f"{kind} {times}{what}" if times > 1 else f"{kind}{what}"
        yield DecisionSummary(at_ns=round_.now_ns, words=words, reason=reasons[kind, what])


def _recent_decisions(stats: RunStats) -> Iterator[Line]:
    """Newest first, with the time since the start."""
    began_ns = stats.started.at_ns if stats.started else 0
    summaries = [summary for round_ in stats.recent_rounds for summary in summaries_of(round_)]
    for summary in reversed(summaries):
        time = f"{max(0, summary.at_ns - began_ns) / 1e9:>8.2f} s"
        yield Line(f"{time}  {summary.words}: {summary.reason}")
