"""`bench policies`: what it publishes is rounded as bfloat16 is; a way has every stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dora_pipe.bench import version_way
from dora_pipe.bench.policies import write_rounded
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.safetensors_file import TensorSource, mapped, read_entries, write_tensors

MANIFEST = Manifest(digest="d" * 64, bytes=8, tensors=())


def test_weights_are_rounded_to_the_nearest_as_torch_rounds_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(2).normal(size=1000).astype("<f4")
    values[:4] = (1.00390625, 1.01171875, -0.0, 3e-39)  # two ties, a sign, a subnormal number
    source = TensorSource(name="x", dtype="F32", shape=(1000,), data=values.tobytes)
    write_tensors(tmp_path / "source", [source])
    write_rounded(tmp_path / "source", tmp_path / "target")
    (entry,) = read_entries(tmp_path / "target")
    with mapped(tmp_path / "target") as data:
        found = bytes(data[entry.start : entry.end])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert (entry.dtype, found) == ("BF16", expected.astype("<i2").tobytes())


def test_stages_of_a_version_are_one_behind_the_other() -> None:
    published = version_way.Published(MANIFEST, 10.0, 10.25, 10.75)
    then = version_way.Stamps(
        seen_s=11.5, fetching_s=0.5, proved_s=12.25, loaded_s=12.5, token_s=13
    )
    stages = version_way.stages_of(published, 11.0, then)
    assert stages == (0.25, 0.5, 0.25, 0.5, 0.5, 0.25, 0.25, 0.5)
    assert sum(stages) == 3.0


@pytest.mark.slow
def test_every_way_brings_a_version_to_a_workers_first_token(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ways = [one for one in version_way.WAYS if one.peers]
    whole, patch = version_way.bench_way(tmp_path, versions=1, mb_s=400, ways=ways)
    assert (whole.stored_as, patch.stored_as) == ("whole", "patch")
    assert min(whole.stored_s, whole.fetched_s) >= whole.megabytes / 400
    for one in (whole, patch):
        assert one.token_s > 0 and one.total_s > one.loaded_s + one.written_s
