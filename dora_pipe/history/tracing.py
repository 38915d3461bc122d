"""The trace of one group, trajectory or step, from the part of the log that it lies in.

It decides which part that is: from the round that dispatched the first group that is asked for, to
what ended it. So it costs the same in a log of any length.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import closing, suppress

from dora_pipe.bus.claims import lost_claim
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.history.entries import GroupEntry, StepEntry
from dora_pipe.history.ledger import Ledger
from dora_pipe.history.reading import record_at
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.schemas.control import WorkerJoined, decode_control
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_glance import Glancer
from dora_pipe.schemas.wire import Unknown
from dora_pipe.telemetry import tree
from dora_pipe.telemetry.course import Courses, Ended, GroupEnded, RunFacts, run_facts
from dora_pipe.telemetry.span import Span
from dora_pipe.telemetry.spans import Content, content_of, group_spans, step_spans
from dora_pipe.telemetry.tree import Row


class Traces:
    """Traces of what a ledger knows. Raises LogTruncated, SchemaError, BusError."""

    def __init__(self, bus: Bus, topics: Topics, ledger: Ledger) -> None:
        self._bus, self._topics, self._ledger = bus, topics, ledger
        self._glancer = Glancer()

    def group(self, group: GroupEntry, *, only: str = "") -> list[Row]:
        """A group's trace; `only` leaves other siblings than this one out."""
        run = self._run()
        if run is None:
            return []
        found = {
            one.course.spec.group: one
            for one in self._ended(self._batch(group), run)
            if isinstance(one, GroupEnded)
        }
        ended = found.get(group.spec.group)
        if ended is None:
            return []
        spans = self._spans(run, ended)
        return tree.rows(tree.branch(spans, only) if only else spans)

    def step(self, entry: StepEntry) -> list[Row]:
        """A step's trace, and under it a row for each group of its batch."""
        run = self._run()
        known = self._members(entry)
        if run is None or not known:
            return []
        found: list[Row] = []
        origin_ns = 0
        members: list[GroupEnded] = []
        for one in self._ended(known, run, step=entry):
            if isinstance(one, GroupEnded):
                members.append(one)
            elif one.fact.step == entry.step:
                spans = step_spans(run, one)
                origin_ns = spans[0].start_ns
                found = tree.rows(spans)
        members = [one for one in members if one.step == entry.step]
        members.sort(key=lambda one: (_came_ns(one), one.course.spec.group))
        return found + [_member(run, one, origin_ns) for one in members if found]

    def _batch(self, group: GroupEntry) -> list[GroupEntry]:
        """A group with those that it was trained with: it may have waited for one of them."""
        entry = None if group.step is None else self._ledger.steps.get(group.step)
        members = [] if entry is None else self._members(entry)
        return members or [group]

    def _members(self, entry: StepEntry) -> list[GroupEntry]:
        groups = (self._ledger.accounts.groups.get(one.group) for one in entry.fact.groups)
        return [one for one in groups if one is not None]

    def _run(self) -> RunFacts | None:
        started = self._ledger.started
        return None if started is None else run_facts(started)

    def _ended(
        self, groups: Collection[GroupEntry], run: RunFacts, *, step: StepEntry | None = None
    ) -> Iterator[Ended]:
        """What ended of these groups, or as they are now; with a step, that too."""
        courses, start = Courses(run), min(one.at.offset for one in groups)
        if step is not None:
            courses.free_ns = self._free_ns(step)
        names = {one.spec.group for one in groups}
        left = set(names)
        now_ns = self._ledger.now_ns
        with closing(self._turns(courses, start)) as turns:
            for ended in turns:
                if isinstance(ended, GroupEnded):
                    if ended.course.spec.group in names:
                        left.discard(ended.course.spec.group)
                        yield ended
                else:
                    yield ended
                    if step is not None and ended.fact.step == step.step:
                        return
                if step is None and not left:
                    return
        for name in sorted(left):
            as_it_is = courses.now(name, now_ns)
            if as_it_is is not None:
                yield as_it_is

    def _turns(self, courses: Courses, start: int) -> Generator[Ended, None, None]:
        """What ends from the round at this offset on."""
        at = TopicPartition(self._topics.decisions, 0)
        first = record_at(self._bus, at, start)
        if first is None:
            return
        # What the first round folds was there before the group was.
        begin = decode_round(first.value).control_next
        courses.workers = {epoch: one for epoch, one in self._joined() if epoch < begin}
        rounds = read_rounds(self._bus, self._topics, decisions_from=start, control_from=begin)
        for each in rounds:
            for record in each.control:
                with suppress(SchemaError):  # it is among the dead letters
                    fact = decode_control(record.value)
                    if not isinstance(fact, Unknown):
                        yield from courses.fact(record.offset, fact)
            yield from courses.round(each.round, each.offset)

    def _joined(self) -> Iterator[tuple[int, WorkerJoined]]:
        for epoch, worker in self._ledger.accounts.workers.items():
            yield epoch, worker.joined

    def _free_ns(self, entry: StepEntry) -> int:
        """When the trainer was free before a step, as far as that lies before its groups."""
        before = self._ledger.steps.get(entry.step - 1)
        free_ns = 0 if before is None else before.fact.at_ns
        until_ns = entry.fact.at_ns if entry.taken_at is None else entry.taken_at.now_ns
        started = (one.at_ns for one in self._ledger.roles if one.role == "trainer")
        return max([free_ns, *(at_ns for at_ns in started if at_ns <= until_ns)])

    def _spans(self, run: RunFacts, ended: GroupEnded) -> list[Span]:
        return group_spans(run, ended, self._contents(ended), dict(self._joined()))

    def _contents(self, ended: GroupEnded) -> dict[str, Content]:
        found: dict[str, Content] = {}
        for logged in ended.course.results:
            at = TopicPartition(self._topics.trajectories, logged.partition)
            record = record_at(self._bus, at, logged.offset)
            if record is not None and not lost_claim(record):
                with suppress(SchemaError):
                    content = content_of(self._glancer.glance(record.value))
                    found[logged.trajectory] = content
        return found


def _came_ns(ended: GroupEnded) -> int:
    last = ended.course.last
    return 0 if last is None else last.at_ns


def _member(run: RunFacts, ended: GroupEnded, origin_ns: int) -> Row:
    """A group of a batch: from its dispatch until its last sibling was published."""
    root = group_spans(run, ended, {}, {})[0]
    last = ended.course.last
    came = "" if last is None else f"; last came {last.trajectory} from {last.worker}"
    found = tree.row(root, 1, origin_ns)
    found["lasted_s"] = max(0, _came_ns(ended) - root.start_ns) / 1e9
    found["what"] = f"{ended.course.spec.group}, version {ended.course.spec.version}{came}"
    return found
