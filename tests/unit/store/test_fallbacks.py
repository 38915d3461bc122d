"""Tests of reports of missing files and their replacements."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.store.names import delta_name, weights_name
from dora_pipe.store.store import PolicyStore
from tests.support.stores import publish_walk
from tests.unit.store.test_store_deltas import Counted, elsewhere, flip, machine

__all__ = ["elsewhere"]


@pytest.mark.parametrize("case", ["lost", "damaged"])
def test_a_delta_that_is_not_to_be_had_is_named_with_the_bytes_of_the_whole(
    tmp_path: Path, elsewhere: Counted, case: str
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
    (fallback,) = worker.fallbacks.take()
    assert fallback.digest == digest and delta_name(digest) in fallback.reason
    assert str(there) in fallback.reason
    assert (fallback.taken, fallback.absent) == (weights_name(digest), case == "lost")
    assert fallback.bytes == (there / weights_name(digest)).stat().st_size
    assert worker.fallbacks.take() == (), "it is said once"


@pytest.mark.parametrize("how", ["away", "here"])
def test_a_damaged_whole_file_is_named_with_the_deltas_that_make_it(
    tmp_path: Path, elsewhere: Counted, how: str
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 6, full_every=4)
    there, digest = tmp_path / "shared" / "x", published[4].manifest.digest
    flip(there / weights_name(digest))
    store = machine(tmp_path, "m1", elsewhere) if how == "away" else PolicyStore(there)
    for _ in range(2):
        store.weights(digest)
    (fallback,) = store.fallbacks.take()
    assert fallback.taken == delta_name(digest) and not fallback.absent
    assert f"{weights_name(digest)}" in fallback.reason and str(there) in fallback.reason
    if how == "here":
        assert fallback.bytes == 0
    else:
        names = [delta_name(version.manifest.digest) for version in published[1:4]]
        names.append(weights_name(published[0].manifest.digest))
        assert fallback.bytes == sum((there / name).stat().st_size for name in names)
