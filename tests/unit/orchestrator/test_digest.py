"""Tests that the state digest follows its documented formula."""

from __future__ import annotations

import json
from hashlib import sha256

from dora_pipe.orchestrator.digest import TABLES, Leaves, digest_of, rest_of
from dora_pipe.schemas.wire import canonical
from tests.support.orchestrator_stage import Stage

RECORDED = "20e7dc2da5fb7d7d1f9301126ac399cda1911c77af3628280efb5770e2378460"


def test_digest_follows_the_formula_and_equals_the_recorded_one() -> None:
    stage = Stage(rollout__group_size=2, rollout__prompts_per_step=2, evaluation__prompts=1).begin()
    stage.worker("w0", slots=5, moves=True)
    stage.worker("w1", slots=3, versions=2)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.settle()
    stage.finish_group(stage.running()[0].rpartition("-")[0])
    state = stage.state
    leaves = Leaves.of(state).settled(state)
    assert len(leaves) == sum(len(getattr(state, table)) for table in TABLES.values()) > 10
    assert {json.loads(leaf)[0] for leaf in leaves} == set(TABLES) - {"row"}
    total = sum(int.from_bytes(sha256(leaf).digest()) for leaf in leaves) % 2**256
    digest = sha256(canonical(rest_of(state))).digest() + total.to_bytes(32)
    assert sha256(digest).hexdigest() == state.digest() == digest_of(state) == RECORDED
