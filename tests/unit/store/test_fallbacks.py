"""Tests of warnings about missing files and their replacements."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.store.names import delta_name, weights_name
from dora_pipe.store.store import PolicyStore
from tests.support.stores import publish_walk
from tests.unit.store.test_store_deltas import Counted, elsewhere, flip, machine

__all__ = ["elsewhere"]


@pytest.mark.parametrize("case", ["lost", "damaged"])
def test_a_delta_that_is_not_to_be_had_is_named_in_the_log(
    tmp_path: Path, elsewhere: Counted, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 6, full_every=4)
    worker, digest = machine(tmp_path, "m1", elsewhere), published[4].manifest.digest
    worker.weights(published[3].manifest.digest)
    there = tmp_path / "shared" / "x"
    if case == "lost":
        (there / delta_name(digest)).unlink()
    else:
        flip(there / delta_name(digest))
    worker.weights(digest)
    (record,) = [record for record in caplog.records if "is taken" in record.message]
    assert delta_name(digest) in record.message and str(there) in record.message
    assert record.message.endswith(f"; {weights_name(digest)} is taken")


@pytest.mark.parametrize("how", ["away", "here"])
def test_a_damaged_whole_file_is_named_with_the_delta_that_is_taken(
    tmp_path: Path, elsewhere: Counted, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 6, full_every=4)
    there, digest = tmp_path / "shared" / "x", published[4].manifest.digest
    flip(there / weights_name(digest))
    store = machine(tmp_path, "m1", elsewhere) if how == "away" else PolicyStore(there)
    for _ in range(2):
        store.weights(digest)
    (record,) = [record for record in caplog.records if "is taken" in record.message]
    assert f"{weights_name(digest)}" in record.message and str(there) in record.message
    assert record.message.endswith(f"; {delta_name(digest)} is taken")
