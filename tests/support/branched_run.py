"""Recorded run with one agent trajectory of four contexts and five calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import msgspec

from dora_pipe.schemas.context_tokens import tokens_before
from dora_pipe.schemas.contexts import Call, Context, prompt_digest
from dora_pipe.schemas.control import TakenGroup, TrajectoryLogged
from dora_pipe.schemas.identity import call_seed
from dora_pipe.schemas.trajectory import Segment, SegmentKind, Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.tamper import Tamper

MS: Final = 1_000_000

PIECES: Final[tuple[tuple[SegmentKind, int, int], ...]] = (
    ("prompt", 6, 0),
    ("model", 5, 0),
    ("environment", 4, 0),
    ("model", 7, 1),
    ("prompt", 5, 0),  # context 1: a sub-agent
    ("model", 6, 0),
    ("prompt", 0, 0),  # context 2: another answer to the first prompt
    ("model", 4, 0),
    ("prompt", 3, 0),  # context 3: continues there without the last token
    ("model", 5, 0),
)
"""Kind, tokens and turn of each segment."""

CONTEXTS: Final = (
    Context(start=22),
    Context(start=33, parent=0, shared=6),
    Context(start=37, parent=2, shared=9),
)

ASKED: Final = (
    (6, 11, 2, 40, "planner"),
    (27, 33, 45, 95, "searcher"),
    (33, 37, 50, 80, "planner"),
    (15, 22, 110, 150, "planner"),
    (40, 45, 160, 190, ""),
)
"""Per call: start, end, asked and answered (ms after placement), caller."""


def branch(
    log: Tamper, index: int = 40, change: Callable[[Trajectory], Trajectory] | None = None
) -> str:
    row, fact = log.trained(index)
    data = log.reencode(row, change or branched)
    log.put(data)
    headers = dict(data.headers)
    digest = headers["sha256"].decode()
    (report,) = [entry for entry in log.logged() if entry[3] == fact]
    changes: dict[str, Any] = {
        "sha256": digest,
        "bytes": len(data.value),
        "tokens": int(headers["sampled"]),
    }
    meta = decode_trajectory(data.value).meta
    counts: dict[str, Any] = {"contexts": 1 + len(meta.contexts), "calls": len(meta.calls)}
    changes["finish"] = meta.finish
    row, record, position, _ = report
    log.log_otherwise(row, record, position, **changes, **counts)
    log.rebatch(lambda step, group: _retaken(group, fact, digest))
    log.mend()
    return fact.trajectory


def branched(trajectory: Trajectory) -> Trajectory:
    at_ns, worker = trajectory.meta.times.scheduled, trajectory.meta.worker
    segments: list[Segment] = []
    calls = {start: (asked, answered) for start, _, asked, answered, _ in ASKED}
    for kind, size, turn in PIECES:
        start = segments[-1].end if segments else 0
        asked, answered = calls.get(start, (0, 0)) if kind == "model" else (0, 0)
        own: dict[str, Any] = {"start_ns": at_ns + asked * MS, "end_ns": at_ns + answered * MS}
        if kind == "model":
            own |= {
                "worker": worker,
                "incarnation": trajectory.meta.incarnation,
                "version": trajectory.version,
            }
        segments.append(Segment(kind=kind, start=start, end=start + size, turn=turn, **own))
    mask = [
        int(segment.kind == "model")
        for segment in segments
        for _ in range(segment.start, segment.end)
    ]
    logprobs = [-0.02 * (index % 40) if bit else None for index, bit in enumerate(mask)]
    new_trajectory = replace(
        trajectory,
        token_ids=[index % 8 for index in range(len(mask))],
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=mask,
        segments=segments,
        meta=msgspec.structs.replace(
            trajectory.meta, prompt_tokens=6, prefills=(6, 27, 33, 40), contexts=CONTEXTS
        ),
    )
    return replace(
        new_trajectory,
        meta=msgspec.structs.replace(new_trajectory.meta, calls=_calls(new_trajectory)),
    )


def _calls(trajectory: Trajectory) -> tuple[Call, ...]:
    at_ns, seed = trajectory.meta.times.scheduled, trajectory.meta.seed
    calls = [
        Call(
            start=start,
            end=end,
            seed=call_seed(seed, prompt_digest(tokens_before(trajectory, start)), int(start == 33)),
            occurrence=int(start == 33),
            asked_ns=at_ns + asked * MS,
            answered_ns=at_ns + answered * MS,
            api="chat",
            caller=caller,
            ignored_settings={"temperature": 0.5} if caller == "searcher" else {},
        )
        for start, end, asked, answered, caller in ASKED
    ]
    return tuple(sorted(calls, key=lambda row: row.answered_ns))


def _retaken(group: TakenGroup, fact: TrajectoryLogged, digest: str) -> TakenGroup:
    taken = (
        msgspec.structs.replace(trajectory, sha256=digest)
        if trajectory.trajectory == fact.trajectory
        else trajectory
        for trajectory in group.trajectories
    )
    return msgspec.structs.replace(group, trajectories=tuple(taken))
