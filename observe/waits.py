"""Sum the waits of each role over a whole run.

The catalogue's view `waits` divides the wait for a batch by the state of its last trajectory:

    commit before ... dispatched   `admission`: no group could be admitted, or no slot was free;
                                   `unusable`: a batch's worth of groups was filtered or failed
    dispatched ...... placed       `queue`: no slot was free on a worker of its version
    placed .......... logged       `sampling`, or `lost` for an attempt without a result
    logged .......... taken        `decision`

Stops of the run are separate and no wait of a role. Waits of orchestrator and workers come from
statuses: exact if a status reports the wait, else to half a heartbeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.bus.bus import Bus
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.pure.wait_tracker import alarm_line
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.statuses import TRAINER, read_statuses, role_of
from dora_pipe.observe.alarms import HEARTBEAT_S, Pauses
from dora_pipe.observe.failed import FailedShare
from dora_pipe.observe.text import ahead_share, counted, duration
from dora_pipe.observe.why import ADVICE, SILENT, WORDS
from dora_pipe.schemas.metrics import AnyMetrics, Wait
from dora_pipe.schemas.topics import Topics

TOP_MAX: Final = 3
STEPS_MAX: Final = 4
ROLES_MAX: Final = 10

ADVICE_SHARE_MIN: Final = 0.05
"""Share of a role's time."""

RUN: Final = """
    select started_ns, last_ns, stopped, cast(config->>'$.timing.heartbeat_s' as double)
    from runs"""

TRAINED: Final = """
    with stopped as (
        select step, sum(seconds) as before_s from waits where kind = 'stopped' group by step)
    select coalesce(sum(early_s), 0) as early_s, coalesce(sum(overlap_s), 0) as overlap_s,
           coalesce(sum(greatest(0, (taken_ns - free_ns) / 1e9 - coalesce(before_s, 0)
                                 - waited_s)), 0) as saved_s,
           coalesce(sum(seconds - waited_s - early_s), 0) as training_s
    from steps left join stopped using (step) where seconds is not null"""

STOPS: Final = "select since_ns, at_ns from marks where kind = 'resumed'"

PAUSES: Final = """
    select at_ns, subject from events
    where kind = 'command' and subject in ('pause', 'resume') order by at_ns"""

FAILED: Final = """
    with ended as (
        select t.trajectory_id, coalesce(error, a.end_reason) as error,
               coalesce(error_class, split_part(a.end_reason, ':', 1)) as class
        from trajectories t join groups g using (group_id)
        left join attempts a on a.trajectory_id = t.trajectory_id and a.attempt = t.attempt
            and a.outcome = 'failed'
        where g.purpose = 'train' and g.outcome in ('trained', 'filtered', 'failed')
              and (logged_ns is not null or a.end_reason is not null)
    )
    select sum(count(*)) over () as trajectories, sum(count(class)) over () as failed,
           coalesce(max_by(error, trajectory_id), '') as error,
           coalesce(max(trajectory_id), '') as example
    from ended group by class order by count(class) desc, class limit 1"""

SILENT_INTERVALS: Final = 6.0
"""Gap between statuses, in usual intervals."""

Kind = Literal["admission", "unusable", "queue", "lost", "sampling", "decision"]

WAITS: Final = """
    with pieces as (
        select step, list({'kind': kind, 'seconds': seconds, 'version': version,
                           'worker': coalesce(worker, '')}) filter (kind <> 'stopped') as pieces,
               sum(seconds) filter (kind = 'stopped') as stopped_s
        from waits group by step
    )
    select b.step, coalesce(b.free_ns, b.taken_ns) as free_ns, b.taken_ns, s.committed_ns,
           coalesce(s.early_s, 0) as early_s,
           coalesce(pieces.stopped_s, 0) as stopped_s,
           coalesce(s.waited_s, greatest(0, (b.taken_ns - b.free_ns) / 1e9
                                         - coalesce(pieces.stopped_s, 0)), 0) as waited_s,
           coalesce(s.seconds, (b.taken_ns - b.free_ns) / 1e9 - coalesce(pieces.stopped_s, 0), 0)
               as known_s,
           coalesce(b.last_trajectory, '') as last, coalesce(g.version, -1) as version,
           coalesce(t.worker, '') as worker, coalesce(t.logged_ns, 0) as logged_ns, pieces
    from batches b left join steps s using (step) left join pieces using (step) left join
         trajectories t on trajectory_id = b.last_trajectory left join groups g using (group_id)
    where b.attempt = 1 order by b.step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a wait for a trajectory, and the worker that had it."""

    kind: Kind
    seconds: float
    version: int = -1
    worker: str = ""

    def words(self) -> str:
        return piece_words(self.kind, self.worker, (self.version,))


def piece_words(kind: Kind, worker: str, versions: Collection[int]) -> str:
    """Describe pieces of one kind and worker, of any versions."""
    first, last = min(versions), max(versions)
    of = f"(version {first})" if first == last else f"(versions {first}-{last})"
    match kind:
        case "admission":
            return f"no group could start: staleness or in-flight limit {of}"
        case "unusable":
            return f"groups were filtered or failed {of}"
        case "queue":
            return f"no free slot {of}"
        case "lost":
            return f"attempt lost on {worker} {of}"
        case "sampling":
            return f"sampling on {worker} {of}"
        case "decision":
            return "batch decision of the orchestrator"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """Time between two steps, wall clock ns."""

    step: int
    free_ns: int
    """Previous commit, or the trainer's start."""
    taken_ns: int
    committed_ns: int | None = None
    """None without a commit."""
    last: str = ""
    """Last trajectory of the batch to arrive."""
    version: int = -1
    worker: str = ""
    logged_ns: int = 0
    early_s: float = 0.0
    """Time spent on parts before the batch was complete."""
    waited_s: float
    """Time the idle trainer had neither the batch nor a part of it."""
    stopped_s: float = 0.0
    """Time the run was stopped before the batch was taken."""
    known_s: float = 0.0
    """Time from `free_ns` to the commit, or to the batch, without stops."""
    pieces: tuple[Piece, ...] = ()

    def text(self) -> str:
        stopped = ""
        if self.stopped_s:
            stopped = f"; run stopped for {self.stopped_s:.2f} s before"
        if not self.waited_s and not self.early_s:
            return f"step {self.step}: the batch was ready before the trainer{stopped}"
        line = f"step {self.step}: the trainer waited {self.waited_s:.2f} s for its batch"
        if self.early_s:
            line += f", computed parts of it for {self.early_s:.2f} s"
        if self.last:
            line += f"; last trajectory {self.last} (version {self.version}) from {self.worker}"
        pieces = [f"{piece.words()} {piece.seconds:.2f} s" for piece in self.pieces]
        return line + (f": {'; '.join(pieces)}" if pieces else "") + stopped


def waits_of(catalogue: Catalogue) -> list[StepWait]:
    """Return the wait before every step whose batch was taken."""
    return [
        StepWait(**row | {"pieces": tuple(Piece(**fields) for fields in row["pieces"] or ())})
        for row in catalogue.records(WAITS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWaits:
    """Waits of one role over all incarnations, in seconds."""

    role: str
    there_s: float
    waited_s: float
    silent_s: float
    waits: tuple[tuple[str, str, float], ...]
    """(name, cause, duration), longest first; names as in docs/troubleshooting.md, or kinds of the
    trainer's pieces."""

    def share(self, seconds: float) -> float:
        return seconds / self.there_s if self.there_s else 0.0

    def rows(self) -> Iterator[tuple[str, float, float, str, str]]:
        """Yield (role, seconds, share, cause, advice): the total first, then the longest waits."""
        silent = f"no status for {duration(self.silent_s)}" if self.silent_s else ""
        whole_s = self.waited_s
        yield self.role, whole_s, self.share(whole_s), silent, SILENT if silent else ""
        for name, what, seconds in self.waits[:TOP_MAX]:
            share = self.share(seconds)
            advice = ADVICE.get(name, "") if share >= ADVICE_SHARE_MIN else ""
            yield "", seconds, share, what, advice
        rest_s = sum(seconds for *_, seconds in self.waits[TOP_MAX:])
        if rest_s:
            more = counted(len(self.waits) - TOP_MAX, "other cause")
            yield "", rest_s, self.share(rest_s), more, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    run: str
    run_s: float
    """Time from start to last record, without stops."""
    over: bool
    steps: int
    untold_s: float
    """Time at the start whose statuses were deleted; its waits are not counted."""
    roles: tuple[RoleWaits, ...]
    longest: tuple[StepWait, ...]
    alarms: tuple[str, ...]
    failed: FailedShare
    stops: tuple[float, ...] = ()
    early_s: float = 0.0
    """Training of parts before their batch was complete."""
    overlap_s: float = 0.0
    """Training of parts while the previous version was published."""
    saved_s: float = 0.0
    """Waiting for batches that parts avoided."""
    training_s: float = 0.0

    @property
    def shown(self) -> tuple[RoleWaits, ...]:
        """Return at most `ROLES_MAX` roles."""
        if len(self.roles) <= ROLES_MAX:
            return self.roles
        workers = sorted(self.roles[2:], key=lambda role: -role.waited_s)
        return (*self.roles[:2], *workers[: ROLES_MAX - 2])

    @property
    def ahead(self) -> str:
        """Return the time that parts saved; empty without parts."""
        if not self.early_s and not self.overlap_s:
            return ""
        overlap = f"; {duration(self.overlap_s)} more while a version was published"
        share = ahead_share(self.early_s, self.training_s)
        return (
            f"parts: {duration(self.early_s)} of training ({share:.0%}) before the batch was "
            f"complete, which saved {duration(self.saved_s)} of waiting"
            + (overlap if self.overlap_s else "")
        )

    @property
    def head(self) -> str:
        state = "finished" if self.over else "open"
        head = f"{self.run} {state}: {counted(self.steps, 'step')} in {duration(self.run_s)}"
        if self.stops:
            times = counted(len(self.stops), "time")
            head += f", stopped {times} for {duration(sum(self.stops))}"
        if not self.untold_s:
            return head
        return f"{head}; waits of the first {duration(self.untold_s)} are deleted"


def summarise(bus: Bus, topics: Topics, catalogue: Catalogue) -> Summary:
    """Sum the waits of a run: those for batches from the catalogue, others from statuses. Raises
    BusError, LogTruncated."""
    started_ns, ended_ns, over, heartbeat_s = catalogue.one(RUN) or (0, 0, False, None)
    heartbeat_ns = int((heartbeat_s or HEARTBEAT_S) * 1e9)
    waits = waits_of(catalogue)
    statuses = read_statuses(bus, topics)
    roles = _by_role(statuses)
    pauses = Pauses(catalogue.query(PAUSES))
    kept_ns = _kept_ns(bus, topics, statuses, ended_ns)
    batch_waits = for_batches([wait for wait in waits if wait.free_ns >= kept_ns])
    known_s = sum(wait.known_s for wait in waits if wait.free_ns >= kept_ns)
    trainer = role_waits(
        TRAINER,
        roles.pop(TRAINER, []),
        heartbeat_ns,
        batch_waits=batch_waits,
        known_s=known_s,
        skip="batch",
    )
    stops = catalogue.query(STOPS)
    waited = sorted(waits, key=lambda wait: (-wait.waited_s, wait.step))
    return Summary(
        run=topics.run,
        run_s=(ended_ns - started_ns - sum(end - begin for begin, end in stops)) / 1e9,
        over=over,
        steps=sum(wait.committed_ns is not None for wait in waits),
        untold_s=max(0, kept_ns - started_ns) / 1e9 if kept_ns else 0.0,
        roles=(trainer, *(role_waits(name, roles[name], heartbeat_ns) for name in sorted(roles))),
        longest=tuple(wait for wait in waited[:STEPS_MAX] if wait.waited_s),
        alarms=tuple(_alarms(map(pauses.excused, statuses))),
        failed=_failed(catalogue),
        stops=tuple((end - begin) / 1e9 for begin, end in stops),
        **catalogue.records(TRAINED)[0],
    )


def _failed(catalogue: Catalogue) -> FailedShare:
    rows = catalogue.records(FAILED)
    return FailedShare(**rows[0]) if rows else FailedShare()


def _kept_ns(bus: Bus, topics: Topics, statuses: Sequence[AnyMetrics], ended_ns: int) -> int:
    """Return the wall clock of the first kept status; 0 if none was deleted."""
    partitions = range(bus.partitions(topics.metrics))
    if not any(bus.begin(TopicPartition(topics.metrics, partition)) for partition in partitions):
        return 0
    return min((status.at_ns for status in statuses), default=ended_ns)


def _by_role(statuses: Sequence[AnyMetrics]) -> dict[str, list[AnyMetrics]]:
    roles: dict[str, list[AnyMetrics]] = defaultdict(list)
    for status in statuses:
        roles[role_of(status)].append(status)
    return roles


def for_batches(waits: Sequence[StepWait]) -> dict[tuple[str, str], float]:
    """Return the seconds that the trainer waited for batches, by (kind, cause)."""
    pieces: dict[tuple[Kind, str], list[Piece]] = defaultdict(list)
    for wait in waits:
        for piece in wait.pieces:
            pieces[piece.kind, piece.worker].append(piece)
    return {
        (kind, piece_words(kind, worker, {piece.version for piece in of})): sum(
            piece.seconds for piece in of
        )
        for (kind, worker), of in pieces.items()
    }


def role_waits(
    name: str,
    statuses: Sequence[AnyMetrics],
    heartbeat_ns: int,
    *,
    batch_waits: Mapping[tuple[str, str], float] | None = None,
    known_s: float = 0.0,
    skip: str = "",
) -> RoleWaits:
    """Return waits from statuses; `batch_waits` by (name, cause) replace waits named `skip`.

    The role was present for at least `known_s`. Other waits are cut to the remaining time, because
    statuses are rounded.
    """
    lasted: dict[tuple[str, str], float] = defaultdict(float)
    there_s = silent_s = 0.0
    usual_ns = _usual_ns(statuses)
    for before, now in _intervals(statuses):
        length_ns = now.at_ns - before.at_ns
        if length_ns > SILENT_INTERVALS * usual_ns:
            silent_s += length_ns / 1e9
            continue
        there_s += length_ns / 1e9
        for wait, seconds in _waited(before, now, heartbeat_ns):
            if wait.name != skip:
                lasted[wait.name, WORDS.get(wait.name, wait.name)] += seconds
    there_s = max(there_s, known_s)
    known_waits = {key: seconds for key, seconds in (batch_waits or {}).items() if seconds}
    left_s, heard_s = max(0.0, there_s - sum(known_waits.values())), sum(lasted.values())
    kept = min(1.0, left_s / heard_s) if heard_s else 0.0
    waits = [(*key, seconds) for key, seconds in known_waits.items()]
    waits += [(*key, seconds * kept) for key, seconds in lasted.items() if seconds * kept]
    waits.sort(key=lambda wait: (-wait[2], wait[1]))
    return RoleWaits(
        role=name,
        there_s=there_s,
        waited_s=sum(seconds for _, _, seconds in waits),
        silent_s=silent_s,
        waits=tuple(waits),
    )


def _intervals(statuses: Sequence[AnyMetrics]) -> Iterator[tuple[AnyMetrics, AnyMetrics]]:
    last: dict[int, AnyMetrics] = {}
    for status in statuses:
        before = last.get(status.incarnation)
        if before is not None and before.at_ns < status.at_ns:
            yield before, status
        last[status.incarnation] = status


def _usual_ns(statuses: Sequence[AnyMetrics]) -> float:
    """Return the median interval: progress sends some early, silence is rare."""
    lengths = sorted(now.at_ns - before.at_ns for before, now in _intervals(statuses))
    return lengths[len(lengths) * 9 // 10] if lengths else 0.0


def _waited(before: AnyMetrics, now: AnyMetrics, heartbeat_ns: int) -> Iterator[tuple[Wait, float]]:
    """Yield the waits between two statuses.

    The old state lasted until at least a heartbeat before `now`.
    """
    length_ns, covered_ns = now.at_ns - before.at_ns, 0
    last, present = _still(before), _still(now)
    if present is not None:
        covered_ns = min(length_ns, max(0, now.at_ns - present.since_ns))
        yield present, covered_ns / 1e9
    ended = present is None or (last is not None and last.since_ns != present.since_ns)
    if last is not None and ended:
        open_ns = length_ns - covered_ns
        yield last, (open_ns - min(open_ns, heartbeat_ns) / 2) / 1e9


def _still(status: AnyMetrics) -> Wait | None:
    return status.waits[0] if status.waits and status.waits[0].blocking else None


def _alarms(statuses: Iterable[AnyMetrics]) -> list[str]:
    last: dict[tuple[str, int, str, int], str] = {}
    for status in statuses:
        for wait in status.waits:
            if wait.overdue:
                key = (role_of(status), status.incarnation, wait.name, wait.since_ns)
                lasted_s = (status.at_ns - wait.since_ns) / 1e9
                last[key] = alarm_line(role_of(status), wait, lasted_s)
    return list(last.values())
