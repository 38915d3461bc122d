"""Tests of trajectory invariants at writer and reader."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.arrow_frame import decompress
from dora_pipe.schemas.trajectory import Meta, Sampler, Segment, Trajectory, mixing_error
from dora_pipe.schemas.trajectory_codec import (
    TRAJECTORY,
    decode_any_progress,
    decode_trajectory,
    encode_any_progress,
    encode_trajectory,
)
from tests.golden.arrow_values import MIXED_TRAJECTORY as MIXED
from tests.golden.arrow_values import PLAIN_TRAJECTORY
from tests.golden.arrow_values import TRAJECTORY as SOUND
from tests.golden.branched_values import PROGRESS

OTHER, NO_DIGEST = Sampler(version=4, digest="ab" * 32), Sampler(version=3, digest="ab")
TILES = list(SOUND.segments)


def changed_to(changes: Mapping[str, Any], sound: Trajectory = SOUND) -> Trajectory:
    meta = {name: value for name, value in changes.items() if name in Meta.__struct_fields__}
    rest = {name: value for name, value in changes.items() if name not in meta}
    return replace(sound, **rest, meta=msgspec.structs.replace(sound.meta, **meta))


def changed(values: Any, index: int, value: Any) -> list[Any]:
    copy = list(values)
    copy[index] = value
    return copy


IDS, LOGPROBS = SOUND.token_ids, SOUND.logprobs
SAMPLER, MASK = SOUND.sampler_logprobs, SOUND.loss_mask


def tile(index: int, **changes: Any) -> list[Segment]:
    return changed(TILES, index, msgspec.structs.replace(TILES[index], **changes))


BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("short log-probs", {"logprobs": LOGPROBS[:-1]}, "$.logprobs", "9 entries for 10 tokens"),
    ("short sampler", {"sampler_logprobs": []}, "$.sampler_logprobs", "0 entries"),
    ("long mask", {"loss_mask": [*MASK, 1]}, "$.loss_mask", "11 entries"),
    ("mask of 2", {"loss_mask": changed(MASK, 4, 2)}, "$.loss_mask[4]", "neither"),
    ("negative token", {"token_ids": changed(IDS, 1, -1)}, "$.token_ids[1]", "negative"),
    ("not sampled", {"logprobs": changed(LOGPROBS, 6, -0.5)}, "$.logprobs[6]", "disagree"),
    (
        "sampled without a log-prob",
        {"sampler_logprobs": changed(SAMPLER, 3, None)},
        "$.sampler_logprobs[3]",
        "disagree",
    ),
    ("NaN", {"logprobs": changed(LOGPROBS, 3, math.nan)}, "$.logprobs[3]", "disagree"),
    ("positive", {"logprobs": changed(LOGPROBS, 8, 1e-3)}, "$.logprobs[8]", "not <= 0"),
    ("infinite", {"logprobs": changed(LOGPROBS, 8, -math.inf)}, "$.logprobs[8]", "not <= 0"),
    (
        "infinite as a float32",
        {"sampler_logprobs": changed(SAMPLER, 9, -1e39)},
        "$.sampler_logprobs[9]",
        "not <= 0",
    ),
    ("segments with a gap", {"segments": TILES[:1] + TILES[2:]}, "$.segments[1]", "tile"),
    ("segments that stop short", {"segments": TILES[:-1]}, "$.segments", "reach"),
    ("segment beyond the end", {"segments": tile(3, end=11)}, "$.segments[3]", "tile"),
    ("segment that ends before it starts", {"segments": tile(3, end=7)}, "$.segments[3]", "tile"),
    ("model not sampled", {"segments": tile(2, kind="model")}, "$.segments[2]", "disagree"),
    ("tool that was sampled", {"segments": tile(1, kind="tool")}, "$.segments[1]", "disagree"),
    ("reward and error", {"reward_error": "crashed"}, "$.reward", "exactly one"),
    ("neither reward nor error", {"reward": None}, "$.reward", "exactly one"),
    ("reward that is NaN", {"reward": math.nan}, "$.reward", "finite"),
    ("infinite reward", {"reward": math.inf}, "$.reward", "finite"),
    ("short digest", {"digest": "ab"}, "$.digest", "64 hex"),
    ("digest that is no hex", {"digest": "zz" * 32}, "$.digest", "64 hex"),
    ("digest in capitals", {"digest": "AB" * 32}, "$.digest", "64 hex"),
    ("negative version", {"version": -1}, "$.version", "-1"),
    ("long prompt", {"prompt_tokens": 11}, "$.meta.prompt_tokens", "longer"),
    ("weights of nobody", {"weights": (OTHER,)}, "$.meta.weights", "versions of its"),
    ("weights that are no digest", {"weights": (NO_DIGEST,)}, "$.digest", "64 hex"),
    ("strange id", {"trajectory": "t1"}, "$.trajectory", "not a trajectory id"),
    ("foreign group", {"group": "g0000000041"}, "$.trajectory", "not of this group"),
    ("foreign trajectory", {"sample": 4}, "$.trajectory", "not of this group"),
    ("foreign purpose", {"purpose": "eval"}, "$.trajectory", "not of this group"),
    ("token beyond an int32", {"token_ids": changed(IDS, 0, 2**31)}, "$.token_ids", "."),
    ("token that is no integer", {"token_ids": changed(IDS, 0, 1.5)}, "$.token_ids", "."),
    ("token that is none", {"token_ids": changed(IDS, 0, None)}, "$.token_ids", "."),
    ("tokens as floats", {"token_ids": np.full(10, 2.5)}, "$.token_ids", "."),
    ("version beyond an int64", {"version": 2**63}, "$.version", "."),
    ("version that is no integer", {"version": 1.5}, "$.version", "."),
    ("log-prob that is a text", {"logprobs": changed(LOGPROBS, 3, "a")}, "$.logprobs", "."),
    ("no log-probs", {"logprobs": None}, "$.logprobs", "null"),
    ("mask of halves", {"loss_mask": changed(MASK, 3, 0.5)}, "$.loss_mask", "."),
    ("mask beyond a byte", {"loss_mask": changed(MASK, 3, 257)}, "$.loss_mask", "."),
    ("raw reward that is NaN", {"reward_raw": math.nan}, "$.reward_raw", "finite"),
    ("infinite part", {"reward_parts": {"a": math.inf}}, "$.reward_parts.a", "finite"),
    ("NaN deep inside", {"extra": {"a": [0.5, {"b": -math.inf}]}}, "$.extra.a[1].b", "finite"),
]


@pytest.mark.parametrize(
    ("changes", "path", "why"), [entry[1:] for entry in BROKEN], ids=[entry[0] for entry in BROKEN]
)
def test_broken_trajectory_is_refused_by_the_writer_with_its_path(
    changes: dict[str, Any], path: str, why: str
) -> None:
    with pytest.raises(SchemaError, match=why) as raised:
        encode_trajectory(changed_to(changes))
    assert raised.value.path == path


def test_weights_of_other_versions_are_named_in_the_order_of_their_segments() -> None:
    with pytest.raises(SchemaError, match="versions of its") as raised:
        encode_trajectory(changed_to({"weights": MIXED.meta.weights[::-1]}, MIXED))
    assert raised.value.path == "$.meta.weights"


FOREIGN: list[tuple[str, Any, str]] = [
    ("loss_mask", [[0, 0, 0, 1, 1, 1, 0, 0, 1, 0]], "$.logprobs[9]"),
    ("token_ids", [[1, 2]], "$.loss_mask"),
    ("token_ids", [[1, None, 3, 4, 5, 6, 7, 8, 9, 10]], "$.token_ids"),
    ("loss_mask", [[None] * 10], "$.loss_mask"),
    ("token_ids", [None], "$.token_ids"),
    ("weights_digest", [None], "$.weights_digest"),
    ("reward", [None], "$.reward"),
    ("segments", [[]], "$.segments"),
    ("segments", [[None]], "$.segments[0]"),
    ("segments", [[{"kind": "later", "start": 0}]], "$.segments[0].kind"),
    ("segments", [[{"kind": "model", "start": None}]], "$.segments[0].start"),
    ("meta_json", ["{}"], "$.meta"),
    ("meta_json", ["nonsense"], "$.meta"),
    ("logprobs", [[math.nan, None, None, -0.1, -1.7, -1.0, None, None, 0.0, -30.0]], "$.logprobs"),
]


@pytest.mark.parametrize(("name", "value", "path"), FOREIGN)
def test_broken_record_of_another_writer_is_refused_by_the_reader(
    name: str, value: Any, path: str
) -> None:
    with pytest.raises(SchemaError) as raised:
        decode_trajectory(rewritten(**{name: value}))
    assert raised.value.path == path


def test_reader_says_which_key_of_the_json_column_is_wrong() -> None:
    meta = msgspec.json.decode(msgspec.json.encode(SOUND.meta))
    meta["times"]["scheduled"] = "yesterday"
    with pytest.raises(SchemaError, match="Expected `int`, got `str`") as raised:
        decode_trajectory(rewritten(meta_json=[msgspec.json.encode(meta).decode()]))
    assert raised.value.path == "$.meta.times.scheduled"


def test_empty_trajectory_without_tokens_is_a_record_too() -> None:
    empty = replace(
        PLAIN_TRAJECTORY,
        token_ids=[],
        logprobs=[],
        sampler_logprobs=[],
        loss_mask=[],
        segments=[],
        meta=msgspec.structs.replace(PLAIN_TRAJECTORY.meta, prompt_tokens=0),
    )
    assert decode_trajectory(encode_trajectory(empty)[0]) == empty


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"start": -1}, "$.start"),
        ({"version": -1}, "$.version"),
        ({"attempt": -1}, "$.attempt"),
        ({"logprobs": [-0.1]}, "$.logprobs"),
        ({"logprobs": [None, None, -0.1, None, -0.2]}, "$.logprobs[3]"),
        ({"logprobs": [None, None, -0.1, 0.5, -0.2]}, "$.logprobs[3]"),
        ({"sampler_logprobs": [None, None, -0.1, -math.inf, -0.2]}, "$.sampler_logprobs[3]"),
        ({"token_ids": [1, 2, -3, 4, 5]}, "$.token_ids[2]"),
        ({"prefills": (None,)}, "$.prefills"),
        ({"digest": "xy"}, "$.digest"),
    ],
)
def test_broken_progress_is_refused_with_its_path(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SchemaError) as raised:
        encode_any_progress(replace(PROGRESS, **changes))
    assert raised.value.path == path


def test_progress_is_not_read_as_a_trajectory_nor_a_trajectory_as_progress() -> None:
    with pytest.raises(SchemaError, match="columns are not those of this record"):
        decode_trajectory(encode_any_progress(PROGRESS))
    with pytest.raises(SchemaError, match="columns are not those of this record"):
        decode_any_progress(encode_trajectory(SOUND)[0])


def rewritten(**columns: Any) -> bytes:
    row = dict(TRAJECTORY.opened(decompress(encode_trajectory(SOUND)[0])).arrays)
    for name, value in columns.items():
        row[name] = pa.array(value, row[name].type)
    batch = pa.RecordBatch.from_arrays(list(row.values()), schema=TRAJECTORY.schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return zstandard.compress(sink.getvalue().to_pybytes())


def by(*versions: int) -> Trajectory:
    prompt, *stays = MIXED.segments
    created = [
        msgspec.structs.replace(stay, version=version)
        for stay, version in zip(stays, versions, strict=True)
    ]
    return replace(MIXED, segments=[prompt, *created])


@pytest.mark.parametrize(
    ("versions", "newest", "why"),
    [
        ((3, 3, 3), 3, ""),
        ((3, 5, 6), 6, ""),
        ((5, 5, 5), 9, ""),
        ((3, 5, 6), 5, "version 6 is later than 5"),
        ((3, 6, 5), 6, "version 5 samples after version 6"),
        ((2, 3, 3), 6, "version 2 samples after version 3"),
    ],
)
def test_versions_of_a_mixed_trajectory_only_grow_from_its_own(
    versions: tuple[int, int, int], newest: int, why: str
) -> None:
    assert mixing_error(by(*versions), newest) == why
