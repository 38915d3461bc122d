"""Tests that the state digest follows its documented formula."""

from __future__ import annotations

import json
from hashlib import sha256
from zlib import crc32

from dora_pipe.orchestrator.digest import TABLES, Leaves, digest_of, rest_of
from dora_pipe.schemas.wire import canonical
from tests.support.orchestrator_stage import Stage

RECORDED = "285bb39c6c38f16dad8106535dfcf3572b8ff8d713fab7f7920484ffd79bd202"


def test_digest_follows_the_formula_and_equals_the_recorded_one() -> None:
    stage = Stage(rollout__group_size=2, rollout__prompts_per_step=2, evaluation__prompts=1).begin()
    stage.worker("w0", slots=5, moves=True)
    stage.worker("w1", slots=3, versions=2)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.settle()
    stage.finish_group(stage.running()[0].rpartition("-")[0])
    state = stage.state
    leaves = [leaf for bucket in Leaves.of(state).settled(state) for leaf in bucket.values()]
    assert len(leaves) == sum(len(getattr(state, table)) for table in TABLES.values()) > 10
    assert {json.loads(leaf)[0] for leaf in leaves} == set(TABLES) - {"row"}
    buckets: list[list[bytes]] = [[] for _ in range(4096)]
    for leaf in leaves:
        buckets[crc32(json.loads(leaf)[1].encode()) % 4096].append(sha256(leaf).digest())
    digest = sha256(canonical(rest_of(state))).digest()
    digest += b"".join(sha256(b"".join(sorted(bucket))).digest() for bucket in buckets)
    assert sha256(digest).hexdigest() == state.digest() == digest_of(state) == RECORDED
