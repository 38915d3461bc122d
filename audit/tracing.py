"""Traces of one group or step, in one pass over control and decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage, PlaceReader
from dora_pipe.ledger.account import GroupEnded, LedgerEvent, RunAccount, StepEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.ledger.history import RecordLogged
from dora_pipe.observe.traces import tree
from dora_pipe.observe.traces.ids import RunFacts, run_facts
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import Content, contents_of, group_spans, step_spans
from dora_pipe.observe.traces.tree import Row
from dora_pipe.schemas.control import AnyControl, WorkerJoined
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import Dispatch, Round
from dora_pipe.schemas.topics import Topics


class History:
    """History of a group or step. A `LogReader`."""

    def __init__(self, *, group: str = "", step: int = -1) -> None:
        self.account = RunAccount()
        self.group: GroupEnded | None = None
        """Ended, or a snapshot."""
        self.group_round = -1
        """Round that ended it or folded its commit."""
        self.records: list[RecordLogged] = []
        self.step: StepEnded | None = None
        self.members: list[GroupEnded] = []
        self.sampled: Counter[int] = Counter()
        self.staleness: dict[int, Counter[int]] = {}
        self.contributions: dict[int, str] = {}
        self.engines: dict[int, str] = {}
        self._wanted, self._step, self._now_ns = group, step, 0
        self._events: list[LedgerEvent] = []

    def read(self, bus: Bus, topics: Topics) -> None:
        """Read the log up to its current end. Raises BusError, LogTruncated."""
        with closing(LogFollower(bus, topics, self)) as follower:
            while follower.advance():
                pass
        if self.group is None:
            self.group = self.account.now(self._wanted, self._now_ns)

    def fact(self, offset: int, fact: AnyControl) -> None:
        if isinstance(fact, WorkerJoined):
            self.engines[offset] = f"{fact.engine} {fact.engine_version}"
        self._events += self.account.fact(offset, fact)

    def round(self, round_: Round, offset: int) -> None:
        self._now_ns = round_.now_ns
        for decision in round_.decisions:
            if isinstance(decision, Dispatch):
                self.sampled[decision.spec.version] += 1
        events, self._events = self._events + self.account.round(round_, offset), []
        self._keep(events, round_.ordinal)

    def _keep(self, events: Iterable[LedgerEvent], ordinal: int) -> None:
        for event in events:
            match event:
                case RecordLogged(fact=fact) if group_of(fact.trajectory) == self._wanted:
                    self.records.append(event)
                case GroupEnded(group=group):
                    if group.spec.group == self._wanted:
                        self.group, self.group_round = event, ordinal
                    if event.step == self._step and event.outcome == "trained":
                        self.members.append(event)
                case StepEnded(fact=fact):
                    self.staleness[fact.step] = Counter(event.staleness)
                    self.contributions[fact.step] = fact.contributions.sha256
                    if fact.step == self._step:
                        self.step = event


class Traces:
    """Traces of a history. Raises BusError."""

    def __init__(self, bus: Bus, topics: Topics, history: History) -> None:
        self._bus, self._topics, self._history = bus, topics, history
        self.damage = Damage()
        """Differing records; events alone describe them."""

    def group(self, *, only: str = "") -> list[Row]:
        run, ended = self._run, self._history.group
        if run is None or ended is None:
            return []
        spans = group_spans(run, ended, self._contents(ended))
        return tree.rows(tree.branch(spans, only) if only else spans)

    def step(self) -> list[Row]:
        """Return the step's trace with a row per group."""
        run, step = self._run, self._history.step
        if run is None or step is None:
            return []
        spans = step_spans(run, step)
        members = sorted(
            self._history.members, key=lambda member: (_came_ns(member), member.group.spec.group)
        )
        origin_ns = spans[0].start_ns
        return tree.rows(spans) + [_member(run, member, origin_ns) for member in members]

    @property
    def _run(self) -> RunFacts | None:
        started = self._history.account.started
        return None if started is None else run_facts(started)

    def _contents(self, ended: GroupEnded) -> dict[str, Content]:
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
