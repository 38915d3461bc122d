"""Tests of JSON records: canonical form, NaN, unknown kinds, error paths."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.policy import Tensor, weights_digest
from dora_pipe.schemas.wire import (
    canonical,
    encode,
    float_fields,
    refuse_non_finite,
)
from tests.golden.values import CONTROL, METRICS, ROUND, TENSORS
from tests.unit.schemas import strategies

BY_KIND = {type(one).__name__: one for one in (*CONTROL, *METRICS)}
NOT_FINITE = [math.nan, math.inf, -math.inf]
TAKE_BATCH = next(one for one in ROUND.decisions if isinstance(one, rounds.TakeBatch))
COST = METRICS[0].cost


def _entry(reward: float | None) -> control.LoggedEntry:
    record = BY_KIND["TrajectoriesLogged"]
    assert isinstance(record, control.TrajectoriesLogged)
    return msgspec.structs.replace(record.trajectories[0], reward=reward)


PLACES: list[tuple[str, Any, str]] = [
    ("StepCommitted", lambda x: {"metrics": {"loss": x}}, "$.metrics.loss"),
    (
        "StepCommitted",
        lambda x: {"settings": {"objective.kl_coef": x}},
        "$.settings.objective.kl_coef",
    ),
    ("StepCommitted", lambda x: {"compute_s": x}, "$.compute_s"),
    ("TrajectoriesLogged", lambda x: {"trajectories": (_entry(x),)}, "$.trajectories[0].reward"),
    ("WorkerReady", lambda x: {"load_ms": x}, "$.load_ms"),
    ("Command", lambda x: {"args": {"value": [1, x]}}, "$.args.value[1]"),
    ("RunStarted", lambda x: {"config": {"a": {"b": x}}}, "$.config.a.b"),
    ("WorkerStatus", lambda x: {"cost": msgspec.structs.replace(COST, bus_s=x)}, "$.cost.bus_s"),
]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(("kind", "change", "path"), PLACES, ids=[entry[2] for entry in PLACES])
def test_number_that_is_not_finite_is_refused_with_its_place(
    kind: str, change: Any, path: str, value: float
) -> None:
    record = msgspec.structs.replace(BY_KIND[kind], **change(value))
    with pytest.raises(SchemaError, match="not a finite number") as raised:
        encode(record)
    assert raised.value.path == path


@pytest.mark.parametrize("value", NOT_FINITE)
def test_number_that_is_not_finite_is_refused_inside_a_round(value: float) -> None:
    batch = msgspec.structs.replace(TAKE_BATCH, settings={"trainer.learning_rate": value})
    with pytest.raises(SchemaError) as raised:
        encode(msgspec.structs.replace(ROUND, decisions=(ROUND.decisions[0], batch)))
    assert raised.value.path == "$.decisions[1].settings.trainer.learning_rate"


def test_null_that_means_unknown_is_written() -> None:
    logged = msgspec.structs.replace(BY_KIND["TrajectoriesLogged"], trajectories=(_entry(None),))
    assert b'"reward":null' in encode(logged)
    assert control.decode_control(encode(logged)) == logged


def test_every_field_that_holds_a_float_is_walked() -> None:
    walked = {
        kind.__name__: float_fields(kind)
        for union in (control.AnyControl, metrics.AnyMetrics, rounds.AnyDecision)
        for kind in union.__args__
        if float_fields(kind)
    }
    assert walked == {
        "RunStarted": ("config",),
        "WorkerReady": ("load_ms",),
        "TrajectoriesLogged": ("trajectories",),
        "GroupScored": ("samples",),
        "StepCommitted": ("groups", "metrics", "settings", "compute_s", "early_s", "overlap_s"),
        "Command": ("args",),
        "WorkerStatus": ("cost",),
        "TrainerStatus": ("cost",),
        "OrchestratorStatus": ("cost",),
        "TakePart": ("groups", "settings"),
        "TakeBatch": ("groups", "settings", "in_flight"),
    }


@given(strategies.JSON)
def test_plain_values_with_finite_numbers_pass(value: Any) -> None:
    refuse_non_finite(value)
    assert msgspec.json.decode(canonical(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00001, "0.00001"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1e-6, "1e-6"),
        (9e15, "9000000000000000.0"),
        (1.5e16, "1.5e16"),
        (2**63 - 1, "9223372036854775807"),
        (None, "null"),
        ('a/é\x1f\x7f"\\', '"a/é\\u001f\x7f\\"\\\\"'),
        ("\b\f\n\r\t", '"\\b\\f\\n\\r\\t"'),
        ({"b": {"é": 1, "z": 2}, "a": [True]}, '{"a":[true],"b":{"z":2,"é":1}}'),
    ],
)
def test_values_are_written_in_canonical_form(value: object, text: str) -> None:
    assert canonical(value).decode() == text


@pytest.mark.parametrize("value", [object(), 1j, "\ud800"])
def test_value_that_json_cannot_say_is_refused(value: Any) -> None:
    command = control.Command(at_ns=1, user="ada", verb="set", args={"value": value})
    with pytest.raises(SchemaError, match="Command cannot be written"):
        encode(command)


def test_wrong_content_of_a_known_kind_is_named_with_its_path() -> None:
    data = encode(BY_KIND["BatchRefused"]).replace(b'"sha256 differs"', b"17")
    with pytest.raises(SchemaError, match="Expected `str`, got `int`") as raised:
        control.decode_control(data)
    assert raised.value.path == "$.offenders[0].reason"


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"kind":null}', b"{", b"\xff"])
def test_record_without_a_kind_is_refused(data: bytes) -> None:
    for decode in (control.decode_control, metrics.decode_metrics, rounds.decode_round):
        with pytest.raises(SchemaError):
            decode(data)


def test_tag_may_stand_anywhere_in_the_record() -> None:
    record = BY_KIND["RoleStarted"]
    plain = msgspec.json.decode(encode(record))
    last = {**{key: plain[key] for key in plain if key != "kind"}, "kind": plain["kind"]}
    assert control.decode_control(msgspec.json.encode(last)) == record


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 9))
def test_chain_depends_on_what_was_folded_and_where_it_ends(
    left: bytes, right: bytes, offset: int
) -> None:
    def chain(*folded: bytes) -> str:
        parts = b"".join(rounds.fold_bytes(offset + n, entry) for n, entry in enumerate(folded))
        return rounds.chain_of(rounds.GENESIS_CHAIN, parts, ROUND)

    assert chain(left, right) == chain(left, right)
    assert chain(left, right) != chain(left + right)
    assert left == right or chain(left, right) != chain(right, left)


def test_chain_depends_on_every_part_of_the_round_but_itself() -> None:
    def chain(**changes: Any) -> str:
        changed = msgspec.structs.replace(ROUND, **changes)
        return rounds.chain_of(rounds.GENESIS_CHAIN, b"", changed)

    assert chain(chain="ff" * 32) == chain()
    changes: list[dict[str, Any]] = [
        {"ordinal": 65},
        {"incarnation": 2},
        {"now_ns": 1},
        {"control_next": 9},
        {"observations": ()},
        {"decisions": ()},
        {"state_digest": None},
    ]
    assert len({chain(), *(chain(**change) for change in changes)}) == 1 + len(changes)
    assert rounds.chain_of("11" * 32, b"", ROUND) != chain()


def test_round_is_sealed_with_the_bytes_and_the_chain_that_it_has() -> None:
    bare = msgspec.structs.replace(ROUND, chain="")
    chain, value = rounds.seal(rounds.GENESIS_CHAIN, b"folded", bare)
    assert chain == rounds.chain_of(rounds.GENESIS_CHAIN, b"folded", bare)
    assert value == encode(msgspec.structs.replace(bare, chain=chain))


@given(st.permutations(TENSORS))
def test_weights_digest_does_not_depend_on_the_order_of_tensors(tensors: list[Tensor]) -> None:
    assert weights_digest(tensors) == weights_digest(TENSORS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", "x"), ("dtype", "bfloat16"), ("shape", (4, 16)), ("sha256", "00" * 32)],
)
def test_weights_digest_depends_on_every_part_of_a_tensor(name: str, value: Any) -> None:
    changed = msgspec.structs.replace(TENSORS[0], **{name: value})
    assert weights_digest([changed, TENSORS[1]]) != weights_digest(TENSORS)
