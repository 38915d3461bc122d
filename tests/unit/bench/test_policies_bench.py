"""`bench policies`: what it publishes is rounded as bfloat16 is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dora_pipe.bench.policies import write_rounded
from dora_pipe.store.safetensors_file import TensorSource, mapped, read_entries, write_tensors


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
