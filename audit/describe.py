"""Describe a trajectory, group or step as plain values in reading order.

A description maps section names to values or rows; `--json` returns it unchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.reading import record_at
from dora_pipe.audit.tracing import History, Traces
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Named, fault_of, logged_trajectory
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.errors import InvariantBroken, SchemaError, UsageError, one_line
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.ledger.account import GroupEnded
from dora_pipe.ledger.calls import call_rows
from dora_pipe.ledger.history import Attempt, GroupHistory
from dora_pipe.ledger.tables import CallRow
from dora_pipe.schemas.batch import parts_of, staleness_of
from dora_pipe.schemas.contexts import bounds
from dora_pipe.schemas.control import StepCommitted, error_class
from dora_pipe.schemas.identity import group_of, parse_trajectory_id, trajectory_id
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Meta, Segment, Times, Trajectory
from dora_pipe.store.store import PolicyStore, as_store

Description = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

CUT_AT: Final = 120
"""Shown characters of an agent's answer."""

TRACE: Final = "trace"
CONTEXTS: Final = "contexts"
CALLS: Final = "calls"

DAMAGE: Final = "damage"
"""Section with damage of the record that counts."""

_STEP: Final = re.compile(r"^(?:step[- ]?)?(\d+)$")
_TRAJECTORY: Final = re.compile(r"^[ge]\d{10}-\d{3}$")


def describe(
    bus: Bus,
    topics: Topics,
    store: PolicyStore | Path,
    name: str,
    *,
    decoder: Callable[[Path], Decode | None] = lambda assets: None,
) -> Description:
    """Describe ``g0000000042-003``, ``g0000000042`` or ``7`` (a step).

    Without `decoder`, texts are token ids. Raises UsageError for an unknown id.
    """
    store = as_store(store)
    step = _STEP.match(name)
    trajectory = name if _TRAJECTORY.match(name) else ""
    group = group_of(trajectory) if trajectory else name
    history = History(group=group, step=int(step[1]) if step else -1)
    history.read(bus, topics)
    decode = None
    if (started := history.account.started) is not None:
        decode = decoder(store.assets(started.assets_digest))
    describer = _Describer(bus, topics, history, store, decode)
    if step:
        return describer.step(int(step[1]))
    ended = history.group
    if ended is not None and not trajectory:
        return describer.group(ended)
    if ended is not None and trajectory in _samples(ended.group):
        return describer.trajectory(trajectory, ended)
    raise UsageError(
        f"{name!r} is not in run {topics.run}",
        hint="a trajectory (g0000000042-003), a group (g0000000042) or a step (7)",
    )


def _samples(group: GroupHistory) -> list[str]:
    return [trajectory_id(group.spec.group, sample) for sample in range(group.spec.samples)]


class _Describer:
    def __init__(
        self, bus: Bus, topics: Topics, history: History, store: PolicyStore, decode: Decode | None
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._history = history
        self._store = store
        self._decode = decode
        self._traces = Traces(bus, topics, history)

    def step(self, number: int) -> Description:
        ended = self._history.step
        if ended is None:
            last = max(self._history.staleness, default=-1)
            what = f"step {number} is not committed in run {self._topics.run}"
            raise UsageError(what, hint=f"the last one is {last}")
        fact, batch = ended.fact, ended.batch
        groups = {group.spec.group: group for group in ended.groups}
        return {
            "step": {
                "step": number,
                "attempt": fact.attempt,
                "committed": f"control:{ended.offset}",
                "taken": f"round {batch.round}",
                "batch reason": batch.take.reason,
                "batch digest": fact.batch_digest,
                "compute s": fact.compute_s,
                **_parts(fact),
                "adopted": fact.adopted,
            },
            "weights": {
                "before": f"version {number} {fact.digest_before}",
                "after": f"version {number + 1} {fact.digest_after}",
                "bytes": fact.policy.bytes,
                "tensors": len(fact.policy.tensors),
                "checkpoint": "-" if fact.checkpoint is None else fact.checkpoint.sha256,
                "contributions": fact.contributions.sha256,
            },
            "metrics": dict(sorted(fact.metrics.items())),
            "settings": dict(sorted(fact.settings.items())),
            "numerics": dict(sorted(fact.numerics.items())),
            "groups": [
                _group_row(taken.group, groups.get(taken.group), number)
                | ({"part": part} if fact.parts else {})
                for part, members in enumerate(parts_of(fact.groups, fact.parts))
                for taken in members
            ],
            "trajectories": self._contributions(fact.contributions.sha256),
            "lineage": self._lineage_of_version(number) | self._descendants(number + 1),
            TRACE: self._traces.step(),
        }

    def group(self, ended: GroupEnded) -> Description:
        trace = self._traces.group()
        damage = self._traces.damage.lines
        return {
            "group": self._dispatch(ended.group),
            "samples": [self._sample_row(ended.group, name) for name in _samples(ended.group)],
            **self._scoring(ended),
            **({DAMAGE: [{"what": line} for line in damage]} if damage else {}),
            "outcome": self._outcome(ended),
            "lineage": self._lineage(ended),
            TRACE: trace,
        }

    def trajectory(self, name: str, ended: GroupEnded) -> Description:
        group = ended.group
        request = group.requests[name]
        description: Description = {
            "trajectory": {"trajectory": name, "status": self._status(group, name)},
            "group": self._dispatch(group),
            "attempts": [_attempt_row(attempt) for attempt in request.attempts],
        }
        failed = [attempt for attempt in request.attempts if attempt.outcome == "failed"]
        if failed:
            description["errors"] = [{"what": f"attempt {a.attempt}: {a.why}"} for a in failed]
        description["records"] = self._records(name)
        if request.logged is not None:
            try:
                trajectory = logged_trajectory(self._record(request.logged), request.logged)
                description |= self._made(trajectory)
                samples = () if group.scores is None else group.scores.samples
                for scored in samples:
                    if scored.trajectory == name:
                        parts = msgspec.json.encode(scored.parts).decode()
                        description["scored together"] = {"reward": scored.reward, "parts": parts}
            except (InvariantBroken, SchemaError) as error:
                description[DAMAGE] = [{"what": error.message}]
        description["outcome"] = self._outcome(ended)
        if (outcome := group.left.get(parse_trajectory_id(name)[2])) is not None:
            description["outcome"] = {"outcome": outcome, "reason": _WHY_LEFT[outcome]}
        description["contribution"] = self._contribution(name, ended)
        description["lineage"] = self._lineage(ended)
        description[TRACE] = self._traces.group(only=name)
        return description

    def _dispatch(self, group: GroupHistory) -> dict[str, Any]:
        spec = group.spec
        return {
            "group": spec.group,
            "purpose": spec.purpose,
            **({"task": spec.task} if spec.task else {}),
            **({"evaluation": spec.evaluation} if spec.evaluation else {}),
            "samples": spec.size,
            **({"redundant trajectories": spec.redundancy} if spec.redundancy else {}),
            "prompt": f"row {spec.index} of {spec.dataset_digest[:12]}, pass {spec.data_epoch}",
            "seed": spec.seed,
            "dispatched": f"round {group.round} ({group.reason})",
            "version": f"{spec.version} ({spec.digest})",
            "deadline": "none" if spec.purpose == "eval" else f"step {spec.deadline}",
        }

    def _status(self, group: GroupHistory, name: str) -> str:
        request = group.requests.get(name)
        if request is not None and request.logged is not None:
            return "logged"
        attempts = [] if request is None else request.attempts
        faults = sum(attempt.outcome in ("failed", "fenced") for attempt in attempts)
        final = any(not attempt.retryable for attempt in attempts)
        if final or (faults and faults >= self._max_attempts):
            return "failed"
        if (outcome := group.left.get(parse_trajectory_id(name)[2])) is not None:
            return outcome
        if not attempts:
            return "queued"
        last = attempts[-1].outcome
        if last in ("migrated", "left", "fenced", "failed"):
            return "waiting for another worker"
        return last or "running"

    @property
    def _max_attempts(self) -> int:
        started = self._history.account.started
        assert started is not None
        return int(started.config["rollout"]["max_attempts"])

    def _scoring(self, ended: GroupEnded) -> dict[str, Any]:
        group, started = ended.group, self._history.account.started
        if started is None or group.spec.source not in started.scored_together:
            return {}
        by = group.asked
        unscored = "not yet" if ended.outcome == "open" else "failed"
        return {
            "scored together": {
                "attempts": 0 if by is None else by.attempt,
                "worker": "-" if by is None else _worker(by.worker, by.incarnation),
                "scored": unscored if group.scores is None else "yes",
            }
        }

    def _sample_row(self, group: GroupHistory, name: str) -> dict[str, Any]:
        request = group.requests.get(name)
        fact = None if request is None else request.logged
        return {
            "trajectory": name,
            "status": self._status(group, name),
            "attempts": 0 if request is None else len(request.attempts),
            "worker": None if fact is None else fact.worker,
            "reward": None if fact is None else fact.reward,
            "tokens": None if fact is None else fact.tokens,
            "finish": None if fact is None else fact.finish,
        }

    def _records(self, name: str) -> list[dict[str, Any]]:
        records = [record for record in self._history.records if record.fact.trajectory == name]
        return [
            {
                "position": f"trajectories:{record.fact.partition}:{record.fact.offset}",
                "status": record.status,
                "attempt": record.fact.attempt,
                "worker": _worker(record.fact.worker, record.fact.incarnation),
                "engine": self._history.engines.get(record.fact.incarnation, "-"),
                "logged": f"control:{record.offset}",
                "bytes": record.fact.bytes,
                "sha256": record.fact.sha256,
                "comparison": fault_of(self._record(record.fact), record.fact) or "as logged",
            }
            for record in records
        ]

    def _record(self, logged: Named) -> Record | None:
        partition = TopicPartition(self._topics.trajectories, logged.partition)
        return record_at(self._bus, partition, logged.offset)

    def _made(self, trajectory: Trajectory) -> Description:
        meta = trajectory.meta
        return {
            "result": {
                "reward": trajectory.reward,
                "reward error": meta.reward_error,
                "reward parts": msgspec.json.encode(meta.reward_parts).decode(),
                "answer": meta.reward_answer or None,
                **_given_by_agent(meta),
                "finish": meta.finish,
                "error": meta.error,
                "tokens": f"{len(trajectory.token_ids)} ({trajectory.sampled} sampled)",
                "prefilled at": " ".join(map(str, meta.prefills)),
                "mean log-prob": _mean(
                    [value for value in trajectory.logprobs if value is not None]
                ),
            },
            "times": _times(meta.times),
            **_branches(trajectory),
            "segments": [
                {
                    **({"context": context} if meta.contexts else {}),
                    "kind": segment.kind,
                    "turn": segment.turn,
                    "tokens": f"{segment.start}-{segment.end}",
                    "worker": _worker(segment.worker, segment.incarnation)
                    if segment.worker
                    else "-",
                    "version": segment.version if segment.version >= 0 else None,
                    "ms": (segment.end_ns - segment.start_ns) / 1e6,
                    "text": self._text(trajectory.token_ids[segment.start : segment.end]),
                }
                for context, segment in _by_context(trajectory)
            ],
        }

    def _text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self._decode is None else self._decode(ids)

    def _outcome(self, ended: GroupEnded) -> dict[str, Any]:
        step = ended.step
        if ended.outcome == "open":
            what = "not taken yet" if step is None else f"in the batch of step {step}"
            return {"outcome": "open", "reason": what}
        outcome: dict[str, Any] = {"outcome": ended.outcome, "reason": ended.why}
        outcome["round"] = self._history.group_round
        if step is not None:
            outcome["step"] = step
            outcome["staleness"] = staleness_of(step, ended.group.spec.version)
        return outcome

    def _contribution(self, name: str, ended: GroupEnded) -> dict[str, Any]:
        if ended.outcome != "trained" or ended.step is None:
            return {"none": "it was not trained"}
        rows = self._contributions(self._history.contributions.get(ended.step, ""))
        own = [row for row in rows if row["trajectory"] == name]
        return own[0] if own else {"none": "its contributions file is not in the store"}

    def _contributions(self, sha256: str) -> list[dict[str, Any]]:
        if not sha256 or not self._store.has_blob("contributions", sha256):
            return []
        return read_contributions(self._store.blob("contributions", sha256))

    def _lineage(self, ended: GroupEnded) -> dict[str, Any]:
        back = self._lineage_of_version(ended.group.spec.version)
        if ended.outcome != "trained" or ended.step is None:
            return back
        return back | self._descendants(ended.step + 1)

    def _lineage_of_version(self, version: int) -> dict[str, Any]:
        if version == 0:
            started = self._history.account.started
            parent = None if started is None else started.lineage
            text = "the model the run started with"
            if parent is not None:
                state = ", with its optimizer's state" if parent.optimizer is not None else ""
                text = f"run {parent.run}, after step {parent.step} ({parent.digest}){state}"
            return {f"made version {version}": text}
        stale = self._history.staleness.get(version - 1)
        if stale is None:
            return {f"made version {version}": "no commit in the log"}
        mixed = ", ".join(
            f"{count} groups of staleness {staleness}" for staleness, count in sorted(stale.items())
        )
        return {f"made version {version}": f"step {version - 1}, from {mixed}"}

    def _descendants(self, version: int) -> dict[str, Any]:
        groups = self._history.sampled[version]
        text = f"{groups} groups sampled from it" if groups else "nothing was sampled"
        return {f"its step made version {version}": text}


def _group_row(name: str, group: GroupHistory | None, step: int) -> dict[str, Any]:
    if group is None:
        return {"group": name}
    results = group.results
    errors = [error_class(record.error) for record in results if record.reward is None]
    rewards = ("-" if record.reward is None else f"{record.reward:g}" for record in results)
    return {
        "group": name,
        "version": group.spec.version,
        "deadline": group.spec.deadline,
        "staleness": staleness_of(step, group.spec.version),
        "row": group.spec.index,
        "rewards": " ".join(rewards),
        **({"no reward": " ".join(errors)} if errors else {}),
        "tokens": sum(record.tokens for record in results),
    }


def _by_context(trajectory: Trajectory) -> Iterator[tuple[int, Segment]]:
    number = -1
    for segment in trajectory.segments:
        number += segment.kind == "prompt"
        yield max(0, number), segment


def _given_by_agent(meta: Meta) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if meta.rewarded_by == "agent":
        given["rewarded by"] = "its agent"
    if meta.agent_answer is not None:
        given["agent's answer"] = one_line(meta.agent_answer, CUT_AT)
    return given


def _branches(trajectory: Trajectory) -> Description:
    meta, rows = trajectory.meta, list(call_rows(trajectory))
    description: Description = {}
    if meta.contexts or rows:
        calls = Counter(row.context for row in rows)
        parents = [(-1, 0), *((context.parent, context.shared) for context in meta.contexts)]
        places = bounds(meta.contexts, trajectory.length)
        description[CONTEXTS] = [
            {
                "context": number,
                "parent": None if parent < 0 else parent,
                "shared": shared,
                "tokens": shared + end - start,
                "sampled": int(sum(trajectory.loss_mask[start:end])),
                "calls": calls[number],
            }
            for number, ((parent, shared), (start, end)) in enumerate(
                zip(parents, places, strict=True)
            )
        ]
    if rows:
        description[CALLS] = [_call_row(row, meta.times.scheduled) for row in rows]
    return description


def _call_row(call: CallRow, scheduled_ns: int) -> dict[str, Any]:
    return {
        "call": call.call,
        "context": call.context,
        "caller": call.caller,
        "asked ms": (call.asked_ns - scheduled_ns) / 1e6,
        "took ms": (call.answered_ns - call.asked_ns) / 1e6,
        "idle before ms": call.idle_ns / 1e6,
        "prompt tokens": call.prompt_tokens,
        "tokens": call.tokens,
        "finish": call.finish,
        "again": call.occurrence or None,
        "api": call.api or None,
        "ignored settings": call.ignored_settings,
    }


def _worker(name: str, incarnation: int) -> str:
    return f"{name} (incarnation {incarnation})"


_WHY_LEFT: Final = {
    "redundant": "its group had enough valid trajectories without it",
    "expired": "its group was open for too long",
}


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.attempt,
        "worker": _worker(attempt.worker, attempt.incarnation),
        "round": attempt.round,
        "resumed tokens": attempt.resumed,
        "reason": attempt.reason,
    }


def _parts(fact: StepCommitted) -> dict[str, Any]:
    if not fact.parts:
        return {}
    sizes = [len(groups) for groups in parts_of(fact.groups, fact.parts)]
    seconds = {"early s": round(sum(fact.early_s), 3)}
    if fact.overlap_s:
        seconds["overlap s"] = round(fact.overlap_s, 3)
    return {"parts": " ".join(map(str, sizes)), **seconds}


def _times(times: Times) -> dict[str, Any]:
    """Return the placement in ns and later times in ms after it."""
    values: dict[str, Any] = {"scheduled": times.scheduled}
    for name in ("started", "first_token", "finished", "rewarded"):
        time_ns = getattr(times, name)
        label = f"{name.replace('_', ' ')} after ms"
        values[label] = None if time_ns is None else (time_ns - times.scheduled) / 1e6
    return values


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
