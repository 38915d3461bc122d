"""Recorded run with one agent trajectory of four contexts and five calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import msgspec

from dora_pipe.schemas.contexts import Call, Context, prompt_digest, tokens_before
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
    log: Tamper, place: int = 40, change: Callable[[Trajectory], Trajectory] | None = None
) -> str:
    row, fact = log.trained(place)
    made = log.reencode(row, change or branched)
    log.put(made)
    said = dict(made.headers)
    digest = said["sha256"].decode()
    (report,) = [one for one in log.logged() if one[3] == fact]
    changes: dict[str, Any] = {
        "sha256": digest,
        "bytes": len(made.value),
        "tokens": int(said["sampled"]),
    }
    meta = decode_trajectory(made.value).meta
    counts: dict[str, Any] = {"contexts": 1 + len(meta.contexts), "calls": len(meta.calls)}
    changes["finish"] = meta.finish
    row, record, at, _ = report
    log.log_otherwise(row, record, at, **changes, **counts)
    log.rebatch(lambda step, group: _retaken(group, fact, digest))
    log.mend()
    return fact.trajectory


def branched(found: Trajectory) -> Trajectory:
    at_ns, worker = found.meta.times.scheduled, found.meta.worker
    segments: list[Segment] = []
    calls = {start: (asked, answered) for start, _, asked, answered, _ in ASKED}
    for kind, size, turn in PIECES:
        start = segments[-1].end if segments else 0
        asked, answered = calls.get(start, (0, 0)) if kind == "model" else (0, 0)
        own: dict[str, Any] = {"start_ns": at_ns + asked * MS, "end_ns": at_ns + answered * MS}
        if kind == "model":
            own |= {
                "worker": worker,
                "incarnation": found.meta.incarnation,
                "version": found.version,
            }
        segments.append(Segment(kind=kind, start=start, end=start + size, turn=turn, **own))
    mask = [int(one.kind == "model") for one in segments for _ in range(one.start, one.end)]
    logprobs = [-0.02 * (place % 40) if one else None for place, one in enumerate(mask)]
    made = replace(
        found,
        token_ids=[place % 8 for place in range(len(mask))],
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=mask,
        segments=segments,
        meta=msgspec.structs.replace(
            found.meta, prompt_tokens=6, prefills=(6, 27, 33, 40), contexts=CONTEXTS
        ),
    )
    return replace(made, meta=msgspec.structs.replace(made.meta, calls=_calls(made)))


def _calls(found: Trajectory) -> tuple[Call, ...]:
    at_ns, seed = found.meta.times.scheduled, found.meta.seed
    made = [
        Call(
            start=start,
            end=end,
            seed=call_seed(seed, prompt_digest(tokens_before(found, start)), int(start == 33)),
            occurrence=int(start == 33),
            asked_ns=at_ns + asked * MS,
            answered_ns=at_ns + answered * MS,
            api="chat",
            caller=caller,
            ignored_settings={"temperature": 0.5} if caller == "searcher" else {},
        )
        for start, end, asked, answered, caller in ASKED
    ]
    return tuple(sorted(made, key=lambda one: one.answered_ns))


def _retaken(group: TakenGroup, fact: TrajectoryLogged, digest: str) -> TakenGroup:
    taken = (
        msgspec.structs.replace(one, sha256=digest) if one.trajectory == fact.trajectory else one
        for one in group.trajectories
    )
    return msgspec.structs.replace(group, trajectories=tuple(taken))
