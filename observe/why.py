"""Explain who waits for whom in a run, for `why`, `top` and the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.core.pure.wait_tracker import alarm_line
from dora_pipe.ledger.history import GroupHistory
from dora_pipe.ledger.statuses import ORCHESTRATOR, TRAINER, read_statuses
from dora_pipe.observe.alarms import silence_line, silent_after_s
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.text import counted, duration
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.identity import group_of, trajectory_id
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    Blocker,
    OrchestratorStatus,
    TrainerStatus,
    WorkerStatus,
)
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics

TAIL_RECORDS: Final = 20_000
"""Last statuses of each metrics partition that an answer reads."""

LEASE_S: Final = 10.0
"""Lease if the configuration is unknown."""

CALLS_MAX: Final = 3
OF_TASKS: Final = frozenset({"prompt", "environment", "reward", "agent"})
FED: Final = frozenset({"requests", "version"})


SILENT: Final = "see its log; restart it"

ADVICE: Final[Mapping[str, str]] = {
    # Trainer, by cause of the last trajectory of the batch.
    "admission": "raise staleness.max_staleness or staleness.async_batches, or add slots",
    "unusable": "change the reward or the data: these groups give no gradient",
    "queue": "raise workers.max_num_seqs or workers.count",
    "lost": "see that worker's log: it died or was fenced",
    "sampling": "add workers, or lower sampling.max_tokens",
    "decision": "the orchestrator or the log is slow: add a core, check the broker's disk",
    "batch": "see the last role of its chain",
    "trajectories": "the log is slow to read: the broker's disk, the network",
    "commit": "the log is slow to acknowledge: the broker's disk, the network",
    "refusal": "the log is slow to acknowledge: the broker's disk, the network",
    "replay": "temporary; trainer.checkpoint_every shortens it after a restart",
    "decisions": "temporary: the role reads the log at its start",
    # Orchestrator.
    "trainer": "training is the bottleneck: a faster trainer, or fewer workers",
    "groups": "generation is the bottleneck: more workers or slots",
    "worker": "start a worker: dora-pipe worker; see its log if it does not join",
    "host": "no worker has that version: see the workers' logs",
    "colocated": "colocated workers finish requests that cannot migrate: see their logs",
    "pause": "dora-pipe control resume RUN",
    "halted": "fix the error of the failed groups, then use run --resume",
    "start": "start the other roles",
    # Worker.
    "requests": "no group may start: larger bound, faster trainer, or fewer workers",
    "version": "no version is assigned: it just joined, or sleeps during a step",
    "weights": "the policy store is slow: transfers.kind",
    "prompt": "the task is slow: task.processes",
    "environment": "the task's environment is slow: task.processes, async def",
    "reward": "the reward is slow: task.processes, async def",
    "agent": "agents think: run more requests concurrently, or see their own logs",
    "call": "the log is slow: the broker's disk, the network",
    "progress": "the log is slow: the broker's disk, the network",
    "append": "the log is slow: the broker's disk, the network",
    "slot": "the engine has no free slot: see its log",
    "tokens": "the engine returns no tokens: see the worker's log",
    "leaving": "temporary: it publishes the progress of its requests",
    "kv": "the other worker does not send its KV cache: see its log",
    "silent": SILENT,
}
"""Advice by wait; a temporary one needs none."""

WORDS: Final[Mapping[str, str]] = {
    "trainer": "the trainer",
    "groups": "groups to finish",
    "worker": "a worker",
    "admission": "new groups",
    "colocated": "colocated workers to sleep",
    "pause": "the end of a pause",
    "start": "the start of the run",
    "requests": "requests",
    "version": "a version",
    "weights": "loading weights",
    "prompt": "prompts",
    "progress": "progress records",
    "slot": "slots",
    "tokens": "overdue tokens",
    "environment": "environments",
    "reward": "rewards",
    "agent": "agents",
    "call": "durable calls",
    "append": "the trajectories topic",
    "leaving": "its last progress records",
    "replay": "the replay of committed steps",
    "decisions": "the decisions before its start",
    "trajectories": "reading its batch",
    "commit": "acknowledgment of a commit",
    "refusal": "acknowledgment of a refusal",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAnswer:
    role: str
    text: str
    since_s: float | None = None
    """Duration of the wait, silence or absence."""
    wait: str = ""
    """Name of the wait; `silent` for a silent role; empty for a working one."""
    alarms: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    """Sentences from the first blocker to the root cause."""

    @property
    def end(self) -> str:
        """Return the last sentence of the chain."""
        return self.chain[-1] if self.chain else ""

    @property
    def advice(self) -> str:
        return ADVICE.get(self.wait, "")

    @property
    def line(self) -> str:
        lasts = "" if self.since_s is None else f" ({duration(self.since_s)})"
        return f"{self.role}: {self.text}{lasts}"


def roles_of(stats: RunStats, at_ns: int) -> tuple[RoleAnswer, ...]:
    """Return the answers of trainer, orchestrator and workers, in this order."""
    present = _Present(stats, at_ns)
    names = [TRAINER, ORCHESTRATOR, *sorted(stats.account.named)]
    return tuple(present.role(name) for name in names)


def batch_words(stats: RunStats) -> str:
    """Describe how complete the next batch is."""
    trained = [group for group in stats.account.open.values() if group.spec.purpose == "train"]
    finished = sum(group.whole for group in trained)
    per_step = "?" if stats.per_step is None else stats.per_step
    words = f"step {stats.version}: {finished} of {per_step} groups finished"
    parts = stats.account.parts
    taken = sum(len(part.groups) for part in parts)
    return words + (f", {taken} of them taken in {counted(len(parts), 'part')}" if parts else "")


class _Present:
    def __init__(self, stats: RunStats, at_ns: int) -> None:
        self._stats, self._at_ns = stats, at_ns
        self._heard = stats.heard
        self._silent_s = silent_after_s(stats.heartbeat_s)
        timing = {} if stats.started is None else stats.started.config.get("timing", {})
        self._lease_s = float(timing.get("lease_s", LEASE_S))

    def role(self, name: str, path: tuple[str, ...] = ()) -> RoleAnswer:
        """Return the answer of a role; `path` lists the roles that wait for it."""
        worker, status = self._stats.account.named.get(name), self._heard.get(name)
        if self._stats.over:
            return RoleAnswer(role=name, text="run finished")
        if worker is not None and worker.gone is not None:
            ago_s = self._ago_s(worker.gone.at_ns)
            return RoleAnswer(
                role=name, text=f"{worker.gone.how}: {worker.gone.why}", since_s=ago_s
            )
        if status is None and worker is not None:
            ago_s = self._ago_s(worker.joined.at_ns)
            return RoleAnswer(role=name, text="joined, no status yet", since_s=ago_s)
        if status is None:
            return RoleAnswer(role=name, text="no status yet")
        if self._ago_s(status.at_ns) > self._silent_s:
            return self._silent(name, status)
        return self._answer(name, status, (*path, name))

    def _answer(self, name: str, status: AnyMetrics, path: tuple[str, ...]) -> RoleAnswer:
        alarms = tuple(
            alarm_line(name, wait, self._ago_s(wait.since_ns))
            for wait in status.waits
            if wait.overdue
        )
        failing = tuple(self._failing(status))
        if not status.waits or not status.waits[0].blocking:
            text = self._work(name, status)
            return RoleAnswer(role=name, text=text, alarms=alarms, failing=failing)
        wait = status.waits[0]
        if wait.name in OF_TASKS and failing:
            chain = failing[:1]
        else:
            blockers = wait.blockers
            if wait.name in FED and ORCHESTRATOR not in path:
                blockers = (*blockers, Blocker("role", ORCHESTRATOR))
            chain = next(filter(None, (self._blocked(blocker, path) for blocker in blockers)), ())
        words = f"batch of {batch_words(self._stats)}" if wait.name == "batch" else wait.description
        if wait.name == "requests" and (limit := self._admission_limit()):
            words += f"; no group may start: {limit}"
        return RoleAnswer(
            role=name,
            text=f"waiting for {words}",
            since_s=self._ago_s(wait.since_ns),
            wait=wait.name,
            alarms=alarms,
            failing=failing,
            chain=chain,
        )

    def _admission_limit(self) -> str:
        status = self._heard.get(ORCHESTRATOR)
        return status.closed_by if isinstance(status, OrchestratorStatus) else ""

    def _silent(self, name: str, status: AnyMetrics) -> RoleAnswer:
        age_s = self._ago_s(status.at_ns)
        if self._stats.halted:
            return RoleAnswer(role=name, text="stopped with the run", since_s=age_s)
        last = status.waits_for
        text = "silent: dead, stopped or disconnected from the log"
        if isinstance(status, WorkerStatus) and age_s <= self._lease_s:
            text += f" (fenced after {self._lease_s:g} s)"
        text += f"; last status: {f'waiting for {last}' if last else self._work(name, status)}"
        alarms = (silence_line(name, age_s, last),) if age_s > self._lease_s else ()
        return RoleAnswer(role=name, text=text, since_s=age_s, wait="silent", alarms=alarms)

    def _work(self, name: str, status: AnyMetrics) -> str:
        if isinstance(status, TrainerStatus):
            return f"working: {status.phase}, step {status.step}"
        if not isinstance(status, WorkerStatus):
            return "working"
        heard = self._stats.statuses.heard.get(name)
        rate = 0.0 if heard is None else heard.tokens_per_s
        counts = (
            (status.waiting, "waiting for a slot"),
            (status.in_environment, "in environments"),
            (status.being_scored, "being scored"),
            (status.with_agent, "with their agents"),
        )
        parts = [f"samples {counted(status.active, 'request')} of version {status.version}"]
        parts += [f"{count} {what}" for count, what in counts if count]
        if status.calls_open:
            longest = duration(self._ago_s(status.call_since_ns))
            parts.append(f"{counted(status.calls_open, 'open call')}, the longest for {longest}")
        return ", ".join(parts + ([f"{rate:,.0f} tok/s"] if rate else []))

    def _failing(self, status: AnyMetrics) -> Iterator[str]:
        for server in status.failing if isinstance(status, WorkerStatus) else ():
            how = "in back-off" if server.suspended else "probed by one process"
            yield (
                f"task {server.task}: {server.url or 'its processes'} {how}, "
                f"{counted(server.failures, 'failure')} in a row in "
                f"{duration(self._ago_s(server.since_ns))}: {server.reason}"
            )

    # Chain from a wait to its root cause

    def _blocked(self, blocker: Blocker, path: tuple[str, ...]) -> tuple[str, ...]:
        """Return the sentences after a blocker; empty if it explains nothing."""
        match blocker.kind:
            case "role" | "worker" if blocker.id not in path:
                answer = self.role(blocker.id, path)
                return (answer.line, *answer.chain)
            case "group" if (group := self._stats.account.open.get(blocker.id)) is not None:
                return self._group(group, path)
            case "trajectory" if history := self._stats.account.open.get(group_of(blocker.id)):
                return self._trajectory(blocker.id, history, path)
            case _:
                return ()

    def _group(self, group: GroupHistory, path: tuple[str, ...]) -> tuple[str, ...]:
        spec = group.spec
        names = [
            trajectory_id(spec.group, sample)
            for sample in range(spec.samples)
            if sample not in group.left
        ]
        still_open = [name for name in names if not _is_logged(group, name)]
        due = f"deadline {spec.deadline}" if spec.purpose == "train" else "evaluation"
        what = f"{len(still_open)} of {spec.samples} trajectories open"
        request = None if group.scoring is None else group.scoring.request
        worker = "" if request is None else request.worker
        what = f"group scoring on {worker}" if worker else what
        ago = duration(self._ago_s(group.dispatched_ns))
        line = f"{spec.group} (version {spec.version}, {due}): {what}, dispatched {ago} ago"
        if worker:
            return (line, *self._blocked(Blocker("worker", worker), path))
        first = (self._trajectory(name, group, path) for name in still_open)
        return (line, *next(first, ()))

    def _trajectory(self, name: str, group: GroupHistory, path: tuple[str, ...]) -> tuple[str, ...]:
        request = group.requests.get(name)
        attempt = request.attempts[-1] if request is not None and request.attempts else None
        if attempt is None or attempt.outcome:
            again = f"; attempt {attempt.attempt} ended: {attempt.outcome}" if attempt else ""
            return (f"{name}: queued for a slot of version {group.spec.version}{again}",)
        line = f"{name}: on {attempt.worker} for {duration(self._ago_s(attempt.scheduled_ns))}"
        line += f", attempt {attempt.attempt}" if attempt.attempt > 1 else ""
        line += f"; migrating to {attempt.migration_target}" if attempt.migration_target else ""
        line += self._progress(name, self._heard.get(attempt.worker))
        return (line, *self._blocked(Blocker("worker", attempt.worker), path))

    def _progress(self, name: str, status: AnyMetrics | None) -> str:
        if not isinstance(status, WorkerStatus):
            return ""
        progress = status.progress.get(name)
        text = f", {progress.tokens} tokens at the last progress record" if progress else ""
        before = status.calls_before or (-1,) * len(status.calls_oldest)
        pairs = zip(status.calls_oldest, before, strict=False)
        own = [(call, ahead) for call, ahead in pairs if call.trajectory == name]
        for call, ahead in own[:CALLS_MAX]:
            lasts = duration(self._ago_s(call.since_ns))
            text += f"; call {call.call} waiting for {call.waits_for}, {lasts}"
            text += f", {ahead} before it" if ahead >= 0 else ""
        return text

    def _ago_s(self, ns: int) -> float:
        return max(0.0, (self._at_ns - ns) / 1e9)


def _is_logged(group: GroupHistory, name: str) -> bool:
    request = group.requests.get(name)
    return request is not None and request.logged is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyAnswer:
    run: str
    at_ns: int
    run_s: float | None
    step: int | None
    """Next step to be taken; None before the start."""
    training: int | None
    """Step whose batch is taken but not committed."""
    steps: int | None
    over: bool
    heard_s: float | None
    halted: str
    failed: str
    """Failed share of recent trajectories, with the error; empty if few."""
    no_step: str
    """Groups that ended since the last step; empty if few, or while a step trains."""
    alarms: tuple[str, ...]
    roles: tuple[RoleAnswer, ...]

    @property
    def head(self) -> str:
        if self.step is None:
            return f"{self.run}: not started"
        if self.over:
            return f"{self.run}: finished, {self.steps} steps"
        when = "" if self.run_s is None else f", {duration(self.run_s)} after its start"
        if self.training is not None:
            return f"{self.run}: step {self.training} of {self.steps} in training{when}"
        return f"{self.run}: step {self.step} of {self.steps} is next{when}"

    def lines(self) -> Iterator[str]:
        """Yield the lines above the table of roles, the most important first."""
        yield self.head
        if self.halted:
            yield f"STOPPED: {self.halted}; fix it, then use `run --resume`"
        yield from filter(None, (self.failed, self.no_step))
        yield from self.alarms
        yield from (f"{role.role}: {line}" for role in self.roles for line in role.failing)

    def trainer_chain(self) -> Sequence[str]:
        """Return the chain from the trainer's wait to its root cause."""
        trainer = self.roles[0]
        return (trainer.line, *trainer.chain) if len(trainer.chain) > 1 else ()


def answer_of(stats: RunStats, at_ns: int) -> WhyAnswer:
    """Answer from statistics; `at_ns` is the wall clock."""
    roles = roles_of(stats, at_ns)
    batch = stats.account.batch
    heard = [status.at_ns for status in stats.heard.values()]
    waiting = not (stats.over or stats.halted) and batch is None
    return WhyAnswer(
        run=stats.run,
        at_ns=at_ns,
        run_s=(at_ns - stats.started.at_ns) / 1e9 if stats.started else None,
        step=stats.version if stats.started else None,
        training=batch.take.step if batch else None,
        steps=stats.steps_planned,
        over=stats.over,
        heard_s=(at_ns - max(heard)) / 1e9 if heard else None,
        halted=stats.halted,
        failed=stats.failed.share().words,
        no_step=stats.since_step.words(stats.per_step) if waiting else "",
        alarms=() if stats.halted else tuple(line for role in roles for line in role.alarms),
        roles=roles,
    )


# Reading a log up to a moment


class _Past(RunStats):
    """Run as of a moment; None: now."""

    def __init__(self, run: str, until_ns: int | None = None) -> None:
        super().__init__(run)
        self._until_ns = until_ns
        self._ended = False

    def fact(self, offset: int, fact: AnyControl) -> None:
        if not self._ended and not self._is_later(fact.at_ns):
            super().fact(offset, fact)

    def round(self, round_: Round, offset: int) -> None:
        self._ended = self._ended or self._is_later(round_.now_ns)
        if not self._ended:
            super().round(round_, offset)

    def _is_later(self, at_ns: int) -> bool:
        return self._until_ns is not None and at_ns > self._until_ns

    def read_until(self, bus: Bus, topics: Topics) -> None:
        """Read a log and its statuses up to the same moment. Raises BusError, LogTruncated."""
        with closing(self.follow(bus, topics, statuses=False)) as follower:
            while not self._ended and follower.advance():
                pass
        for status in read_statuses(bus, topics, tail=TAIL_RECORDS, until_ns=self._until_ns):
            self.status(status)


def why_now(bus: Bus, topics: Topics, *, now_ns: int) -> WhyAnswer:
    """Return the present waits; `now_ns` is the wall clock. Raises BusError, LogTruncated."""
    present = _Past(topics.run)
    present.read_until(bus, topics)
    return answer_of(present, now_ns)


def why_at(bus: Bus, topics: Topics, *, at_ns: int) -> WhyAnswer:
    """Return the waits at a past moment. Raises as `why_now`."""
    past = _Past(topics.run, at_ns)
    past.read_until(bus, topics)
    return answer_of(past, at_ns)
