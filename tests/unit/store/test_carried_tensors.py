"""Layers that nothing here computes with are published again as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_pipe.consumers.learners.torch.model import TorchModel, load_weights
from dora_pipe.consumers.learners.torch.network import build
from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.engines.vllm.weights import expected_tensors
from dora_pipe.store.carried_tensors import CarriedTensors, carried_names, further_layers
from dora_pipe.store.safetensors_file import read_entries, read_manifest, write_tensors
from tests.support.models import make_further

FURTHER = '"num_nextn_predict_layers": 1'
BEHIND = "model.layers.2.eh_proj.weight"


def test_layers_behind_the_last_are_as_many_as_the_config_says() -> None:
    names = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(5)} | {"model.norm.weight"}
    sizes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    assert carried_names(names, further_layers(sizes)) == {
        "model.layers.2.mlp.gate.weight",
        "model.layers.3.mlp.gate.weight",
    }
    for other in ({"num_hidden_layers": 2}, sizes | {"num_nextn_predict_layers": None}, {}):
        assert not carried_names(names, further_layers(other))


def test_a_trained_version_has_them_with_their_bytes_though_the_file_is_gone(
    tmp_path: Path,
) -> None:
    first = make_further(tmp_path / "model") / "model.safetensors"
    before = {one.name: one.sha256 for one in read_manifest(first).tensors}
    model = TorchModel(first.parent, device="cpu")
    model.load(first)
    with torch.no_grad():
        for _, parameter in model.parameters():
            parameter.mul_(2)
    first.unlink()
    written = write_tensors(tmp_path / "v1", model.sources())
    after = {one.name: one.sha256 for one in written.tensors}
    carried = {name for name in before if name.startswith("model.layers.2.")}
    assert BEHIND in carried and len(carried) > 20
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    assert carried <= same and "model.layers.1.mlp.gate.weight" not in same


def test_engines_leave_them_out_and_refuse_what_no_config_speaks_of(tmp_path: Path) -> None:
    folder = make_further(tmp_path)
    shapes, _, further = expected_tensors(folder)
    entries = {one.name for one in read_entries(folder / "model.safetensors")}
    assert carried_names(entries, further) == entries - shapes.keys() != set()
    engine = TorchEngine.open(folder, slots=1, context_tokens=32, threads=1)
    weights = folder / "model.safetensors"
    engine.load(weights, version=1, digest=read_manifest(weights).digest)
    config = folder / "config.json"
    said = config.read_text()
    config.write_text(said.replace(FURTHER, '"other": 1'))
    TorchEngine.open(folder, slots=1, context_tokens=32, threads=1)
    config.write_text(said.replace(FURTHER, FURTHER.replace("1", "0")))
    with pytest.raises(PolicyError, match=r"unexpected tensors model\.layers\.2\."):
        TorchEngine.open(folder, slots=1, context_tokens=32, threads=1)
    with pytest.raises(PolicyError, match=r"model\.layers\.2\..* is on one side only"):
        load_weights(build(folder), weights)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    weights = make_further(tmp_path) / "model.safetensors"
    (entry,) = [one for one in read_entries(weights) if one.name == BEHIND]
    (source,) = CarriedTensors(weights, [entry]).sources()
    weights.write_bytes(b"")
    with pytest.raises(PolicyError, match=f"has become shorter: '{BEHIND}' is not in it"):
        source.data()
    with pytest.raises(PolicyError, match="cannot be read: No such file"):
        CarriedTensors(tmp_path / "none", [entry])
    assert CarriedTensors().sources() == []
