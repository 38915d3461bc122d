"""Tests that released record bytes are still read equally.

`python -m tests.golden.make` creates missing files. A differing file means a released record
changed: fix the code, not the file.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.headers import header_pairs, parse_headers
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory
from dora_pipe.schemas.wire import encode
from tests.golden import arrow_values, branched_values, later_values, make, values

V1 = Path(make.__file__).parent / "v1"

JSON: list[tuple[str, Callable[[bytes], Any], Any]] = [
    *((f"control/{make.kind_of(one)}", control.decode_control, one) for one in values.CONTROL),
    *((f"metrics/{make.kind_of(one)}", metrics.decode_metrics, one) for one in values.METRICS),
    ("control/step-committed-dropped", control.decode_control, values.COMMITTED_DROPPED),
    ("control/request-released-peer", control.decode_control, values.RELEASED_PEER),
    ("decisions/round", rounds.decode_round, values.ROUND),
    ("control/worker-joined-several", control.decode_control, values.JOINED_SEVERAL),
    ("control/worker-joined-chat", control.decode_control, later_values.JOINED_CHAT),
    ("control/worker-joined-plays", control.decode_control, later_values.JOINED_PLAYS),
    ("control/worker-joined-colocated", control.decode_control, later_values.JOINED_COLOCATED),
    ("control/worker-joined-tasks", control.decode_control, later_values.JOINED_TASKS),
    ("decisions/round-pins", rounds.decode_round, values.ROUND_PINS),
    ("decisions/round-drops", rounds.decode_round, values.ROUND_DROPS),
    ("decisions/round-halt", rounds.decode_round, later_values.ROUND_HALT),
    (
        "control/run-started-with-optimizer",
        control.decode_control,
        later_values.STARTED_WITH_OPTIMIZER,
    ),
    ("control/trajectories-logged-invalid", control.decode_control, later_values.LOGGED_INVALID),
    ("control/trajectories-logged-branched", control.decode_control, later_values.LOGGED_BRANCHED),
    ("control/run-started-several", control.decode_control, later_values.STARTED_SEVERAL),
    ("decisions/round-named", rounds.decode_round, later_values.ROUND_NAMED),
    ("decisions/round-skipped", rounds.decode_round, later_values.ROUND_SKIPPED),
    ("control/role-started-draws", control.decode_control, later_values.ORCHESTRATOR_DRAWS),
    ("control/run-started-together", control.decode_control, later_values.STARTED_TOGETHER),
    ("decisions/round-impatient", rounds.decode_round, later_values.ROUND_IMPATIENT),
    ("control/group-scored", control.decode_control, later_values.SCORED),
    ("control/group-scored-error", control.decode_control, later_values.NOT_SCORED),
    ("decisions/round-scored", rounds.decode_round, later_values.ROUND_SCORED),
]


@pytest.mark.parametrize(("name", "decode", "expected"), JSON, ids=[entry[0] for entry in JSON])
def test_json_record_has_its_golden_value_and_bytes(
    name: str, decode: Callable[[bytes], Any], expected: msgspec.Struct
) -> None:
    data = (V1 / f"{name}.json").read_bytes()
    assert decode(data) == expected
    assert encode(expected) == data


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("several-turns", arrow_values.TRAJECTORY),
        ("plain", arrow_values.PLAIN_TRAJECTORY),
        ("mixed", arrow_values.MIXED_TRAJECTORY),
        ("named", later_values.NAMED_TRAJECTORY),
        ("agents-own", later_values.AGENTS_TRAJECTORY),
        ("branched", branched_values.BRANCHED_TRAJECTORY),
        ("stopped", branched_values.STOPPED_TRAJECTORY),
    ],
)
def test_trajectory_has_its_golden_value(name: str, expected: Any) -> None:
    data = (V1 / f"trajectories/{name}.arrow.zst").read_bytes()
    assert decode_trajectory(data) == expected


def test_progress_has_its_golden_value() -> None:
    data = (V1 / "progress/progress.arrow.zst").read_bytes()
    assert decode_any_progress(data) == branched_values.PROGRESS
    turn = (V1 / "progress/turn.arrow.zst").read_bytes()
    assert decode_any_progress(turn) == branched_values.TURN_PROGRESS


def test_headers_have_their_golden_value_and_bytes() -> None:
    pairs = make.pairs_from_bytes((V1 / "trajectories/headers.txt").read_bytes())
    assert parse_headers(pairs) == arrow_values.HEADERS
    assert header_pairs(arrow_values.HEADERS) == pairs


def test_dead_letter_has_its_golden_value_and_bytes() -> None:
    value = (V1 / "dead-letters/value.bin").read_bytes()
    pairs = make.pairs_from_bytes((V1 / "dead-letters/headers.txt").read_bytes())
    assert decode_dead_letter(value, pairs) == arrow_values.DEAD_LETTER
    files = make.files()
    assert files["dead-letters/value.bin"] == value
    assert files["dead-letters/headers.txt"] == make.pairs_to_bytes(pairs)


def test_every_record_kind_has_golden_bytes() -> None:
    expected = {f"control/{kind}.json" for kind in control.KINDS}
    expected |= {f"metrics/{kind}.json" for kind in metrics.KINDS}
    assert {f"control/{make.kind_of(fact)}.json" for fact in values.CONTROL} <= expected
    missing = sorted(name for name in expected | set(make.files()) if not (V1 / name).exists())
    assert missing == [], "run python -m tests.golden.make"


def test_every_topic_has_golden_bytes() -> None:
    topics = {topic.removeprefix("demo.") for topic in Topics("demo").all()}
    assert {path.name for path in V1.iterdir() if path.is_dir()} == topics


def test_golden_round_has_every_observation_and_decision() -> None:
    later = [
        decision
        for entry in (
            later_values.ROUND_HALT,
            later_values.ROUND_EARLY_STOP,
            later_values.ROUND_PARTS,
            later_values.ROUND_IN_FLIGHT,
            later_values.ROUND_SCORED,
            later_values.ROUND_IMPATIENT,
        )
        for decision in entry.decisions
    ]
    for union, result in (
        (
            rounds.AnyObservation,
            (
                *values.ROUND.observations,
                *later_values.ROUND_OFF_ENGINE.observations,
                *later_values.ROUND_IMPATIENT.observations,
            ),
        ),
        (rounds.AnyDecision, (*values.ROUND.decisions, *later)),
    ):
        assert {type(event) for event in result} == set(typing.get_args(union))


LATER = (
    values.COMMITTED_DROPPED,
    values.RELEASED_PEER,
    values.JOINED_SEVERAL,
    values.ROUND_PINS,
    values.ROUND_DROPS,
    later_values.ROUND_HALT,
    later_values.ROUND_EARLY_STOP,
    later_values.ROUND_PARTS,
    later_values.ROUND_IN_FLIGHT,
    later_values.COMMITTED_PARTS,
    later_values.COMMITTED_OVERLAP,
    later_values.COMMITTED_DELTA,
    later_values.LOGGED_INVALID,
    later_values.LOGGED_SAID,
    later_values.STATUS_SINCE,
    *make.STARTED.values(),
    later_values.ROUND_NAMED,
    later_values.ROUND_SKIPPED,
    later_values.ORCHESTRATOR_DRAWS,
    later_values.JOINED_CHAT,
    later_values.JOINED_PLAYS,
    later_values.JOINED_COLOCATED,
    later_values.JOINED_TASKS,
    later_values.STATUS_OFF_ENGINE,
    later_values.STATUS_KEEPING,
    later_values.STATUS_SESSIONS,
    later_values.STATUS_FAILING,
    later_values.STATUS_TRIED,
    later_values.STATUS_CALLS,
    later_values.STATUS_QUEUE,
    later_values.ROUND_OFF_ENGINE,
    later_values.LOGGED_BRANCHED,
    later_values.STARTED_WITH_OPTIMIZER,
    later_values.SCORED,
    later_values.NOT_SCORED,
    later_values.ROUND_SCORED,
    later_values.ROUND_IMPATIENT,
)
"""Records with fields added later."""

TRAJECTORIES = (
    arrow_values.TRAJECTORY,
    arrow_values.PLAIN_TRAJECTORY,
    arrow_values.MIXED_TRAJECTORY,
    later_values.NAMED_TRAJECTORY,
    later_values.ANSWERED_TRAJECTORY,
    later_values.AGENTS_TRAJECTORY,
    branched_values.BRANCHED_TRAJECTORY,
    branched_values.STOPPED_TRAJECTORY,
)


def test_every_field_is_somewhere_in_the_golden_bytes() -> None:
    observed: dict[type[msgspec.Struct], set[str]] = {}
    for record in (*values.CONTROL, *values.METRICS, values.ROUND, *LATER):
        _note_fields(record, msgspec.json.decode(encode(record)), observed)
    for meta in (trajectory.meta for trajectory in TRAJECTORIES):
        _note_fields(meta, msgspec.json.decode(encode(meta)), observed)
    missing = {
        kind.__name__: sorted(set(kind.__struct_encode_fields__) - names)
        for kind, names in observed.items()
    }
    assert {kind: names for kind, names in missing.items() if names} == {}


def test_digests_of_the_golden_values_are_pinned() -> None:
    assert batch_digest(values.GROUPS) == (
        "94679a331a4b481e6c443511e29211ce1c9103af6c1ad79d551e580e51cd8359"
    )
    assert values.MANIFEST.digest == (
        "c2369e84ead3a95018cc9dcf3f4c189ab075dc659025ec30ce9326ead28c6349"
    )
    assert rounds.chain_of(rounds.GENESIS_CHAIN, values.FOLDED, values.ROUND) == (
        "09822ceb3ad93248104560dddfb92df2ac263179faf61d75181bfae95f579895"
    )


def _note_fields(
    record: msgspec.Struct, plain: Any, observed: dict[type[msgspec.Struct], set[str]]
) -> None:
    if not isinstance(plain, dict):
        return
    observed.setdefault(type(record), set()).update(plain)
    for name in plain:
        value = getattr(record, name, None)
        for nested, inner in _pairs(value, plain[name]):
            if isinstance(nested, msgspec.Struct):
                _note_fields(nested, inner, observed)


def _pairs(value: Any, plain: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, tuple) and isinstance(plain, list):
        return list(zip(value, plain, strict=True))
    return [(value, plain)]
