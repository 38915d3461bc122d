"""Makes the spans of one trajectory; it decides which of its segments each stay has made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from dora_pipe.schemas.control import TrajectoryLogged, WorkerJoined
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Segment, Times, Trajectory
from dora_pipe.telemetry import names
from dora_pipe.telemetry.course import GroupEnded, Stay, Way
from dora_pipe.telemetry.ids import span_id
from dora_pipe.telemetry.maker import Cursor, Maker, Said, within
from dora_pipe.telemetry.span import Event, Value

PROVIDER: Final = "dora-pipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a trajectory's record says of its making."""

    segments: tuple[Segment, ...]
    times: Times
    prompt_tokens: int
    moves: int
    reward_error: str
    error: str


def content_of(trajectory: Trajectory) -> Content:
    """What traces need of a record."""
    meta = trajectory.meta
    return Content(
        segments=tuple(trajectory.segments),
        times=meta.times,
        prompt_tokens=meta.prompt_tokens,
        moves=meta.moves,
        reward_error=meta.reward_error or "",
        error=meta.error or "",
    )


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a sibling's spans go."""

    at_ns: int
    skew_ns: int
    """Clocks disagreed by so much."""


class Sibling:
    """Makes the spans of one way of a group that has ended; `parent` is the group's root."""

    def __init__(
        self,
        maker: Maker,
        ended: GroupEnded,
        way: Way,
        content: Content | None,
        workers: Mapping[int, WorkerJoined],
    ) -> None:
        self._maker, self._run = maker, maker.run
        self._ended, self._spec = ended, ended.course.spec
        self._way, self._content, self._workers = way, content, workers
        self._name = span_id(maker.trace, "trajectory", way.trajectory)
        self._cursor = Cursor(ended.course.dispatched_ns)
        self._told = _Told(content)
        batch = ended.batch
        self._known_ns = ended.ended_ns if batch is None else batch.taken_ns
        """When the orchestrator knew that the siblings had ended."""

    def spans(self, parent: str) -> Reached:
        """Add all of them, the trajectory's own first."""
        way, cursor, began_ns = self._way, self._cursor, self._cursor.at_ns
        place = len(self._maker.made)
        for stay, following in zip_longest(way.stays, way.stays[1:]):
            self._queued(stay)
            cursor.limit_ns = self._known_ns if following is None else following.placed_ns
            self._stay(stay)
        if way.logged is not None:
            self._published(way.logged)
        logged, content = way.logged, self._content
        said: Said = {
            names.TRAJECTORY: way.trajectory,
            names.CONVERSATION: way.trajectory,
            names.STAYS: len(way.stays),
            names.MOVES: None if content is None else content.moves,
            names.STEP: None if logged is None else self._ended.step,
            names.REWARD: None if logged is None else logged.reward,
        }
        times = began_ns, cursor.at_ns
        self._maker.add(
            "trajectory",
            parent,
            times,
            said,
            way.trajectory,
            error=self._why(),
            error_type="failed",
        )
        self._maker.made.insert(place, self._maker.made.pop())
        return Reached(cursor.at_ns, cursor.skew_ns)

    def _why(self) -> str:
        """What went wrong with it, if anything did."""
        if self._way.logged is None:
            open_yet = self._ended.fate == "open"
            return "" if open_yet else self._way.stays[-1].why or self._ended.why
        return "" if self._content is None else self._content.error

    @property
    def _unfinished(self) -> str:
        """What became of a stay of which nothing was said."""
        return "running" if self._ended.fate == "open" else "cancelled"

    def _queued(self, stay: Stay) -> None:
        version = self._spec.version
        times = self._cursor.to(stay.placed_ns)
        said: Said = {
            names.VERSION: version,
            names.ATTEMPT: stay.attempt,
            names.WORKER: stay.worker,
            names.REASON: stay.reason,
            names.WAITED_FOR: f"a slot of version {version}" if times[0] < times[1] else None,
        }
        about = self._way.trajectory, stay.attempt
        self._maker.add("queued", self._name, times, said, *about)

    def _stay(self, stay: Stay) -> None:
        content = self._content
        until_ns = stay.ended_ns or self._ended.ended_ns
        if stay.outcome == "logged" and content is not None:
            until_ns = content.times.finished or until_ns
        times = self._cursor.to(until_ns)
        about = self._way.trajectory, stay.attempt
        first_ns = self._told.first_token(times[1])
        segments = self._told.take(stay, times[1])
        said = self._request(stay) | self._result(stay, segments)
        said[names.FIRST_TOKEN] = None if first_ns is None else max(0, first_ns - times[0]) / 1e9
        lost = stay.outcome in ("fenced", "failed")
        name = self._maker.add(
            "generated",
            self._name,
            times,
            said,
            *about,
            events=_events(stay, first_ns),
            error=(stay.why or "its worker was fenced") if lost else "",
            error_type=stay.outcome,
        )
        self._turns(segments, name, times, about, stay)

    def _request(self, stay: Stay) -> Said:
        """The request, as the conventions for generative AI and this house name it."""
        spec, run = self._spec, self._run
        sampling = run.sampling if spec.purpose == "train" else run.eval_sampling
        worker = self._workers.get(stay.epoch)
        return {
            names.OPERATION: "text_completion",
            names.PROVIDER: PROVIDER,
            names.MODEL: run.model,
            names.ANSWERED_BY: f"{run.model}@{spec.version}",
            names.RESPONSE: self._way.trajectory,
            names.CONVERSATION: self._way.trajectory,
            names.TEMPERATURE: _float(sampling.get("temperature")),
            names.TOP_P: _float(sampling.get("top_p")),
            names.TOP_K: sampling.get("top_k") or None,
            names.MAX_TOKENS: sampling.get("max_tokens"),
            names.VERSION: spec.version,
            names.WORKER: stay.worker,
            names.EPOCH: stay.epoch,
            names.HOST: None if worker is None else worker.host,
            names.ENGINE: None if worker is None else f"{worker.engine} {worker.engine_version}",
        }

    def _result(self, stay: Stay, segments: list[Segment]) -> Said:
        """What came of a stay."""
        content = self._content
        logged = self._way.logged if stay.outcome == "logged" else None
        sampled = sum(one.end - one.start for one in segments if one.kind == "model")
        whole = None if logged is None else logged.tokens
        return {
            names.INPUT: None if content is None else content.prompt_tokens,
            names.OUTPUT: whole if content is None else sampled,
            names.FINISH: None if logged is None else (logged.finish,),
            names.ATTEMPT: stay.attempt,
            names.RESUMED: stay.resumed or None,
            names.OUTCOME: stay.outcome or self._unfinished,
            names.MOVED_TO: stay.move_to if stay.outcome == "moved" else None,
            names.REASON: stay.reason,
        }

    def _turns(
        self,
        segments: list[Segment],
        parent: str,
        times: tuple[int, int],
        about: tuple[str, int],
        stay: Stay,
    ) -> None:
        """What a stay consists of, each within it."""
        began = next((one.start_ns for one in segments if one.kind == "model"), None)
        if began is not None:
            at_ns = within(began, times)
            said: Said = {
                names.WORKER: stay.worker,
                names.WAITED_FOR: f"a slot on {stay.worker}" if at_ns > times[0] else None,
            }
            self._maker.add("slot", parent, (times[0], at_ns), said, *about)
        for place, one in enumerate(segments):
            # A lost stay's tokens are known by a progress record, which says only their beginning.
            ends_ns = one.end_ns if one.end_ns > one.start_ns else times[1]
            span = within(one.start_ns, times), within(ends_ns, times)
            said = {names.TURN: one.turn, names.TOKENS: one.end - one.start}
            if one.kind == "model":
                said[names.VERSION] = one.version
                self._maker.add("sampled", parent, span, said, *about, place)
                continue
            said[names.OK] = one.ok
            if one.kind == "tool":
                said |= {names.OPERATION: "execute_tool", names.TOOL: one.tool}
            error = "" if one.ok else f"the {one.kind} failed"
            self._maker.add(one.kind, parent, span, said, *about, place, error=error)

    def _published(self, logged: TrajectoryLogged) -> None:
        content = self._content
        if content is not None and content.times.rewarded is not None:
            self._maker.add(
                "reward",
                self._name,
                self._cursor.to(content.times.rewarded),
                {names.REWARD: logged.reward},
                logged.trajectory,
                error=content.reward_error,
                error_type="invalid",
            )
        said = self._maker.message("append", "send", Topics(self._run.key.run).trajectories)
        said |= {
            names.PARTITION: str(logged.partition),
            names.OFFSET: logged.offset,
            names.KEY: self._spec.group,
            names.MESSAGE: logged.trajectory,
            names.SIZE: logged.bytes,
            names.SHA256: logged.sha256,
            names.TRAJECTORY: logged.trajectory,
        }
        times = self._cursor.to(logged.at_ns)
        self._maker.add("published", self._name, times, said, logged.trajectory)


class _Told:
    """The segments of a record, given to the stays that made them."""

    def __init__(self, content: Content | None) -> None:
        self.content = content
        self._left = [] if content is None else [s for s in content.segments if s.kind != "prompt"]
        self._first_ns = None if content is None else content.times.first_token

    def take(self, stay: Stay, until_ns: int) -> list[Segment]:
        """Those of a stay, in order: up to its worker's last one; all that is left of the last."""
        if stay.outcome == "logged":
            found, self._left = self._left, []
            return found
        upto = 0
        for place, one in enumerate(self._left):
            if one.kind == "model" and (one.epoch != stay.epoch or one.start_ns > until_ns):
                break
            if one.kind == "model":
                upto = place + 1
        found, self._left = self._left[:upto], self._left[upto:]
        return found

    def first_token(self, until_ns: int) -> int | None:
        """When the first token was sampled, if that was before this moment; told once."""
        if self._first_ns is None or self._first_ns > until_ns:
            return None
        found, self._first_ns = self._first_ns, None
        return found


def _events(stay: Stay, first_ns: int | None) -> tuple[Event, ...]:
    found = []
    if first_ns is not None:
        found.append(Event("first token", first_ns))
    if stay.move_ns:
        said: dict[str, Value] = {names.MOVED_TO: stay.move_to, names.REASON: stay.move_why}
        found.append(Event("move asked", stay.move_ns, said))
    return tuple(sorted(found, key=lambda one: one.at_ns))


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
