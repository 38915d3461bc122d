"""Makes the spans of a group and of a step; it decides where one stage ends and the next begins.

The spans of a group tile its time: each sibling's are `queued`, `generated` (again after a move or
the loss of a worker), `reward` and `published`, without a gap; then the group is `selected` and
`trained`. Clocks of different machines may disagree: what would end before it began ends at once,
and the group says by how much (`dora.clock_skew_ms`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import TrajectoryLogged, WorkerJoined
from dora_pipe.schemas.topics import Topics
from dora_pipe.telemetry import names
from dora_pipe.telemetry.course import GroupEnded, RunFacts, StepEnded
from dora_pipe.telemetry.maker import (
    Cursor,
    Maker,
    Said,
    root_of,
    step_span,
    trajectory_span,
)
from dora_pipe.telemetry.sibling import Content, Sibling, content_of
from dora_pipe.telemetry.span import Link, Span

__all__ = ["Content", "content_of", "group_spans", "step_spans"]


def group_spans(
    run: RunFacts,
    ended: GroupEnded,
    contents: Mapping[str, Content],
    workers: Mapping[int, WorkerJoined],
    *,
    kept: str = "all",
) -> list[Span]:
    """The trace of a group that has ended, parents first.

    `contents` by trajectory: one that is not there (its record is gone) is told by facts alone.
    `workers` by role epoch.
    """
    return _Group(run, ended, contents, workers).spans(kept)


class _Group:
    def __init__(
        self,
        run: RunFacts,
        ended: GroupEnded,
        contents: Mapping[str, Content],
        workers: Mapping[int, WorkerJoined],
    ) -> None:
        self._ended, self._contents, self._workers = ended, contents, workers
        self._spec = ended.course.spec
        self._topics = Topics(run.key.run)
        trace, self._root = root_of(run, self._spec.group)
        self._maker = Maker(run, trace)

    def spans(self, kept: str) -> list[Span]:
        ended, began_ns = self._ended, self._ended.course.dispatched_ns
        self._dispatched()
        came, skew_ns = self._siblings()
        cursor = Cursor(max(came.values(), default=began_ns))
        if ended.batch is not None:
            self._consumed(cursor)
        cursor.to(ended.ended_ns)
        self._group((began_ns, cursor.at_ns), kept, max(skew_ns, cursor.skew_ns))
        return [self._maker.made[-1], *self._maker.made[:-1]]

    def _group(self, times: tuple[int, int], kept: str, skew_ns: int) -> None:
        spec, ended = self._spec, self._ended
        said: Said = {
            names.GROUP: spec.group,
            names.PURPOSE: spec.purpose,
            names.VERSION: spec.version,
            names.DIGEST: spec.digest,
            names.DEADLINE: spec.deadline if spec.purpose == "train" else None,
            names.SIBLINGS: spec.size,
            names.ROW: spec.index,
            names.PASS: spec.data_epoch,
            names.FATE: ended.fate,
            names.REASON: ended.why,
            names.STEP: ended.step,
            names.STALENESS: self._staleness(),
            names.KEPT: kept,
            names.SKEW: skew_ns / 1e6 if skew_ns else None,
        }
        error = ended.why if ended.fate == "failed" else ""
        self._maker.add("group", "", times, said, error=error, error_type=ended.fate)

    def _staleness(self) -> int | None:
        step = self._ended.step
        return None if step is None else staleness_of(step, self._spec.version)

    def _dispatched(self) -> None:
        course = self._ended.course
        said = self._maker.message("dispatch", "send", self._topics.decisions)
        said |= {
            names.OFFSET: course.offset,
            names.GROUP: self._spec.group,
            names.ROUND: course.round,
            names.REASON: course.reason,
        }
        at = course.dispatched_ns, course.dispatched_ns
        self._maker.add("dispatched", self._root, at, said)

    def _siblings(self) -> tuple[dict[str, int], int]:
        """All of them. When each was published, by its id; by how much clocks disagreed."""
        came: dict[str, int] = {}
        skew_ns = 0
        for name, way in sorted(self._ended.course.ways.items()):
            sibling = Sibling(
                self._maker, self._ended, way, self._contents.get(name), self._workers
            )
            reached = sibling.spans(self._root)
            skew_ns = max(skew_ns, reached.skew_ns)
            if way.logged is not None:
                came[name] = reached.at_ns
        if len(came) > 1:
            last = max(came, key=lambda name: (came[name], name))
            logged = self._ended.course.ways[last].logged
            said: Said = {names.WAITED_FOR: None if logged is None else _on(logged)}
            self._maker.add("gathered", self._root, (min(came.values()), came[last]), said)
        return came, skew_ns

    def _consumed(self, cursor: Cursor) -> None:
        """What the trainer did with the group."""
        ended, batch = self._ended, self._ended.batch
        assert batch is not None
        shared: Said = {
            names.COUNT: len(ended.course.results),
            names.STEP: batch.take.step,
            names.ATTEMPT: batch.take.attempt,
            names.STALENESS: self._staleness(),
        }
        last = ended.batch_last
        others = last is not None and last.group != self._spec.group
        said = self._maker.message("take", "receive", self._topics.trajectories) | shared
        said[names.REASON] = batch.take.reason
        said[names.WAITED_FOR] = _on(last) if last is not None and others else None
        self._maker.add("selected", self._root, cursor.to(batch.taken_ns), said)
        said = self._maker.message("train", "process", self._topics.trajectories) | shared
        link = Link(*step_span(self._maker.run, batch.take.step), {names.STEP: batch.take.step})
        self._maker.add("trained", self._root, cursor.to(ended.ended_ns), said, links=(link,))


def step_spans(run: RunFacts, ended: StepEnded) -> list[Span]:
    """The trace of a committed step: its wait, its work, and a link to every trajectory of it."""
    fact, batch = ended.fact, ended.batch
    trace, root = step_span(run, fact.step)
    maker = Maker(run, trace)
    began_ns = min(batch.free_ns or batch.taken_ns, batch.taken_ns)
    cursor = Cursor(began_ns)
    waited, computed = cursor.to(batch.taken_ns), cursor.to(fact.at_ns)
    said = maker.message("train", "process", Topics(run.key.run).trajectories)
    said |= {
        names.COUNT: sum(len(one.trajectories) for one in fact.groups),
        names.STEP: fact.step,
        names.ATTEMPT: fact.attempt,
        names.GROUPS: len(fact.groups),
        names.DIGEST: fact.digest_after,
        names.COMPUTE: fact.compute_s,
    }
    figure = names.FIGURE.removesuffix("*")
    said |= {figure + name: value for name, value in sorted(fact.figures.items())}
    links = tuple(
        Link(
            *trajectory_span(run, taken.group, one.trajectory),
            {names.TRAJECTORY: one.trajectory},
        )
        for taken in fact.groups
        for one in taken.trajectories
    )
    maker.add("step", "", (began_ns, cursor.at_ns), said, links=links)
    last = ended.last
    if waited[0] < waited[1]:
        what: Said = {names.WAITED_FOR: None if last is None else _on(last)}
        maker.add("waited", root, waited, what)
    maker.add("computed", root, computed, {names.COMPUTE: fact.compute_s})
    return maker.made


def _on(logged: TrajectoryLogged) -> str:
    """A record and who made it."""
    return f"{logged.trajectory} on {logged.worker}"
