"""Trace of one group or step, in one pass over control and decisions."""

from __future__ import annotations

from contextlib import closing

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage, PlaceReader
from dora_pipe.ledger.account import GroupEnded, LedgerEvent, RunAccount, StepEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.traces import tree
from dora_pipe.observe.traces.ids import RunFacts, run_facts
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import contents_of, group_spans, step_spans
from dora_pipe.observe.traces.tree import Row
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory


class History:
    """History of a group or step, with its trace. A `LogReader`."""

    def __init__(self, bus: Bus, topics: Topics, *, group: str = "", step: int = -1) -> None:
        """Read the log up to its current end. Raises BusError, LogTruncated."""
        self.account = RunAccount()
        self.name = group
        self.group: GroupEnded | None = None
        """Ended, or a snapshot."""
        self.step: StepEnded | None = None
        self.members: list[GroupEnded] = []
        self.damage = Damage()
        """Differing records of the group's trace; events alone describe them."""
        self._bus, self._topics = bus, topics
        self._step, self._now_ns = step, 0
        self._events: list[LedgerEvent] = []
        with closing(LogFollower(bus, topics, self)) as follower:
            while follower.advance():
                pass
        if self.group is None:
            self.group = self.account.now(self.name, self._now_ns)

    def fact(self, offset: int, fact: AnyControl) -> None:
        self._events += self.account.fact(offset, fact)

    def round(self, round_: Round, offset: int) -> None:
        self._now_ns = round_.now_ns
        events, self._events = self._events + self.account.round(round_, offset), []
        for event in events:
            match event:
                case GroupEnded(group=group):
                    if group.spec.group == self.name:
                        self.group = event
                    if event.step == self._step and event.outcome == "trained":
                        self.members.append(event)
                case StepEnded(fact=fact) if fact.step == self._step:
                    self.step = event

    def group_trace(self, *, only: str = "") -> list[Row]:
        """Return the group's trace, or that of one trajectory. Raises BusError."""
        run, ended = self._run, self.group
        if run is None or ended is None:
            return []
        spans = group_spans(run, ended, self._contents(ended))
        return tree.rows(tree.branch(spans, only) if only else spans)

    def step_trace(self) -> list[Row]:
        """Return the step's trace with a row per group."""
        run, step = self._run, self.step
        if run is None or step is None:
            return []
        spans = step_spans(run, step)
        members = sorted(
            self.members, key=lambda member: (_came_ns(member), member.group.spec.group)
        )
        origin_ns = spans[0].start_ns
        return tree.rows(spans) + [_member(run, member, origin_ns) for member in members]

    @property
    def _run(self) -> RunFacts | None:
        started = self.account.started
        return None if started is None else run_facts(started)

    def _contents(self, ended: GroupEnded) -> dict[str, Trajectory]:
        with closing(PlaceReader(self._bus, self._topics.trajectories)) as reader:
            return contents_of(reader, ended.group.results, self.damage)


def _came_ns(ended: GroupEnded) -> int:
    last = ended.group.last
    return 0 if last is None else last.at_ns


def _member(run: RunFacts, ended: GroupEnded, origin_ns: int) -> Row:
    root: Span = group_spans(run, ended, {})[0]
    last = ended.group.last
    came = "" if last is None else f"; last came {last.trajectory} from {last.worker}"
    row = tree.row(root, 1, origin_ns)
    row["lasted_s"] = max(0, _came_ns(ended) - root.start_ns) / 1e9
    row["what"] = f"{ended.group.spec.group}, version {ended.group.spec.version}{came}"
    return row
