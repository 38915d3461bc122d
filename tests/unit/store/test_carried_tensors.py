"""Tests that unused layers are republished unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_pipe.consumers.learners.torch.model import TorchModel, load_weights
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.engines.vllm.weights import expected_tensors
from dora_pipe.store.carried_tensors import carried_names
from dora_pipe.store.safetensors_file import read_entries, read_manifest, write_tensors
from tests.support.models import make_further

FURTHER = '"num_nextn_predict_layers": 1'
BEHIND = "model.layers.2.eh_proj.weight"


def test_a_trained_version_has_them_with_their_bytes_though_the_file_is_gone(
    tmp_path: Path,
) -> None:
    first = make_further(tmp_path / "model") / "model.safetensors"
    before = {tensor.name: tensor.sha256 for tensor in read_manifest(first).tensors}
    model = TorchModel(first.parent, device="cpu")
    model.load(first)
    with torch.no_grad():
        for _, parameter in model.parameters():
            parameter.mul_(2)
    first.unlink()
    written = write_tensors(tmp_path / "v1", model.sources())
    after = {tensor.name: tensor.sha256 for tensor in written.tensors}
    carried = {name for name in before if name.startswith("model.layers.2.")}
    assert BEHIND in carried and len(carried) > 20
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    assert carried <= same and "model.layers.1.mlp.gate.weight" not in same


def test_engines_leave_them_out_and_refuse_what_no_config_speaks_of(tmp_path: Path) -> None:
    folder = make_further(tmp_path)
    shapes, _, further = expected_tensors(folder)
    entries = {entry.name for entry in read_entries(folder / "model.safetensors")}
    assert carried_names(entries, further) == entries - shapes.keys() != set()
    engine = TorchEngine.open(folder, slots=1, context_tokens=32, threads=1)
    weights = folder / "model.safetensors"
    engine.load(weights, version=1, digest=read_manifest(weights).digest)
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace(FURTHER, '"other": 1'))
    TorchEngine.open(folder, slots=1, context_tokens=32, threads=1)
    config.write_text(text.replace(FURTHER, FURTHER.replace("1", "0")))
    with pytest.raises(PolicyError, match=r"unexpected tensors model\.layers\.2\."):
        TorchEngine.open(folder, slots=1, context_tokens=32, threads=1)
    with pytest.raises(PolicyError, match=r"model\.layers\.2\..* is on one side only"):
        load_weights(build(folder), weights)
