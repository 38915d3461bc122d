"""The trace of one group, trajectory or step, from the part of the log that it lies in.

It decides which part that is: from the round that dispatched the first group that is asked for, to
what ended it. So it costs the same in a log of any length.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import closing, suppress

from dora_pipe.audit.entries import GroupEntry, StepEntry
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.reading import record_at
from dora_pipe.bus.logged import Damage
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.catalogue.account import Event, GroupEnded, RunAccount, StepEnded
from dora_pipe.core.errors import SchemaError
from dora_pipe.observe.traces import tree
from dora_pipe.observe.traces.ids import RunFacts, run_facts
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import Content, content_of, group_spans, step_spans
from dora_pipe.observe.traces.tree import Row
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.schemas.control import WorkerJoined, decode_control
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import view_trajectory
from dora_pipe.schemas.wire import Unknown


class Traces:
    """Traces of what a ledger knows. Raises LogTruncated, SchemaError, BusError."""

    def __init__(self, bus: Bus, topics: Topics, ledger: Ledger) -> None:
        self._bus, self._topics, self._ledger = bus, topics, ledger
        self.damage = Damage()
        """Records that were asked for and are not what was logged: facts alone tell of them."""

    def group(self, group: GroupEntry, *, only: str = "") -> list[Row]:
        """A group's trace; `only` leaves other siblings than this one out."""
        run = self._run()
        if run is None:
            return []
        found = {
            one.group.spec.group: one
            for one in self._ended(self._batch(group))
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
        for one in self._ended(known, step=entry):
            if isinstance(one, GroupEnded):
                members.append(one)
            else:
                spans = step_spans(run, one)
                origin_ns = spans[0].start_ns
                found = tree.rows(spans)
        members = [one for one in members if one.step == entry.step]
        members.sort(key=lambda one: (_came_ns(one), one.group.spec.group))
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
        self, groups: Collection[GroupEntry], *, step: StepEntry | None = None
    ) -> Iterator[GroupEnded | StepEnded]:
        """What ended of these groups, or as they are now; with a step, up to its end, and that."""
        account, start = RunAccount(), min(one.at.offset for one in groups)
        if step is not None:
            account.free_ns = self._free_ns(step)
        names = {one.spec.group for one in groups}
        left = set(names)
        now_ns = self._ledger.now_ns
        with closing(self._turns(account, start)) as turns:
            for event in turns:
                match event:
                    case GroupEnded(group=group) if group.spec.group in names:
                        left.discard(group.spec.group)
                        yield event
                    case StepEnded(fact=fact) if step is not None and fact.step == step.step:
                        yield event
                        return
                if step is None and not left:
                    return
        for name in sorted(left):
            as_it_is = account.now(name, now_ns)
            if as_it_is is not None:
                yield as_it_is

    def _turns(self, account: RunAccount, start: int) -> Generator[Event, None, None]:
        """What happens from the round at this offset on."""
        at = TopicPartition(self._topics.decisions, 0)
        first = record_at(self._bus, at, start)
        if first is None:
            return
        # What the first round folds was there before the group was.
        begin = decode_round(first.value).control_next
        account.meet({epoch: one for epoch, one in self._joined() if epoch < begin})
        rounds = read_rounds(self._bus, self._topics, decisions_from=start, control_from=begin)
        for each in rounds:
            for record in each.control:
                with suppress(SchemaError):  # it is among the dead letters
                    fact = decode_control(record.value)
                    if not isinstance(fact, Unknown):
                        yield from account.fact(record.offset, fact)
            yield from account.round(each.round, each.offset)

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
        known = RunAccount()
        known.meet(dict(self._joined()))
        return group_spans(run, ended, self._contents(ended), known.workers)

    def _contents(self, ended: GroupEnded) -> dict[str, Content]:
        found: dict[str, Content] = {}
        for logged in ended.group.results:
            at = TopicPartition(self._topics.trajectories, logged.partition)
            record = record_at(self._bus, at, logged.offset)
            if self.damage.is_sound(record, logged) and record is not None:
                with suppress(SchemaError):
                    content = content_of(view_trajectory(record.value))
                    found[logged.trajectory] = content
        return found


def _came_ns(ended: GroupEnded) -> int:
    last = ended.group.last
    return 0 if last is None else last.at_ns


def _member(run: RunFacts, ended: GroupEnded, origin_ns: int) -> Row:
    """A group of a batch: from its dispatch until its last sibling was published."""
    root = group_spans(run, ended, {}, {})[0]
    last = ended.group.last
    came = "" if last is None else f"; last came {last.trajectory} from {last.worker}"
    found = tree.row(root, 1, origin_ns)
    found["lasted_s"] = max(0, _came_ns(ended) - root.start_ns) / 1e9
    found["what"] = f"{ended.group.spec.group}, version {ended.group.spec.version}{came}"
    return found
