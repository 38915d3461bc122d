"""Everything the log knows of one trajectory, group or step, as plain values in reading order.

A description is an ordered mapping of sections; a section is a mapping of facts or a list of rows.
The command line prints it, `--json` gives it as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.auditor import build_ledger
from dora_pipe.audit.entries import GroupEntry, Logged, RequestEntry, StepEntry
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.reading import record_at
from dora_pipe.audit.tracing import Traces
from dora_pipe.bus.logged import fault_of, logged_trajectory
from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.catalogue.calls import call_rows
from dora_pipe.catalogue.tables import CallRow
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.errors import InvariantBroken, SchemaError, UsageError, one_line
from dora_pipe.schemas.batch import parts_of, staleness_of
from dora_pipe.schemas.contexts import bounds
from dora_pipe.schemas.control import StepCommitted, error_class
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Meta, Segment, Times, Trajectory
from dora_pipe.store.store import PolicyStore, as_store

Description = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens written out."""

CUT_AT: Final = 120
"""Characters of an agent's answer."""

TRACE: Final = "trace"
"""The section whose rows are the spans of a tree (`telemetry.tree`)."""

CONTEXTS: Final = "contexts"
"""The section whose rows are the contexts of a trajectory, each with its parent."""

CALLS: Final = "calls"
"""The section whose rows are the calls of its agent, each with its context."""

DAMAGE: Final = "damage"
"""The section that says why the record that counts is not what was logged."""

_STEP: Final = re.compile(r"^(?:step[- ]?)?(\d+)$")
_GROUP: Final = re.compile(r"^[ge]\d{10}$")
_TRAJECTORY: Final = re.compile(r"^[ge]\d{10}-\d{3}$")


def describe(
    bus: Bus,
    topics: Topics,
    store: PolicyStore | Path,
    wanted: str,
    *,
    decoder: Callable[[Path], Decode | None] = lambda assets: None,
) -> Description:
    """The description of an id: ``g0000000042-003``, ``g0000000042`` or ``7`` (a step).

    `decoder` opens the tokenizer in a directory of assets; without one, texts are token ids.
    Raises UsageError for an id that the log does not know.
    """
    store = as_store(store)
    ledger = build_ledger(bus, topics)
    decode = None
    if ledger.started is not None:
        decode = decoder(store.assets(ledger.started.assets_digest))
    describer = _Describer(bus, topics, ledger, store, decode)
    if found := _STEP.match(wanted):
        return describer.step(int(found[1]))
    if _GROUP.match(wanted) and wanted in ledger.accounts.groups:
        return describer.group(ledger.accounts.groups[wanted])
    if _TRAJECTORY.match(wanted) and ledger.accounts.request(wanted) is not None:
        return describer.trajectory(wanted)
    raise UsageError(
        f"{wanted!r} is not in run {topics.run}",
        hint="a trajectory (g0000000042-003), a group (g0000000042) or a step (7)",
    )


class _Describer:
    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        ledger: Ledger,
        store: PolicyStore,
        decode: Decode | None,
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._ledger = ledger
        self._store = store
        self._decode = decode
        self._traces = Traces(bus, topics, ledger)

    def step(self, number: int) -> Description:
        """A training step: what it was made of and what it made."""
        entry = self._ledger.steps.get(number)
        if entry is None:
            last = self._ledger.version - 1
            what = f"step {number} is not committed in run {self._ledger.run}"
            raise UsageError(what, hint=f"the last one is {last}")
        fact = entry.fact
        return {
            "step": {
                "step": number,
                "attempt": fact.attempt,
                "committed": f"control:{entry.at.offset}",
                "taken": "-" if entry.taken_at is None else f"round {entry.taken_at.round}",
                "why then": "-" if entry.take is None else entry.take.reason,
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
            "figures": dict(sorted(fact.figures.items())),
            "settings": dict(sorted(fact.settings.items())),
            "numerics": dict(sorted(fact.numerics.items())),
            "groups": [
                self._group_row(taken.group, number) | ({"part": part} if fact.parts else {})
                for part, groups in enumerate(parts_of(fact.groups, fact.parts))
                for taken in groups
            ],
            "trajectories": self._contributions(entry),
            "lineage": self._lineage_of_version(number) | self._descendants(number + 1),
            TRACE: self._traces.step(entry),
        }

    def _group_row(self, name: str, step: int) -> dict[str, Any]:
        group = self._ledger.accounts.groups.get(name)
        if group is None:
            return {"group": name}
        rewards = [group.reward_of(one.fact) for one in group.results]
        errors = [
            error_class(one.fact.error)
            for one, reward in zip(group.results, rewards, strict=True)
            if reward is None
        ]
        return {
            "group": name,
            "version": group.spec.version,
            "deadline": group.spec.deadline,
            "staleness": staleness_of(step, group.spec.version),
            "row": group.spec.index,
            "rewards": " ".join("-" if one is None else f"{one:g}" for one in rewards),
            **({"no reward": " ".join(errors)} if errors else {}),
            "tokens": group.tokens,
        }

    def group(self, group: GroupEntry) -> Description:
        """A group: dispatch, siblings, fate."""
        trace = self._traces.group(group)
        damage = self._traces.damage.lines
        return {
            "group": self._dispatch(group),
            "siblings": [_sibling_row(group, entry) for _, entry in sorted(group.requests.items())],
            **_scoring(group),
            **({DAMAGE: [{"what": line} for line in damage]} if damage else {}),
            "fate": self._fate(group),
            "lineage": self._lineage(group),
            TRACE: trace,
        }

    def trajectory(self, name: str) -> Description:
        """A trajectory: where it came from, how it was made, what became of it."""
        group = self._ledger.accounts.groups[group_of(name)]
        entry = group.requests[name]
        description: Description = {
            "trajectory": {"trajectory": name, "standing": _standing(entry)},
            "group": self._dispatch(group),
            "attempts": [_placement_row(entry, place) for place in range(len(entry.placements))],
        }
        if entry.errors:
            description["errors"] = [{"what": error} for error in entry.errors]
        description["records"] = self._records(name)
        if entry.bound is not None:
            try:
                trajectory = self._read(entry.bound)
                description |= self._made(trajectory)
                if group.scoring and (scored := group.scoring.siblings.get(name)):
                    description["scored together"] = {
                        "reward": scored.reward,
                        "parts": msgspec.json.encode(scored.parts).decode(),
                    }
            except (InvariantBroken, SchemaError) as error:
                description[DAMAGE] = [{"what": error.message}]
        description["fate"] = self._fate(group)
        if entry.left is not None:
            description["fate"] = {"fate": entry.left, "why": _WHY_LEFT[entry.left]}
        description["contribution"] = self._contribution(name, group)
        description["lineage"] = self._lineage(group)
        description[TRACE] = self._traces.group(group, only=name)
        return description

    def _dispatch(self, group: GroupEntry) -> dict[str, Any]:
        spec = group.spec
        return {
            "group": spec.group,
            "purpose": spec.purpose,
            **({"task": spec.task} if spec.task else {}),
            **({"evaluation": spec.evaluation} if spec.evaluation else {}),
            "siblings": spec.size,
            **({"spare siblings": spec.spare} if spec.spare else {}),
            "prompt": f"row {spec.index} of {spec.dataset_digest[:12]}, pass {spec.data_epoch}",
            "seed": spec.seed,
            "dispatched": f"round {group.at.round} ({group.reason})",
            "version": f"{spec.version} ({spec.digest})",
            "deadline": "none" if spec.purpose == "eval" else f"step {spec.deadline}",
        }

    def _records(self, name: str) -> list[dict[str, Any]]:
        group = self._ledger.accounts.groups[group_of(name)]
        found = [one for one in group.records if one.fact.trajectory == name]
        return [
            {
                "place": f"trajectories:{one.fact.partition}:{one.fact.offset}",
                "standing": one.standing,
                "attempt": one.fact.attempt,
                "worker": _worker(one.fact.worker, one.fact.epoch),
                "engine": self._engine(one.fact.epoch),
                "logged": f"control:{one.at.offset}",
                "bytes": one.fact.bytes,
                "sha256": one.fact.sha256,
                "found": fault_of(self._record(one), one.fact) or "as logged",
            }
            for one in found
        ]

    def _engine(self, epoch: int) -> str:
        worker = self._ledger.accounts.workers.get(epoch)
        return "-" if worker is None else f"{worker.joined.engine} {worker.joined.engine_version}"

    def _record(self, logged: Logged) -> Record | None:
        at = TopicPartition(self._topics.trajectories, logged.fact.partition)
        return record_at(self._bus, at, logged.fact.offset)

    def _read(self, logged: Logged) -> Trajectory:
        """The record's content. Raises InvariantBroken, SchemaError for one that is not it."""
        return logged_trajectory(self._record(logged), logged.fact)

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
                "mean log-prob": _mean([one for one in trajectory.logprobs if one is not None]),
            },
            "times": _times(meta.times),
            **_branches(trajectory),
            "segments": [
                {
                    **({"context": context} if meta.contexts else {}),
                    "kind": segment.kind,
                    "turn": segment.turn,
                    "tokens": f"{segment.start}-{segment.end}",
                    "worker": _worker(segment.worker, segment.epoch) if segment.worker else "-",
                    "version": segment.version if segment.version >= 0 else None,
                    "ms": (segment.end_ns - segment.start_ns) / 1e6,
                    "text": self._text(trajectory.token_ids[segment.start : segment.end]),
                }
                for context, segment in _by_context(trajectory)
            ],
        }

    def _text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self._decode is None else self._decode(ids)

    def _fate(self, group: GroupEntry) -> dict[str, Any]:
        if group.fate is None:
            taken = group.taken
            what = "not taken yet" if taken is None else f"in the batch of step {taken[0]}"
            return {"fate": "open", "why": what}
        fate: dict[str, Any] = {"fate": group.fate, "why": group.why}
        if group.ended is not None:
            fate["round"] = group.ended.round
        if group.step is not None:
            fate["step"] = group.step
            fate["staleness"] = staleness_of(group.step, group.spec.version)
        return fate

    def _contribution(self, name: str, group: GroupEntry) -> dict[str, Any]:
        if group.step is None:
            return {"none": "it was not trained"}
        entry = self._ledger.steps[group.step]
        rows = [row for row in self._contributions(entry) if row["trajectory"] == name]
        return rows[0] if rows else {"none": "its contributions file is not in the store"}

    def _contributions(self, entry: StepEntry) -> list[dict[str, Any]]:
        sha256 = entry.fact.contributions.sha256
        if not self._store.has_blob("contributions", sha256):
            return []
        return read_contributions(self._store.blob("contributions", sha256))

    def _lineage(self, group: GroupEntry) -> dict[str, Any]:
        """Back: what made its version. Forward: what its step made."""
        back = self._lineage_of_version(group.spec.version)
        return back if group.step is None else back | self._descendants(group.step + 1)

    def _lineage_of_version(self, version: int) -> dict[str, Any]:
        if version == 0:
            started = self._ledger.started
            parent = None if started is None else started.lineage
            text = "the model the run started with"
            if parent is not None:
                state = ", with its optimizer's state" if parent.optimizer is not None else ""
                text = f"run {parent.run}, after step {parent.step} ({parent.digest}){state}"
            return {f"made version {version}": text}
        maker = self._ledger.steps.get(version - 1)
        if maker is None:
            return {f"made version {version}": "no commit in the log"}
        stale = Counter(staleness_of(maker.step, group.version) for group in maker.fact.groups)
        mixed = ", ".join(f"{count} of staleness {one}" for one, count in sorted(stale.items()))
        return {f"made version {version}": f"step {maker.step} of {mixed}"}

    def _descendants(self, version: int) -> dict[str, Any]:
        groups = self._ledger.accounts.sampled_from(version)
        text = f"{groups} groups were sampled from it" if groups else "nothing was sampled"
        return {f"made by its step: version {version}": text}


def _by_context(trajectory: Trajectory) -> Iterator[tuple[int, Segment]]:
    """Each segment with the number of the context that it is of."""
    number = -1
    for segment in trajectory.segments:
        number += segment.kind == "prompt"
        yield max(0, number), segment


def _given_by_agent(meta: Meta) -> dict[str, Any]:
    """What an agent gave back, where it gave something."""
    given: dict[str, Any] = {}
    if meta.rewarded_by == "agent":
        given["rewarded by"] = "its agent"
    if meta.agent_answer is not None:
        given["agent's answer"] = one_line(meta.agent_answer, CUT_AT)
    return given


def _branches(trajectory: Trajectory) -> Description:
    """The contexts and calls of a trajectory that has several contexts, or an agent."""
    meta, found = trajectory.meta, list(call_rows(trajectory))
    description: Description = {}
    if meta.contexts or found:
        calls = Counter(one.context for one in found)
        parents = [(-1, 0), *((one.parent, one.shared) for one in meta.contexts)]
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
    if found:
        description[CALLS] = [_call_row(one, meta.times.placed) for one in found]
    return description


def _call_row(call: CallRow, placed_ns: int) -> dict[str, Any]:
    return {
        "call": call.call,
        "context": call.context,
        "caller": call.caller,
        "asked ms": (call.asked_ns - placed_ns) / 1e6,
        "took ms": (call.answered_ns - call.asked_ns) / 1e6,
        "idle before ms": call.idle_ns / 1e6,
        "prompt tokens": call.prompt_tokens,
        "tokens": call.tokens,
        "finish": call.finish,
        "again": call.occurrence or None,
        "api": call.api or None,
        "asked for": call.asked,
    }


def _worker(name: str, epoch: int) -> str:
    return f"{name} (incarnation {epoch})"


def _standing(entry: RequestEntry) -> str:
    if entry.bound is not None:
        return "logged"
    if entry.failed:
        return "failed"
    if entry.left is not None:
        return entry.left
    if entry.waiting:
        return "waits for another worker"
    return "running" if entry.placements else "queued"


_WHY_LEFT: Final = {
    "surplus": "its group had enough valid siblings without it",
    "expired": "its group was open for too long",
}


def _placement_row(entry: RequestEntry, place: int) -> dict[str, Any]:
    placement = entry.placements[place]
    resume = placement.resume
    return {
        "attempt": placement.attempt,
        "worker": _worker(placement.worker, placement.epoch),
        "round": placement.at.round,
        "goes on at": "the prompt" if resume is None else f"token {resume.tokens}",
        "why": placement.reason,
    }


def _scoring(group: GroupEntry) -> dict[str, Any]:
    """Who scored its siblings together, where that was to be done."""
    scoring = group.scoring
    if scoring is None:
        return {}
    answer = scoring.answer
    by = scoring.asked[-1] if scoring.asked else None
    return {
        "scored together": {
            "attempts": len(scoring.asked),
            "worker": "-" if by is None else _worker(by.worker, by.epoch),
            "scored": "failed" if scoring.failed else "not yet" if answer is None else "yes",
        }
    }


def _parts(fact: StepCommitted) -> dict[str, Any]:
    """Of a batch in parts: how many groups each had, and what was computed before it was whole."""
    if not fact.parts:
        return {}
    sizes = [len(groups) for groups in parts_of(fact.groups, fact.parts)]
    seconds = {"ahead s": round(sum(fact.ahead_s), 3)}
    if fact.beside_s:
        seconds["beside s"] = round(fact.beside_s, 3)
    return {"parts": " ".join(map(str, sizes)), **seconds}


def _sibling_row(group: GroupEntry, entry: RequestEntry) -> dict[str, Any]:
    fact = None if entry.bound is None else entry.bound.fact
    return {
        "trajectory": entry.trajectory,
        "standing": _standing(entry),
        "attempts": len(entry.placements),
        "worker": None if fact is None else fact.worker,
        "reward": None if fact is None else group.reward_of(fact),
        "tokens": None if fact is None else fact.tokens,
        "finish": None if fact is None else fact.finish,
    }


def _times(times: Times) -> dict[str, Any]:
    """When it was placed (ns since 1970), then how many ms later everything else was."""
    found: dict[str, Any] = {"placed": times.placed}
    for name in ("started", "first_token", "finished", "rewarded"):
        at = getattr(times, name)
        label = f"{name.replace('_', ' ')} after ms"
        found[label] = None if at is None else (at - times.placed) / 1e6
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
