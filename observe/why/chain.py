"""Follows a wait from role to role, group, request and version, down to who does not move.

It decides whom to believe: a role that was not heard for `silent_after_s` is called silent, and
what it said last is history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dora_pipe.catalogue.statuses import ORCHESTRATOR, TRAINER, LastStatus
from dora_pipe.observe.alarms import silent_after_s
from dora_pipe.observe.text import counted, duration
from dora_pipe.observe.why.log import Picture
from dora_pipe.observe.why.parts import next_part
from dora_pipe.orchestrator.elastic import held
from dora_pipe.orchestrator.hosting import holders
from dora_pipe.orchestrator.index import queue_key
from dora_pipe.orchestrator.planner import may_still_admit
from dora_pipe.orchestrator.state import Group, Request, Worker
from dora_pipe.orchestrator.waits import blockers, waits
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.metrics import TrainerStatus, Wait, WorkerStatus

BRANCHES_MAX: Final = 3
"""Groups, requests or workers that one sentence leads to; the others are counted."""


OF_TASKS: Final = ("prompt", "environment", "reward", "agent")
"""Waits of a worker for what its tasks do."""

NOT_SAID_NS: Final = -1
"""The beginning of a wait that follows from the state and has not been said yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A sentence of the answer, and the sentences that say why."""

    kind: str
    """`role`, `wait`, `group`, `trajectory`, `worker`, `version`, `bound`, `task` or `more`."""
    id: str
    text: str
    since_s: float | None = None
    """Seconds before the moment at which it began, where that is known."""
    alarm: bool = False
    wait: str = ""
    """The name of the wait that stops a role."""
    because: tuple[Node, ...] = ()

    @property
    def end(self) -> Node:
        """Where the chain ends: who or what does not move."""
        return self.because[0].end if self.because else self


def roles_of(picture: Picture) -> list[Node]:
    """Every role with what it waits for: orchestrator, trainer, workers by name."""
    chain = Chain(picture)
    names = [TRAINER, ORCHESTRATOR, *sorted({*picture.state.workers, *picture.gone()})]
    return [chain.role(name) for name in names]


class Chain:
    """Makes the nodes of one picture."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._state = picture.state
        timing = self._state.config.timing if self._state.config else None
        self._silent_s = silent_after_s(timing.heartbeat_s if timing else None)
        self._lease_s = timing.lease_s if timing else 10.0
        self._path: list[str] = []

    def role(self, name: str) -> Node:
        """A role; one that stands above in the same branch is only named."""
        if name in self._path:
            return Node(kind="role", id=name, text=f"{name}: see above")
        self._path.append(name)
        try:
            return self._role(name)
        finally:
            self._path.pop()

    def _role(self, name: str) -> Node:
        kind = "role" if name in (TRAINER, ORCHESTRATOR) else "worker"
        heard = self._heard(name)
        if heard is None:
            return self._never_heard(kind, name)
        age_s = self._ago_s(heard.status.at_ns)
        if age_s > self._silent_s and not self._state.done:
            return self._silent(kind, name, heard, age_s)
        if self._state.done:
            return Node(kind=kind, id=name, text=f"{name}: the run is over")
        present = self._decided(heard) if name == ORCHESTRATOR else heard.status.waits
        nodes = tuple(self._wait(one) for one in present)
        failing = self._failing(heard)
        if not present or not present[0].still:
            text = f"{name}: {self._work(name, heard)}"
            return Node(kind=kind, id=name, text=text, because=(*failing, *nodes))
        first = nodes[0]
        led_to = (*first.because, *nodes[1:])
        return Node(
            kind=kind,
            id=name,
            text=f"{name}: {first.text}",
            since_s=first.since_s,
            alarm=first.alarm,
            wait=present[0].name,
            because=((*failing, *led_to) if present[0].name in OF_TASKS else (*led_to, *failing)),
        )

    def _failing(self, heard: LastStatus) -> tuple[Node, ...]:
        """Where a worker's tasks run and do not work."""
        status = heard.status
        places = status.failing if isinstance(status, WorkerStatus) else ()
        return tuple(
            Node(
                kind="task",
                id=one.url or one.task,
                text=f"task {one.task}: {one.url or 'its processes'}"
                f" {'left alone' if one.left_alone else 'tried with one process'},"
                f" {counted(one.failures, 'failure')} in a row since"
                f" {self._ago(one.since_ns)}: {one.why}",
                since_s=self._ago_s(one.since_ns),
            )
            for one in places
        )

    def _heard(self, name: str) -> LastStatus | None:
        """What the present incarnation said; an earlier one is not believed."""
        heard = self._picture.heard.get(name)
        worker = self._state.workers.get(name)
        if heard is None or not isinstance(heard.status, WorkerStatus):
            return heard
        if worker is None or heard.status.epoch != worker.epoch:
            return None
        return heard

    def _never_heard(self, kind: str, name: str) -> Node:
        known = self._picture.account.named.get(name)
        gone = None if known is None else known.gone
        worker = self._state.workers.get(name)
        if gone is not None and worker is None:
            ago_s = self._ago_s(gone.at_ns)
            text = f"{name}: is out since {duration(ago_s)} ({gone.why})"
            return Node(kind=kind, id=name, text=text, since_s=ago_s)
        if worker is None and kind == "worker":
            return Node(kind=kind, id=name, text=f"{name}: is unknown to this run")
        if worker is None:
            return Node(kind=kind, id=name, text=f"{name}: has said nothing yet")
        joined_ns = self._picture.at_ns if known is None else known.joined.at_ns
        text = f"{name}: has joined, and said nothing since"
        return Node(kind=kind, id=name, text=text, since_s=self._ago_s(joined_ns))

    def _silent(self, kind: str, name: str, heard: LastStatus, age_s: float) -> Node:
        last = heard.status.waits_for
        said = f"waits for {last}" if last else self._work(name, heard)
        text = f"{name}: is silent since {duration(age_s)}; dead, stopped or cut off from the log"
        if kind == "worker" and age_s <= self._lease_s:
            text += f" (fenced after {self._lease_s:g} s)"
        text += f"; its last word was: {said}"
        alarm = age_s > self._lease_s
        return Node(kind=kind, id=name, text=text, since_s=age_s, alarm=alarm, wait="silent")

    def _work(self, name: str, heard: LastStatus) -> str:
        """What a role does that does not wait."""
        status = heard.status
        if isinstance(status, TrainerStatus):
            return f"works: {status.phase}, step {status.step}"
        if isinstance(status, WorkerStatus):
            rate = _rate(heard)
            text = f"samples {counted(status.active, 'request')} of version {status.version}"
            text += f", {status.waiting} ahead of its slots" if status.waiting else ""
            text += f", {status.in_environment} at environments" if status.in_environment else ""
            text += f", {status.being_scored} being scored" if status.being_scored else ""
            again = status.episodes_started_again
            text += f", {counted(again, 'episode')} started again so far" if again else ""
            text += self._agents(status)
            return text + ("" if rate is None else f", {rate:,.0f} tok/s")
        return "works"

    def _agents(self, status: WorkerStatus) -> str:
        """What sessions do there, if there are any."""
        text = f", {status.with_agent} with their agents" if status.with_agent else ""
        if status.calls_open:
            longest = self._ago(status.call_since_ns)
            text += f", {counted(status.calls_open, 'open call')}, the longest since {longest}"
        return text

    # Waits

    def _decided(self, heard: LastStatus) -> tuple[Wait, ...]:
        """What the orchestrator waits for by the state, which is newer than what it said."""
        said = {one.name: one for one in heard.status.waits}
        return tuple(
            Wait(
                name=one.name,
                words=one.words,
                since_ns=said[one.name].since_ns if one.name in said else NOT_SAID_NS,
                limit_ms=said[one.name].limit_ms if one.name in said else None,
                overdue=one.name in said and said[one.name].overdue,
                still=one.still,
                blockers=tuple(one.blockers),
                more=one.more,
            )
            for one in waits(self._state)
        )

    def _wait(self, wait: Wait) -> Node:
        lasts_s = None if wait.since_ns == NOT_SAID_NS else self._ago_s(wait.since_ns)
        text = f"waits for {self._words(wait)}"
        text += "" if lasts_s is None else f", since {duration(lasts_s)}"
        if wait.overdue and wait.limit_ms is not None:
            text += f": ALARM, its limit is {wait.limit_ms / 1000:.4g} s"
        return Node(
            kind="wait",
            id=wait.name,
            text=text,
            since_s=lasts_s,
            alarm=wait.overdue,
            because=self._because(wait),
        )

    def _words(self, wait: Wait) -> str:
        """What the wait is for; the state knows what the groups of a batch have come to."""
        state = self._state
        if wait.name != "batch" or state.config is None or state.facts is None:
            return wait.words
        fates = state.counters.fates
        part = next_part(state)
        said = part.words if part else f"batch of step {state.standing().step}: "
        finished = len(state.finished) + len(state.in_parts)
        said += f"{finished} of {state.config.groups.per_step} groups are finished"
        ends = ", ".join(f"{fates[one]} {one}" for one in ("failed", "filtered") if fates.get(one))
        ends = f" ({ends} so far)" if ends else ""
        return f"{said}{ends}"

    def _because(self, wait: Wait) -> tuple[Node, ...]:
        """What the wait's blockers do; where the state knows more than the status, the state."""
        match wait.name:
            case "groups" | "admission":
                return self.step_blockers()
            case "host":
                return tuple(self.version(int(one.id)) for one in wait.blockers)
            case "requests" | "version":
                return (self._no_work(), self.role(ORCHESTRATOR))
            case _:
                pass
        nodes = []
        for one in wait.blockers:
            if one.kind in ("role", "worker"):
                nodes.append(self.role(one.id))
            elif one.kind == "group" and one.id in self._state.groups:
                nodes.append(self.group(self._state.groups[one.id]))
            elif one.kind == "trajectory" and one.id in self._state.requests:
                nodes.append(self._named(one.id))
        return tuple(nodes)

    def _no_work(self) -> Node:
        """Why a worker has nothing to do."""
        state = self._state
        worker = state.workers.get(self._path[-1]) if self._path else None
        queued = sum(map(len, state.queues.values()))
        if state.config is None or state.facts is None:
            text = "the run has not started"
        elif worker is not None and worker.name in held(state):
            text = f"it is elastic: step {state.version} is computed, or is to begin"
        elif worker is not None and worker.loading:
            text = f"it was told {self._ago(worker.target_ns)} ago to load version {worker.target}"
        elif worker is not None and worker.requests:
            text = f"{counted(len(worker.requests), 'request')} was placed on it just now"
        elif queued:
            versions = ", ".join(map(str, sorted(state.queues)))
            text = f"queued: {counted(queued, 'request')}, of version {versions}"
        elif state.paused:
            text = "the run is paused: no group is admitted"
        elif may_still_admit(state):
            groups = counted(may_still_admit(state), "group")
            text = f"{groups} may be admitted, as soon as a slot is free on a worker of the newest"
        else:
            at = state.standing()
            text = (
                f"no request is queued, and no group may be admitted yet: "
                f"{counted(sum(state.deadlines.values()), 'group')} dispatched and not taken"
            )
            text += ", a batch is being trained" if at.training else ""
            text += f" (max_staleness {at.max_staleness}, in_flight_batches "
            text += f"{at.in_flight_batches:g}, {at.per_step} groups a step)"
        return Node(kind="bound", id="admission", text=text)

    # Groups and requests

    def step_blockers(self) -> tuple[Node, ...]:
        """The groups that the next step waits for, and what each waits for."""
        state = self._state
        if state.config is None or state.done:
            return ()
        found = blockers(state, BRANCHES_MAX)
        nodes = [self.group(group) for group in found.first]
        if not found.count and state.training is None:
            nodes.append(self._no_work())
            nodes += [self.role(one.name) for one in _loading(state.workers)[:BRANCHES_MAX]]
        return (*nodes, *_more(found.count - BRANCHES_MAX, "group"))

    def group(self, group: Group) -> Node:
        """A group with its open siblings."""
        spec, state = group.spec, self._state
        names = [trajectory_id(spec.group, sibling) for sibling in range(spec.siblings)]
        still_open = [name for name in names if name in state.requests]
        due = f", deadline {spec.deadline}" if spec.purpose == "train" else ", evaluation"
        since_s = None
        text = f"{spec.group} (version {spec.version}{due}): "
        scoring = state.scoring.get(spec.group)
        if scoring is None:
            text += f"{len(still_open)} of {counted(spec.siblings, 'sibling')} open"
            text += f", {spec.size - group.valid} more make it complete" if spec.spare else ""
        else:
            by = f" by {scoring.worker}" if scoring.worker else ", by whom is not decided"
            text += f"scored together{by}, attempt {max(1, scoring.attempt)}"
        history = self._picture.account.open.get(spec.group)
        if history is not None:
            since_s = self._ago_s(history.dispatched_ns)
            text += f", dispatched {duration(since_s)} ago"
        nodes = [self._named(name) for name in still_open[:BRANCHES_MAX]]
        if scoring is not None and scoring.worker in state.workers:
            nodes.append(self.role(scoring.worker))
        return Node(
            kind="group",
            id=spec.group,
            text=text,
            since_s=since_s,
            because=(*nodes, *_more(len(still_open) - BRANCHES_MAX, "sibling")),
        )

    def _named(self, trajectory: str) -> Node:
        request = self._state.requests[trajectory]
        if not request.worker:
            return self._queued(trajectory, request)
        since_ns = self._picture.placed_ns(trajectory)
        since_s = None if since_ns is None else self._ago_s(since_ns)
        text = f"{trajectory}: on {request.worker}"
        text += "" if since_s is None else f" since {duration(since_s)}"
        text += f", attempt {request.attempt}" if request.attempt > 1 else ""
        text += f", {self._tokens(trajectory, request)}"
        if request.moving is not None:
            text += f"; to be moved to {request.moving[0]}"
        return Node(
            kind="trajectory",
            id=trajectory,
            text=text,
            since_s=since_s,
            because=() if request.worker in self._path else (self.role(request.worker),),
        )

    def _tokens(self, trajectory: str, request: Request) -> str:
        """How far a request has come, as far as progress records say."""
        newest = request.resume
        heard = self._heard(request.worker)
        if heard is not None and isinstance(heard.status, WorkerStatus):
            known = heard.status.progress.get(trajectory)
            if known is not None and (newest is None or known.tokens >= newest.tokens):
                newest = known
        asked = self._asked(trajectory, heard)
        if newest is None:
            return f"no progress record yet{asked}"
        text = f"{newest.tokens} tokens at its last progress record"
        return f"{text}{self._answered(newest)}{asked}"

    def _asked(self, trajectory: str, heard: LastStatus | None) -> str:
        """Which calls of a session its worker has named among the oldest."""
        if heard is None or not isinstance(heard.status, WorkerStatus):
            return ""
        asked = heard.status.calls_oldest
        before = heard.status.calls_before or (-1,) * len(asked)
        own = [
            pair for pair in zip(asked, before, strict=False) if pair[0].trajectory == trajectory
        ]
        said = (
            f"; its call {one.call} waits for {one.waits_for} since {self._ago(one.since_ns)}"
            + (f", {ahead} before it" if ahead >= 0 else "")
            for one, ahead in own[:BRANCHES_MAX]
        )
        return "".join(said)

    def _answered(self, resume: Resume) -> str:
        """What the agent of a session heard last."""
        turn = self._picture.answered(resume)
        if turn is None:
            return ""
        count = counted(turn.turn + 1, "answer")
        who = f" {turn.call.caller}" if turn.call.caller else ""
        ago = self._ago(turn.ended_ns)
        return f"; its agent{who} has had {count}, the last {ago} ago in context {turn.context}"

    def _queued(self, trajectory: str, request: Request) -> Node:
        spec = self._state.groups[request.group].spec
        queue = self._state.queues.get(spec.version, [])
        before = sum(key < queue_key(spec, request.sibling) for key in queue)
        text = f"{trajectory}: queued for a slot of version {spec.version}, {before} before it"
        if request.attempt:
            text += f"; attempt {request.attempt} was lost with its worker or failed"
        node = self.version(spec.version)
        return Node(kind="trajectory", id=trajectory, text=text, because=(node,))

    def version(self, version: int) -> Node:
        """Who hosts a version, or gets it, and how full they are."""
        hosts = [one for one in self._state.workers.values() if one.target == version]
        hosts += [one for one in holders(self._state, version) if one.target != version]
        hosts.sort(key=lambda one: one.name)
        if not hosts:
            text = f"version {version}: no worker hosts it, or loads it"
            rest = sorted(self._state.workers)[:BRANCHES_MAX]
            return Node(
                kind="version",
                id=str(version),
                text=text,
                because=tuple(self.role(name) for name in rest),
            )
        text = f"version {version}: " + ", ".join(map(_room, hosts[:BRANCHES_MAX]))
        text += f" and {len(hosts) - BRANCHES_MAX} more" if len(hosts) > BRANCHES_MAX else ""
        nodes = tuple(self.role(one.name) for one in hosts[:BRANCHES_MAX] if one.loading)
        return Node(kind="version", id=str(version), text=text, because=nodes)

    def _ago(self, ns: int) -> str:
        return duration(self._ago_s(ns))

    def _ago_s(self, ns: int) -> float:
        return max(0.0, (self._picture.at_ns - ns) / 1e9)


def _room(worker: Worker) -> str:
    if worker.loading:
        return f"{worker.name} is to load it"
    held = len(worker.requests) - worker.off_engine
    size = f"{worker.slots + worker.prefetch}"
    if worker.off_engine:
        size += f", and {worker.off_engine} that need no slot"
    if not worker.usable:
        return f"{worker.name} takes nothing more ({len(worker.requests)} requests)"
    return f"{worker.name} holds {held} of {size}"


def _loading(workers: dict[str, Worker]) -> list[Worker]:
    return [workers[name] for name in sorted(workers) if workers[name].loading]


def _rate(heard: LastStatus) -> float | None:
    """Tokens per second between a worker's last two statuses."""
    now, before = heard.status, heard.before
    if not isinstance(now, WorkerStatus) or not isinstance(before, WorkerStatus):
        return None
    seconds = (now.at_ns - before.at_ns) / 1e9
    return (now.tokens_total - before.tokens_total) / seconds if seconds > 0 else None


def _more(count: int, what: str) -> tuple[Node, ...]:
    if count <= 0:
        return ()
    return (Node(kind="more", id=what, text=f"and {counted(count, f'more {what}')}"),)
