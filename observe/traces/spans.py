"""Spans of a group and of a step.

The spans of a group tile its time: each trajectory has `queued`, `generated` (again after a
migration or a lost worker), `reward` and `published`; then the group is `selected` and `trained`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Final

from dora_pipe.bus.logged import Damage, PlaceReader, fingerprint_of
from dora_pipe.core.errors import SchemaError
from dora_pipe.ledger.account import GroupEnded, StepEnded
from dora_pipe.ledger.calls import call_rows
from dora_pipe.ledger.history import Attempt, RequestHistory
from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.ids import RunFacts, group_trace, span_id
from dora_pipe.observe.traces.span import (
    Attributes,
    Cursor,
    Link,
    Span,
    SpanBuilder,
    SpanEvent,
    Value,
    step_span,
    within,
)
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import TrajectoryLogged
from dora_pipe.schemas.rounds import GroupSpec, SampleOutcome
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Segment, Trajectory
from dora_pipe.schemas.trajectory_codec import view_trajectory

PROVIDER: Final = "dora-pipe"

_NO_ARRAYS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("token_ids", "logprobs", "sampler_logprobs", "loss_mask"), ()),
    "routed_experts": None,
}


def contents_of(
    reader: PlaceReader, named: Iterable[TrajectoryLogged], damage: Damage
) -> dict[str, Trajectory]:
    """Return readable records by trajectory, without arrays; record others in `damage`."""
    contents: dict[str, Trajectory] = {}
    for record, logged in reader.named(named, damage):
        with suppress(SchemaError):  # reported by audit
            value = view_trajectory(record.value)
            if value.trajectory == logged.trajectory or damage.is_sound(
                fingerprint_of(record, value_of=value.trajectory), logged
            ):
                contents[logged.trajectory] = replace(value, **_NO_ARRAYS)
    return contents


class _Sample:
    def __init__(self, group: _Group, request: RequestHistory) -> None:
        self._builder, self._run = group.builder, group.builder.run
        self._ended, self._spec = group.ended, group.spec
        self._request = request
        self._content = group.contents.get(request.trajectory)
        self._name = span_id(group.builder.trace, "trajectory", request.trajectory)
        self._cursor = Cursor(self._ended.group.dispatched_ns)
        self._segments = _Segments(self._content)
        batch = self._ended.batch
        self._known_ns = (
            self._ended.ended_ns if batch is None else batch.taken_ns_of(self._spec.group)
        )
        """Time at which the orchestrator knew of the end."""

    def spans(self, parent: str) -> Cursor:
        """Add all spans, the trajectory's own first; return the end."""
        request, cursor, began_ns = self._request, self._cursor, self._cursor.at_ns
        index = len(self._builder.spans)
        for attempt, following in zip_longest(request.attempts, request.attempts[1:]):
            self._queued(attempt)
            cursor.limit_ns = self._known_ns if following is None else following.scheduled_ns
            self._generated(attempt)
        if request.logged is not None:
            self._published(request.logged)
        logged, content = request.logged, self._content
        attrs: Attributes = {
            names.TRAJECTORY: request.trajectory,
            names.CONVERSATION: request.trajectory,
            names.ATTEMPTS: len(request.attempts),
            names.MIGRATIONS: None if content is None else content.meta.migrations,
            names.STEP: None if logged is None else self._ended.step,
            names.REWARD: None if logged is None else logged.reward,
            names.OUTCOME: self._unawaited_outcome,
        }
        times = began_ns, cursor.at_ns
        self._builder.add(
            "trajectory",
            parent,
            times,
            attrs,
            request.trajectory,
            error=self._why(),
            error_type="failed",
        )
        self._builder.spans.insert(index, self._builder.spans.pop())
        return cursor

    @property
    def _unawaited_outcome(self) -> SampleOutcome | None:
        """Return the outcome of a trajectory that its group did not wait for."""
        return self._request.left

    def _why(self) -> str:
        if self._unawaited_outcome is not None:
            return ""
        if self._request.logged is None:
            open_yet = self._ended.outcome == "open"
            return "" if open_yet else self._request.attempts[-1].why or self._ended.why
        return "" if self._content is None else self._content.meta.error or ""

    @property
    def _unfinished(self) -> str:
        return "running" if self._ended.outcome == "open" else "cancelled"

    def _queued(self, attempt: Attempt) -> None:
        version = self._spec.version
        times = self._cursor.to(attempt.scheduled_ns)
        attrs: Attributes = {
            names.VERSION: version,
            names.ATTEMPT: attempt.attempt,
            names.WORKER: attempt.worker,
            names.REASON: attempt.reason,
            names.WAITED_FOR: f"a slot of version {version}" if times[0] < times[1] else None,
        }
        about = self._request.trajectory, attempt.attempt
        self._builder.add("queued", self._name, times, attrs, *about)

    def _generated(self, attempt: Attempt) -> None:
        content = self._content
        until_ns = attempt.ended_ns or self._ended.ended_ns
        if attempt.outcome == "logged" and content is not None:
            until_ns = content.meta.times.finished or until_ns
        times = self._cursor.to(until_ns)
        about = self._request.trajectory, attempt.attempt
        first_ns = self._segments.first_token(times[1])
        segments = self._segments.take(attempt, times[1])
        attrs = self._request_attributes(attempt) | self._result_attributes(attempt, segments)
        attrs[names.FIRST_TOKEN] = None if first_ns is None else max(0, first_ns - times[0]) / 1e9
        lost = attempt.outcome in ("fenced", "failed")
        name = self._builder.add(
            "generated",
            self._name,
            times,
            attrs,
            *about,
            events=_events(attempt, first_ns),
            error=(attempt.why or "its worker was fenced") if lost else "",
            error_type=attempt.outcome,
        )
        self._turns(segments, name, times, about, attempt)

    def _request_attributes(self, attempt: Attempt) -> Attributes:
        spec, run = self._spec, self._run
        sampling = run.sampling if spec.purpose == "train" else run.eval_sampling
        return {
            names.OPERATION: "text_completion",
            names.PROVIDER: PROVIDER,
            names.MODEL: run.model,
            names.ANSWERED_BY: f"{run.model}@{spec.version}",
            names.RESPONSE: self._request.trajectory,
            names.CONVERSATION: self._request.trajectory,
            names.TEMPERATURE: _float(sampling.get("temperature")),
            names.TOP_P: _float(sampling.get("top_p")),
            names.TOP_K: sampling.get("top_k") or None,
            names.MAX_TOKENS: sampling.get("max_tokens"),
            names.VERSION: spec.version,
            names.WORKER: attempt.worker,
            names.INCARNATION: attempt.incarnation,
            names.HOST: attempt.host,
            names.ENGINE: attempt.engine,
        }

    def _result_attributes(self, attempt: Attempt, segments: list[Segment]) -> Attributes:
        content = self._content
        logged = self._request.logged if attempt.outcome == "logged" else None
        sampled = sum(
            segment.end - segment.start for segment in segments if segment.kind == "model"
        )
        total = None if logged is None else logged.tokens
        return {
            names.INPUT: None if content is None else content.meta.prompt_tokens,
            names.OUTPUT: total if content is None else sampled,
            names.FINISH: None if logged is None else (logged.finish,),
            names.ATTEMPT: attempt.attempt,
            names.RESUMED: attempt.resumed or None,
            names.OUTCOME: attempt.outcome or self._unfinished,
            names.MIGRATED_TO: attempt.migration_target if attempt.outcome == "migrated" else None,
            names.REASON: attempt.reason,
        }

    def _turns(
        self,
        segments: list[Segment],
        parent: str,
        times: tuple[int, int],
        about: tuple[str, int],
        attempt: Attempt,
    ) -> None:
        began = next((segment.start_ns for segment in segments if segment.kind == "model"), None)
        if began is not None:
            at_ns = within(began, times)
            attrs: Attributes = {
                names.WORKER: attempt.worker,
                names.WAITED_FOR: f"a slot on {attempt.worker}" if at_ns > times[0] else None,
            }
            self._builder.add("slot", parent, (times[0], at_ns), attrs, *about)
        self._called(segments, parent, times, about)
        for index, segment in enumerate(segments):
            # A progress record of a lost attempt has only the start of its tokens.
            ends_ns = segment.end_ns if segment.end_ns > segment.start_ns else times[1]
            span = within(segment.start_ns, times), within(ends_ns, times)
            attrs = {names.TURN: segment.turn, names.TOKENS: segment.end - segment.start}
            attrs[names.CONTEXT] = self._segments.context_of(segment)
            if segment.kind == "model":
                attrs[names.VERSION] = segment.version
                self._builder.add("sampled", parent, span, attrs, *about, index)
                continue
            attrs[names.OK] = segment.ok
            if segment.kind == "tool":
                attrs |= {names.OPERATION: "execute_tool", names.TOOL: segment.tool}
            error = "" if segment.ok else f"the {segment.kind} failed"
            self._builder.add(segment.kind, parent, span, attrs, *about, index, error=error)

    def _called(
        self, segments: list[Segment], parent: str, times: tuple[int, int], about: tuple[str, int]
    ) -> None:
        content = self._content
        if content is None:
            return
        sampled = {segment.start for segment in segments if segment.kind == "model"}
        for record, call in zip(content.meta.calls, call_rows(content), strict=True):
            if record.start not in sampled:
                continue
            attrs: Attributes = {
                names.OPERATION: "chat",
                names.CALLER: call.caller,
                names.CALL: call.call,
                names.CONTEXT: call.context,
                names.API: call.api,
                names.IDLE: call.idle_ns / 1e9,
                names.INPUT: call.prompt_tokens,
                names.OUTPUT: call.tokens,
                names.FINISH: (call.finish,),
            }
            span = within(call.asked_ns, times), within(call.answered_ns, times)
            self._builder.add("chat", parent, span, attrs, *about, call.call)

    def _published(self, logged: TrajectoryLogged) -> None:
        content = self._content
        if content is not None and content.meta.times.rewarded is not None:
            self._builder.add(
                "reward",
                self._name,
                self._cursor.to(content.meta.times.rewarded),
                {names.REWARD: logged.reward},
                logged.trajectory,
                error=content.meta.reward_error or "",
                error_type="invalid",
            )
        attrs = self._builder.message("append", "send", Topics(self._run.key.run).trajectories)
        attrs |= {
            names.PARTITION: str(logged.partition),
            names.OFFSET: logged.offset,
            names.KEY: self._spec.group,
            names.MESSAGE: logged.trajectory,
            names.SIZE: logged.bytes,
            names.SHA256: logged.sha256,
            names.TRAJECTORY: logged.trajectory,
        }
        times = self._cursor.to(logged.at_ns)
        self._builder.add("published", self._name, times, attrs, logged.trajectory)


class _Segments:
    """Assign the segments of a record to the attempts that made them."""

    def __init__(self, content: Trajectory | None) -> None:
        self.content = content
        self._pending = (
            [] if content is None else [s for s in content.segments if s.kind != "prompt"]
        )
        if content is not None and content.meta.contexts:
            # They are ordered by context, but attempts differ by time.
            self._pending.sort(key=lambda segment: segment.start_ns)
        self._first_ns = None if content is None else content.meta.times.first_token

    def take(self, attempt: Attempt, until_ns: int) -> list[Segment]:
        """Return the segments of an attempt, up to its worker's last; the last attempt takes the
        rest."""
        if attempt.outcome == "logged":
            taken, self._pending = self._pending, []
            return taken
        upto = 0
        for index, segment in enumerate(self._pending):
            if segment.kind == "model" and (
                segment.incarnation != attempt.incarnation or segment.start_ns > until_ns
            ):
                break
            if segment.kind == "model":
                upto = index + 1
        taken, self._pending = self._pending[:upto], self._pending[upto:]
        return taken

    def context_of(self, segment: Segment) -> int | None:
        contexts = () if self.content is None else self.content.meta.contexts
        starts = [context.start for context in contexts]
        return bisect_right(starts, segment.start) if starts else None

    def first_token(self, until_ns: int) -> int | None:
        """Return the time of the first token if before `until_ns`; only once."""
        if self._first_ns is None or self._first_ns > until_ns:
            return None
        first_ns, self._first_ns = self._first_ns, None
        return first_ns


def _events(attempt: Attempt, first_ns: int | None) -> tuple[SpanEvent, ...]:
    events = []
    if first_ns is not None:
        events.append(SpanEvent("first token", first_ns))
    if attempt.migration_ns:
        attrs: dict[str, Value] = {
            names.MIGRATED_TO: attempt.migration_target,
            names.REASON: attempt.migration_reason,
        }
        events.append(SpanEvent("migration requested", attempt.migration_ns, attrs))
    return tuple(sorted(events, key=lambda event: event.at_ns))


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def group_spans(
    run: RunFacts, ended: GroupEnded, contents: Mapping[str, Trajectory], *, sampled: str = "all"
) -> list[Span]:
    """Return the trace of an ended group, parents first.

    Trajectories without a record in `contents` have only times of facts.
    """
    trace = group_trace(run.key, ended.group.spec.group)
    return _Group(ended, contents, SpanBuilder(run, trace)).spans(sampled)


@dataclass(frozen=True, slots=True)
class _Group:
    ended: GroupEnded
    contents: Mapping[str, Trajectory]
    builder: SpanBuilder

    @property
    def spec(self) -> GroupSpec:
        return self.ended.group.spec

    @property
    def root(self) -> str:
        return span_id(self.builder.trace, "group")

    def spans(self, sampled: str) -> list[Span]:
        ended, began_ns = self.ended, self.ended.group.dispatched_ns
        self._dispatched()
        came, skew_ns = self._samples()
        cursor = Cursor(max(came.values(), default=began_ns))
        if ended.batch is not None:
            self._consumed(cursor)
        cursor.to(ended.ended_ns)
        self._group((began_ns, cursor.at_ns), sampled, max(skew_ns, cursor.skew_ns))
        return [self.builder.spans[-1], *self.builder.spans[:-1]]

    def _group(self, times: tuple[int, int], sampled: str, skew_ns: int) -> None:
        spec, ended = self.spec, self.ended
        attrs: Attributes = {
            names.GROUP: spec.group,
            names.PURPOSE: spec.purpose,
            names.VERSION: spec.version,
            names.DIGEST: spec.digest,
            names.DEADLINE: spec.deadline if spec.purpose == "train" else None,
            names.GROUP_SIZE: spec.samples,
            names.ROW: spec.index,
            names.PASS: spec.data_epoch,
            names.OUTCOME: ended.outcome,
            names.REASON: ended.why,
            names.STEP: ended.step,
            names.STALENESS: self._staleness(),
            names.KEPT: sampled,
            names.SKEW: skew_ns / 1e6 if skew_ns else None,
        }
        error = ended.why if ended.outcome == "failed" else ""
        self.builder.add("group", "", times, attrs, error=error, error_type=ended.outcome)

    def _staleness(self) -> int | None:
        step = self.ended.step
        return None if step is None else staleness_of(step, self.spec.version)

    def _dispatched(self) -> None:
        group = self.ended.group
        attrs = self.builder.message("dispatch", "send", Topics(self.builder.run.key.run).decisions)
        attrs |= {
            names.OFFSET: group.offset,
            names.GROUP: self.spec.group,
            names.ROUND: group.round,
            names.REASON: group.reason,
        }
        times = group.dispatched_ns, group.dispatched_ns
        self.builder.add("dispatched", self.root, times, attrs)

    def _samples(self) -> tuple[dict[str, int], int]:
        came: dict[str, int] = {}
        skew_ns = 0
        for request in self.ended.group.placed:
            reached = _Sample(self, request).spans(self.root)
            skew_ns = max(skew_ns, reached.skew_ns)
            if request.logged is not None:
                came[request.trajectory] = reached.at_ns
        if len(came) > 1:
            last = max(came, key=lambda name: (came[name], name))
            logged = self.ended.group.requests[last].logged
            attrs: Attributes = {names.WAITED_FOR: None if logged is None else _on(logged)}
            self.builder.add("group_wait", self.root, (min(came.values()), came[last]), attrs)
        return came, skew_ns

    def _consumed(self, cursor: Cursor) -> None:
        ended, batch = self.ended, self.ended.batch
        assert batch is not None
        shared: Attributes = {
            names.COUNT: len(ended.group.results),
            names.STEP: batch.take.step,
            names.PART: batch.part_of.get(self.spec.group),
            names.ATTEMPT: batch.take.attempt,
            names.STALENESS: self._staleness(),
        }
        part = batch.taken_of(self.spec.group)
        last = batch.last if part is None else part.last
        other_group = last is not None and last.group != self.spec.group
        attrs = (
            self.builder.message("take", "receive", Topics(self.builder.run.key.run).trajectories)
            | shared
        )
        attrs[names.REASON] = batch.take.reason if part is None else part.reason
        attrs[names.WAITED_FOR] = _on(last) if last is not None and other_group else None
        self.builder.add(
            "selected", self.root, cursor.to(batch.taken_ns_of(self.spec.group)), attrs
        )
        attrs = (
            self.builder.message("train", "process", Topics(self.builder.run.key.run).trajectories)
            | shared
        )
        link = Link(*step_span(self.builder.run, batch.take.step), {names.STEP: batch.take.step})
        self.builder.add("trained", self.root, cursor.to(ended.ended_ns), attrs, links=(link,))


def step_spans(run: RunFacts, ended: StepEnded) -> list[Span]:
    """Return the trace of a committed step, with links to its trajectories."""
    fact, batch = ended.fact, ended.batch
    trace, root = step_span(run, fact.step)
    builder = SpanBuilder(run, trace)
    began_ns = min(ended.free_ns, batch.taken_ns)
    ends_ns = max(began_ns, fact.at_ns)
    attrs = builder.message("train", "process", Topics(run.key.run).trajectories)
    attrs |= {
        names.COUNT: sum(len(group.trajectories) for group in fact.groups),
        names.STEP: fact.step,
        names.ATTEMPT: fact.attempt,
        names.GROUPS: len(fact.groups),
        names.DIGEST: fact.digest_after,
        names.COMPUTE: fact.compute_s,
        names.OVERLAP: fact.overlap_s or None,
    }
    prefix = names.METRIC.removesuffix("*")
    attrs |= {prefix + name: value for name, value in sorted(fact.metrics.items())}
    links = tuple(
        Link(
            trace,
            span_id(trace, "trajectory", trajectory.trajectory),
            {names.TRAJECTORY: trajectory.trajectory},
        )
        for taken in fact.groups
        for trace in [group_trace(run.key, taken.group)]
        for trajectory in taken.trajectories
    )
    builder.add("step", "", (began_ns, ends_ns), attrs, links=links)
    cursor = Cursor(began_ns, ends_ns)
    if ended.parts:
        _parts(builder, root, cursor, ended)
    elif (waited := cursor.to(batch.taken_ns))[0] < waited[1]:
        builder.add("batch_wait", root, waited, {names.WAITED_FOR: _on(ended.last)})
    builder.add("train_step", root, cursor.to(ends_ns), {names.COMPUTE: fact.compute_s})
    return builder.spans


def _parts(builder: SpanBuilder, root: str, cursor: Cursor, ended: StepEnded) -> None:
    results = {group.spec.group: group.results for group in ended.groups}
    for part in ended.parts:
        taken = part.taken
        waited = cursor.to(part.begun_ns)
        if waited[0] < waited[1]:
            attrs: Attributes = {names.PART: part.part, names.WAITED_FOR: _on(taken.last)}
            builder.add("batch_wait", root, waited, attrs, part.part)
        if part.seconds is None:
            continue
        records = [record for name in taken.groups for record in results.get(name, ())]
        attrs = {
            names.PART: part.part,
            names.GROUPS: len(taken.groups),
            names.COUNT: len(records),
            names.OUTPUT: sum(record.tokens for record in records),
            names.REASON: taken.reason,
        }
        builder.add("part", root, cursor.to(part.ended_ns), attrs, part.part)


def _on(logged: TrajectoryLogged | None) -> str | None:
    return None if logged is None else f"{logged.trajectory} on {logged.worker}"
