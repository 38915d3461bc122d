"""Tests that the fold handles every record kind in every state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator.apply_control import apply_control, read_control
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import (
    KINDS,
    AnyControl,
    GroupScored,
    VersionsDropped,
    WeightsAdopted,
)
from dora_pipe.schemas.wire import Unknown
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage, unchanged
from tests.support.singly import as_record

CONFIG = records.make_config()


def busy() -> Stage:
    stage = Stage().begin()
    stage.worker("w0", slots=4)
    stage.join("w1")
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.settle()
    return stage


def every_kind(stage: Stage) -> list[AnyControl]:
    request = next(iter(stage.placed.values()))
    assert stage.batch is not None
    adopted = WeightsAdopted(
        at_ns=0, step=0, incarnation=9, digest_committed="a", digest_replayed="b", reason="test"
    )
    return [
        records.run_started(CONFIG),
        records.role_started("orchestrator", -1),
        records.joined("", slots=4),
        records.ready("w0", 9_999, 0),
        records.left("w0", 9_999),
        as_record(msgspec.structs.replace(records.logged(request), incarnation=9_999)),
        records.released(msgspec.structs.replace(request, incarnation=9_999)),
        msgspec.structs.replace(records.failed(request), worker="nobody"),
        GroupScored(at_ns=0, worker="w0", incarnation=9_999, group=request.spec.group, attempt=1),
        records.committed(7, stage.batch.groups),
        records.refused(7, ["g0000000000"]),
        records.command("dance"),
        adopted,
        VersionsDropped(at_ns=0, user="ada", versions=(0, 7)),
    ]


def test_the_list_below_has_every_kind() -> None:
    kinds = {type(event).__struct_config__.tag for event in every_kind(busy())}
    assert kinds == KINDS


@pytest.mark.parametrize("index", range(len(KINDS)))
def test_illegal_record_changes_nothing(index: int) -> None:
    stage = busy()
    before = stage.copy()
    record = every_kind(stage)[index]
    stage.tell(record)
    assert unchanged(before, stage.state), record


def test_trajectory_that_contradicts_its_dispatch_is_rejected_and_changes_nothing() -> None:
    stage = busy()
    legal = records.logged(stage.placed[stage.running()[0]])
    wrong: list[dict[str, Any]] = [
        {"version": 1},
        {"digest": records.weights(1)},
        {"partition": 1 - legal.partition},
    ]
    for change in wrong:
        before = stage.copy()
        stage.tell(msgspec.structs.replace(legal, **change))
        assert unchanged(before, stage.state), change
        assert stage.state.counters.rejected == before.counters.rejected + 1
    stage.tell(legal)
    assert legal.trajectory not in stage.state.requests


def test_unknown_kinds_and_unreadable_bytes_change_nothing() -> None:
    state = State()
    apply_control(state, 0, Unknown(kind="worker-danced", raw=b"{}"))
    control = read_control(b'{"kind":"worker-ready","worker":7}')
    assert isinstance(control, SchemaError)
    apply_control(state, 2, control)
    assert isinstance(read_control(b'{"kind":"worker-danced"}'), Unknown)
    assert unchanged(State(), state)


def test_run_whose_configuration_cannot_be_read_does_not_start() -> None:
    state = State()
    record = records.run_started(CONFIG)
    odd = msgspec.structs.replace(record, config={**record.config, "warp": {}})
    apply_control(state, 0, odd)
    assert state.started is None
    assert "warp" in state.counters.rejection
    apply_control(state, 2, msgspec.structs.replace(record, dataset_rows=0))
    assert state.started is None
    apply_control(state, 4, record)
    assert state.started is not None
