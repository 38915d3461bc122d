"""Writes the bytes of the values; a file that exists stays: released bytes never change.

python -m tests.golden.make
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from dora_pipe.schemas.dead_letter import encode_dead_letter
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.trajectory_codec import encode_any_progress, encode_trajectory
from dora_pipe.schemas.wire import SCHEMA_VERSION, encode
from tests.golden import arrow_values, later_values, values
from tests.golden.branched_values import (
    BRANCHED_TRAJECTORY,
    PROGRESS,
    STOPPED_TRAJECTORY,
    TURN_PROGRESS,
)

FOLDER = Path(__file__).parent / f"v{SCHEMA_VERSION}"
RECORD_BYTES_MAX = 10 * 1024 * 1024


def kind_of(record: msgspec.Struct) -> str:
    return str(record.__struct_config__.tag)


def pairs_to_bytes(pairs: tuple[tuple[str, bytes], ...]) -> bytes:
    return b"".join(name.encode() + b": " + value + b"\n" for name, value in pairs)


def pairs_from_bytes(data: bytes) -> tuple[tuple[str, bytes], ...]:
    split = [line.split(b": ", 1) for line in data.splitlines()]
    return tuple((name.decode(), value) for name, value in split)


COMMITTED = {
    "parts": later_values.COMMITTED_PARTS,
    "overlap": later_values.COMMITTED_OVERLAP,
    "delta": later_values.COMMITTED_DELTA,
}


STARTED = {
    "several": later_values.STARTED_SEVERAL,
    "together": later_values.STARTED_TOGETHER,
    "with-optimizer": later_values.STARTED_WITH_OPTIMIZER,
}


def trajectory_files() -> dict[str, bytes]:
    records = {
        "named": later_values.NAMED_TRAJECTORY,
        "branched": BRANCHED_TRAJECTORY,
        "stopped": STOPPED_TRAJECTORY,
        "answered": later_values.ANSWERED_TRAJECTORY,
        "agents-own": later_values.AGENTS_TRAJECTORY,
        "several-turns": arrow_values.TRAJECTORY,
        "plain": arrow_values.PLAIN_TRAJECTORY,
        "mixed": arrow_values.MIXED_TRAJECTORY,
    }
    return {
        f"trajectories/{name}.arrow.zst": encode_trajectory(record)[0]
        for name, record in records.items()
    }


def files() -> dict[str, bytes]:
    letter, letter_headers = encode_dead_letter(
        arrow_values.DEAD_LETTER, max_record_bytes=RECORD_BYTES_MAX
    )
    return {
        **{f"control/{kind_of(fact)}.json": encode(fact) for fact in values.CONTROL},
        **{f"metrics/{kind_of(status)}.json": encode(status) for status in values.METRICS},
        "control/step-committed-dropped.json": encode(values.COMMITTED_DROPPED),
        "control/request-released-peer.json": encode(values.RELEASED_PEER),
        "control/worker-joined-several.json": encode(values.JOINED_SEVERAL),
        "control/worker-joined-chat.json": encode(later_values.JOINED_CHAT),
        "control/worker-joined-plays.json": encode(later_values.JOINED_PLAYS),
        "control/worker-joined-colocated.json": encode(later_values.JOINED_COLOCATED),
        "control/worker-joined-tasks.json": encode(later_values.JOINED_TASKS),
        "control/trajectories-logged-invalid.json": encode(later_values.LOGGED_INVALID),
        "control/trajectories-logged-said.json": encode(later_values.LOGGED_SAID),
        "control/trajectories-logged-branched.json": encode(later_values.LOGGED_BRANCHED),
        "decisions/round.json": encode(values.ROUND),
        "decisions/round-pins.json": encode(values.ROUND_PINS),
        "decisions/round-drops.json": encode(values.ROUND_DROPS),
        "metrics/worker-status-since.json": encode(later_values.STATUS_SINCE),
        "metrics/worker-status-off-engine.json": encode(later_values.STATUS_OFF_ENGINE),
        "metrics/worker-status-keeping.json": encode(later_values.STATUS_KEEPING),
        "metrics/worker-status-sessions.json": encode(later_values.STATUS_SESSIONS),
        "metrics/worker-status-failing.json": encode(later_values.STATUS_FAILING),
        "metrics/worker-status-calls.json": encode(later_values.STATUS_CALLS),
        "metrics/worker-status-tried.json": encode(later_values.STATUS_TRIED),
        "metrics/worker-status-queue.json": encode(later_values.STATUS_QUEUE),
        "decisions/round-off-engine.json": encode(later_values.ROUND_OFF_ENGINE),
        "decisions/round-halt.json": encode(later_values.ROUND_HALT),
        "decisions/round-early-stop.json": encode(later_values.ROUND_EARLY_STOP),
        "decisions/round-parts.json": encode(later_values.ROUND_PARTS),
        "decisions/round-in-flight.json": encode(later_values.ROUND_IN_FLIGHT),
        **{
            f"control/step-committed-{name}.json": encode(record)
            for name, record in COMMITTED.items()
        },
        **{f"control/run-started-{name}.json": encode(record) for name, record in STARTED.items()},
        "decisions/round-named.json": encode(later_values.ROUND_NAMED),
        "decisions/round-skipped.json": encode(later_values.ROUND_SKIPPED),
        "control/role-started-draws.json": encode(later_values.ORCHESTRATOR_DRAWS),
        "control/group-scored.json": encode(later_values.SCORED),
        "control/group-scored-error.json": encode(later_values.NOT_SCORED),
        "decisions/round-scored.json": encode(later_values.ROUND_SCORED),
        "decisions/round-impatient.json": encode(later_values.ROUND_IMPATIENT),
        **trajectory_files(),
        "trajectories/headers.txt": pairs_to_bytes(header_pairs(arrow_values.HEADERS)),
        "progress/progress.arrow.zst": encode_any_progress(PROGRESS),
        "progress/turn.arrow.zst": encode_any_progress(TURN_PROGRESS),
        "dead-letters/value.bin": letter,
        "dead-letters/headers.txt": pairs_to_bytes(letter_headers),
    }


def main() -> None:
    for name, content in files().items():
        path = FOLDER / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sys.stdout.write(f"{path.relative_to(FOLDER.parent)}\n")


if __name__ == "__main__":
    main()
